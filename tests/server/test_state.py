"""What the server says about itself, and who may ask."""

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
from http_client import ask
from small_service import SmallService, demo_model, open_service

from pshard.server.http.guards import Door
from pshard.server.jobs import Refused
from pshard.server.routes.make_app import make_app

PROMPT = {"prompt": "ROMEO:\n", "max_tokens": 2}


@pytest.fixture(scope="module")
def service() -> Iterator[SmallService]:
    made = open_service()
    yield made
    made.close()


@pytest.fixture
def app(service: SmallService):
    return make_app(service, demo_model(), aliases=("other",))


def test_health_says_when_jobs_are_taken(app, service) -> None:
    assert ask(app, "/health").json() == {"status": "ok", "state": "ready"}
    service.state = "loading"
    try:
        found = ask(app, "/health")
        assert found.status_code == 503 and found.headers["retry-after"] == "5"
        assert found.json()["error"]["message"] == "the weights are read"
        refused = ask(app, "/v1/completions", PROMPT)
        assert refused.status_code == 503 and refused.headers["retry-after"] == "7"
        assert refused.json()["error"]["type"] == "unavailable"
    finally:
        service.state = "ready"


def test_models_are_listed_as_front_ends_read_them(app) -> None:
    listed = ask(app, "/v1/models").json()
    assert listed["object"] == "list" and [m["id"] for m in listed["data"]] == ["demo", "other"]
    one = ask(app, "/v1/models/demo").json()
    assert one["object"] == "model" and one["created"] == 1700000000 and one["max_model_len"] == 512
    assert one["meta"]["n_ctx"] == 512 and one["meta"]["n_ctx_train"] == 512
    assert ask(app, "/v1/models/a/b").json()["error"]["code"] == "model_not_found"
    assert ask(app, "/v1/completions", PROMPT | {"model": "other"}).status_code == 200


def test_texts_become_tokens_and_texts_again_in_both_forms(app, service) -> None:
    text = "ROMEO: café ☃<|endoftext|>"
    ids = service.engine.tokenizer.encode(text)
    assert ask(app, "/tokenize", {"prompt": text, "add_special_tokens": False}).json()["tokens"] == ids
    assert ask(app, "/tokenize", {"content": text}).json()["tokens"] == ids
    pieces = ask(app, "/tokenize", {"content": text, "with_pieces": True}).json()["tokens"]
    assert [piece["id"] for piece in pieces] == ids and pieces[-1]["piece"] == "<|endoftext|>"
    assert any(isinstance(piece["piece"], list) for piece in pieces)  # parts of the snowman
    found = ask(app, "/detokenize", {"tokens": ids}).json()
    assert found["prompt"] == found["content"] == text
    chat = ask(app, "/tokenize", {"messages": [{"role": "user", "content": "hi"}]}).json()
    assert chat["tokens"] == service.engine.tokenizer.encode("hi\n") and chat["count"] == len(chat["tokens"])
    hi = {"messages": [{"role": "user", "content": "hi"}]}
    tools = {"tools": [{"type": "function", "function": {"name": "f", "description": "does f"}}]}
    used = ask(app, "/v1/chat/completions", hi | tools | {"max_tokens": 1}).json()["usage"]["prompt_tokens"]
    assert ask(app, "/tokenize", hi | tools).json()["count"] == used > chat["count"]
    info = ask(app, "/tokenizer_info").json()
    assert info["eos_token"] == "<|endoftext|>" and info["bos_token"] == "<|endoftext|>" and "chat_template" in info


@pytest.mark.parametrize(("path", "body", "where"), [
    ("/tokenize", {}, "prompt"), ("/tokenize", {"prompt": 5}, "prompt"), ("/tokenize", {"content": []}, "content"),
    ("/detokenize", {}, "tokens"), ("/detokenize", {"tokens": [5000]}, "tokens[0]"), ("/budget", {}, "vram_mib"),
    ("/budget", {"vram_mib": -5}, "vram_mib"),
    ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"enable_thinking": False}},
     "chat_template_kwargs"),
])  # fmt: skip
def test_bad_fields_are_named(app, path, body, where) -> None:
    found = ask(app, path, body)
    assert found.status_code == 400 and found.json()["error"]["param"] == where


