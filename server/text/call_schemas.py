"""What an answer is that has to be calls of tools, or may be: as JSON schemas, and as a grammar."""

import json
from typing import Any

from pshard.runtime.sampling.grammar import spell_schema
from pshard.server.api.asks import Tool
from pshard.server.text.call_reader import CLOSES


def write_either(schema: dict[str, Any], tools: tuple[Tool, ...], most: int, mark: str) -> str:
    """A Lark grammar of up to `most` calls, or of an answer that follows the schema. mark: the tag before each call;
    "" for none: several are a list then."""
    call = spell_schema(schema_of_calls(tools, 1))
    rules = [f"answer: {spell_schema(schema)}", f"call: {call}"]
    if mark:
        rules.append(f'marked: {json.dumps(mark)} "\\n"? call "\\n"? {json.dumps(CLOSES[mark])}')
        rules.append(f'calls: marked ("\\n"? marked){{0,{most - 1}}}' if most > 1 else "calls: marked")
    elif most > 1:
        rules.append(f"calls: call | {spell_schema(schema_of_calls(tools, most))}")
    else:
        rules.append("calls: call")
    return "\n".join(["start: answer | calls", *rules, ""])


def schema_of_calls(tools: tuple[Tool, ...], most: int) -> dict[str, Any]:
    """JSON schema of calls of any of these tools, the name of each first: of one call, or of a list of up to `most`."""
    calls: list[dict[str, Any]] = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, "arguments": {"$ref": f"#/$defs/{i}"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for i, tool in enumerate(tools)
    ]
    # each tool's schema stands on its own: two may define different things by one name
    definitions = {f"{i}": _move_root(as_object(tool.parameters), f"#/$defs/{i}") for i, tool in enumerate(tools)}
    call = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return (call if most == 1 else {"type": "array", "items": call, "minItems": 1, "maxItems": most}) | {
        "$defs": definitions
    }


def as_object(parameters: dict[str, Any]) -> dict[str, Any]:
    """A schema of arguments: they are an object in any case."""
    free = not any(key in parameters for key in ("type", "anyOf", "$ref"))
    named = ("$schema", "$id")  # of the document that it was
    return {key: value for key, value in parameters.items() if key not in named} | ({"type": "object"} if free else {})


def _move_root(schema: Any, root: str) -> Any:
    """The schema with references to its own root led to where it stands now."""
    if isinstance(schema, list):
        return [_move_root(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _move_root(value, root) for key, value in schema.items()}
    target = moved.get("$ref")
    return moved | {"$ref": root + target[1:]} if isinstance(target, str) and target.startswith("#") else moved
