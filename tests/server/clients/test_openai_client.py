"""The package `openai` against the server: sync, async, streams, tools, schemas, responses, errors."""

import asyncio
import json
from typing import Literal

import pytest

HI = [{"role": "user", "content": "ROMEO:"}]
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Bern"]}},
    "required": ["city"],
    "additionalProperties": False,
}
either_service = pytest.mark.parametrize("url", ["small_url", "scheduled_url"], indirect=True)
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}


@pytest.fixture
def client(url, openai):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="a-key", max_retries=0) as made:
        yield made


@pytest.mark.quick("scheduled_url")
@either_service
def test_models_chats_and_completions(client) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").owned_by == "pshard"
    chat = client.chat.completions.create(model="demo", messages=HI, max_completion_tokens=8, temperature=0)
    assert chat.choices[0].message.content and chat.usage.completion_tokens == 8
    found = client.completions.create(model="demo", prompt="ROMEO:", max_tokens=8, temperature=0, logprobs=2, echo=True)
    assert found.choices[0].text.startswith("ROMEO:") and found.choices[0].logprobs.token_logprobs[0] is None


@either_service
def test_streams_say_the_same_as_whole_answers(client) -> None:
    body = {"model": "demo", "messages": HI, "max_completion_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**body).choices[0].message.content
    chunks = list(client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole
    assert chunks[-1].usage.completion_tokens == 12
    with client.chat.completions.stream(**body, stop=whole[6:9]) as stream:
        assert stream.get_final_completion().choices[0].message.content == whole[: whole.index(whole[6:9])]


@either_service
def test_async_clients_ask_at_once(url, openai) -> None:
    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="a-key") as client:
            asks = [
                client.chat.completions.create(model="demo", messages=HI, max_completion_tokens=6, temperature=0)
                for _ in range(4)
            ]
            return [found.choices[0].message.content for found in await asyncio.gather(*asks)]

    assert len(set(asyncio.run(ask_all()))) == 1


@pytest.mark.quick("small_url")
@either_service
def test_tools_and_schemas(client) -> None:
    one_call = {
        "tools": [WEATHER],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_completion_tokens": 60,
    }
    found = client.chat.completions.create(model="demo", messages=HI, **one_call)
    (call,) = found.choices[0].message.tool_calls
    assert call.function.name == "get_weather" and json.loads(call.function.arguments)["city"] in ("Rome", "Bern")
    with client.chat.completions.stream(model="demo", messages=HI, **one_call) as stream:
        events = [event.type for event in stream]
        assert "tool_calls.function.arguments.delta" in events and "tool_calls.function.arguments.done" in events
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
        assert call.id and json.loads(call.function.arguments)["city"] in ("Rome", "Bern")
    pydantic = pytest.importorskip("pydantic")

    class City(pydantic.BaseModel):
        city: Literal["Rome", "Bern"]
        large: bool

    parsed = client.chat.completions.parse(model="demo", messages=HI, response_format=City, max_completion_tokens=60)
    choice = parsed.choices[0]
    assert choice.finish_reason == "stop" and isinstance(choice.message.parsed, City)


@pytest.mark.quick("scheduled_url")
@either_service
def test_responses_whole_and_streamed(client) -> None:
    body = {"model": "demo", "input": "ROMEO:", "instructions": "Speak.", "max_output_tokens": 12, "temperature": 0}
    whole = client.responses.create(**body)
    assert whole.status == "incomplete" and whole.incomplete_details.reason == "max_output_tokens"
    assert whole.output_text and whole.usage.output_tokens == 12 and whole.id.startswith("resp_")
    events = list(client.responses.create(**body, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events if not event.type.endswith(".delta")] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
    with client.responses.stream(**body) as stream:
        stream.until_done()


def test_responses_call_tools_and_take_their_answers(client, service) -> None:
    tool = {"type": "function", "name": "get_weather", "parameters": CITY, "strict": True}
    body = {"model": "demo", "tools": [tool], "tool_choice": "required", "max_output_tokens": 60}
    body["parallel_tool_calls"] = False
    found = client.responses.create(input="weather?", **body)
    (call,) = found.output
    assert found.status == "completed" and call.type == "function_call" and call.name == "get_weather"
    events = list(client.responses.create(input="weather?", stream=True, **body))
    done = next(event for event in events if event.type == "response.function_call_arguments.done")
    assert json.loads(done.arguments)["city"] in ("Rome", "Bern") and events[-1].type == "response.completed"
    history = [
        {"role": "user", "content": "weather?"},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]},
        call.model_dump(),
        {"type": "function_call_output", "call_id": call.call_id, "output": "sun"},
    ]
    client.responses.create(model="demo", input=history, max_output_tokens=2)
    prompt = service.engine.tokenizer.decode(list(service.jobs[-1].prompt))
    assert "get_weather" in prompt and "sun" in prompt


@either_service
def test_responses_follow_a_schema(client) -> None:
    text = {"format": {"type": "json_schema", "name": "city", "schema": CITY, "strict": True}}
    found = client.responses.create(model="demo", input="ROMEO:", text=text, max_output_tokens=60)
    assert json.loads(found.output_text)["city"] in ("Rome", "Bern") and found.status == "completed"


@pytest.mark.parametrize(("body", "where"), [
    ({"previous_response_id": "resp_1"}, "previous_response_id"), ({"background": True}, "background"),
    ({"truncation": "auto"}, "truncation"), ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"input": [{"type": "image"}]}, "input[0].type"), ({"input": [{"role": "x", "content": ""}]}, "input[0].role"),
    ({"input": []}, "input"), ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"input": [{"type": "function_call", "name": 5, "call_id": "c"}]}, "input[0].tool_calls[0].function.name"),
])  # fmt: skip
def test_what_responses_cannot_keep_is_refused_by_name(client, body, where, openai) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{"model": "demo", "input": "hi"} | body)
    assert caught.value.param == where


def test_errors_are_the_clients_own(client, url, openai) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-4", messages=HI)
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="demo", prompt=[1] * 600)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{url}/v1", api_key="wrong").models.list()
