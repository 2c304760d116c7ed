"""Fields that belong to another interface: told where they belong, never dropped in silence."""

import pytest
from http_client import ask

from pshard.server.api.tables.other_names import INSTEAD

USER = [{"role": "user", "content": "ROMEO:"}]
RIGHT = {
    "/v1/completions": {"prompt": "ROMEO:", "max_tokens": 2},
    "/v1/chat/completions": {"messages": USER, "max_tokens": 2},
    "/v1/responses": {"input": "ROMEO:", "max_output_tokens": 2},
    "/v1/messages": {"messages": USER, "max_tokens": 2},
    "/api/chat": {"messages": USER, "options": {"num_predict": 2}},
    "/api/generate": {"prompt": "ROMEO:", "options": {"num_predict": 2}},
}
ASKS = {"n": 2, "best_of": 2, "tool_choice": "required", "logprobs": True, "stop": ["x"], "stop_sequences": ["x"]}
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}


def refusal(app, path: str, **more) -> dict:
    found = ask(app, path, RIGHT[path] | more)
    assert found.status_code == 400, found.text
    error = found.json()["error"]
    return error if isinstance(error, dict) else {"message": error}


@pytest.mark.parametrize(("path", "name", "why"), [(p, n, w) for p, fields in INSTEAD.items() for n, w in fields])
def test_a_field_of_another_interface_is_refused_with_what_to_give(app, path, name, why) -> None:
    assert refusal(app, path, **{name: ASKS.get(name, 3)})["message"] == f"{name} {why}"


def test_values_that_ask_for_nothing_are_taken(app) -> None:
    for path, fields in INSTEAD.items():
        nothing = {name: None for name, _ in fields} | {"best_of": 1}
        assert ask(app, path, RIGHT[path] | nothing).status_code == 200
    assert ask(app, "/v1/responses", RIGHT["/v1/responses"] | {"n": 1, "logprobs": False}).status_code == 200
    chats = {"tools": [], "tool_choice": "auto", "best_of": 1}
    assert ask(app, "/v1/completions", RIGHT["/v1/completions"] | chats).status_code == 200


def test_messages_are_drawn_by_the_fields_that_chats_have(app, service) -> None:
    drawn = {"seed": 7, "min_p": 0.2, "logit_bias": {"5": -100}, "frequency_penalty": 0.5, "repeat_last_n": 9}
    assert ask(app, "/v1/messages", RIGHT["/v1/messages"] | drawn).status_code == 200
    sampling = service.jobs[-1].sampling
    assert (sampling.seed, sampling.min_p, sampling.logit_bias) == (7, 0.2, ((5, -100.0),))
    assert (sampling.penalties.frequency, sampling.penalties.last) == (0.5, 9)
    assert "grammar is not taken" in refusal(app, "/v1/messages", grammar="x")["message"]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/responses", "text.format"),
        ("/v1/messages", "output_config.format"),
        ("/v1/messages", "output_format"),
    ],
)
def test_a_schema_that_cannot_be_kept_is_refused_by_the_field_that_has_it(app, path, name) -> None:
    def give(schema: dict) -> dict:
        field, _, inner = name.partition(".")
        format = {"type": "json_schema", "schema": schema}
        return {field: {inner: format} if inner else format}

    assert ask(app, path, RIGHT[path] | give(CITY)).status_code == 200
    assert refusal(app, path, **give({"type": "objct"}))["message"].startswith(f"{name} cannot be kept: ")
