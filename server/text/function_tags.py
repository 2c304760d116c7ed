"""Calls written as tags, as Qwen's coders do: a function, with every parameter in a tag of its own.

Values stand there as they are, so any of the tags may be within one. A tag ends something where what follows fits.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

OPEN = "<function="
HEAD = re.compile(r"<function=([^>\n]+)>")
NEXT = re.compile(r"(?:<tool_call>\s*)?<function=[^>\n]+>")
PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?")
CLOSE = "</parameter>"
END = re.compile(r"(?:</parameter>|<function=[^>\n]+>)\s*(?:(</function>)(\s*</tool_call>)?|</tool_call>)")
OPENERS = ("<tool_call>", OPEN)


def find_call_end(text: str, over: bool) -> int | None:
    """Where the call ends that the text begins with; None: not yet known, or it has no end. over: no text follows.

    An end within a value looks like the call's own. So it is the last one before another call or the end of the answer:
    what stands between two ends belongs to a value.
    """
    found = END.search(text)
    while found:
        rest = text[found.end() :].lstrip()
        if rest.startswith(OPENERS):
            return found.end()
        other, following = NEXT.search(text, found.end()), END.search(text, found.end())
        if other and (following is None or other.start() < following.start()):
            return found.end()
        if following is None:
            return found.end() if over else None
        found = following
    return None


def read_function(text: str, types: Mapping[str, Any]) -> tuple[str, str] | None:
    """Name and arguments, as JSON, of a whole call. types: the properties of each tool's schema, by its name. None: its
    parameters are not as they have to be."""
    head = HEAD.match(text)
    end = [*re.finditer(r"</function>|</tool_call>", text)]
    assert head and end, "find_call_end found it"
    name = head[1].strip()
    known = types.get(name)
    body = text[head.end() : _body_end(text, end)]
    given: dict[str, Any] = {}
    at = 0
    while found := PARAMETER.match(body, at):
        key = found[1].strip()
        value_end = _find_value_end(body, found.end(), {*given, key})
        if value_end is None:
            return None
        given[key] = _type_value(body[found.end() : value_end].removesuffix("\n"), known, key)
        at = value_end + len(CLOSE)
    return None if body[at:].strip() else (name, json.dumps(given, ensure_ascii=False))


def _body_end(text: str, ends: list[re.Match[str]]) -> int:
    """Where the last closing tags begin."""
    functions = [found for found in ends if found[0] == "</function>"]
    last = ends[-1]
    if functions and not text[functions[-1].end() : last.start()].strip() and last[0] == "</tool_call>":
        return functions[-1].start()
    return last.start()


def _find_value_end(body: str, start: int, given: set[str]) -> int | None:
    """Where a parameter's value ends: what follows is the body's end, or a parameter that was not given."""
    at = body.find(CLOSE, start)
    while at >= 0:
        rest = body[at + len(CLOSE) :]
        if not rest.strip():
            return at
        other = PARAMETER.match(rest)
        if other and other[1].strip() not in given:
            return at
        at = body.find(CLOSE, at + 1)
    return None


def _type_value(value: str, known: Any, name: str) -> Any:
    """A parameter that is written as text; the tool's schema says whether it is one."""
    if _may_be_text(known.get(name) if isinstance(known, dict) else None):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _may_be_text(schema: Any) -> bool:
    """Whether a schema takes texts; one that does not say is taken to."""
    if not isinstance(schema, dict):
        return True
    kinds = schema.get("type")
    if kinds is not None:
        return "string" in kinds if isinstance(kinds, list) else kinds == "string"
    parts = [part for word in ("anyOf", "oneOf") for part in schema.get(word) or ()]
    return any(map(_may_be_text, parts)) if parts else True
