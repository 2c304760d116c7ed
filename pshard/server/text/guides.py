"""Grammars that answers follow: a JSON schema of the request, or the call of a tool that is forced."""

import json
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pshard.errors import UserError
from pshard.runtime.drawing.grammar import Grammar, GrammarWords, open_words
from pshard.server.api.asks import Tool
from pshard.server.api.faults import Fault

if TYPE_CHECKING:
    from pshard.server.snapshot import ServedModel


class Guides:
    """Compiles grammars for one model. Slow: called off the event loop."""

    def __init__(self, model: "ServedModel") -> None:
        self._model = model
        self._words: GrammarWords | None = None
        self._lock = threading.Lock()

    def follow_schema(self, schema: dict[str, Any], where: str) -> Callable[[], Grammar]:
        """What makes a grammar for each answer: compact JSON of that schema, as whitespace lets a small model go on for
        ever. Raises Fault for a schema that cannot be kept to."""
        try:
            with self._lock:
                self._words = self._words or open_words(self._model.tokenizer, self._model.vocab)
            return self._words.compile_schema(json.dumps(schema), spaces="")
        except UserError as error:
            raise Fault(400, f"{where} cannot be kept: {error}", param=where, code="invalid_schema") from None


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
    definitions = {f"{i}": _move_root(_as_object(tool.parameters), f"#/$defs/{i}") for i, tool in enumerate(tools)}
    call = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return (call if most == 1 else {"type": "array", "items": call, "minItems": 1, "maxItems": most}) | {
        "$defs": definitions
    }


def _as_object(parameters: dict[str, Any]) -> dict[str, Any]:
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
