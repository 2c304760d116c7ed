"""Grammars that answers follow: a JSON schema of the request, or the call of a tool that is forced."""

import json
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pshard.errors import UserError
from pshard.runtime.sampling.grammar import Grammar, GrammarWords, open_words
from pshard.server.api.asks import ChatAsk, Rule, Tool
from pshard.server.api.faults import Fault
from pshard.server.text.call_schemas import as_object, schema_of_calls, write_either

if TYPE_CHECKING:
    from pshard.server.snapshot import ServedModel

UNKNOWN_KEYS = re.compile(r"Unimplemented keys: \[([^\]]*)\]")
SAID = ("type", "format", "pattern", "$ref")  # keywords whose value may be what is wrong
TABLES = ("properties", "patternProperties", "$defs", "definitions")


class Guides:
    """Compiles grammars for one model. Slow: called off the event loop."""

    def __init__(self, model: "ServedModel") -> None:
        self._model = model
        self._words: GrammarWords | None = None
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Make the vocabulary's words now: a large one takes seconds, which no request is to wait for."""
        with suppress(UserError):  # there are none: each request that needs them is told
            self._open_words()

    def _open_words(self) -> GrammarWords:
        with self._lock:
            self._words = self._words or open_words(self._model.tokenizer, self._model.vocab)
            return self._words

    def follow_schema(self, schema: dict[str, Any], where: str) -> Callable[[], Grammar]:
        """What makes a grammar for each answer: compact JSON of that schema, as whitespace lets a small model go on for
        ever. Raises Fault for a schema that cannot be kept to."""
        try:
            return self._open_words().compile_schema(json.dumps(schema))
        except UserError as error:
            raise _refuse(schema, where, error) from None

    def follow_rule(self, rule: Rule) -> Callable[[], Grammar]:
        """The same of a grammar, an expression or a choice. Raises Fault that shows what cannot be kept to, as it was
        written."""
        try:
            words = self._open_words()
            if isinstance(rule.value, tuple):
                return words.compile_choice(rule.value, rule.where)
            make = words.compile_regex if rule.kind == "regex" else words.compile_grammar
            return make(rule.value, rule.where)
        except UserError as error:
            raise Fault(400, str(error), param=rule.where, code="invalid_grammar") from None

    def follow_ask(self, ask: ChatAsk, most: int, mark: str) -> Callable[[], Grammar]:
        """The same for an ask that forces calls, has a schema, or both tools and a schema: then the answer is calls or
        follows the schema. most: calls of an answer; mark: the tag before a call, "" for none. Raises Fault that names
        the tool and the field."""
        several = most if ask.several and not isinstance(ask.choice, tuple) else 1  # a named one is called once
        if ask.rule is not None:
            return self.follow_rule(ask.rule)
        if not ask.tools:
            assert ask.schema is not None
            return self.follow_schema(ask.schema, ask.format)
        try:
            words = self._open_words()
            if ask.forced:
                return words.compile_schema(json.dumps(schema_of_calls(ask.forced, several)))
            either = write_either(ask.schema or {}, ask.tools, several, mark)
            return words.compile_grammar(either, "the grammar of calls and answers")
        except UserError as error:
            for tool in ask.forced or ask.tools:
                self._check_tool(tool)
            if ask.schema is not None and not ask.forced:
                self.follow_schema(ask.schema, ask.format)
            raise Fault(400, f"tools cannot be kept: {error}", param="tools", code="invalid_schema") from None

    def _check_tool(self, tool: Tool) -> None:
        """Raises Fault for a tool whose schema cannot be kept to."""
        try:
            self._open_words().compile_schema(json.dumps(as_object(tool.parameters)))
        except UserError as error:
            raise _refuse(tool.parameters, tool.where or "tools", error, tool.name) from None


def _refuse(schema: Any, where: str, error: UserError, tool: str = "") -> Fault:
    field = find_field(schema, str(error))
    of = " of ".join(part for part in (field, f"the tool {tool!r}" if tool else "") if part)
    told = f"{where} cannot be kept: {of}{': ' if of else ''}{error}"
    return Fault(400, told, param=where, code="invalid_schema")


def find_field(schema: Any, told: str) -> str:
    """The field of a schema that an error speaks of, as "properties.city.if"; "" where none can be told apart."""
    keys = UNKNOWN_KEYS.search(told)
    named = set(re.findall(r'"([^"]*)"', keys[1])) if keys else set()
    level: list[tuple[str, Any, bool]] = [("", schema, False)]  # the last: its keys are names that the schema gives
    while level:
        inner = []
        for place, value, names in level:
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                at = f"{place}.{key}".lstrip(".")
                wrong = isinstance(item, str) and (f": {item}" in told or f"'{item.lstrip('#')}'" in told)
                if not names and (key in named or (key in SAID and wrong)):
                    return at
                if isinstance(item, dict | list):
                    inner.append((at, item, key in TABLES and not names))
        level = inner
    return ""
