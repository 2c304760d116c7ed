"""POST /v1/completions over the demo model: what clients read, and what they get for bad fields."""

import json
import threading
from dataclasses import replace

import pytest
import torch
from http_client import ask, events_of
from hypothesis import given
from hypothesis import strategies as some
from quick_service import QuickService
from small_service import demo_model

pytest.importorskip("starlette", reason="the extra serve is not installed")

from pshard.runtime.sampling.grammar import open_words
from pshard.server.api.limits import DEFAULT_LIMITS
from pshard.server.routes.make_app import make_app
from pshard.server.text import guides

PATH = "/v1/completions"
ROMEO = {"prompt": "ROMEO:\n", "max_tokens": 24, "temperature": 0}


def complete(app, **body):
    response = ask(app, PATH, ROMEO | body)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_greedy_answer_is_the_engines_own(app, service) -> None:
    found = complete(app)
    service.engine.reset()
    tokenizer = service.engine.tokenizer
    from pshard.runtime.sampling import Sampling

    alone = "".join(service.engine.generate(ROMEO["prompt"], 24, Sampling(temperature=0)))
    assert found["choices"][0]["text"] == alone
    assert found["choices"][0]["finish_reason"] == "length"
    n = len(tokenizer.encode(ROMEO["prompt"]))
    assert found["usage"] == {
        "prompt_tokens": n,
        "completion_tokens": 24,
        "total_tokens": n + 24,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert found["id"].startswith("cmpl-") and found["object"] == "text_completion" and found["model"] == "demo"


def test_a_streamed_answer_is_the_same_text_and_ends_with_done(app) -> None:
    response = ask(app, PATH, ROMEO | {"stream": True, "stream_options": {"include_usage": True}})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-store" and response.headers["x-accel-buffering"] == "no"
    *chunks, usage, done = events_of(response)
    whole = complete(app)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"][0]["finish_reason"]] == ["length"]
    assert done == "[DONE]" and usage["choices"] == [] and usage["usage"] == whole["usage"]


def test_without_usage_no_chunk_is_empty(app) -> None:
    chunks = events_of(ask(app, PATH, ROMEO | {"stream": True}))[:-1]
    assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_and_what_only_began_like_one_is_not_lost(app, stream) -> None:
    text = complete(app)["choices"][0]["text"]
    stop, never = text[10:14], text[-2:] + "\x00"

    def made(**body) -> tuple[str, str]:
        if not stream:
            choice = complete(app, **body)["choices"][0]
            return choice["text"], choice["finish_reason"]
        choices = [c["choices"][0] for c in events_of(ask(app, PATH, ROMEO | body | {"stream": True}))[:-1]]
        return "".join(c["text"] for c in choices), choices[-1]["finish_reason"]

    assert made(stop=stop) == (text[: text.index(stop)], "stop")
    assert made(stop=[never, "\x01\x02"]) == (text, "length")


def test_texts_ids_and_lists_of_both_are_prompts(app, service) -> None:
    ids = service.engine.tokenizer.encode(ROMEO["prompt"])
    alone = complete(app)["choices"][0]["text"]
    assert complete(app, prompt=ids)["choices"][0]["text"] == alone
    for prompt in ([ROMEO["prompt"], "KING"], [ids, service.engine.tokenizer.encode("KING")]):
        found = complete(app, prompt=prompt)
        assert [c["index"] for c in found["choices"]] == [0, 1]
        assert found["choices"][0]["text"] == alone
        assert found["usage"]["completion_tokens"] == 48


def test_echo_scores_the_prompt_as_the_engine_does(app, service) -> None:
    ids = service.engine.tokenizer.encode("ROMEO:\nI am the king of you")
    found = complete(app, prompt=[ids], max_tokens=1, logprobs=1, echo=True)["choices"][0]
    service.engine.reset()
    rows = torch.log_softmax(service.engine.forward(ids, all_logits=True).double(), 1)
    told = found["logprobs"]["token_logprobs"]
    assert told[0] is None and found["logprobs"]["top_logprobs"][0] is None
    assert told[1:-1] == pytest.approx([float(row[i]) for row, i in zip(rows, ids[1:])], abs=1e-6)
    assert len(found["logprobs"]["tokens"]) == len(ids) + 1
    for offset, token in zip(found["logprobs"]["text_offset"], found["logprobs"]["tokens"]):
        assert found["text"][offset : offset + len(token)] == token
    top = [max(row, key=row.get) for row in found["logprobs"]["top_logprobs"][1:-1]]
    assert top == [service.engine.tokenizer.decode([int(row.argmax())]) for row in rows[:-1]]


def test_no_tokens_with_echo_scores_the_prompt_only(app) -> None:
    found = complete(app, max_tokens=0, echo=True, logprobs=0)
    choice = found["choices"][0]
    assert choice["text"] == ROMEO["prompt"] and choice["finish_reason"] == "length"
    assert found["usage"]["completion_tokens"] == 0
    assert len(choice["logprobs"]["tokens"]) == found["usage"]["prompt_tokens"]


def test_a_streamed_echo_begins_with_the_prompt_and_its_scores(app) -> None:
    whole = complete(app, echo=True, logprobs=2)["choices"][0]
    chunks = events_of(ask(app, PATH, ROMEO | {"echo": True, "logprobs": 2, "stream": True}))[:-1]
    assert "".join(c["choices"][0]["text"] for c in chunks) == whole["text"]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        told = [value for c in chunks for value in c["choices"][0]["logprobs"][name]]
        assert told == whole["logprobs"][name]


def test_choices_differ_and_a_seed_repeats_them(app) -> None:
    body = {"n": 3, "seed": 7, "temperature": 1.0, "max_tokens": 12}
    first, again = complete(app, **body), complete(app, **body)
    texts = [c["text"] for c in first["choices"]]
    assert texts == [c["text"] for c in again["choices"]] and len(set(texts)) == 3
    assert first["usage"]["completion_tokens"] == 36
    assert first["usage"]["prompt_tokens"] == complete(app)["usage"]["prompt_tokens"]


def test_a_bias_forbids_a_token_and_penalties_reach_the_sampler(app, service) -> None:
    first = complete(app, max_tokens=1, return_token_ids=True)["choices"][0]["token_ids"][0]
    other = complete(app, max_tokens=1, return_token_ids=True, logit_bias={str(first): -100})
    assert other["choices"][0]["token_ids"][0] != first
    complete(app, presence_penalty=0.5, frequency_penalty=0.25, repeat_penalty=1.1, top_k=3, min_p=0.1, top_p=0.5)
    sampling = service.jobs[-1].sampling
    assert (sampling.penalties.presence, sampling.penalties.frequency, sampling.penalties.repeat) == (0.5, 0.25, 1.1)
    assert (sampling.top_k, sampling.min_p, sampling.top_p) == (3, 0.1, 0.5)


def test_a_schema_is_kept_to(app) -> None:
    import json

    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "yes"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    given = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    text = complete(app, response_format=given, max_tokens=60)["choices"][0]["text"]
    assert json.loads(text)["a"] in ("x", "yes") and " " not in text


BAD = [
    ("max_tokens", -2), ("max_tokens", 1.5), ("max_tokens", "9"), ("max_tokens", 0), ("temperature", 2.1),
    ("temperature", -0.1), ("temperature", True), ("temperature", "hot"), ("top_p", 1.1), ("top_k", -2), ("min_p", 2),
    ("presence_penalty", 3), ("frequency_penalty", -3), ("repeat_penalty", 0), ("seed", 1.5), ("seed", 1 << 70),
    ("logit_bias", []), ("logit_bias.x", {"x": 1}), ("logit_bias.1024", {"1024": 1}), ("logit_bias.5", {"5": 101}),
    ("stop", ""), ("stop", 5), ("stop[1]", ["a", ""]), ("stop", ["a"] * 17), ("n", 0), ("n", 17), ("stream", "yes"),
    ("stream_options", {"include_usage": True}), ("logprobs", 21), ("logprobs", True), ("echo", 1), ("best_of", 2),
    ("suffix", "end"), ("prompt", {}), ("prompt", []), ("prompt[1]", ["a", 5]), ("prompt[0]", [5000]),
    ("prompt[1][0]", [[1], [-1]]), ("prompt[0]", [[]]), ("response_format.type", {"type": "yaml"}),
    ("response_format.json_schema", {"type": "json_schema"}), ("model", 5),
]  # fmt: skip


@pytest.mark.parametrize(("where", "value"), BAD, ids=[f"{w}={str(v)[:20]}" for w, v in BAD])
def test_a_bad_field_is_refused_by_its_name(app, where, value) -> None:
    name = where.partition(".")[0].partition("[")[0]
    response = ask(app, PATH, ROMEO | {name: value})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error" and error["param"] == where and where in error["message"]


def test_a_prompt_beyond_the_context_is_refused_with_both_sizes(app) -> None:
    for prompt in ([1] * 513, "word " * 600, "a" * 1_000_000):
        error = ask(app, PATH, ROMEO | {"prompt": prompt}).json()["error"]
        assert error["code"] == "context_length_exceeded" and error["n_ctx"] == 512
        assert str(error["n_prompt_tokens"]) in error["message"] and "512" in error["message"]


def test_fields_that_clients_send_and_nobody_needs_are_ignored(app) -> None:
    extra = {"user": "u", "store": True, "metadata": {"a": 1}, "service_tier": "auto", "stop": None, "seed": None}
    assert complete(app, **extra)["choices"][0]["text"] == complete(app)["choices"][0]["text"]


def test_a_model_that_is_not_here_is_not_found(app) -> None:
    response = ask(app, PATH, ROMEO | {"model": "gpt-4"})
    assert response.status_code == 404 and response.json()["error"]["code"] == "model_not_found"


@given(some.text(some.characters(exclude_categories=("Cs",))), some.text(some.characters(exclude_categories=("Cs",))))
def test_a_prepared_event_is_the_one_that_is_written_whole(text: str, name: str) -> None:
    from pshard.server.http.replies import prepare_event, write_event

    def show(text: str) -> dict:
        return {"model": name, "choices": [{"index": 0, "text": text}], name: None}

    assert prepare_event(show)(text) == write_event(show(text))


def test_the_first_answer_by_a_schema_does_not_wait_for_the_vocabulary(service, monkeypatch) -> None:
    """Making a large vocabulary's words takes longer, on a busy machine, than a schema may take."""

    may, made = threading.Event(), []

    def take_long(*given):
        may.wait(60)
        return open_words(*given)

    def count(*given):
        made.append(given)
        return open_words(*given)

    monkeypatch.setattr(guides, "open_words", take_long)
    body = {"prompt": "a", "max_tokens": 2, "response_format": {"type": "json_object"}}
    limits = replace(DEFAULT_LIMITS, compile_seconds=0.1)
    assert ask(make_app(service, demo_model(), limits), "/v1/completions", body).status_code == 400
    may.set()
    monkeypatch.setattr(guides, "open_words", count)
    app = make_app(service, demo_model(), replace(DEFAULT_LIMITS, compile_seconds=60.0))
    app.prepare()
    prepared = len(made)
    assert ask(app, "/v1/completions", body).status_code == 200 and len(made) == prepared
    make_app(service, replace(demo_model(), tokenizer=None)).prepare()  # there are no words, which is no failure


def test_a_mark_of_the_byte_order_before_a_body_is_passed_over(app) -> None:
    body = json.dumps(ROMEO | {"max_tokens": 2}).encode()
    assert ask(app, PATH, content=b"\xef\xbb\xbf" + body).status_code == 200
    assert ask(app, PATH, content=body[:5] + b"\xef\xbb\xbf" + body[5:]).status_code == 400


@pytest.mark.parametrize(("path", "name", "more"), [
    (PATH, "max_tokens", {"prompt": "ROMEO:\n"}),
    ("/v1/chat/completions", "max_tokens", {"messages": [{"role": "user", "content": "a"}]}),
    ("/v1/chat/completions", "max_completion_tokens", {"messages": [{"role": "user", "content": "a"}]}),
    ("/v1/messages", "max_tokens", {"messages": [{"role": "user", "content": "a"}]}),
    ("/v1/responses", "max_output_tokens", {"input": "a"}),
])  # fmt: skip
def test_minus_one_token_is_as_many_as_there_is_room_for(path, name, more) -> None:
    service = QuickService()
    app = make_app(service, demo_model())
    assert ask(app, path, more | {name: -1}).status_code == 200
    job = service.jobs[-1]
    assert job.most == demo_model().context - len(job.prompt) + 1
    refused = ask(app, path, more | {name: -2})
    assert refused.status_code == 400 and name in refused.text


def test_a_request_for_fewer_drafts_is_told_how_many_there_are(app, service, monkeypatch) -> None:
    plan = replace(service.snapshot().plan, drafter="lookup", drafts=3)
    now = replace(service.snapshot(), plan=plan)
    monkeypatch.setattr(service, "snapshot", lambda: now)
    for asked, told in ((0, 0), (2, 2), (9, 3)):
        found = complete(app, speculative={"n_max": asked})
        assert found["speculative"] == {"n_max": told} and service.jobs[-1].drafts == asked
        *chunks, done = events_of(ask(app, PATH, ROMEO | {"stream": True, "speculative": {"n_max": asked}}))
        assert done == "[DONE]" and all(chunk["speculative"] == {"n_max": told} for chunk in chunks)
    assert "speculative" not in complete(app) and service.jobs[-1].drafts is None
    for wrong in (5, {"n_max": -1}, {"n_max": 1.5}):
        refused = ask(app, PATH, ROMEO | {"speculative": wrong})
        assert refused.status_code == 400 and refused.json()["error"]["param"].startswith("speculative")
