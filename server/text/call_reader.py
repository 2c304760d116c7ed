"""Calls of tools in an answer's text, as the model writes them, told in the parts that clients expect."""

import json
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pshard.server.text import function_tags
from pshard.server.text.brackets import Brackets

if TYPE_CHECKING:
    from pshard.server.api.asks import Tool

BETWEEN = " \t\r\n[],;"  # around calls in lists of them
CLOSES = {"<tool_call>": "</tool_call>"}  # of stretches that hold calls; others go to the answer's end
HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
NAMED = re.compile(r"([\w.:-]+)\s*(?:\[CALL_ID\][\w-]*\s*)?(?:\[ARGS\])?\s*(?=\{)")  # of newer Mistral models
CHANNEL_TO = re.compile(r"to=(?:functions\.)?([\w.:-]+)")
FIRST_KEY = re.compile(r'\{\s*"([^"\\]*)"(?:\s*:\s*"([^"\\]*)")?')
KEYS = ("name", "arguments", "parameters", "type", "function", "id")  # with which an object that is a call may begin


@dataclass(frozen=True)
class CallPart:
    """Some of a call. The first part of each has its id and name, and others have pieces of its arguments' JSON."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


def make_call_id() -> str:
    """An id of a call, unlike all others."""
    return f"call_{secrets.token_hex(12)}"


def make_short_id() -> str:
    """Nine letters and digits: templates of Mistral take no other ids."""
    return secrets.token_hex(5)[:9]


class CallReader:
    """Reads text that holds calls. Arguments are given out as they come; what turns out to be no call is text.

    Without a tag a call names one of the tools and has arguments: an answer in JSON may look like one. `count`: calls
    so far; `open`: whether there is text of which the end of a call is awaited; `cut`: the answer ended within the last
    call's arguments.
    """

    def __init__(self, tools: tuple["Tool", ...], make_id: Callable[[], str] = make_call_id) -> None:
        self._types = {tool.name: tool.parameters.get("properties") for tool in tools}
        self._make_id = make_id
        self.count, self.cut = 0, False
        self._clear()

    def _clear(self) -> None:
        self._buffer = self._mark = self._channel = ""
        self._lost = ""  # text since the last call that is none of it, the tag that began the stretch included
        self._value: Brackets | None = None  # of arguments, while they come
        self._object, self._seen = Brackets(), 0  # of an object that may be a call, and how much of it was looked at
        self._tail = self._begun = self._closes = False
        self._after: str | None = None  # text behind the end of the stretch

    @property
    def open(self) -> bool:
        return self._value is not None or self._tail or bool(self._buffer)

    def begin(self, mark: str, within: str) -> tuple[list[CallPart], str]:
        """A tag came, after which there may be calls. Returns what that says for certain of what was before, and its
        text that is no call."""
        calls, rest = self.finish()
        self.cut = False  # the model went on
        if mark == function_tags.OPEN:
            self._buffer = mark
        elif mark.strip():
            self._mark = self._lost = mark
        if found := CHANNEL_TO.search(within):
            self._channel, self._value = found[1], Brackets()  # its text is the arguments, and nothing else
        return calls, rest

    def push(self, text: str) -> list[CallPart]:
        """What is certain of calls after some more text."""
        parts: list[CallPart] = []
        self._buffer += text
        self._closes = ">" in text
        while self._after is None and self._step(parts):
            pass
        return parts

    def leave(self) -> tuple[str, str] | None:
        """Where the stretch that may hold calls is over, by its own end or because none can be in it: the text of it
        that is no call, and what follows. Both are given once."""
        if self._after is None:
            return None
        text, after = self._text_of_none(), self._after
        self._clear()
        return text, after

    def finish(self) -> tuple[list[CallPart], str]:
        """At the end of the stretch or of the answer: the last calls, and the text that is none."""
        parts: list[CallPart] = []
        while self._after is None and self._buffer.startswith(function_tags.OPEN):
            if not self._read_functions(parts, True):
                break
        if self._value is not None and self._begun:
            parts += [self._add(self._buffer)] if self._buffer else []
            self.cut = True
        else:
            self._lost += self._buffer if not self._tail else ""
        rest = self._text_of_none() + (self._after or "")
        self._clear()
        return parts, rest

    def _text_of_none(self) -> str:
        """Text that turned out to be no call, without what stands between calls."""
        return self._lost if not self._begun or self._lost.strip(BETWEEN) else ""

    def _step(self, parts: list[CallPart]) -> bool:
        """Read some of the buffer; whether there may be more to read."""
        end = CLOSES.get(self._mark, "")
        if self._channel:
            return self._read_channel(parts)
        if self._value is not None:
            return self._read_arguments(parts, end)
        if self._tail:
            return self._skip_tail(end)
        self._skip(len(self._buffer) - len(self._buffer.lstrip().removeprefix("[TOOL_CALLS]").lstrip(BETWEEN)))
        held = self._buffer
        if end and held.startswith(end):
            return self._end_stretch(len(end))
        if held.startswith(function_tags.OPEN):
            return self._read_functions(parts, False)
        if not self._mark and self._is_none(held):
            return self._give_up()
        if found := HEAD.match(held):
            name = json.loads(found[1], strict=False)
            return self._give_up() if self._is_stranger(name) else self._enter(parts, name, found.end(), True)
        if self._mark and (found := NAMED.match(held)):
            return self._enter(parts, found[1], found.end(), False)
        if held.startswith("{"):
            return self._read_object(parts, end)
        at = held.find(end) if end else -1
        if at >= 0:  # neither JSON nor tags
            self._skip(at)
            return self._end_stretch(len(end))
        return False

    def _skip(self, n: int) -> None:
        """So many letters are no part of a call."""
        self._lost += self._buffer[:n]
        self._buffer = self._buffer[n:]

    def _end_stretch(self, n: int) -> bool:
        """The stretch ends with the so many letters that come next."""
        if not self._begun or self._lost.strip(BETWEEN):
            self._skip(n)
            n = 0
        self._after, self._buffer = self._buffer[n:], ""
        return False

    def _give_up(self) -> bool:
        """Nothing in this stretch is a call any more."""
        if self._buffer.startswith(function_tags.OPEN):  # else it would begin such a stretch again
            self._skip(len(function_tags.OPEN))
        self._after, self._buffer = self._buffer, ""
        return False

    def _is_stranger(self, name: str) -> bool:
        """Whether a call without a tag names no tool."""
        return not self._mark and name not in self._types

    def _is_none(self, held: str) -> bool:
        """Whether text without a tag cannot become a call any more."""
        if not held or function_tags.OPEN.startswith(held):
            return False
        found = FIRST_KEY.match(held)
        key, value = found.groups() if found else ("name", None)
        return held[0] != "{" or key not in KEYS or (key == "name" and value is not None and value not in self._types)

    def _enter(self, parts: list[CallPart], name: str, at: int, tail: bool) -> bool:
        parts.append(self._start(name))
        self._buffer, self._value, self._tail = self._buffer[at:], Brackets(), tail
        return True

    def _read_channel(self, parts: list[CallPart]) -> bool:
        if not self._begun and self._buffer.strip():
            parts.append(self._start(self._channel))
        if self._begun and self._buffer:
            parts.append(self._add(self._buffer))
            if self._value is not None and self._value.find_end(self._buffer)[2]:
                self._value = None
            self._buffer = ""
        return False

    def _read_arguments(self, parts: list[CallPart], stop: str) -> bool:
        assert self._value is not None
        size, controls, ended = self._value.find_end(self._buffer, stop)
        if size:
            told = list(self._buffer[:size])
            for i in controls:  # JSON has them escaped within texts, and models not always
                told[i] = json.dumps(told[i])[1:-1]
            parts.append(self._add("".join(told)))
        self._buffer = self._buffer[size:]
        if stop and self._buffer.startswith(stop):  # brackets that are still open are the model's mistake
            ended = True
        if ended:
            self._value = None
        return ended

    def _skip_tail(self, end: str) -> bool:
        """What follows the arguments within the call's object: an id, or nothing."""
        close, stop = self._buffer.find("}"), self._buffer.find(end) if end else -1
        if close >= 0 and not 0 <= stop < close:
            self._buffer, self._tail = self._buffer[close + 1 :], False
        elif stop >= 0:
            self._buffer, self._tail = self._buffer[stop:], False
        return not self._tail

    def _read_object(self, parts: list[CallPart], end: str) -> bool:
        """An object whose fields are in another order than usual, when it is whole."""
        size, _, ended = self._object.find_end(self._buffer[self._seen :], end)
        self._seen += size
        if not ended:
            if not (end and self._buffer.startswith(end, self._seen)):
                return False
            self._skip(self._seen)
            return self._end_stretch(len(end))
        size, self._object, self._seen = self._seen, Brackets(), 0
        name, arguments = _find_call(self._buffer[:size])
        if not name or (not self._mark and (arguments is None or self._is_stranger(name))):
            if not self._mark:
                return self._give_up()
            self._skip(size)
            return True
        parts += [self._start(name), self._add(arguments or "{}")]
        self._buffer = self._buffer[size:]
        return True

    def _read_functions(self, parts: list[CallPart], over: bool) -> bool:
        """Calls as tags, each when its end is certain."""
        head = function_tags.HEAD.match(self._buffer) if self._closes or over else None
        if head and self._is_stranger(head[1].strip()):
            return self._give_up()
        end = function_tags.find_call_end(self._buffer, over) if head else None
        call = function_tags.read_function(self._buffer[:end], self._types) if end is not None else None
        if end is None or call is None:
            return False
        parts += [self._start(call[0]), self._add(call[1])]
        closed = self._buffer[:end].endswith("</tool_call>")
        self._buffer = self._buffer[end:]
        if closed or not (self._mark or self._buffer.lstrip().startswith(function_tags.OPEN)):
            return self._end_stretch(0)
        self._buffer = self._buffer.lstrip()
        return True

    def _start(self, name: str) -> CallPart:
        self.count += 1
        self._begun, self._lost = True, ""
        return CallPart(self.count - 1, self._make_id(), name)

    def _add(self, arguments: str) -> CallPart:
        return CallPart(self.count - 1, arguments=arguments)


def _find_call(text: str) -> tuple[str, str | None]:
    """Name and arguments of an object that is a call, None where it has none; "" for one that is no call."""
    try:
        found = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return "", None
    inner = found.get("function", found) if isinstance(found, dict) else None
    inner = found if isinstance(inner, str) else inner
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        return "", None
    given = inner.get("arguments", inner.get("parameters"))
    return inner["name"], given if given is None or isinstance(given, str) else json.dumps(given, ensure_ascii=False)
