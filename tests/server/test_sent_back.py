"""What this server and others made comes back with every later turn, whatever the template takes."""

import json

import pytest
from family_templates import CHATML_TOOLS, MISTRAL
from http_client import ask
from small_service import demo_model
from test_calls_or_schema import Keeper

from pshard.server.routes.make_app import make_app

ONE_CALL = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('one call at a time') }}{% endif %}{% set call = m.tool_calls[0].function %}{% for name, value "
    "in call.arguments | items %}({{ name }}={{ value }}){% endfor %}{{ call.name }}{% endif %}{% endfor %}{{ tools }}"
)
STRICT = (  # turns alternate, and ids have nine letters
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'user' or (m.role == 'assistant' and not "
    "m.tool_calls) %}{% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('take turns') }}{% endif %}"
    "{% set ns.n = ns.n + 1 %}{% endif %}{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}"
    "{{ raise_exception('ids have nine letters') }}{% endif %}[TOOL_CALLS]{{ c.id }}{{ c.function.name }}{% endfor %}"
    "{% if m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('ids have nine letters') }}"
    "{% endif %}<{{ m.tool_call_id }}>{% endif %}{{ m.content }}|{% endfor %}{{ tools }}"
)
WORDS = {"type": "object", "properties": {"n": {"type": "integer"}}}
PATHS = ("/v1/chat/completions", "/v1/messages", "/v1/responses")


def build(path: str, calls: list[tuple[str, object]], after: str | None) -> dict:
    """A conversation with these calls (an id, and arguments as text or an object), their results, and what the user
    says then."""
    if path == "/v1/messages":
        used = [{"type": "tool_use", "id": id, "name": "get", "input": given} for id, given in calls]
        results = [{"type": "tool_result", "tool_use_id": id, "content": f"is {id}"} for id, _ in reversed(calls)]
        told = [{"type": "text", "text": after}] if after else []
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": used}]
        messages.append({"role": "user", "content": [*results, *told]})
        return {"messages": messages, "max_tokens": 4, "tools": [{"name": "get", "input_schema": WORDS}]}
    texts = [(id, given if isinstance(given, str) else json.dumps(given)) for id, given in calls]
    user = [{"role": "user", "content": after}] if after else []
    tool = {"name": "get", "parameters": WORDS}
    if path == "/v1/responses":
        made = [{"type": "function_call", "call_id": id, "name": "get", "arguments": text} for id, text in texts]
        results = [{"type": "function_call_output", "call_id": id, "output": f"is {id}"} for id, _ in reversed(calls)]
        items = [{"role": "user", "content": "Hi"}, *made, *results, *user]
        return {"input": items, "tools": [{"type": "function", **tool}]}
    made = [{"id": id, "type": "function", "function": {"name": "get", "arguments": text}} for id, text in texts]
    results = [{"role": "tool", "tool_call_id": id, "content": f"is {id}"} for id, _ in reversed(calls)]
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None, "tool_calls": made}]
    return {"messages": [*messages, *results, *user], "tools": [{"type": "function", "function": tool}]}


def render(path: str, template: str, calls: list[tuple[str, object]], after: str | None = None) -> str:
    service = Keeper()
    found = ask(make_app(service, demo_model(template)), path, build(path, calls, after))
    assert found.status_code == 200, found.text
    return demo_model().tokenizer.decode(list(service.jobs[-1].prompt))


@pytest.mark.parametrize("path", PATHS)
def test_several_calls_are_turns_of_one_where_the_template_takes_one(path) -> None:
    told = render(path, ONE_CALL, [("a", {"n": 1}), ("b", {"n": 2})], "And?")
    assert "[assistant](n=1)get[tool]is a[assistant](n=2)get[tool]is b[user]And?" in told


@pytest.mark.parametrize(
    ("path", "spoiled", "template"),
    [
        (PATHS[(i + n) % 3], spoiled, template)
        for i, spoiled in enumerate(['{"n": 1', "", "null", "[1]", "5", "text"])
        for n, template in enumerate([ONE_CALL, CHATML_TOOLS, MISTRAL, STRICT, None])
    ],
)
def test_arguments_that_are_no_object_render(path, spoiled, template) -> None:
    given = json.loads(spoiled) if path == "/v1/messages" and spoiled in ("null", "[1]", "5") else spoiled
    assert "is a" in render(path, template, [("a", given), ("b", {"n": 2})])


@pytest.mark.parametrize("path", PATHS)
def test_arguments_that_were_cut_are_told_where_the_template_takes_text(path) -> None:
    assert '[ARGS]{"n": 1[' in render(path, MISTRAL, [("a", '{"n": 1')]).replace("</s>", "")


@pytest.mark.parametrize("path", PATHS)
def test_ids_of_elsewhere_have_nine_letters_where_the_template_asks_for_them(path) -> None:
    told = render(path, STRICT, [("call_of_elsewhere", {}), ("abcdefgh9", {})])
    first, second = (part[:9] for part in told.split("[TOOL_CALLS]")[1:])
    assert second == "abcdefgh9" and f"<{first}>is call_of_elsewhere" in told and "<abcdefgh9>is abc" in told


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("template", [MISTRAL, STRICT])
def test_the_user_may_speak_right_after_a_result(path, template) -> None:
    told = render(path, template, [("a", {"n": 1}), ("b", {"n": 2})], "Stop that.")
    assert told.index("is a") < told.index("Understood.") < told.index("Stop that.")
    assert "Understood." not in render(path, CHATML_TOOLS, [("a", {"n": 1})], "Stop that.")


def test_a_conversation_that_no_way_mends_is_refused_by_the_first_reason() -> None:
    template = "{{ raise_exception('of ' ~ messages | length ~ ' messages') }}{{ tools }}"
    body = build(PATHS[0], [("a", '{"n'), ("b", {})], "And?")
    found = ask(make_app(Keeper(), demo_model(template)), PATHS[0], body)
    assert found.status_code == 400 and "of 5 messages" in found.json()["error"]["message"]
    loops = "{% for a in range(60000) %}{% for b in range(60000) %}{% endfor %}{% endfor %}{{ tools }}"
    found = ask(make_app(Keeper(), demo_model(loops)), PATHS[0], body)
    assert found.status_code == 400 and "steps" in found.json()["error"]["message"]
