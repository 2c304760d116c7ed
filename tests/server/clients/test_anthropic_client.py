"""The package `anthropic` against the server: messages whole and streamed, tools, counts, errors."""

import pytest

GREEDY = {"temperature": 0}  # no argument of newer clients
HI = [{"role": "user", "content": "ROMEO:"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Bern"]}},
    "required": ["city"],
    "additionalProperties": False,
}
either_service = pytest.mark.parametrize("url", ["small_url", "scheduled_url"], indirect=True)
WEATHER = {"name": "get_weather", "description": "of a city", "input_schema": SCHEMA}


@pytest.fixture
def client(url, anthropic):
    with anthropic.Anthropic(base_url=url, api_key="a-key", max_retries=0) as made:
        yield made


@pytest.mark.quick("scheduled_url")
@either_service
def test_a_message_is_answered_whole_and_streamed_alike(client) -> None:
    body = {"model": "demo", "messages": HI, "max_tokens": 8, "system": "Speak.", "extra_body": GREEDY}
    whole = client.messages.create(**body)
    assert whole.stop_reason == "max_tokens" and whole.usage.output_tokens == 8 and whole.role == "assistant"
    with client.messages.stream(**body) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        last = stream.get_final_message()
    assert last.stop_reason == "max_tokens" and last.usage.input_tokens == whole.usage.input_tokens
    events = [event.type for event in client.messages.create(**body, stream=True)]
    assert events[:2] == ["message_start", "content_block_start"]
    assert events[-3:] == ["content_block_stop", "message_delta", "message_stop"]


@either_service
def test_a_stop_sequence_is_named(client) -> None:
    body = {"model": "demo", "messages": HI, "max_tokens": 12, "extra_body": GREEDY}
    text = client.messages.create(**body).content[0].text
    found = client.messages.create(**body, stop_sequences=[text[5:8]])
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", text[5:8])
    assert found.content[0].text == text[: text.index(text[5:8])]


def test_tools_are_called_and_their_results_taken(client, service) -> None:
    body = {"model": "demo", "max_tokens": 80, "tools": [WEATHER]}
    body["tool_choice"] = {"type": "any", "disable_parallel_tool_use": True}
    found = client.messages.create(messages=HI, **body)
    (block,) = found.content
    assert found.stop_reason == "tool_use" and block.name == "get_weather" and block.input["city"] in ("Rome", "Bern")
    with client.messages.stream(messages=HI, **body) as stream:
        assert stream.get_final_message().content[0].input["city"] in ("Rome", "Bern")
    result = {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "sun"}]}
    history = [*HI, {"role": "assistant", "content": found.content}, {"role": "user", "content": [result]}]
    client.messages.create(model="demo", messages=history, max_tokens=2)
    assert "sun" in service.engine.tokenizer.decode(list(service.jobs[-1].prompt))


@either_service
def test_tokens_are_counted_as_they_are_used(client) -> None:
    counted = client.messages.count_tokens(model="demo", messages=HI, system="Speak.").input_tokens
    made = client.messages.create(model="demo", messages=HI, system="Speak.", max_tokens=1)
    assert counted == made.usage.input_tokens


@pytest.mark.parametrize(("body", "where"), [
    ({"max_tokens": 0}, "max_tokens"), ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"), ({"system": [{"type": "image"}]}, "system[0]"),
    ({"tool_choice": {"type": "tool", "name": "f"}, "tools": [WEATHER]}, "tool_choice"),
])  # fmt: skip
def test_bad_fields_are_named(client, body, where, anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(**{"model": "demo", "messages": HI, "max_tokens": 2} | body)
    error = caught.value.body["error"]
    assert error["type"] == "invalid_request_error" and where in error["message"]


def test_errors_are_the_clients_own(client, url, anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="claude", messages=HI, max_tokens=2)
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=url, api_key="wrong").messages.create(model="demo", messages=HI, max_tokens=2)