def test_a_budget_is_moved_to_when_there_is_a_plan(app) -> None:
    assert ask(app, "/budget", {"vram_mib": 32}).json() == {"vram_mib": 32, "plan": "32 MiB: all pinned"}
    refused = ask(app, "/budget", {"vram_mib": 33})
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "no_such_budget"
    assert refused.json()["error"]["param"] == "vram_mib"


def test_a_budget_without_a_plan_is_refused_with_what_makes_one(app, service, monkeypatch) -> None:
    asked = []

    def find(mib: int, plan: bool) -> None:
        asked.append((mib, plan))
        if not plan:
            raise Refused(400, "no plan has a budget of 32 MiB; run: pshard-plan --vram 32", "no_such_budget")

    monkeypatch.setattr(service, "find_budget", find)
    refused = ask(app, "/budget", {"vram_mib": 32})
    assert refused.status_code == 400 and "run: pshard-plan --vram 32" in refused.json()["error"]["message"]
    assert refused.json()["error"]["param"] == "vram_mib"
    assert ask(app, "/budget", {"vram_mib": 32, "plan": True}).json()["plan"] == "32 MiB: all pinned"
    assert asked == [(32, False), (32, True)]
    assert ask(app, "/budget", {"vram_mib": 32, "plan": 1}).json()["error"]["param"] == "plan"


def test_props_slots_and_metrics_tell_what_is_in_force(app, service) -> None:
    props = ask(app, "/props").json()
    assert props["plan"]["tiers"][0]["tokens"] == 64 and props["default_generation_settings"]["n_ctx"] == 512
    assert ask(app, "/slots").json() == []
    found = ask(app, "/metrics")
    assert found.headers["content-type"].startswith("text/plain; version=0.0.4")
    names = re.findall(r"^([^\s{#]+)", found.text, re.M)
    assert all(re.fullmatch(r"pshard_[a-z_]+", name) for name in names)
    assert f"pshard_jobs_total {len(service.jobs)}\n" in found.text
    assert 'pshard_kv_blocks{use="cached"} 2\n' in found.text and 'pshard_state{state="ready"} 1\n' in found.text
    assert 'pshard_token_gap_seconds_bucket{le="+Inf"} 0\n' in found.text


def test_all_but_health_wants_the_key(service) -> None:
    app = make_app(service, demo_model(), door=Door(keys=("first", "sécret")))
    assert ask(app, "/health").status_code == 200
    for path in ("/v1/models", "/props", "/slots", "/metrics", "/tokenizer_info", "/nothing"):
        refused = ask(app, path)
        assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
        assert refused.headers["www-authenticate"] == "Bearer"
    for path in ("/budget", "/tokenize", "/v1/completions", "/v1/chat/completions"):
        assert ask(app, path, {}, headers={"authorization": "Bearer wrong"}).status_code == 401
    for headers in (
        {"authorization": "Bearer first"},
        {"x-api-key": "sécret".encode()},
        {"authorization": "bearer first"},
    ):
        assert ask(app, "/v1/models", headers=headers).status_code == 200


def test_the_page_is_there_and_tells_nothing_without_the_key(service) -> None:
    app = make_app(service, demo_model(), door=Door(keys=("first",)))
    unknown, known = ask(app, "/"), ask(app, "/", headers={"x-api-key": "first"})
    assert unknown.status_code == known.status_code == 200 and "all pinned" not in unknown.text
    assert "all pinned" in known.text and ask(app, "/events").status_code == 401


def test_keys_are_told_apart_without_being_told(service) -> None:
    app = make_app(service, demo_model(), door=Door(keys=("first", "second")))
    for key in ("first", "second", "first"):
        ask(app, "/v1/completions", PROMPT, headers={"authorization": f"Bearer {key}"})
    one, two, three = (job.key for job in service.jobs[-3:])
    assert one == three != two and "first" not in one


