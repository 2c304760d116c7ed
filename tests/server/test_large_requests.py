"""Large requests are read in a process of their own: they stop nobody, and their memory comes back."""

import asyncio
import json
import os
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import body_readers
import httpx
import pytest
from body_readers import end_early, fail, note_process_and_wait, refuse, take_forever, tell_process
from http_client import ask
from small_service import demo_model

from pshard.runtime.sampling import Sampling
from pshard.server.api.faults import Fault
from pshard.server.api.limits import DEFAULT_LIMITS
from pshard.server.http.desk import LARGE
from pshard.server.reading import other_process
from pshard.server.reading.other_process import Line, OtherProcess
from pshard.server.reading.reader import Reader

TRIES = 10  # in one that no other program disturbs, threads and the event loop have their turns

SMALL, BIG = b"{}", b'{"text": "' + b"a" * LARGE + b'"}'


@pytest.fixture(scope="module", autouse=True)
def known_there():
    """The other process finds what makes test data, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(body_readers.__file__).parent))
        yield


@pytest.fixture(scope="module")
def elsewhere(known_there):
    made = OtherProcess(Reader(demo_model(), DEFAULT_LIMITS, Sampling(), ("demo",)))
    yield made
    made.close()


def read(elsewhere: OtherProcess, *given: Any) -> Any:
    return elsewhere.read(Line(), *given)


def words(n: int) -> str:
    return "hello " * n


def ids(n: int) -> str:
    return "[" + ",".join(["300"] * n) + "]"


def bodies(n: int) -> dict[str, tuple[str, str]]:
    """Requests of some 6 * n bytes, by what takes long in them."""
    tool = {"type": "function", "function": {"name": "f", "description": words(n // 20)}}
    tools = [tool | {"function": tool["function"] | {"name": f"f{i}"}} for i in range(20)]
    return {
        "text": ("/tokenize", json.dumps({"content": words(n)})),
        "ids": ("/v1/completions", f'{{"prompt": {ids(n)}}}'),
        "detokenize": ("/detokenize", f'{{"tokens": {ids(n)}}}'),
        "tools": ("/v1/chat/completions", json.dumps({"messages": [{"role": "user", "content": "a"}], "tools": tools})),
        "objects": ("/v1/completions", f'{{"prompt": [{",".join(["{}"] * n * 2)}]}}'),
    }


@pytest.mark.quick("tools-150000")
@pytest.mark.parametrize(("what", "n"), [*((what, 150_000) for what in bodies(1)), ("ids", 1_300_000)])
def test_the_event_loop_goes_on_while_a_large_request_is_read(app, what, n) -> None:
    path, body = bodies(n)[what]

    async def send() -> tuple[httpx.Response, float, float]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=300) as client:
            task = asyncio.ensure_future(client.post(path, content=body))
            now = begun = time.monotonic()
            longest = 0.0
            while not task.done():
                await asyncio.sleep(0.002)
                now, before = time.monotonic(), now
                longest = max(longest, now - before)
            return await task, longest, now - begun

    def goes_on() -> bool:
        """It was nowhere near all of the time that the loop stood."""
        response, longest, whole = asyncio.run(send())
        assert response.status_code in (200, 400) and "failed" not in response.text
        return longest < max(0.1, whole / 2)

    asyncio.run(send())  # the process is there
    assert any(goes_on() for _ in range(TRIES))


def test_the_size_of_a_body_says_in_which_process_it_is_read(app, elsewhere) -> None:
    here = os.getpid()
    first, second = (read(elsewhere, tell_process, BIG, 60.0) for _ in range(2))
    assert first[1] == second[1] == LARGE and len({here, first[0], second[0]}) == 3
    desk = app.routes[0].endpoint._desk
    try:
        assert asyncio.run(desk.read(tell_process, SMALL)) == (here, 0)
        assert asyncio.run(desk.read(tell_process, BIG))[0] != here
    finally:
        desk._elsewhere.close()


def test_memory_of_a_large_request_comes_back(elsewhere) -> None:
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")

    from pshard.server.reading.read_requests import tokenize

    body = json.dumps({"content": words(50_000), "with_pieces": True}).encode()
    read(elsewhere, tokenize, body, 100.0)
    before = resident()
    for _ in range(2):
        assert len(read(elsewhere, tokenize, body, 100.0)) > 1 << 20
    assert resident() - before < 48 << 20


def test_a_large_request_that_takes_too_long_is_ended(elsewhere) -> None:
    with pytest.raises(Fault, match="more than 1 seconds to read") as told:
        read(elsewhere, take_forever, BIG, 1.0)
    assert told.value.status == 400 and told.value.code == "too_complex"


def test_who_goes_takes_the_reading_of_a_large_request_along(elsewhere, tmp_path) -> None:
    """Also while it is in the midst of it."""
    place = tmp_path / "process"
    body = json.dumps({"text": "a" * LARGE, "place": str(place)}).encode()
    line, told = Line(), list[Fault]()

    def ask_elsewhere() -> None:
        with pytest.raises(Fault) as fault:
            elsewhere.read(line, note_process_and_wait, body, 60.0)
        told.append(fault.value)

    thread = threading.Thread(target=ask_elsewhere)
    thread.start()
    while not place.exists() or not place.read_text():
        time.sleep(0.01)
    process = int(place.read_text())
    line.cut()
    thread.join(60)
    assert told[0].status == 503
    end = time.monotonic() + 60
    while Path(f"/proc/{process}").exists():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_client_that_goes_cuts_the_line_of_its_request(app, monkeypatch) -> None:
    cut = []
    monkeypatch.setattr(Line, "cut", lambda line: cut.append(line))

    async def leave() -> None:
        desk = app.routes[0].endpoint._desk
        task = asyncio.ensure_future(desk.read(tell_process, BIG))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()

    asyncio.run(leave())
    assert len(cut) == 1


def test_a_process_that_ends_is_told_and_the_next_request_has_another(elsewhere) -> None:
    with pytest.raises(Fault, match="memory is short") as told:
        read(elsewhere, end_early, BIG, 60.0)
    assert told.value.status == 503 and told.value.retry_after
    elsewhere._process.kill()
    elsewhere._process.wait()
    assert read(elsewhere, tell_process, BIG, 60.0)[1] == LARGE


def test_what_is_refused_or_fails_elsewhere_is_told_like_here(elsewhere) -> None:
    with pytest.raises(Fault, match="not here") as told:
        read(elsewhere, refuse, BIG, 60.0)
    fault = told.value
    assert (fault.status, fault.param, fault.code, fault.more, fault.retry_after) == (404, "text", "gone", {"n": 1}, 2)
    with pytest.raises(Exception, match=r"RuntimeError at .*body_readers.py:\d+") as failed:
        read(elsewhere, fail, BIG, 60.0)
    assert "secret" not in str(failed.value)


def test_the_process_ends_when_nothing_was_asked_for_long(elsewhere, monkeypatch) -> None:
    read(elsewhere, tell_process, BIG, 60.0)
    elsewhere.close_when_idle()
    process = elsewhere._process
    assert process.poll() is None
    monkeypatch.setattr(other_process, "IDLE_SECONDS", 0.0)
    elsewhere.close_when_idle()
    assert process.returncode is not None


def test_a_large_request_has_the_answer_of_a_small_one(app, service) -> None:
    pad = " " * LARGE  # between the words of JSON
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "temperature": 0}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 16, "temperature": 0, "metadata": {"a": "b"}}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "temperature": 0}),
        ("/v1/completions", {"prompt": ["hi", [300]], "echo": True, "logprobs": 1, "max_tokens": 2, "temperature": 0}),
    ):
        answers = [ask(app, path, content=json.dumps(body) + more).json() for more in ("", pad)]
        for answer in answers:
            for name in ("id", "created", "created_at", "completed_at"):
                answer.pop(name, None)
            for item in answer.get("output", ()):
                item.pop("id")
        assert (answers[0] == answers[1] and "error" not in answers[0]) or answers[0]["error"] is None


def test_tokens_are_counted_whatever_the_context_has_room_for(app, service) -> None:
    text = words(40_000)
    n = len(service.engine.tokenizer.encode(text, add_special=False))
    assert n > demo_model().context
    chat = {"messages": [{"role": "user", "content": text}]}
    assert ask(app, "/tokenize", {"content": text}).json()["count"] == n
    assert ask(app, "/tokenize", chat).json()["count"] >= n
    assert ask(app, "/v1/messages/count_tokens", chat).json()["input_tokens"] >= n


def test_a_prompt_that_was_not_counted_has_at_least_so_many_tokens(app) -> None:
    text = words(40_000)
    for path, body in (
        ("/v1/completions", {"prompt": text}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": words(100)}] * 400}),
    ):
        error = ask(app, path, body).json()["error"]
        assert f"has at least {error['n_prompt_tokens']} tokens" in error["message"], path
        assert error["n_prompt_tokens"] > 512 and error["n_prompt_tokens_at_least"] is True
    counted = ask(app, "/v1/completions", {"prompt": words(300)}).json()["error"]
    assert "at least" not in counted["message"] and "n_prompt_tokens_at_least" not in counted


def test_tools_are_measured_together(app) -> None:
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1000)}}
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": schema}} for i in range(60)]
    hi = {"messages": [{"role": "user", "content": "hi"}]}
    error = ask(app, "/v1/chat/completions", hi | {"tools": tools}).json()["error"]
    assert error["param"] == "tools" and "1024 KiB together" in error["message"]
    error = ask(app, "/v1/chat/completions", hi | {"tools": tools[:30]}).json()["error"]
    assert error["code"] == "context_length_exceeded" and "at least" in error["message"]


def test_what_a_response_repeats_is_bounded(app) -> None:
    error = ask(app, "/v1/responses", {"input": "hi", "metadata": [{}] * 800_000}).json()["error"]
    assert error["param"] == "metadata" and "2 MiB" in error["message"]


def test_encoding_lets_other_threads_run() -> None:
    tokenizer = demo_model().tokenizer

    def lets_run() -> bool:
        done, ticks = threading.Event(), list[float]()

        def tick() -> None:
            while not done.wait(0.001):
                ticks.append(time.monotonic())

        watch = threading.Thread(target=tick)
        watch.start()
        begun = time.monotonic()
        tokenizer.encode(words(60_000))
        end = time.monotonic()
        done.set()
        watch.join()
        inside = [begun, *(at for at in ticks if begun < at < end), end]
        return max(later - at for at, later in pairwise(inside)) < 0.7 * (end - begun)

    assert any(lets_run() for _ in range(TRIES))
