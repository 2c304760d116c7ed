"""POST /v1/chat/completions over the demo model: messages, formats, tools, reasoning."""

import json

import numpy as np
import pytest
from http_client import ask, events_of
from small_service import demo_model

from pshard.server.routes.make_app import make_app

PATH = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "ROMEO:"}], "max_completion_tokens": 16, "temperature": 0}
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Bern"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "of a city", "parameters": CITY}}
CLOCK = {"type": "function", "function": {"name": "get_time"}}


def chat(app, **body):
    response = ask(app, PATH, HI | body)
    assert response.status_code == 200, response.text
    return response.json()


def prompt_of(service) -> str:
    return service.engine.tokenizer.decode(list(service.jobs[-1].prompt))


def test_a_chat_is_answered_and_streamed_alike(app) -> None:
    whole = chat(app)
    message = whole["choices"][0]["message"]
    assert message["role"] == "assistant" and message["content"] and "tool_calls" not in message
    assert whole["object"] == "chat.completion" and whole["id"].startswith("chatcmpl-")
    *chunks, usage, done = events_of(ask(app, PATH, HI | {"stream": True, "stream_options": {"include_usage": True}}))
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == message["content"]
    assert chunks[-1]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}
    assert usage["choices"] == [] and usage["usage"] == whole["usage"] and done == "[DONE]"
    assert len({c["id"] for c in (*chunks, usage)}) == 1


def test_every_choice_of_a_stream_begins_and_ends(app) -> None:
    body = HI | {"stream": True, "n": 3, "temperature": 1, "seed": 5}
    chunks = events_of(ask(app, PATH, body))[:-1]
    whole = chat(app, n=3, temperature=1, seed=5)
    for index, choice in enumerate(whole["choices"]):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert own[0]["delta"]["role"] == "assistant" and own[-1]["finish_reason"] == "length"
        assert "".join(c["delta"].get("content", "") for c in own) == choice["message"]["content"]


def test_logprobs_have_bytes_and_the_likeliest_others(app) -> None:
    entries = chat(app, logprobs=True, top_logprobs=3)["choices"][0]["logprobs"]["content"]
    assert len(entries) == 16
    for entry in entries:
        assert bytes(entry["bytes"]).decode("utf-8", "replace") == entry["token"]
        assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] <= 0 and len(entry["top_logprobs"]) == 3
    chunks = events_of(ask(app, PATH, HI | {"stream": True, "logprobs": True}))[:-1]
    told = [e for c in chunks for e in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert [e["logprob"] for e in told] == [e["logprob"] for e in entries]


def test_contents_may_be_parts_and_roles_reach_the_template(service) -> None:
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    app = make_app(service, demo_model(template))
    messages = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "user", "content": "c"},
    ]
    chat(app, messages=messages)
    assert prompt_of(service) == "[system]be kind[user]a\nb[assistant][user]c"


def test_a_schema_makes_compact_json(app) -> None:
    given = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": CITY}}
    text = chat(app, response_format=given, max_completion_tokens=60)["choices"][0]["message"]["content"]
    assert text in ('{"city":"Rome"}', '{"city":"Bern"}')
    body = {"response_format": {"type": "json_object"}, "temperature": 1, "seed": 1, "max_completion_tokens": 200}
    assert chat(app, **body)["choices"][0]["message"]["content"].startswith("{")


def test_a_weak_model_writes_no_keys_that_a_schema_does_not_name(app, service) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    given = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    found = chat(app, response_format=given, max_completion_tokens=60)["choices"][0]
    assert found["finish_reason"] == "stop" and json.loads(found["message"]["content"]).keys() == {"ok"}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    found = chat(app, tools=tools, tool_choice="required", max_completion_tokens=60)["choices"][0]
    assert allowed(service, '[{"name":"f","arguments":{"ok":true}}]')
    assert not allowed(service, '[{"name":"f","arguments":{"ok":true,"more":1}}]')


