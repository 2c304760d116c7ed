"""Where a chat is typed and read: an edited line on a terminal, plain lines from a pipe."""

import os
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pshard.commands.everyday.chat_commands import COMMANDS
from pshard.commands.everyday.word_wrap import WordWrap
from pshard.commands.parsing.text_flags import NO_TEXT, check_text
from pshard.errors import UserError

if TYPE_CHECKING:
    from pshard.session.chat.thoughts import Piece

DIM, PLAIN = "\x1b[2m", "\x1b[0m"


class Terminal:
    """Lines in, answers out. Answers go to stdout, all else to stderr."""

    def __init__(self, name: str) -> None:
        self.typed = sys.stdin.isatty() and sys.stdout.isatty()
        self._wraps = sys.stdout.isatty()
        self._coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        self._session: Any = None
        self._ends = "\n"  # what the answer's last letter is
        self._wrap, self._dim = WordWrap(lambda: self.width), False
        if self.typed:
            self.tell(f"chat with {name}: /help lists what else you can say, Ctrl-D ends it, Ctrl-C stops an answer")

    def read_line(self, status: Callable[[], str]) -> str | None:
        """The next message, of several lines where all but the last end with a backslash; None at the end."""
        lines: list[str] = []
        while True:
            line = self._edit(status, bool(lines)) if self.typed else self._read()
            if line is None:
                return "\n".join(lines) or None
            if not line.endswith("\\"):
                return "\n".join([*lines, line])
            lines.append(line[:-1])

    @property
    def width(self) -> int:
        """Columns of the window: of the terminal itself, as COLUMNS may be that of another one."""
        with suppress(OSError, ValueError):
            if columns := os.get_terminal_size(sys.stdout.fileno()).columns:
                return columns
        return shutil.get_terminal_size().columns

    def show(self, piece: "Piece") -> None:
        """Some of an answer; what is an aside is dim on a terminal, where lines break between words."""
        if not piece.text:
            return
        if not self._wraps:
            self._write(piece.text, piece.aside)
        else:
            if piece.aside != self._dim:
                self._write(self._wrap.finish(), self._dim)
                self._dim = piece.aside
            self._write(self._wrap.push(piece.text), piece.aside)

    def end_answer(self) -> None:
        """The answer is over."""
        self._write(self._wrap.finish(), self._dim)
        self._wrap.restart()
        if self._ends != "\n":
            print(flush=True)
        self._ends = "\n"

    def confirm(self, question: str) -> bool:
        """Whether who types says yes; nobody does where lines are piped in."""
        if not self.typed:
            return False
        from prompt_toolkit import prompt

        try:
            return prompt(f"{question} [y/N] ").strip().lower() in ("y", "yes")
        except (KeyboardInterrupt, EOFError):
            return False

    def _write(self, text: str, aside: bool) -> None:
        if text:
            print(f"{DIM}{text}{PLAIN}" if aside and self._coloured else text, end="", flush=True)
            self._ends = text[-1]

    def tell(self, line: str) -> None:
        """A line about the chat."""
        print(f"{DIM}{line}{PLAIN}" if self._coloured and sys.stderr.isatty() else line, file=sys.stderr, flush=True)

    def _read(self) -> str | None:
        try:
            line = check_text(sys.stdin.readline(), "what is piped in")
        except UnicodeDecodeError as error:
            raise UserError(NO_TEXT.format("what is piped in", error)) from None
        except OSError as error:
            raise UserError(f"cannot read what is piped in: {error.strerror or error}; give -p TEXT") from None
        return line.rstrip("\n") if line else None

    def _edit(self, status: Callable[[], str], goes_on: bool) -> str | None:
        """A line from prompt_toolkit, with the history of this chat; Ctrl-C empties it."""
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter

        if self._session is None:
            commands = WordCompleter([f"/{name}" for name in COMMANDS], sentence=True)
            self._session = PromptSession(completer=commands, complete_while_typing=False)
        while True:
            try:
                return self._session.prompt("... " if goes_on else "> ", bottom_toolbar=status)
            except KeyboardInterrupt:
                self.tell("Ctrl-D ends the chat")
            except EOFError:
                return None
