"""What a line of a chat does that begins with a slash."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pshard.errors import UserError
from pshard.jsonio import parse_json, read_regular, write_text_atomically

if TYPE_CHECKING:
    from pshard.session.chat.conversation import Conversation

COMMANDS = {
    "system": "TEXT   what the chat begins with; without TEXT nothing",
    "temp": "X      the temperature from now on; 0 is greedy",
    "reset": "       forget all turns",
    "undo": "       forget the last turn",
    "save": "FILE   write the chat to a file",
    "load": "FILE   go on with the chat of a file",
    "stats": "       rates, context used, what came from the cache",
    "help": "       this list",
    "exit": "       end the chat, as Ctrl-D does",
}

Tell = Callable[[str], None]


def describe_status(chat: "Conversation") -> str:
    """Rates of the last answer, the context that is used, and what of the prompts came from the cache."""
    last, total = chat.last, chat.total
    context = f"{chat.context_used} of {chat.engine.longest} tokens of context"
    if not total.prompt:
        return context
    rates = f"{last.rate:.1f} tok/s, prompt {last.prompt_rate:.0f} tok/s"
    return f"{rates} | {context} | {total.reused / total.prompt:.0%} of prompts from the cache"


def run_command(chat: "Conversation", line: str, tell: Tell) -> bool:
    """Do what the line says; `tell` hears what came of it, also of a mistake. False: the chat is to end."""
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
        elif name in ("save", "load"):
            (_save if name == "save" else _load)(chat, rest, tell)
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


def _save(chat: "Conversation", name: str, tell: Tell) -> None:
    path = _path(name, "save")
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
        raise UserError(f"cannot read {path}: {error}; give a file that /save wrote") from None
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
    tell(describe_status(chat))
    tell(
        f"so far {total.generated} tokens of answers in {total.seconds:.1f} s; of {total.prompt} tokens of prompts "
        f"{total.prompt - total.reused} were computed, in {total.prompt_seconds:.1f} s"
    )
