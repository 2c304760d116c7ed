"""Schemas whose objects take the keys that they name: what their grammars let come."""

import json
from pathlib import Path

import numpy as np
import pytest

from pshard.models import open_model
from pshard.runtime.sampling.close_objects import close_objects
from pshard.runtime.sampling.grammar import GrammarWords, Tokenizer, open_words

pytest.importorskip("llguidance", reason="llguidance is not installed")
VOCAB = 1024
WHOLE, TEXT, NONE = {"type": "integer"}, {"type": "string"}, {"type": "null"}


def of(required: tuple[str, ...] = (), /, **properties: object) -> dict:
    return {"type": "object", "properties": properties} | ({"required": list(required)} if required else {})


@pytest.fixture(scope="module")
def words() -> tuple[GrammarWords, Tokenizer]:
    with open_model(Path(__file__).parents[2] / "examples" / "demo.gguf") as file:
        tokenizer = file.tokenizer()
    return open_words(tokenizer, VOCAB), tokenizer


def allows(words: tuple[GrammarWords, Tokenizer], schema: dict, value: object) -> bool:
    """Whether the schema's grammar lets that value come, and end."""
    grammars, tokenizer = words
    guide = grammars.compile_schema(json.dumps(schema))()
    text = json.dumps(value, separators=(",", ":"))
    for token in [*tokenizer.encode(text, add_special=False), min(tokenizer.eos_ids)]:
        if not np.isfinite(guide.mask(np.zeros(VOCAB, np.float32))[token]):
            return False
        guide.accept(token)
    return True


A, B, K = of(("a",), a=WHOLE), of(("b",), b=TEXT), of(("k",), k=TEXT)
DEFS = {"$defs": {"A": A, "B": B, "Deep": {"allOf": [{"$ref": "#/$defs/A"}, K]}}}
REF_A, REF_B = {"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}
TREE = {"$ref": "#/$defs/T", "$defs": {"T": of(n=WHOLE, kids={"type": "array", "items": {"$ref": "#/$defs/T"}})}}
CASES = [  # a schema, values that may come, values that may not
    (A, [{"a": 1}], [{"a": 1, "x": 2}, {"x": 2}]),
    (A | {"additionalProperties": True}, [{"a": 1, "x": [2]}], []),
    (A | {"additionalProperties": TEXT}, [{"a": 1, "x": "y"}], [{"a": 1, "x": 2}]),
    ({"type": "object"}, [{}, {"x": {"y": 1}}], []),
    ({"type": "object", "properties": {}}, [{}, {"x": 1}], []),
    ({"properties": {"a": {}}}, [{"a": {"x": 1}}, 5], [{"x": 1}]),
    (of(inner=of(a=WHOLE)), [{"inner": {"a": 1}}], [{"inner": {"a": 1, "x": 1}}]),
    ({"type": "array", "items": A}, [[{"a": 1}, {"a": 2}]], [[{"a": 1, "x": 1}]]),
    ({"allOf": [A, B]}, [{"a": 1, "b": "c"}], [{"a": 1}, {"a": 1, "b": "c", "x": 1}]),
    ({"allOf": [REF_A, K], **DEFS}, [{"a": 1, "k": "c"}], [{"a": 1, "k": "c", "x": 1}, {"a": "b", "k": "c"}]),
    ({"allOf": [REF_A], "description": "one", **DEFS}, [{"a": 1}], [{"a": 1, "x": 1}]),
    (K | {"allOf": [REF_A, REF_B], **DEFS}, [{"k": "c", "a": 1, "b": "d"}], [{"k": "c", "a": 1, "b": "d", "x": 1}]),
    (K | {"$ref": "#/$defs/A", **DEFS}, [{"k": "c", "a": 1}], [{"k": "c", "a": 1, "x": 1}]),
    ({"anyOf": [A, B, NONE]}, [{"a": 1}, {"b": "c"}, None], [{"a": 1, "b": "c"}, {"b": "c", "x": 1}]),
    (K | {"anyOf": [A, B]}, [{"k": "c", "a": 1}, {"k": "c", "b": "d"}], [{"k": "c", "a": 1, "b": "d"}, {"k": "c"}]),
    (K | {"anyOf": [REF_A, REF_B], **DEFS}, [{"k": "c", "a": 1}], [{"k": "c", "a": 1, "x": 1}, {"k": "c", "a": "1"}]),
    (of(a=WHOLE, b=WHOLE) | {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{"a": 1}], [{"a": 1, "x": 1}]),
    (K | {"anyOf": [A | {"additionalProperties": TEXT}, B]}, [{"k": "c", "a": 1, "x": "y"}],
     [{"k": "c", "b": "c", "x": 1}]),
    ({"allOf": [{"anyOf": [A, B]}, K]}, [{"a": 1, "k": "c"}, {"b": "d", "k": "c"}], [{"a": 1, "k": "c", "x": 1}]),
    ({"allOf": [A | {"additionalProperties": True}, K]}, [{"a": 1, "k": "c", "x": 1}], []),
    ({"$ref": "#/$defs/Deep", **DEFS}, [{"a": 1, "k": "c"}], [{"a": 1, "k": "c", "x": 1}]),
    (of(one={"$ref": "#/$defs/Deep"}, two=REF_A) | DEFS, [{"one": {"a": 1, "k": "c"}, "two": {"a": 1}}],
     [{"two": {"a": 1, "k": "c"}}, {"one": {"a": 1, "k": "c", "x": 1}}]),
    (TREE, [{"n": 1, "kids": [{"kids": []}]}], [{"kids": [{"x": 1}]}, {"x": 1}]),
    (of(l=WHOLE, r={"$ref": "#"}), [{"l": 1, "r": {"r": {}}}], [{"r": {"x": 1}}]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "right", "wrong"), CASES, ids=map(str, range(len(CASES))))
def test_objects_take_the_keys_that_they_name_and_others_where_the_schema_asks(words, schema, right, wrong) -> None:
    given = json.dumps(schema)
    assert all(allows(words, schema, value) for value in right)
    assert not any(allows(words, schema, value) for value in wrong)
    assert json.dumps(schema) == given


def test_schemas_that_lead_to_themselves_or_nowhere_are_closed_all_the_same() -> None:
    for schema in (
        {"$ref": "#"},
        {"allOf": [{"$ref": "#"}, A]},
        {"$ref": "#/$defs/none", "properties": {"a": {}}},
        {"properties": {"a": 5}, "anyOf": [True, 7, {"$ref": "https://else.where/x"}]},
        {"properties": [], "allOf": {}, "$ref": 7},
    ):
        assert isinstance(close_objects(schema), dict)


def test_a_schema_of_many_branches_stays_small() -> None:
    names = {f"name{n}": WHOLE for n in range(400)}
    branches = [{"properties": {f"own{n}": WHOLE}} for n in range(400)]
    schema = {"type": "object", "properties": names, "anyOf": branches}
    assert len(json.dumps(close_objects(schema))) < 3 * len(json.dumps(schema))
    deep: dict = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 9, "properties": {"a": {}}} for n in range(30)}
    schema = {"$ref": "#/$defs/d0", "properties": {"b": {}}, "$defs": deep | {"d30": A}}
    assert len(json.dumps(close_objects(schema))) < 4 * len(json.dumps(schema))
