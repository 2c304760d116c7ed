"""Tools together with a schema: an answer is calls, or follows the schema, in every interface and family."""

import json

import numpy as np
import pytest
from http_client import ask, events_of
from small_service import demo_model
from test_streams import Speaker

from pshard.server.jobs import Ended
from pshard.server.routes.make_app import make_app

PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}"
FAMILIES = {
    "hermes": "<tool_call>" + PLAIN,
    "coder": "<tool_call><function=x>" + PLAIN,
    "none": None,
    "llama": "ipython" + PLAIN,
    "mistral": "[TOOL_CALLS]" + PLAIN,
    "harmony": "<|channel|>" + PLAIN,
}
MARKED = ("hermes", "coder", "none")
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "born": {"type": "integer"}},
    "required": ["name"],
}
ARGUMENTS = {"type": "object", "properties": {"n": {"type": "integer"}}}
HI = [{"role": "user", "content": "Hi"}]
BODIES = {
    "/v1/chat/completions": {
        "messages": HI,
        "tools": [{"type": "function", "function": {"name": name, "parameters": ARGUMENTS}} for name in ("get", "put")],
        "response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}},
    },
    "/v1/messages": {
        "messages": HI,
        "max_tokens": 400,
        "tools": [{"name": name, "input_schema": ARGUMENTS} for name in ("get", "put")],
        "output_config": {"format": {"type": "json_schema", "schema": PERSON}},
    },
    "/v1/responses": {
        "input": "Hi",
        "tools": [{"type": "function", "name": name, "parameters": ARGUMENTS} for name in ("get", "put")],
        "text": {"format": {"type": "json_schema", "name": "p", "schema": PERSON}},
    },
}
SINGLE = {"/v1/messages": {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}}
ANSWER = '{"name":"get","born":1815}'
CALLS = '{"name":"get","arguments":{"n":1}}', '{"name":"put","arguments":{}}'


class Keeper(Speaker):
    """Says what it is given, and keeps the jobs."""

    def submit(self, job, listener) -> None:
        self.jobs.append(job)
        super().submit(job, listener)


def write_calls(family: str, *calls: str) -> str:
    if family in MARKED:
        return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
    return calls[0] if len(calls) == 1 else f"[{','.join(calls)}]"


def say(path: str, family: str, text: str, stream: bool = False, **more):
    """What the server tells when the model says that, and what checks its grammar."""
    service = Keeper(words=tuple(text), ended=Ended("stop"))
    found = ask(make_app(service, demo_model(FAMILIES[family])), path, BODIES[path] | {"stream": stream} | more)
    assert found.status_code == 200, found.text

    def allows(told: str) -> bool:
        tokenizer = demo_model().tokenizer
        guide = service.jobs[-1].constrain()
        for token in [*tokenizer.encode(told, add_special=False), min(tokenizer.eos_ids)]:
            if not np.isfinite(guide.mask(np.zeros(1024, np.float32))[token]):
                return False
            guide.accept(token)
        return True

    return (read_stream if stream else read_whole)(path, found), allows


def read_whole(path, found) -> tuple[str, list[str]]:
    """Text and names of calls."""
    told = found.json()
    if path == "/v1/messages":
        blocks = told["content"]
        return "".join(b.get("text", "") for b in blocks), [b["name"] for b in blocks if b["type"] == "tool_use"]
    if path == "/v1/responses":
        texts = [part["text"] for item in told["output"] for part in item.get("content", ())]
        return "".join(texts), [item["name"] for item in told["output"] if item["type"] == "function_call"]
    message = told["choices"][0]["message"]
    return message["content"] or "", [call["function"]["name"] for call in message.get("tool_calls", ())]


def read_stream(path, found) -> tuple[str, list[str]]:
    events = [event for event in events_of(found) if event != "[DONE]"]
    if path == "/v1/messages":
        names = [e["content_block"].get("name") for e in events if e["type"] == "content_block_start"]
        return "".join(e.get("delta", {}).get("text", "") for e in events), [name for name in names if name]
    if path == "/v1/responses":
        names = [e["item"].get("name") for e in events if e["type"] == "response.output_item.done"]
        texts = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
        return "".join(texts), [name for name in names if name]
    deltas = [event["choices"][0]["delta"] for event in events]
    names = [part["function"].get("name") for delta in deltas for part in delta.get("tool_calls", ())]
    return "".join(delta.get("content", "") for delta in deltas), [name for name in names if name]


