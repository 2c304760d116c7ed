"""What a line of a chat does that begins with a slash."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pshard.errors import UserError, name_cause
from pshard.jsonio import parse_json, read_regular, write_text_atomically

if TYPE_CHECKING:
    from pshard.session.chat.conversation import Conversation

COMMANDS = {
    "system": "TEXT   what the chat begins with; without TEXT nothing",
    "temp": "X      the temperature from now on; 0 is greedy",
    "reset": "       forget all turns",
    "undo": "       forget the last turn",
    "regen": "       say the last message again, for another answer",
    "save": "FILE   write the chat to a file",
    "load": "FILE   go on with the chat of a file",
    "stats": "       rates, context used, what came from the cache",
    "help": "       this list",
    "exit": "       end the chat, as /bye and Ctrl-D do",
    "bye": "       the same",
}

Tell = Callable[[str], None]
Confirm = Callable[[str], bool]


def fit_status(chat: "Conversation", width: int) -> str:
    """The status in a window of so many columns: what matters least is left out first."""
    parts = list_status(chat)
    kept: list[int] = []
    for i in (1, 0, 2) if len(parts) == 3 else (0,):  # the context matters most
        if len(" | ".join(parts[j] for j in sorted([*kept, i]))) <= width:
            kept.append(i)
    return " | ".join(parts[i] for i in sorted(kept)) or f"{chat.context_used}/{chat.engine.longest}"[:width]


def list_status(chat: "Conversation") -> list[str]:
    """Rates of the last answer, the context that is used, and what of the prompts came from the cache."""
    last, total = chat.last, chat.total
    context = f"{chat.context_used} of {chat.engine.longest} tokens of context"
    if not total.prompt:
        return [context]
    rates = f"{last.rate:.1f} tok/s, prompt {last.prompt_rate:.0f} tok/s"
    return [rates, context, f"{total.reused / total.prompt:.0%} of prompts from the cache"]


def run_command(chat: "Conversation", line: str, tell: Tell, confirm: Confirm) -> bool | str:
    """Do what the line says; `tell` hears what came of it, also of a mistake; `confirm` asks a question. False: the
    chat is to end; a text: it is to be said now."""
    name, _, rest = line[1:].partition(" ")
    rest = rest.strip()
    try:
        if name in ("exit", "quit", "bye"):
            return False
        if name == "help":
            for command, what in COMMANDS.items():
                tell(f"/{command:<7}{what}")
        elif name == "stats":
            _tell_stats(chat, tell)
        elif name == "system":
            chat.set_system(rest or None)
            tell("the chat begins with these words now" if rest else "the chat begins without words of a system now")
        elif name == "temp":
            _set_temperature(chat, rest, tell)
        elif name == "reset":
            chat.reset()
            tell("all turns are forgotten")
        elif name == "undo":
            said = chat.undo()
            tell("there is no turn to forget" if said is None else f"forgotten: {said}")
        elif name == "regen":
            return _say_again(chat, tell)
        elif name == "save":
            _save(chat, rest, tell, confirm)
        elif name == "load":
            _load(chat, rest, tell)
        else:
            tell(f"there is no /{name}; /help lists what there is (a message cannot begin with a slash)")
    except UserError as error:
        tell(f"error: {error}")
    return True


def _set_temperature(chat: "Conversation", text: str, tell: Tell) -> None:
    try:
        value = float(text)
    except ValueError:
        raise UserError(f"{text!r} is no temperature; say /temp 0.7") from None
    chat.sampling = replace(chat.sampling, temperature=value)
    tell(f"the temperature is {value:g}")


def _say_again(chat: "Conversation", tell: Tell) -> bool | str:
    said = chat.undo()
    if said is None:
        tell("there is no message to say again")
        return True
    if chat.sampling.temperature == 0 or chat.sampling.seed is not None:
        tell("a temperature of 0 and a seed give the same answer; /temp 0.7 without --seed gives others")
    return said


def _save(chat: "Conversation", name: str, tell: Tell, confirm: Confirm) -> None:
    path = _path(name, "save")
    folder = path.absolute().parent
    if not folder.exists() and not confirm(f"there is no folder {folder}; make it?"):
        raise UserError(f"there is no folder {folder}, and nothing was saved; make it first, or choose another place")
    try:
        write_text_atomically(path, json.dumps({"messages": chat.messages}, indent=1, ensure_ascii=False) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; choose another place") from None
    tell(f"{len(chat.messages)} messages are in {path}")


def _load(chat: "Conversation", name: str, tell: Tell) -> None:
    path = _path(name, "load")
    try:
        data = parse_json(read_regular(path))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {name_cause(error)}; give a file that /save wrote") from None
    messages = data.get("messages") if isinstance(data, dict) else None
    if not isinstance(messages, list):
        raise UserError(f"{path} is no chat: it has no list of messages; give a file that /save wrote")
    chat.replace(messages)
    tell(f"{len(messages)} messages are taken from {path}")


def _path(name: str, command: str) -> Path:
    if not name:
        raise UserError(f"no file is named; say /{command} FILE")
    return Path(name).expanduser()


def _tell_stats(chat: "Conversation", tell: Tell) -> None:
    total = chat.total
    tell(" | ".join(list_status(chat)))
    tell(
        f"so far {total.generated} tokens of answers in {total.seconds:.1f} s; of {total.prompt} tokens of prompts "
        f"{total.prompt - total.reused} were computed, in {total.prompt_seconds:.1f} s"
    )
