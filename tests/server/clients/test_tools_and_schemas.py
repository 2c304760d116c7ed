"""Tools together with a schema, and schemas as libraries write them: openai, pydantic-ai, instructor, langchain-openai
and the AI SDK against the server, each where it is installed."""

import json
import os
import shutil
import subprocess
from enum import Enum
from pathlib import Path
from typing import Literal

import pytest

pydantic = pytest.importorskip("pydantic", reason="pydantic is not installed")
HI = [{"role": "user", "content": "ROMEO:"}]
MISSING = "{} is not installed; scripts/test-clients installs it"


class Place(pydantic.BaseModel):
    """Where it is."""

    city: Literal["Rome", "Bern"]
    large: bool


class Hour(Enum):
    noon = "noon"
    night = "night"


class Clock(pydantic.BaseModel):
    """Tells the time."""

    hour: Hour


def test_openai_parses_an_answer_or_a_call(url) -> None:
    openai = pytest.importorskip("openai", reason=MISSING.format("openai"))
    tool = openai.pydantic_function_tool(Clock)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="a-key", max_retries=0) as client:
        ask = {"model": "demo", "messages": HI, "tools": [tool], "response_format": Place}
        ask |= {"parallel_tool_calls": False}
        for more in ({}, {"tool_choice": "required"}):
            choice = client.chat.completions.parse(**ask, **more, max_completion_tokens=120).choices[0]
            assert choice.finish_reason in (("stop", "tool_calls") if not more else ("tool_calls",))
            calls = choice.message.tool_calls or []
            assert isinstance(choice.message.parsed, Place) or calls
            assert all(isinstance(call.function.parsed_arguments, Clock) for call in calls)
        with client.chat.completions.stream(**ask, max_completion_tokens=120) as stream:
            choice = stream.get_final_completion().choices[0]
        assert isinstance(choice.message.parsed, Place) or choice.message.tool_calls
        tool = openai.pydantic_function_tool(Clock)["function"]
        found = client.responses.parse(
            model="demo",
            input="ROMEO:",
            tools=[{"type": "function", **tool}],
            text_format=Place,
            parallel_tool_calls=False,
            max_output_tokens=120,
        )
        assert isinstance(found.output_parsed, Place) or found.output[0].type == "function_call"
        with pytest.raises(openai.LengthFinishReasonError):
            client.chat.completions.parse(**ask, tool_choice="required", max_completion_tokens=4)


def test_pydantic_ai_asks_for_native_output_beside_tools(url) -> None:
    pytest.importorskip("pydantic_ai", reason=MISSING.format("pydantic-ai"))
    from pydantic_ai import (
        Agent,
        ModelHTTPError,
        NativeOutput,
        ToolOutput,
        UnexpectedModelBehavior,
        UsageLimitExceeded,
        UsageLimits,
    )
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="a-key")
    for model in (OpenAIChatModel("demo", provider=provider), OpenAIResponsesModel("demo", provider=provider)):
        for output in (NativeOutput(Place), ToolOutput(Place)):
            agent = Agent(
                model, output_type=output, model_settings={"max_tokens": 120, "seed": 1, "parallel_tool_calls": False}
            )
            called: list[Hour] = []

            @agent.tool_plain
            def tell_time(hour: Hour, called: list[Hour] = called) -> str:
                """Tells the time."""
                called.append(hour)
                return "late"

            try:
                assert isinstance(agent.run_sync("ROMEO:", usage_limits=UsageLimits(request_limit=3)).output, Place)
            except UsageLimitExceeded:
                assert called  # a weak model asks for the time again and again
            except UnexpectedModelBehavior as error:
                assert "token limit (120) exceeded" in str(error)  # or writes a call that does not end
            except ModelHTTPError as error:
                assert "context_length_exceeded" in str(error)  # or fills the little context that it has


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA", "TOOLS_STRICT"])
def test_instructor_gets_its_model_in_modes_that_have_a_grammar(url, mode) -> None:
    instructor = pytest.importorskip("instructor", reason=MISSING.format("instructor"))
    openai = pytest.importorskip("openai", reason=MISSING.format("openai"))
    chosen = getattr(instructor.Mode, mode, None)
    if chosen is None:
        pytest.skip(f"this instructor has no mode {mode}")
    client = instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="a-key", max_retries=0), mode=chosen)
    ask = {"model": "demo", "messages": HI, "max_tokens": 80, "max_retries": 1}
    assert isinstance(client.chat.completions.create(**ask, response_model=Place), Place)


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_langchain_gives_structured_output_with_and_without_tools(url, method) -> None:
    langchain = pytest.importorskip("langchain_openai", reason=MISSING.format("langchain-openai"))
    chat = langchain.ChatOpenAI(base_url=f"{url}/v1", api_key="a-key", model="demo", temperature=0, max_tokens=80)
    assert isinstance(chat.with_structured_output(Place, method=method).invoke("ROMEO:"), Place)
    if method == "json_schema":
        both = chat.bind_tools([Clock], strict=True, response_format=Place, parallel_tool_calls=False)
        told = both.invoke("ROMEO:")
        assert told.tool_calls or isinstance(told.additional_kwargs.get("parsed"), Place)


def test_the_ai_sdk_gives_an_object_beside_tools(url) -> None:
    modules, node = os.environ.get("NODE_PATH", ""), shutil.which("node")
    if node is None or not (Path(modules) / "ai").exists():
        pytest.skip("node or the package ai is not installed; scripts/test-clients installs the package")
    script = Path(__file__).with_name("ai_sdk.mjs")
    place = {**os.environ, "SERVER": url, "MODULES": modules}
    found = subprocess.run([node, str(script)], env=place, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr[-3000:]
    told = json.loads(found.stdout)
    assert len(told) == 6
    for name, answer in told.items():
        assert answer["calls"] or answer["cut"] or answer["object"]["city"] in ("Rome", "Bern"), name
        assert all(call in ("noon", "night") for call in answer["calls"]), name
