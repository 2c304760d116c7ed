"""Fields that say what an answer has to be: schemas, grammars, regular expressions and choices, by the names that they
have in OpenAI's interface, llama.cpp, vLLM and SGLang."""

import json
from collections.abc import Mapping
from typing import Any

from pshard.server.api.asks import Rule
from pshard.server.api.faults import bad_field
from pshard.server.api.limits import Limits
from pshard.server.api.read_tools import check_schema
from pshard.server.api.tables.fields import ByType, Field, Fields, Flag, Items, Kind, Object, Refused, Table, Text

Schema = dict[str, Any]
RULES = {  # field -> what it holds
    "grammar": "grammar", "json_schema": "schema", "guided_json": "schema", "guided_regex": "regex",
    "guided_choice": "choice", "guided_grammar": "grammar", "regex": "regex", "ebnf": "grammar",
}  # fmt: skip
OUTPUTS = {"json": "schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}  # of structured_outputs
SPACES = "is not taken: JSON is compact here"


def rule_table(limits: Limits) -> Table:
    """Fields of which a request may have one."""
    kinds = _kinds(limits)
    outputs = (
        *(Field(name, kinds[kind], None) for name, kind in OUTPUTS.items()),
        Field("json_object", Flag(), False),
        Field("structural_tag", Refused("is not taken; give json")),
        Field("whitespace_pattern", Refused(SPACES)),
        Field("disable_additional_properties", Flag(), True),
    )
    return (
        *(Field(name, kinds[kind], None, f"a {kind} that the answer follows") for name, kind in RULES.items()),
        Field("guided_whitespace_pattern", Refused(SPACES)),
        Field("structured_outputs", Fields(outputs), None, "one of json, regex, choice, grammar and json_object"),
    )


def _kinds(limits: Limits) -> dict[str, Kind]:
    text = Text(limits.schema_bytes)
    schema = ByType((("string", text), ("object", Object())), "a JSON schema, as an object or as text")
    return {
        "grammar": text,
        "regex": text,
        "schema": schema,
        "choice": Items(Text(limits.schema_bytes, 1), limits.named),
    }


def read_rules(v: Mapping[str, Any], limits: Limits) -> tuple[Schema | None, Rule | None, str]:
    """What an answer has to be: a JSON schema, or another rule, and the field that says so. Raises Fault where several
    say it, and for a schema beyond the limits."""
    found: list[tuple[str, str, Any]] = []  # field, kind, value
    if (schema := read_format(v["response_format"], limits)) is not None:
        found.append(("response_format", "schema", schema))
    found += [(name, kind, v[name]) for name, kind in RULES.items() if v[name]]
    if (outputs := v["structured_outputs"]) is not None:
        there = [(f"structured_outputs.{n}", kind, outputs[n]) for n, kind in OUTPUTS.items() if outputs[n]]
        if outputs["json_object"]:
            there.append(("structured_outputs.json_object", "schema", {"type": "object"}))
        found += there
    if len(found) > 1:
        raise bad_field(found[1][0], f"is not taken beside {found[0][0]}: an answer follows one of them")
    if not found:
        return None, None, "response_format"
    where, kind, value = found[0]
    if kind != "schema" and v.get("tools"):
        raise bad_field(where, "is not taken beside tools; give a JSON schema as response_format")
    if kind == "schema":
        return value if where == "response_format" else _read_schema(value, where, limits), None, where
    return None, Rule(kind, value, where), where


def _read_schema(given: str | Schema, where: str, limits: Limits) -> Schema:
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            raise bad_field(where, "is no JSON") from None
        if not isinstance(given, dict):
            raise bad_field(where, "is no JSON object")
    check_schema(given, where, limits)
    return given


def read_format(given: Mapping[str, Any] | None, limits: Limits, where: str = "response_format") -> Schema | None:
    """The JSON schema that `response_format` asks for; None: any text. Raises Fault for one beyond the limits."""
    if given is None or given["type"] == "text":
        return None
    if given["type"] == "json_object":
        return {"type": "object"}
    if given["json_schema"] is None:
        raise bad_field(f"{where}.json_schema", "is missing")
    schema: Schema = given["json_schema"]["schema"]
    check_schema(schema, f"{where}.json_schema.schema", limits)
    return schema
