"""Calls of tools in an answer's text, as the model writes them, told in the parts that clients expect."""

import json
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pshard.server.api.asks import Tool

BETWEEN = " \t\r\n[],;"  # around calls in lists of them
HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
NAMED = re.compile(r"([\w.:-]+)\s*(?:\[CALL_ID\][\w-]*\s*)?(?:\[ARGS\])?\s*(?=\{)")  # of newer Mistral models
CHANNEL_TO = re.compile(r"to=(?:functions\.)?([\w.:-]+)")
FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)(?:</function>|$)", re.S)  # of Qwen's coders
PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.S)


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

    `count`: calls so far; `open`: whether there is text of which the end of a call is awaited.
    """

    def __init__(self, tools: tuple["Tool", ...], make_id: Callable[[], str] = make_call_id) -> None:
        self._types = {tool.name: tool.parameters.get("properties") for tool in tools}
        self._make_id = make_id
        self.count = 0
        self._buffer = self._mark = ""
        self._depth = -1  # of brackets within arguments; -1: between calls
        self._quoted = self._escaped = self._tail = self._whole = False

    @property
    def open(self) -> bool:
        return self._depth >= 0 or self._tail or self._whole or bool(self._buffer)

    def begin(self, mark: str, within: str) -> tuple[list[CallPart], str]:
        """A tag came: a call ends, or one begins. Returns what that says for certain, and text that is no call."""
        calls, rest = self.finish()
        rest += mark if rest else ""
        self._mark = mark if mark.strip() else ""
        if found := CHANNEL_TO.search(within):
            self._whole = True  # the channel's text is the arguments, and nothing else
            calls.append(self._start(found[1]))
        return calls, rest

    def push(self, text: str) -> list[CallPart]:
        """What is certain of calls after some more text."""
        if self._whole:
            return [self._add(text)] if text else []
        self._buffer += text
        parts: list[CallPart] = []
        while self._step(parts):
            pass
        return parts

    def finish(self) -> tuple[list[CallPart], str]:
        """At the end of the stretch that may hold calls: the last ones, and the text that is none."""
        parts, rest = [], ""
        held = self._buffer.strip(BETWEEN)
        if held and self._depth < 0 and not self._tail:
            parts = self._read_functions(held)
            rest = "" if parts else self._mark + self._buffer
        elif self._depth >= 0 and self._buffer:
            parts = [self._add(self._buffer)]
        self._buffer = self._mark = ""
        self._depth, self._quoted, self._escaped, self._tail, self._whole = -1, False, False, False, False
        return parts, rest

    def _step(self, parts: list[CallPart]) -> bool:
        """Read some of the buffer; whether there may be more to read."""
        if self._depth >= 0:
            return self._read_arguments(parts)
        if self._tail:  # what follows the arguments within the call's object: an id, or nothing
            at = self._buffer.find("}")
            self._buffer, self._tail = self._buffer[at + 1 :] if at >= 0 else "", at < 0
            return at >= 0
        self._buffer = self._buffer.lstrip().removeprefix("[TOOL_CALLS]").lstrip(BETWEEN)
        if found := HEAD.match(self._buffer):
            return self._enter(parts, json.loads(found[1], strict=False), found.end(), True)
        if found := NAMED.match(self._buffer):
            return self._enter(parts, found[1], found.end(), False)
        return self._buffer.startswith("{") and "}" in self._buffer and self._read_object(parts)

    def _enter(self, parts: list[CallPart], name: str, at: int, tail: bool) -> bool:
        parts.append(self._start(name))
        self._buffer, self._depth, self._tail = self._buffer[at:], 0, tail
        return True

    def _read_arguments(self, parts: list[CallPart]) -> bool:
        end, controls = len(self._buffer), list[int]()
        for i, letter in enumerate(self._buffer):
            if self._quoted:
                if letter < " " and not self._escaped:
                    controls.append(i)
                self._quoted = self._escaped or letter != '"'
                self._escaped = letter == "\\" and not self._escaped
            elif letter == '"':
                self._quoted = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self._depth, end = -1, i + 1
                    break
        if end:
            told = list(self._buffer[:end])
            for i in controls:  # JSON has them escaped within texts, and models not always
                told[i] = json.dumps(told[i])[1:-1]
            parts.append(self._add("".join(told)))
        self._buffer = self._buffer[end:]
        return self._depth < 0

    def _read_object(self, parts: list[CallPart]) -> bool:
        """A whole object whose fields are in another order than usual."""
        try:
            found, end = json.JSONDecoder(strict=False).raw_decode(self._buffer)
        except (ValueError, RecursionError):
            return False
        call = _find_call(found)
        if call is None:
            return False
        parts += [self._start(call[0]), self._add(call[1])]
        self._buffer = self._buffer[end:]
        return True

    def _read_functions(self, text: str) -> list[CallPart]:
        """Calls as tags, with every parameter in a tag of its own."""
        parts = []
        for name, inner in FUNCTION.findall(text):
            types = self._types.get(name.strip())
            given = {key.strip(): _type_value(value, types, key.strip()) for key, value in PARAMETER.findall(inner)}
            parts += [self._start(name.strip()), self._add(json.dumps(given, ensure_ascii=False))]
        return parts

    def _start(self, name: str) -> CallPart:
        self.count += 1
        return CallPart(self.count - 1, self._make_id(), name)

    def _add(self, arguments: str) -> CallPart:
        return CallPart(self.count - 1, arguments=arguments)


def _find_call(found: Any) -> tuple[str, str] | None:
    """Name and arguments of an object that is a call."""
    inner = found.get("function", found) if isinstance(found, dict) else None
    inner = found if isinstance(inner, str) else inner
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        return None
    given = inner.get("arguments", inner.get("parameters", {}))
    return inner["name"], given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)


def _type_value(value: str, types: Any, name: str) -> Any:
    """A parameter that is written as text; the tool's schema says whether it is one."""
    schema = types.get(name) if isinstance(types, dict) else None
    if not isinstance(schema, dict) or schema.get("type", "string") == "string":
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
