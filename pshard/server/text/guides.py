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


def schema_of_call(tools: tuple[Tool, ...]) -> dict[str, Any]:
    """JSON schema of one call of any of these tools, its name first."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, "arguments": _root_inside(tool.parameters)},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    definitions: dict[str, Any] = {}
    for tool in tools:
        for key in ("$defs", "definitions"):
            definitions |= {f"{key}": tool.parameters[key] | definitions.get(key, {})} if key in tool.parameters else {}
    return (calls[0] if len(calls) == 1 else {"anyOf": calls}) | definitions


def _root_inside(parameters: dict[str, Any]) -> dict[str, Any]:
    """A schema to stand within another: what it defines stands at the root; it is an object in any case."""
    inner = {key: value for key, value in parameters.items() if key not in ("$defs", "definitions", "$schema", "$id")}
    return inner if "type" in inner or "anyOf" in inner or "$ref" in inner else {**inner, "type": "object"}
