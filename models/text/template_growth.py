"""How much a filter or a method of text makes, told from the lengths of what it is given.

A limit that is asked when the text is there comes too late: one line of a template can make gigabytes.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from jinja2 import Undefined
from jinja2.sandbox import SecurityError
from jinja2.utils import Cycler, Joiner, Namespace

from pshard.models.text.template_limits import LONGEST_TEXT

MOST_PIECES = 1 << 20  # texts that one is cut into: each is an object
LONGEST_ODD = 1 << 13  # letters for what no chat template does: whatever comes of them, their square is not too long

# fmt: off
_ODD = frozenset((
    "decode", "encode", "expandtabs", "hex", "maketrans", "pprint", "striptags", "translate", "urlize", "wordwrap",
    "xmlattr",
))
_SMALL = frozenset((  # these give a number, or something that was there
    "abs", "attr", "count", "d", "default", "dictsort", "endswith", "filesizeformat", "find", "first", "float", "index",
    "int", "items", "last", "length", "partition", "random", "removeprefix", "removesuffix", "reverse", "rfind",
    "rindex", "round", "rpartition", "rsplit", "split", "splitlines", "startswith",
))
TURNING = frozenset((  # these turn to each item of a list, or letter of a text
    "batch", "groupby", "join", "list", "map", "max", "min", "reject", "rejectattr", "select", "selectattr", "slice",
    "sort", "sum", "title", "unique", "wordcount",
))
# fmt: on
_LINE_END = re.compile("\r\n|[\n\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")
_WORD = re.compile(r"\S+")
_FIELD_IN_FIELD = re.compile(r"\{[^{}]*\{")


class _Size(NamedTuple):
    """Of a value as Python or JSON write it, at most: letters of its texts and numbers, items, how deep they nest."""

    letters: int
    items: int = 0
    depth: int = 0

    @property
    def written(self) -> int:
        """Letters with what stands between items."""
        return self.letters + 4 * self.items


def check_growth(name: str, given: Sequence[Any], settings: Mapping[str, Any]) -> None:
    """What it works on comes first. Raises SecurityError for a filter or method whose result may be beyond use."""
    subject, others = given[0], [*given[1:], *settings.values()]
    if _count_pieces(name, subject, others) > MOST_PIECES:
        raise SecurityError(f"{name} cuts a text into more than {MOST_PIECES} pieces")
    if name in _ODD:
        if sum(map(_count_odd, (subject, *others))) > LONGEST_ODD:
            raise SecurityError(f"{name} is given more than {LONGEST_ODD} letters")
    elif name not in _SMALL | TURNING and _count_letters(name, subject, others, settings) > LONGEST_TEXT:
        raise SecurityError(f"{name} makes a text beyond all use")


def check_written(value: Any) -> None:
    """Raises SecurityError for a value that is too long once it is written as text."""
    if not isinstance(value, str | int | float) and _measure(value, {}).written > LONGEST_TEXT:
        raise SecurityError("it writes a list beyond all use")


def check_joined(parts: Iterable[str], between: str | bytes) -> None:
    """Raises SecurityError for texts that are too long as one."""
    if sum(len(part) + len(between) for part in parts if isinstance(part, str | bytes)) > LONGEST_TEXT:
        raise SecurityError("it joins a text beyond all use")


def check_formatted(layout: str, values: Sequence[Any]) -> None:
    """Raises SecurityError for `layout % values` and `layout.format(values)` that may be too long, or whose widths are
    among the values."""
    bare = layout.replace("{{", "").replace("}}", "")
    if _FIELD_IN_FIELD.search(bare):
        raise SecurityError("it formats text in a width that is not known")
    for value in values:
        if not isinstance(value, str | bytes | int | float | list | tuple | dict | Undefined | None):
            raise SecurityError(f"it formats a {type(value).__name__}, which is no text, number or list")
    fields = layout.count("%") + bare.count("{")
    widths = sum(int(number) for number in re.findall(r"[0-9]{1,5}", layout))
    if len(layout) + fields * sum(_measure(value, {}).written for value in values) + widths > LONGEST_TEXT:
        raise SecurityError("it formats a text beyond all use")


def _count_pieces(name: str, subject: Any, others: Sequence[Any]) -> int:
    """The texts that a text is cut into, at most; 0 where it is not cut."""
    if not isinstance(subject, str | bytes):
        return 0
    if name == "splitlines":
        return _count_matches(_LINE_END, subject) + 1
    if name in ("split", "rsplit"):
        separator: Any = next((other for other in others if isinstance(other, str | bytes)), None)
        return subject.count(separator) + 1 if separator else _count_matches(_WORD, subject)
    return len(subject) if name in TURNING else 0


def _count_letters(name: str, subject: Any, others: Sequence[Any], settings: Mapping[str, Any]) -> int:
    """Of what the filter or method makes, at most."""
    is_text = isinstance(subject, str | bytes)
    letters = len(subject) if is_text else _measure(subject, {}).written
    if name == "replace":
        old, new = [settings.get(word) for word in ("old", "new") if word in settings] or others[:2] or (None, None)
        return letters + _count_found(subject, old, letters) * _measure(new, {}).written
    if name == "indent":
        lines = _count_matches(_LINE_END, subject) if is_text else letters
        return letters + (lines + 2) * max([4, *map(_count_width, others)])
    if name == "tojson":
        size = _measure(subject, {})
        between = sum(len(part) for o in others if isinstance(o, list | tuple) for part in o if isinstance(part, str))
        return size.written + size.items * (between + sum(map(_count_width, others)) * (size.depth + 1))
    if name in ("urlencode", "escape", "e", "forceescape"):
        return 2 * _measure(subject, {}).written
    return 3 * letters  # in another case: one letter can become three


def _count_found(text: Any, part: Any, most: int) -> int:
    alike = any(isinstance(text, kind) and isinstance(part, kind) for kind in (str, bytes))
    return text.count(part) if alike else most + 1


def _count_width(value: Any) -> int:
    return abs(value) if isinstance(value, int) else len(value) if isinstance(value, str) else 0


def _count_odd(value: Any) -> int:
    if isinstance(value, str | bytes | int):
        return abs(value) if isinstance(value, int) else len(value)
    return _measure(value, {}).written


def _count_matches(pattern: re.Pattern[str], text: str | bytes) -> int:
    """At most MOST_PIECES + 1: more need not be told apart."""
    return len(text) if isinstance(text, bytes) else sum(1 for _ in islice(pattern.finditer(text), MOST_PIECES + 1))


def _measure(value: Any, known: dict[int, tuple[_Size, Any]]) -> _Size:
    """The size of a value. `known`: lists that were measured, as a list may hold one a thousand times. Raises
    SecurityError for a list of too many letters."""
    if isinstance(value, str):
        return _Size(
            3 * len(str.encode(value, "utf-16-le", "surrogatepass")) + 2
        )  # "\u1234", and "\ud83d\ude00" for four
    if isinstance(value, bytes):
        return _Size(4 * len(value) + 3)
    if isinstance(value, int):
        return _Size(value.bit_length() // 3 + 6)
    if id(value) in known:
        return known[id(value)][0]
    held = value._Namespace__attrs if isinstance(value, Namespace) else value
    held = vars(value) if isinstance(value, Cycler | Joiner) else held
    if isinstance(held, Mapping):
        inner: list[Any] = [*held.keys(), *held.values()]
    elif isinstance(held, list | tuple | set | frozenset) or type(held).__name__.startswith("dict_"):
        inner = list(held)
    else:
        return _Size(64)
    letters, items, depth = 2, len(inner), 0
    for item in inner:
        part = _measure(item, known)
        letters, items, depth = letters + part.letters, items + part.items, max(depth, part.depth)
        if letters > LONGEST_TEXT:
            raise SecurityError("it makes text of a list beyond all use")
    known[id(value)] = _Size(letters, items, depth + 1), value  # which stays, so that no other has its id
    return known[id(value)][0]
