"""The parser of every command: whole flags only, one-line errors, the nearest flag for one that there is not."""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pshard.commands.parsing.llama_flags import drop_harmless
from pshard.errors import UserError

_spoken: list[str] = []  # what the command is called while `pshard` runs it


@contextmanager
def called_as(name: str) -> Iterator[None]:
    """Parsers made within call themselves so, as "pshard run"."""
    _spoken.append(name)
    try:
        yield
    finally:
        _spoken.pop()


class CommandParser(argparse.ArgumentParser):
    """Refuses abbreviated and unknown flags, takes those of llama.cpp that change nothing here, and may take the model
    as a plain word (`takes_model`), which becomes `reference`.

    argparse's own optional words are filled by nothing when flags stand before them, up to Python 3.12.
    """

    def __init__(self, prog: str, description: str, takes_model: bool = False) -> None:
        called = _spoken[-1] if _spoken else prog
        usage = f"{called} {'[MODEL] ' if takes_model else ''}[flags]"
        super().__init__(prog=called, description=description, allow_abbrev=False, usage=usage)
        self.takes_model = takes_model

    @property
    def flags(self) -> dict[str, argparse.Action]:
        """Every flag by each of its names."""
        return self._option_string_actions

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> argparse.Namespace:
        """As argparse. Raises UserError for what cannot be read, in one line."""
        words = drop_harmless(sys.argv[1:] if args is None else args, self.flags, _say)
        found, rest = self.parse_known_args(words, namespace)
        unknown = [word for word in rest if word.startswith("-") and word not in ("-", "--")]
        plain = [word for word in rest if word not in unknown and word != "--"]
        if unknown:
            raise UserError("; ".join(map(self._describe_unknown, unknown)) + f"; see {self.prog} --help")
        if self.takes_model:
            found.reference = plain.pop(0) if plain else None
        if plain:
            raise UserError(f"{plain[0]!r} is one word too many; see {self.prog} --help")
        return found

    def _describe_unknown(self, word: str) -> str:
        from difflib import get_close_matches

        flag = word.partition("=")[0]
        near = get_close_matches(flag, self.flags, 1)
        return f"there is no flag {flag}" + (f" (did you mean {near[0]}?)" if near else "")

    def _get_option_tuples(self, option_string: str) -> list:
        """A flag of one dash is neither abbreviated nor split: -t is not -ts, and -ngl is not -n with "gl" (-n5 stays
        -n 5)."""
        found = super()._get_option_tuples(option_string)
        return [
            match for match in found
            if option_string.startswith(match[1]) and option_string[len(match[1]) :][:1].isdigit()
        ]  # fmt: skip

    def error(self, message: str) -> None:  # type: ignore[override]
        raise UserError(f"{message}; see {self.prog} --help")


def _say(line: str) -> None:
    """A line on stderr, once when several ranks run the same command."""
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr)
