"""What a run is to continue: a prompt from a flag, a file or a pipe, or a conversation."""

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from pshard.errors import UserError, name_cause

ANSWER = 128  # tokens, where none are asked for
MISSING = "there is no prompt: give -p TEXT or -f FILE, or pipe one in"
NO_TEXT = "{} is not UTF-8 ({}); convert it, as with iconv -t utf-8"
THINKING = ("enable_thinking", "thinking")  # names that templates have for it
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "'": "'", '"': '"', "\\": "\\"}


def add_thinking_flag(group: Any) -> None:
    """Add --reasoning-budget to a parser or a group of it."""
    group.add_argument(
        "--reasoning-budget", type=int, choices=(-1, 0), default=-1,
        help="0: the model's template leaves thinking out; -1: it ends when the model ends it (the default)",
    )  # fmt: skip


def read_thinking(args: argparse.Namespace, template: str | None) -> dict[str, Any]:
    """Variables of the template that --reasoning-budget asks for. Raises UserError for a template without any."""
    if args.reasoning_budget:
        return {}
    if not any(name in (template or "") for name in THINKING):
        raise UserError("--reasoning-budget 0: the model's template cannot leave thinking out; leave the flag out")
    return dict.fromkeys(THINKING, False)


def add_text_flags(parser: argparse.ArgumentParser, chats: bool = False) -> None:
    """Add the flags to a parser; chats: to that of pshard chat."""
    text = parser.add_argument_group("text")
    without = "none: you begin" if chats else "what is piped in; on a terminal a chat begins"
    text.add_argument("-p", "--prompt", help=f"the {'first message' if chats else 'prompt'} (default: {without})")
    text.add_argument("-f", "--file", type=Path, help="the same from a file")
    text.add_argument(
        "-e", "--escape", action=argparse.BooleanOptionalAction, default=True,
        help=r"\n, \t, \', \" and \xNN in -p mean what they do in C (the default)",
    )  # fmt: skip
    text.add_argument(
        "-n", "--predict", "--n-predict", type=_count_or_all, metavar="N",
        help=f"tokens of an answer at most (default {ANSWER}, in a chat no limit); -1: until the context is full",
    )  # fmt: skip
    text.add_argument(
        "-cnv", "--conversation", action="store_true", default=chats,
        help="chat, which this command does anyway" if chats else "chat; -p is then the first message",
    )  # fmt: skip
    text.add_argument("-st", "--single-turn", action="store_true", help="end the chat after one answer")
    text.add_argument(
        "-r", "--reverse-prompt", action="append", default=[], metavar="TEXT",
        help="a text that ends an answer; may be given again",
    )  # fmt: skip
    add_thinking_flag(text)
    text.add_argument("-sys", "--system-prompt", dest="system", metavar="TEXT", help="what a chat begins with")
    if chats:
        parser.set_defaults(chat=False, tokens=False, no_parse_special=False, no_conversation=False)
        return
    text.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template, once")
    text.add_argument("-no-cnv", "--no-conversation", action="store_true", help="no chat: continue the text of -p")
    text.add_argument(
        "--tokens", action="store_true", help="prompt and output are token ids, for files without tokenizer"
    )
    text.add_argument(
        "--no-parse-special", action="store_true", help="special tokens spelled out in the prompt are plain text"
    )


def check_text_flags(args: argparse.Namespace) -> None:
    """Raise UserError for flags that do not go together."""
    if args.chat and args.tokens:
        raise UserError("--chat and --tokens exclude each other, as a chat template is text; give one")
    if args.no_parse_special and (args.chat or args.tokens):
        flag, why = ("--chat", "never makes tokens of a message") if args.chat else ("--tokens", "takes ids, not text")
        raise UserError(f"leave out --no-parse-special: {flag} {why}")
    if args.conversation and (args.tokens or args.no_conversation):
        raise UserError(f"-cnv and {'--tokens' if args.tokens else '-no-cnv'} exclude each other; give one")
    if args.prompt is not None and args.file is not None:
        raise UserError("-p and -f exclude each other; give one prompt")
    if "" in args.reverse_prompt:
        raise UserError("-r is empty; give the text that ends an answer")
    if args.reverse_prompt and args.tokens:
        raise UserError("-r is a text, and --tokens reads none; leave one of them out")
    if args.single_turn and not args.no_conversation and not args.tokens:
        args.conversation = True
    if args.system and (args.tokens or (args.no_conversation and not args.chat)):
        raise UserError(f"-sys is for a chat; leave out {'--tokens' if args.tokens else '-no-cnv'}, or -sys")
    if args.system and not args.chat:
        args.conversation = True


def read_given(args: argparse.Namespace) -> str | None:
    """The text of -p or -f; None without either. Raises UserError for a file that cannot be read, and for no text."""
    if args.prompt is not None:
        text = check_text(args.prompt, "-p")
        text = _unescape(text) if args.escape else text
    elif args.file is not None:
        try:
            text = args.file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            cause = name_cause(error)
            raise UserError(f"cannot read the prompt file {args.file}: {cause}; give a text file in UTF-8") from None
    else:
        return None
    if not text:
        raise UserError(MISSING)
    return text


def read_prompt(args: argparse.Namespace) -> str | list[int] | None:
    """The prompt of -p, -f, or of a pipe; None where there is none, but a terminal to chat on. Raises UserError."""
    text = read_given(args)
    if text is None and args.conversation:
        return None
    if text is None:
        text = _read_pipe()
        if text is None and not (args.no_conversation or args.tokens or args.chat):
            return None
        if not text:
            raise UserError(MISSING)
    if not args.tokens:
        return text
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise UserError("--tokens: the prompt is no list of token ids; give one like 1,2,3") from None


def sized_for(prompt: int, asked: int | None, most: int) -> int:
    """Tokens of context for a prompt and its answer: as many as were asked for; where nothing was, ANSWER at most, and
    no more than the model has (0: not known)."""
    if asked is not None and asked > 0:
        return prompt + asked
    return prompt + (max(1, min(ANSWER, most - prompt)) if most else ANSWER)


def most_tokens(asked: int | None) -> int:
    """Tokens to generate at most."""
    return sys.maxsize if asked == -1 else asked or ANSWER


def _read_pipe() -> str | None:
    """What is piped in, nothing where standard input is closed; None where it is a terminal."""
    try:
        if sys.stdin.isatty():
            return None
        return check_text(sys.stdin.read(), "what is piped in")
    except UnicodeDecodeError as error:
        raise UserError(NO_TEXT.format("what is piped in", error)) from None
    except (OSError, ValueError):
        return ""


def check_text(text: str, what: str) -> str:
    """The text. Raises UserError, about `what`, where bytes that are no UTF-8 hide in it: Python lets them through in
    arguments, and in the C locale in pipes too."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(NO_TEXT.format(what, error)) from None
    return text


def _unescape(text: str) -> str:
    """Backslash escapes as in C; others stay as they are."""

    def replaced(match: re.Match[str]) -> str:
        return chr(int(match[2], 16)) if match[2] else ESCAPES[match[1]]

    return re.sub(r"\\(?:([ntr'\"\\])|x([0-9a-fA-F]{2}))", replaced, text)


def _count_or_all(text: str) -> int:
    if not re.fullmatch("-1|[0-9]+", text.strip()) or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more, or -1")
    return int(text)
