"""Text that knows of every character whether a chat template wrote it or a message brought it."""

import re
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn, SupportsIndex

TEMPLATE, MESSAGE, UNKNOWN = range(3)  # who wrote a character; UNKNOWN: perhaps a message


class TracedText(str):
    """A string with the origin of each of its characters, which whatever cuts and joins it keeps.

    `origins` has a byte for each character: TEMPLATE, MESSAGE or UNKNOWN. Other methods of str than those below give a
    plain str: whoever calls them says where that is from.
    """

    __slots__ = ("origins",)
    origins: bytes

    def __new__(cls, text: str = "", origins: bytes | None = None) -> "TracedText":
        """`origins` None: all of it is UNKNOWN."""
        self = super().__new__(cls, text)
        self.origins = bytes([UNKNOWN]) * len(self) if origins is None else origins
        return self

    def runs(self, origin: int) -> list[tuple[int, int]]:
        """Begin and end of each stretch that has this origin throughout, as long as can be."""
        return [found.span() for found in re.finditer(b"[%c]+" % origin, self.origins)]

    def forget(self) -> str:
        """The text as a plain str."""
        return super().__str__()

    def __str__(self) -> "TracedText":  # Jinja calls str() on all that it writes
        return self

    def __getitem__(self, key: SupportsIndex | slice) -> "TracedText":
        found = self.origins[key]
        return TracedText(super().__getitem__(key), bytes([found]) if isinstance(found, int) else found)

    def __iter__(self) -> Iterator["TracedText"]:  # type: ignore[override]
        return (self[i] for i in range(len(self)))

    def __add__(self, other: str) -> "TracedText":
        return join_texts((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> "TracedText":
        return join_texts((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, count: SupportsIndex) -> "TracedText":
        return TracedText(super().__mul__(count), self.origins * count)

    __rmul__ = __mul__

    def join(self, parts: Iterable[str], /) -> "TracedText":
        texts: list[str] = []
        for part in parts:
            texts += [self, part] if texts else [part]
        return join_texts(texts)

    def lstrip(self, chars: str | None = None, /) -> "TracedText":
        return self[len(self) - len(super().lstrip(chars)) :]

    def rstrip(self, chars: str | None = None, /) -> "TracedText":
        return self[: len(super().rstrip(chars))]

    def strip(self, chars: str | None = None, /) -> "TracedText":
        return self.lstrip(chars).rstrip(chars)

    def removeprefix(self, prefix: str, /) -> "TracedText":
        return self[len(prefix) :] if self.startswith(prefix) else self

    def removesuffix(self, suffix: str, /) -> "TracedText":
        return self[: len(self) - len(suffix)] if self.endswith(suffix) else self

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list["TracedText"]:  # type: ignore[override]
        return self._locate(super().split(sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list["TracedText"]:  # type: ignore[override]
        return self._locate(super().rsplit(sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list["TracedText"]:  # type: ignore[override]
        whole = self._locate(super().splitlines(keepends=True), "")
        return whole if keepends else [line[: len(bare)] for line, bare in zip(whole, super().splitlines())]

    def partition(self, sep: str, /) -> tuple["TracedText", "TracedText", "TracedText"]:
        head, *tail = self.split(sep, 1)
        return self._cut(len(head), len(sep)) if tail else (self, self[:0], self[:0])

    def rpartition(self, sep: str, /) -> tuple["TracedText", "TracedText", "TracedText"]:
        head, *tail = self.rsplit(sep, 1)
        return self._cut(len(head), len(sep)) if tail else (self[:0], self[:0], self)

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> "TracedText":  # type: ignore[override]
        if not old:  # `new` between all characters: no template asks for it
            return TracedText(super().replace(old, new, count))
        origins, at, brought = bytearray(), 0, _origins(new)  # no piece is kept: there may be millions
        for _ in range(super().count(old) if int(count) < 0 else min(int(count), super().count(old))):
            found = self.index(old, at)
            origins += self.origins[at:found] + brought
            at = found + len(old)
        return TracedText(super().replace(old, new, count), bytes(origins + self.origins[at:]))

    def lower(self) -> "TracedText":
        return self._recase(super().lower())

    def upper(self) -> "TracedText":
        return self._recase(super().upper())

    def capitalize(self) -> "TracedText":
        return self._recase(super().capitalize())

    def title(self) -> "TracedText":
        return self._recase(super().title())

    def encode(self, *_: Any, **__: Any) -> NoReturn:  # type: ignore[override]
        """Bytes have no origins. Raises TypeError."""
        raise TypeError("it turns text into bytes, and then nobody knows what of it is a message")

    def _cut(self, at: int, length: int) -> tuple["TracedText", "TracedText", "TracedText"]:
        return self[:at], self[at : at + length], self[at + length :]

    def _locate(self, parts: list[str], between: str | None) -> list["TracedText"]:
        """The parts of this text, in their order; `between` stands between them, None: any whitespace."""
        found, at = [], 0
        for part in parts:
            at = self.index(part, at) if between is None else at  # a part begins with the first that is no whitespace
            found.append(self[at : at + len(part)])
            at += len(part) + len(between or "")
        return found

    def _recase(self, text: str) -> "TracedText":
        """The same characters in another case. Some become two ("ß" and "SS"), none vanishes: equal lengths fit."""
        return TracedText(text, self.origins if len(text) == len(self) else None)


def join_texts(parts: Iterable[str]) -> TracedText:
    """One text. A plain str is the template's own words; of its subclasses only TracedText says what it is."""
    texts = list(parts)
    return TracedText("".join(texts), b"".join(map(_origins, texts)))


def _origins(text: str) -> bytes:
    if isinstance(text, TracedText):
        return text.origins
    return bytes([TEMPLATE if type(text) is str else UNKNOWN]) * len(text)
