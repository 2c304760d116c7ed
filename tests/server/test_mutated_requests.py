"""Requests changed by chance, and bytes that are none: errors that clients understand, or right answers."""

import asyncio
import copy
import json
import random
import socket
from typing import Any
from urllib.parse import urlsplit

import httpx
import jsonschema
import pytest
from http_client import ask, serve
from quick_service import QuickService
from small_service import demo_model

from pshard.server.routes.make_app import make_app

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, "x"]}}, "required": ["a"], "additionalProperties": False}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHAT = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
    {"role": "tool", "tool_call_id": "c", "content": "1"},
]
SAMPLING = {
    "temperature": 0.5,
    "top_p": 0.9,
    "seed": 1,
    "stop": ["\n\n"],
    "logit_bias": {"5": 1},
    "presence_penalty": 1,
}
RIGHT: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "hi", "max_tokens": 4, "logprobs": 1, "echo": True, "n": 2, **SAMPLING}),
    ("/v1/completions", {"prompt": [[1, 2], [3]], "stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", {"messages": CHAT, "logprobs": True, "top_logprobs": 2, "max_tokens": 5, **SAMPLING}),
    ("/v1/chat/completions", {"messages": CHAT, "stream": True, "tools": [{"type": "function", "function": FUNCTION}],
                              "tool_choice": "required", "chat_template_kwargs": {"enable_thinking": False}}),
    ("/v1/chat/completions", {"messages": CHAT, "response_format": {
        "type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}}),
    ("/v1/responses", {"input": [{"role": "user", "content": "hi"}, {"type": "reasoning", "summary": []},
                                 {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                                 {"type": "function_call_output", "call_id": "c", "output": "1"}],
                       "tools": [{"type": "function", **FUNCTION}], "stream": True,
                       "text": {"format": {"type": "text"}}}),
    ("/v1/responses", {"input": "hi", "instructions": "s", "reasoning": {"effort": "low"}, "max_output_tokens": 9}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "hm"}, {"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "1"}]}], "max_tokens": 5,
        "system": [{"type": "text", "text": "s"}], "tools": [{"name": "f", "input_schema": SCHEMA}], "stream": True}),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "hi"}]}),
    ("/tokenize", {"prompt": "hi", "add_special_tokens": False}),
    ("/tokenize", {"content": "hi", "with_pieces": True}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
    ("/api/chat", {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "thinking": "hm",
                                 "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
                                {"role": "tool", "tool_name": "f", "content": "1"}], "format": SCHEMA,
                   "tools": [{"type": "function", "function": FUNCTION}], "options": {"num_predict": 5, "top_k": 3}}),
    ("/api/generate", {"prompt": "hi", "system": "s", "stream": False, "think": False, "keep_alive": 5,
                       "options": {"num_predict": 4, "stop": ["x"]}, "logprobs": True, "top_logprobs": 1}),
    ("/v1/completions", {"prompt": "hi", "max_tokens": 4, "grammar": 'root ::= "a" [b-d]+'}),
    ("/v1/chat/completions", {"messages": CHAT, "structured_outputs": {"choice": ["yes", "no"]}}),
    ("/apply-template", {"messages": CHAT}), ("/v1/responses/input_tokens", {"input": "hi", "instructions": "s"}),
    ("/api/show", {"model": "demo"}),
]  # fmt: skip
JUNK: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**63, -(2**63), 10**30, 0.5, 1e308, -0.0, "", "x", "\u0000", "☃" * 50,
    "a" * 5000, "NaN", "<|endoftext|>",
    [], {}, [[]], [{}], [None], {"": None}, {"type": "x"}, [1, "2"], {"type": "function"}, [[[[[]]]]],
    {"$ref": "#"}, {"role": "user"}, ["user"], {"content": {"content": 1}},
]  # fmt: skip