@pytest.mark.parametrize(  # each family has its grammar, each interface its shapes
    ("path", "family", "stream"),
    [
        *((path, "hermes", stream) for path in BODIES for stream in (False, True)),
        *((path, family, False) for path, family in zip([*BODIES] * 2, FAMILIES) if family != "hermes"),
        ("/v1/messages", "mistral", True),
    ],
)
def test_an_answer_follows_the_schema_or_calls_tools(path, family, stream) -> None:
    told, allows = say(path, family, ANSWER, stream)
    assert told == (ANSWER, [])  # it names a tool, and is no call
    one, two = write_calls(family, CALLS[0]), write_calls(family, *CALLS)
    assert allows(ANSWER) and allows(one) and allows(two)
    for wrong in ("Hi", '{"born":1815}', '{"name":"x","more":1}', write_calls(family, '{"name":"x","arguments":{}}')):
        assert not allows(wrong), wrong
    assert say(path, family, one, stream)[0] == ("", ["get"])
    assert say(path, family, two, stream)[0] == ("", ["get", "put"])
    single = SINGLE.get(path, {"parallel_tool_calls": False})
    told, allows = say(path, family, two, stream, **single)
    assert told == ("", ["get"]) and allows(one) and allows(ANSWER) and not allows(two)


@pytest.mark.parametrize("path", BODIES)
def test_a_forced_call_is_a_call_whatever_the_schema_and_no_call_follows_it(path) -> None:
    words = {"forced": "required", "none": "none"}
    if path == "/v1/messages":
        words = {"forced": {"type": "any"}, "none": {"type": "none"}}
    told, allows = say(path, "hermes", f"[{CALLS[0]}]", tool_choice=words["forced"])
    assert told == ("", ["get"]) and allows(f"[{CALLS[0]}]") and not allows(ANSWER)
    told, allows = say(path, "hermes", ANSWER, tool_choice=words["none"])
    assert told == (ANSWER, []) and allows(ANSWER) and not allows(write_calls("hermes", CALLS[0]))


NAMES = {
    "/v1/chat/completions": "tools[1].function.parameters",
    "/v1/messages": "tools[1].input_schema",
    "/v1/responses": "tools[1].parameters",
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"properties": {"if": {"properties": {"city": {"if": {}}}}}}, "properties.if.properties.city.if"),
        ({"properties": {"city": {"type": "string", "format": "postcode"}}}, "properties.city.format"),
        ({"properties": {"city": {"$ref": "#/$defs/none"}}}, "properties.city.$ref"),
        ({"properties": {"city": {"pattern": "(?=x)"}}}, "properties.city.pattern"),
        ({"properties": {"city": {"type": ["text"]}}}, ""),
    ],
)  # fmt: skip
def test_a_keyword_that_cannot_be_kept_is_refused_by_its_tool_and_field(path, wrong, field) -> None:
    body = json.loads(json.dumps(BODIES[path]))
    tool = body["tools"][1].get("function", body["tools"][1])
    tool["input_schema" if path == "/v1/messages" else "parameters"] = wrong
    forced = {"type": "any"} if path == "/v1/messages" else "required"
    for choice in ({}, {"tool_choice": forced}):
        found = ask(make_app(Speaker(), demo_model(FAMILIES["hermes"])), path, body | choice)
        assert found.status_code == 400
        error = found.json()["error"]
        assert f"{NAMES[path]} cannot be kept: {field}" in error["message"] and "the tool 'put'" in error["message"]
        assert error.get("param", NAMES[path]) == NAMES[path]


def test_a_keyword_of_an_answers_schema_is_named_too() -> None:
    path = "/v1/chat/completions"
    schema = {"type": "json_schema", "json_schema": {"name": "p", "schema": {"properties": {"a": {"not": {}}}}}}
    for tools in ([], BODIES[path]["tools"]):
        body = BODIES[path] | {"response_format": schema, "tools": tools}
        error = ask(make_app(Speaker(), demo_model(None)), path, body).json()["error"]
        assert error["param"] == "response_format" and "properties.a.not" in error["message"]