@pytest.mark.quick("required")
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_forced_tool_is_called_whatever_the_model_likes(app, choice) -> None:
    body = {"tools": [WEATHER, CLOCK], "tool_choice": choice, "max_completion_tokens": 80}
    body["parallel_tool_calls"] = False
    found = chat(app, **body)["choices"][0]
    assert found["finish_reason"] == "tool_calls" and found["message"]["content"] is None
    (call,) = found["message"]["tool_calls"]
    assert call["type"] == "function" and call["id"].startswith("call_")
    arguments = json.loads(call["function"]["arguments"])
    if call["function"]["name"] == "get_weather":
        assert arguments["city"] in ("Rome", "Bern")
    assert isinstance(choice, str) or call["function"]["name"] == "get_weather"
    chunks = events_of(ask(app, PATH, HI | body | {"stream": True}))[:-1]
    parts = [t for c in chunks for t in c["choices"][0]["delta"].get("tool_calls", [])]
    assert parts[0]["id"] and parts[0]["function"] == {"name": call["function"]["name"], "arguments": ""}
    assert "".join(p["function"]["arguments"] for p in parts) == call["function"]["arguments"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def allowed(service, text: str) -> bool:
    """Whether the grammar of the last job lets that text come, and end there."""
    guide, tokenizer = service.jobs[-1].constrain(), service.engine.tokenizer
    for token in [*tokenizer.encode(text, add_special=False), min(tokenizer.eos_ids)]:
        if not np.isfinite(guide.mask(np.zeros(1024, np.float32))[token]):
            return False
        guide.accept(token)
    return True


def test_required_is_one_call_or_more_and_one_where_the_client_wants_no_more(app, service) -> None:
    call = '{"name":"get_weather","arguments":{"city":"Rome"}}'
    other = '{"name":"get_time","arguments":{}}'
    named = {"type": "function", "function": {"name": "get_weather"}}
    for more, one, two in (
        ({"tool_choice": "required"}, f"[{call}]", f"[{call},{other}]"),
        ({"tool_choice": "required", "parallel_tool_calls": False}, call, None),
        ({"tool_choice": named}, call, None),
    ):
        chat(app, tools=[WEATHER, CLOCK], max_completion_tokens=1, **more)
        assert allowed(service, one) and (two is None or allowed(service, two))
        assert not allowed(service, "[]") and not allowed(service, f"[{call},]")
        assert two is not None or not allowed(service, f"[{call}]")


def test_tools_may_define_different_things_by_one_name(app, service) -> None:
    def tool(name: str, word: str) -> dict:
        place = {"type": "object", "properties": {"at": {"$ref": "#/$defs/At"}}, "required": ["at"]}
        place |= {"$defs": {"At": {"enum": [word]}}, "additionalProperties": False}
        return {"type": "function", "function": {"name": name, "parameters": place}}

    tools = [tool("go", "Rome"), tool("stay", "Bern")]
    chat(app, tools=tools, tool_choice="required", parallel_tool_calls=False, max_completion_tokens=1)
    assert allowed(service, '{"name":"go","arguments":{"at":"Rome"}}')
    assert allowed(service, '{"name":"stay","arguments":{"at":"Bern"}}')
    assert not allowed(service, '{"name":"stay","arguments":{"at":"Rome"}}')
    nested = {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#"}}}}
    nested = {"type": "function", "function": {"name": "f", "parameters": nested | {"additionalProperties": False}}}
    chat(app, tools=[nested], tool_choice="required", parallel_tool_calls=False, max_completion_tokens=1)
    assert allowed(service, '{"name":"f","arguments":{"kids":[{"kids":[]}]}}')


def test_a_template_without_tools_is_told_of_them(app, service) -> None:
    calls = [{"id": "c1", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}]
    history = [
        *HI["messages"],
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
    ]
    chat(app, messages=history, tools=[WEATHER])
    prompt = prompt_of(service)
    assert "get_weather" in prompt and "<tool_call>" in prompt and "<tool_response>noon</tool_response>" in prompt


def test_tools_that_may_not_be_called_are_not_in_the_prompt(app, service) -> None:
    chat(app, tools=[WEATHER], tool_choice="none")
    assert "get_weather" not in prompt_of(service)


def test_arguments_of_calls_and_names_of_their_tools_reach_the_template(service) -> None:
    template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments.city }};{% endfor %}"
        "{{ m.name }}:{{ m.content }}|{% endfor %}{{ tools[0].function.name }}"
        "{{ enable_thinking }}{{ reasoning_effort }}"
    )
    app = make_app(service, demo_model(template))
    calls = [{"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Rome"}'}}]
    history = [
        *HI["messages"],
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "sun"},
    ]
    chat(app, messages=history, tools=[WEATHER], reasoning_effort="none")
    assert prompt_of(service) == ":ROMEO:|Rome;:|get_weather:sun|get_weatherFalsenone"


def test_templates_get_known_arguments_and_no_others(app) -> None:
    for kwargs, where in (
        ({"chat_template": "x"}, "chat_template_kwargs.chat_template"),
        ({"messages": []}, "chat_template_kwargs.messages"),
        ({"enable_thinking": "no"}, "chat_template_kwargs.enable_thinking"),
    ):
        found = ask(app, PATH, HI | {"chat_template_kwargs": kwargs})
        assert found.status_code == 400 and found.json()["error"]["param"] == where


