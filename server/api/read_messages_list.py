"""Messages of a chat, as chat templates expect them."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from pshard.server.api.asks import Message
from pshard.server.api.faults import bad_field

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def read_messages(given: Iterable[tuple[str, dict[str, Any]]]) -> tuple[Message, ...]:
    """The messages, each given with the field that it is from: contents are texts, arguments of calls are objects,
    answers of tools know the tool's name. Raises Fault by the part that is wrong."""
    names: dict[str, str] = {}  # of tools, by the id of their call
    return tuple(_read_message(message, where, names) for where, message in given)


def number_places(given: Iterable[dict[str, Any]], where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Entries of a list field with their names."""
    return ((f"{where}[{i}]", item) for i, item in enumerate(given))


def _read_message(message: dict[str, Any], where: str, names: dict[str, str]) -> Message:
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise bad_field(f"{where}.role", f"is one of {', '.join(ROLES)}")
    read: Message = {"role": ROLES[role]}
    calls = message.get("tool_calls") if role == "assistant" else None
    if calls is not None:
        if not isinstance(calls, list):
            raise bad_field(f"{where}.tool_calls", "is a list")
        found = [_read_call(call, f"{where}.tool_calls[{i}]", names) for i, call in enumerate(calls)]
        if found:
            read["tool_calls"] = found
    content = message.get("content")
    if content is None and role != "assistant":
        raise bad_field(f"{where}.content", "is missing")
    read["content"] = "" if content is None else read_content(content, f"{where}.content")
    if role == "tool":
        call = _text_of(message, "tool_call_id", where, "")
        read["tool_call_id"] = call
        read["name"] = _text_of(message, "name", where, names.get(call, ""))
    elif message.get("name") is not None:
        read["name"] = _text_of(message, "name", where, "")
    thought = message.get("reasoning_content") or message.get("reasoning")
    if role == "assistant" and isinstance(thought, str):
        read["reasoning_content"] = read["thinking"] = thought  # names that templates have for it
    return read


def _read_call(call: Any, where: str, names: dict[str, str]) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise bad_field(f"{where}.function", "is an object with a name and arguments")
    name, id = _text_of(function, "name", f"{where}.function"), _text_of(call, "id", where, "")
    names[id] = name
    arguments = read_call_arguments(function.get("arguments"))
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def read_call_arguments(given: Any) -> dict[str, Any] | str:
    """Arguments of a call as an object, from the text that clients send back; a text that is none is what the model
    wrote, and stays one. None at all are an empty object."""
    if isinstance(given, str):
        try:
            read = json.loads(given or "{}", strict=False)
        except (ValueError, RecursionError):
            return given
        return read if isinstance(read, dict) else given if read is not None else {}
    return {} if given is None else given if isinstance(given, dict) else json.dumps(given, ensure_ascii=False)


def read_content(content: Any, where: str) -> str:
    """The text of a content: a text, or parts of type text. Raises Fault for images and other parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_field(where, "is a text or a list of parts")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in TEXTS:
            told = f"of type {kind[:40]!r} is not taken" if isinstance(kind, str) else "has no type"
            raise bad_field(f"{where}[{i}]", f"{told}: this model reads text only")
        texts.append(_text_of(part, TEXTS[kind], f"{where}[{i}]"))
    return "\n".join(texts)


def _text_of(holder: dict[str, Any], name: str, where: str, default: str | None = None) -> str:
    value = holder.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, str):
        raise bad_field(f"{where}.{name}", "is a text")
    return value