def list_places(value: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value within a body."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, item in inner for place in ((*way, key), *list_places(item, (*way, key)))]


def change(body: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """The body with one to three of its values replaced, gone, doubled, or with a field that it lacks."""
    body = copy.deepcopy(body)
    names = ["n", "max_tokens", "tools", "tool_choice", "response_format", "stop", "stream", "echo", "logprobs", "user"]
    for _ in range(rng.randint(1, 3)):
        places = list_places(body)
        if not places or rng.random() < 0.2:
            body[rng.choice(names)] = copy.deepcopy(rng.choice(JUNK))
            continue
        *way, last = rng.choice(places)
        holder: Any = body
        for key in way:
            holder = holder[key]
        match rng.randrange(4):
            case 0 if isinstance(holder, dict):
                del holder[last]
            case 1 if isinstance(holder, list):
                holder.append(copy.deepcopy(holder[last]))
            case 2 if isinstance(holder, dict):
                holder[str(last) + rng.choice("x_ A")] = holder.pop(last)
            case _:
                holder[last] = copy.deepcopy(rng.choice(JUNK))
    return body


def spoil(data: bytes, rng: random.Random) -> bytes:
    """The bytes with some changed, cut or doubled."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(3):
            case 0:
                changed[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del changed[at : at + rng.randint(1, 9)]
            case _:
                changed[at:at] = rng.choice([b"{", b"]", b'"', b"\\ud800", b"\xff", b"1e999", b"NaN", b"\x00"])
    return bytes(changed)


def check_answer(path: str, found: httpx.Response, told: str) -> None:
    """An error in the shape of its interface, or an answer that holds together."""
    assert found.status_code == 200 or 400 <= found.status_code < 500, f"{found.status_code} {found.text[:300]} {told}"
    if found.headers["content-type"].startswith("text/event-stream"):
        events = [json.loads(line[6:]) for line in found.text.splitlines() if line.startswith("data: {")]
        assert events and not any(event.get("error") for event in events), told
        return
    if found.headers["content-type"] == "application/x-ndjson":
        lines = [json.loads(line) for line in found.text.splitlines()]
        assert lines[-1]["done"] and not any(line["done"] for line in lines[:-1]), told
        return
    body = found.json()
    if found.status_code != 200 and path.startswith("/api/"):
        assert isinstance(body["error"], str) and body["error"], told
    elif found.status_code != 200:
        assert body["error"]["message"] and body["error"]["type"], told
    elif "choices" in body:
        assert [choice["index"] for choice in body["choices"]] == list(range(len(body["choices"]))), told
        assert all(choice["finish_reason"] in ("stop", "length", "tool_calls") for choice in body["choices"]), told
        assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + body["usage"]["completion_tokens"]


@pytest.mark.parametrize("count", [100, pytest.param(2000, marks=pytest.mark.slow)])
def test_changed_requests_get_an_error_or_a_right_answer(count) -> None:
    rng, app = random.Random(24), make_app(QuickService(), demo_model())
    seen = set[int]()

    async def send_all() -> None:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for i in range(count):
                path, body = RIGHT[i % len(RIGHT)]
                data = json.dumps(change(body, rng)).encode()
                if i % 5 == 4:
                    data = spoil(data, rng)
                async with asyncio.timeout(30):
                    found = await client.post(path, content=data)
                check_answer(path, found, f"#{i} {path} {data[:2000]!r}")
                seen.add(found.status_code)

    asyncio.run(send_all())
    assert {200, 400} <= seen


@pytest.mark.quick("/api/show-18", "/api/chat-12")
@pytest.mark.parametrize(("path", "body"), RIGHT, ids=[f"{p}-{i}" for i, (p, _) in enumerate(RIGHT)])
def test_right_requests_are_answered_and_keep_to_the_published_document(path, body) -> None:
    app = make_app(QuickService(), demo_model())
    document = ask(app, "/openapi.json").json()
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(body, schema)
    found = ask(app, path, body)
    assert found.status_code == 200, found.text
    check_answer(path, found, path)


def test_the_document_names_what_fields_may_hold() -> None:
    document = ask(make_app(QuickService(), demo_model()), "/openapi.json").json()
    schema = document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert schema["required"] == ["prompt"]
    assert schema["properties"]["n"]["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": 16}
    for value in (0, 17, "x", 1.5):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"prompt": "hi", "n": value}, schema)


@pytest.mark.parametrize("count", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_bytes_that_are_no_http_end_nothing(count) -> None:
    rng = random.Random(7)
    data = json.dumps(RIGHT[0][1]).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (len(data), data)
    with serve(make_app(QuickService(), demo_model())) as url:
        parts = urlsplit(url)
        for _ in range(count):
            with socket.create_connection((parts.hostname, parts.port)) as connection:
                connection.sendall(spoil(request, rng))
                connection.shutdown(socket.SHUT_WR)
                connection.settimeout(20)
                answer = connection.recv(65536)
                assert not answer or answer.split()[1][:1] in (b"2", b"4"), answer[:300]
        assert httpx.get(f"{url}/health").status_code == 200