def test_a_template_that_never_ends_is_ended(service) -> None:
    loops = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
    found = ask(make_app(service, demo_model(loops)), PATH, HI)
    assert found.status_code == 400 and "steps" in found.json()["error"]["message"]


U = {"role": "user", "content": "hi"}
BAD = [
    ("messages", None), ("messages", []), ("messages", "hi"), ("messages[0]", ["hi"]), ("messages[0].role", [{}]),
    ("messages[0].role", [{"role": "king", "content": "x"}]), ("messages[0].content", [{"role": "user"}]),
    ("messages[0].content", [{"role": "user", "content": 5}]),
    ("messages[1].content[0]", [U, {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
    ("messages[0].content[0].text", [{"role": "user", "content": [{"type": "text", "text": 5}]}]),
    ("messages[0].tool_calls", [{"role": "assistant", "tool_calls": {}}]),
    ("messages[0].tool_calls[0].function", [{"role": "assistant", "tool_calls": [{}]}]),
]  # fmt: skip
FIELDS = [
    ("max_completion_tokens", 0), ("top_logprobs", 3), ("tools", {}), ("tools[0].type", [{}]),
    ("tools[0].function", [{"type": "function"}]), ("tools[0].function.name", [{"type": "function", "function": {}}]),
    ("tools[0].function.name", [{"type": "function", "function": {"name": "a b"}}]), ("tool_choice", "any"),
    ("tool_choice", "required"), ("tools[1].function.name", [CLOCK, CLOCK]), ("functions", [{"name": "f"}]),
    ("modalities[0]", ["audio"]), ("reasoning_effort", "huge"), ("web_search_options", {}), ("n", 99),
]  # fmt: skip


@pytest.mark.parametrize(
    ("where", "value"),
    [*((w, {"messages": v}) for w, v in BAD), *((w, {w.partition("[")[0]: v}) for w, v in FIELDS)],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_field_is_refused_by_its_name(app, where, value) -> None:
    found = ask(app, PATH, HI | value)
    assert found.status_code == 400, found.text
    assert found.json()["error"]["param"] == where and where in found.json()["error"]["message"]


def test_fields_of_other_servers_that_change_answers_are_refused_unless_they_change_none(app) -> None:
    neutral = {"typical_p": 1.0, "tfs": 1, "mirostat": 0, "min_tokens": 0, "dry_multiplier": 0.0, "samplers": [],
               "guided_json": None, "use_beam_search": False, "top_n_sigma": -1, "grammar": "",
               "stop_token_ids": [], "skip_special_tokens": True, "add_generation_prompt": True, "echo": False,
               "thinking_token_budget": -1, "lora": []}  # fmt: skip
    chat(app, max_completion_tokens=1, **neutral)
    for name, value in (("typical_p", 0.9), ("dry_multiplier", 0.8), ("stop_token_ids", [5]),
                        ("samplers", ["top_k"]), ("min_tokens", True), ("truncate_prompt_tokens", 9),
                        ("documents", [{}]), ("cache_salt", "x"),
                        ("skip_special_tokens", False), ("add_generation_prompt", False), ("echo", True),
                        ("thinking_token_budget", 100), ("lora", [{"id": 0, "scale": 1}])):  # fmt: skip
        error = ask(app, PATH, HI | {name: value}).json()["error"]
        assert error["param"] == name and error["message"].startswith(f"{name} is ")


def test_what_a_stream_cannot_tell_is_refused(app) -> None:
    for more, where in (
        ({"return_token_ids": True}, "return_token_ids"),
        ({"stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
    ):
        found = ask(app, PATH, HI | {"stream": True} | more)
        assert found.status_code == 400 and found.json()["error"]["param"] == where
    told = {"include_usage": True, "continuous_usage_stats": False}
    assert ask(app, PATH, HI | {"stream": True, "stream_options": told}).status_code == 200


def test_schemas_that_cannot_be_kept_to_are_refused_at_once(app, service) -> None:
    deep: dict = {}
    for _ in range(100):
        deep = {"type": "object", "properties": {"a": deep}}
    before = len(service.jobs)
    for schema in (deep, {"if": {}}, {"type": "objct"}, {"$ref": "http://other/schema"}, {"enum": ["x" * 99] * 999}):
        given = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        found = ask(app, PATH, HI | {"response_format": given})
        assert found.status_code == 400 and found.json()["error"]["param"].startswith("response_format")
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        assert ask(app, PATH, HI | {"tools": [tool], "tool_choice": "required"}).status_code == 400
    assert len(service.jobs) == before
