"""Gaps that models with marks of them fill, prompts as templates write them, and counts of responses."""

from dataclasses import replace

import pytest
from clients.test_agents import TEMPLATE, Scripted
from http_client import ask, events_of
from small_service import demo_model

from pshard.server.routes.make_app import make_app

MARKS = {"<|fim_prefix|>": 1001, "<|fim_suffix|>": 1002, "<|fim_middle|>": 1003, "<|file_sep|>": 1004}


class Marked:
    """The demo model's tokenizer with marks of gaps."""

    def __init__(self) -> None:
        self._inner = demo_model().tokenizer

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def encode(self, text, *more, **settings):
        return [MARKS[text]] if text in MARKS else self._inner.encode(text, *more, **settings)

    def special_name(self, token):
        return next((name for name, id in MARKS.items() if id == token), self._inner.special_name(token))


@pytest.fixture
def scripted() -> Scripted:
    return Scripted(script="a + b")


@pytest.fixture
def filling(scripted):
    return make_app(scripted, replace(demo_model(TEMPLATE), tokenizer=Marked()))


def test_a_gap_is_filled_by_each_of_its_interfaces(filling, scripted) -> None:
    def encode(text: str) -> list[int]:
        return demo_model().tokenizer.encode(text, add_special=False)

    begin = [id for id in demo_model().tokenizer.encode("") if id == demo_model().tokenizer.bos_id]
    gap = [*begin, 1001, *encode("return "), 1002, *encode("\n#end"), 1003]
    told = ask(filling, "/infill", {"input_prefix": "return ", "input_suffix": "\n#end", "n_predict": 9}).json()
    assert told["content"] == "a + b" and told["stop"] and told["tokens_predicted"]
    assert list(scripted.jobs[-1].prompt) == gap and scripted.jobs[-1].stops >= {1001, 1002, 1003, 1004}
    assert scripted.jobs[-1].most == 9
    told = ask(filling, "/v1/completions", {"prompt": "return ", "suffix": "\n#end"}).json()
    assert told["choices"][0]["text"] == "a + b" and list(scripted.jobs[-1].prompt) == gap
    body = {"model": "demo", "prompt": "return ", "suffix": "\n#end", "stream": False}
    assert ask(filling, "/api/generate", body).json()["response"] == "a + b"
    assert list(scripted.jobs[-1].prompt) == gap
    shown = ask(filling, "/api/show", {"model": "demo"}).json()
    assert "insert" in shown["capabilities"] and ".Suffix" in shown["template"]


def test_llama_vim_gets_its_gap_filled_beside_other_files(filling, scripted) -> None:
    body = {"id_slot": 0, "input_prefix": "x", "input_suffix": "", "prompt": "  y", "n_predict": 128, "top_k": 40,
            "input_extra": [{"filename": "a.py", "text": "import b"}], "samplers": ["top_k", "top_p", "infill"],
            "cache_prompt": True, "t_max_prompt_ms": 500, "t_max_predict_ms": 1000, "stream": True}  # fmt: skip
    *parts, last = events_of(ask(filling, "/infill", body))
    assert "".join(part["content"] for part in parts) == "a + b" and last["stop"] and last["content"] == ""
    prompt = list(scripted.jobs[-1].prompt)
    assert prompt.index(1004) < prompt.index(1001) < prompt.index(1003) < len(prompt) - 1
    assert scripted.jobs[-1].sampling.samplers == ("top_k", "top_p")


def test_a_model_without_marks_refuses_gaps_by_the_field(app) -> None:
    for path, body, where in (
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}, "input_suffix"),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix"),
        ("/v1/completions", {"prompt": ["a", "b"], "suffix": "b"}, "suffix"),
        ("/infill", {"input_prefix": "a", "samplers": ["mirostat"]}, "samplers[0]"),
        ("/infill", {"input_extra": [{}]}, "input_extra[0].text"),
    ):
        found = ask(app, path, body)
        assert found.status_code == 400 and found.json()["error"]["param"] == where, found.text


def test_a_template_is_applied_without_an_answer(filling, scripted) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": tools, "reasoning_effort": "low"}
    assert ask(filling, "/apply-template", body).json() == {"prompt": "[user]Hi(f)low"}
    assert ask(filling, "/apply-template", {}).json()["error"]["param"] == "messages" and not scripted.jobs


def test_tokens_of_a_response_are_counted_as_they_are_used(filling, scripted) -> None:
    body = {"model": "demo", "input": "Hi", "instructions": "Be brief."}
    used = ask(filling, "/v1/responses", body).json()["usage"]["input_tokens"]
    told = ask(filling, "/v1/responses/input_tokens", body).json()
    assert told == {"object": "response.input_tokens", "input_tokens": used}
    long = ask(filling, "/v1/responses/input_tokens", body | {"input": "word " * 900}).json()
    assert long["input_tokens"] > 512
