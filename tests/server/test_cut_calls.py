"""A call that is cut by the limit of tokens or a stop string: in every interface, streamed and not, nobody can run
it."""

import json

import pytest
from http_client import ask, events_of
from small_service import demo_model
from test_streams import TEMPLATE, Speaker

from pshard.server.jobs import Ended
from pshard.server.routes.make_app import make_app

SCHEMA = {"type": "object", "properties": {"n": {"type": "string"}}}
CODER = TEMPLATE + "<function=x>"
NAMES = ("get", "edit")
CHAT = {
    "messages": [{"role": "user", "content": "Hi"}],
    "tools": [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in NAMES],
}
BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/messages": {
        "messages": CHAT["messages"],
        "max_tokens": 400,
        "tools": [{"name": name, "input_schema": SCHEMA} for name in NAMES],
    },
    "/v1/responses": {
        "input": "Hi",
        "tools": [{"type": "function", "name": "get", "parameters": SCHEMA}, {"type": "custom", "name": "edit"}],
    },
}
WHOLE = '<tool_call>{"name": "get", "arguments": {"n": "1"}}</tool_call>'
CUT = {
    "json": '<tool_call>{"name": "get", "arguments": {"n": "a',
    "custom": '<tool_call>{"name": "edit", "arguments": {"input": "rm a',
    "tags": "<tool_call>\n<function=get>\n<parameter=n>\n1\n</parameter>\n<parameter=m>\n2",
    "between": "<tool_call>\n<function=get>\n<parameter=n>\n1\n</parameter>\n",
}
REASONS = {"/v1/chat/completions": "length", "/v1/messages": "max_tokens", "/v1/responses": "incomplete"}


def send(path: str, text: str, stream: bool, ended: str = "length", **more):
    """Calls that a client would run, the reason, and the events or the body."""
    body = BODIES[path] | {"stream": stream} | more
    app = make_app(Speaker(words=(text,), ended=Ended(ended)), demo_model(CODER))
    found = ask(app, path, body)
    assert found.status_code == 200, found.text
    read = {"/v1/chat/completions": of_chat, "/v1/messages": of_message, "/v1/responses": of_response}[path]
    return read(events_of(found) if stream else found.json())


def of_chat(told):
    if isinstance(told, dict):
        (choice,) = told["choices"]
        calls = [c["function"] for c in choice["message"].get("tool_calls", [])]
        return [c for c in calls if is_json(c["arguments"])], choice["finish_reason"]
    choices = [chunk["choices"][0] for chunk in told[:-1]]
    calls: dict[int, dict] = {}
    for part in (p for c in choices for p in c["delta"].get("tool_calls", [])):
        call = calls.setdefault(part["index"], part["function"] | {"arguments": ""})
        call["arguments"] += part["function"]["arguments"]
    return [c for c in calls.values() if is_json(c["arguments"])], choices[-1]["finish_reason"]


def of_message(told):
    if isinstance(told, dict):
        return [b for b in told["content"] if b["type"] == "tool_use"], told["stop_reason"]
    calls, ended = {}, []
    for event in told:
        if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            calls[event["index"]] = ""
        if event["type"] == "content_block_delta" and event["index"] in calls:
            calls[event["index"]] += event["delta"]["partial_json"]
        if event["type"] == "content_block_stop" and event["index"] in calls:
            ended.append(event["index"])
    assert all(is_json(calls[index]) == (index in ended) for index in calls)
    return [calls[index] for index in ended], told[-2]["delta"]["stop_reason"]


def of_response(told):
    whole = told if isinstance(told, dict) else told[-1]["response"]
    calls = [item for item in whole["output"] if item["type"].endswith("_call")]
    assert all(item["status"] == "completed" for item in calls)
    if not isinstance(told, dict):
        assert told[-1]["type"] == f"response.{whole['status']}"
        done = [e["item"] for e in told if e["type"] == "response.output_item.done"]
        assert [item for item in done if item["type"].endswith("_call")] == calls
    return calls, whole["status"]


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", CUT)
def test_a_call_that_is_cut_is_told_as_cut_and_cannot_be_run(path, stream, kind) -> None:
    assert send(path, CUT[kind], stream) == ([], REASONS[path])
    calls, reason = send(path, WHOLE + CUT[kind], stream)
    assert len(calls) == 1 and reason == REASONS[path]


@pytest.mark.quick("True-/v1/chat/completions")
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_single_call_that_is_cut_does_not_look_whole(path, stream) -> None:
    one = {"parallel_tool_calls": False, "tool_choice": "required"}
    one = {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}} if path == "/v1/messages" else one
    for name in NAMES:
        text = f'{{"name":"{name}","arguments":{{"input":"rm a'
        assert send(path, text, stream, **one) == ([], REASONS[path])
        calls, reason = send(path, text + '"}}', stream, **one)
        assert len(calls) == 1 and reason in ("tool_calls", "tool_use", "completed")


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_within_a_call_cuts_it(path, stream) -> None:
    stop = {"stop_sequences" if path == "/v1/messages" else "stop": ["XX"]}
    text = '<tool_call>{"name": "get", "arguments": {"n": "bbXX"}}</tool_call>'
    calls, reason = send(path, text, stream, "stop", **stop)
    assert calls == [] and reason in ("stop", "stop_sequence", "completed")