def test_a_host_that_is_not_this_server_is_refused(app, service) -> None:
    assert ask(app, "/health", headers={"host": "evil.example"}).json()["error"]["code"] == "host_not_allowed"
    for host in ("127.0.0.1:8080", "[::1]:8080", "LOCALHOST", "localhost.", "localhost.:8080"):
        assert ask(app, "/health", headers={"host": host}).status_code == 200
    for host in ("evil.example.", "localhost..", "."):
        assert ask(app, "/health", headers={"host": host}).status_code == 403
    for host in ("10.0.0.7:8080", "[fd00::7]:8080"):  # no page is served by this machine under its address
        assert ask(app, "/health", headers={"host": host}).status_code == 403
        beyond = make_app(service, demo_model(), door=Door(addresses=True))
        assert ask(beyond, "/health", headers={"host": host}).status_code == 200
    assert ask(beyond, "/health", headers={"host": "10.0.0.7.evil.example"}).status_code == 403
    open_app = make_app(service, demo_model(), door=Door(hosts=("*",)))
    assert ask(open_app, "/health", headers={"host": "evil.example"}).status_code == 200


def test_web_pages_of_others_may_not_ask_unless_they_are_named(app, service) -> None:
    there = {"origin": "https://evil.example"}
    refused = ask(app, "/v1/completions", PROMPT, headers=there)
    assert refused.status_code == 403 and "access-control-allow-origin" not in refused.headers
    assert ask(app, "/health", headers={"origin": "http://localhost"}).status_code == 200
    named = make_app(service, demo_model(), door=Door(origins=("https://evil.example",), keys=("k",)))
    found = ask(named, "/health", headers=there)
    assert found.headers["access-control-allow-origin"] == "https://evil.example"
    assert "access-control-allow-credentials" not in found.headers
    asks = there | {"access-control-request-method": "POST"}
    assert ask(named, "/v1/completions", method="OPTIONS", headers=asks).status_code == 204
    assert ask(app, "/v1/completions", method="OPTIONS", headers=asks).status_code == 403


def test_paths_and_methods_that_are_not_there_are_told_like_other_errors(app) -> None:
    assert ask(app, "/v1/nothing").json()["error"]["code"] == "not_found"
    found = ask(app, "/v1/completions")
    assert found.status_code == 405 and found.json()["error"]["code"] == "method_not_allowed"


def test_a_broken_handler_tells_no_internals_and_no_prompt(app, service, monkeypatch, caplog) -> None:
    def fail() -> None:
        raise RuntimeError("ROMEO's secret")

    monkeypatch.setattr(service, "snapshot", fail)
    found = ask(app, "/props")
    assert found.status_code == 500 and found.headers["x-should-retry"] == "false"
    assert "secret" not in found.text and "secret" not in caplog.text and "RuntimeError" in caplog.text


def test_several_keys_share_no_prefixes_and_one_key_shares_them_with_all(service) -> None:
    body = {"prompt": "ROMEO:\n", "max_tokens": 1, "n": 2}

    def salts(keys: tuple[str, ...], given: str) -> set[str]:
        before = len(service.jobs)
        app = make_app(service, demo_model(), door=Door(keys=keys))
        assert ask(app, "/v1/completions", body, headers={"authorization": f"Bearer {given}"}).status_code == 200
        return {job.salt for job in service.jobs[before:]}

    (first,), (again,), (second,) = (salts(("first", "second"), given) for given in ("first", "first", "second"))
    assert first == again != second and "" not in (first, second)
    assert salts(("first",), "first") == salts((), "any") == {""}


def test_a_cache_that_cannot_be_written_shows_in_props_and_metrics(app, service, monkeypatch) -> None:
    assert ask(app, "/props").json()["prefix_cache_problem"] is None
    assert "pshard_prefix_cache_failing 0\n" in ask(app, "/metrics").text
    now = service.snapshot()
    broken = replace(now, blocks=replace(now.blocks, files_problem="cannot write /there: No space left on device"))
    monkeypatch.setattr(service, "snapshot", lambda: broken)
    assert "No space left" in ask(app, "/props").json()["prefix_cache_problem"]
    assert "pshard_prefix_cache_failing 1\n" in ask(app, "/metrics").text
