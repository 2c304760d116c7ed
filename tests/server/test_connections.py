"""Connections that close, wait, read slowly or send too much."""

import asyncio
import gc
import json
import os
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from urllib.parse import urlsplit

import httpx
import pytest
from http_client import ask, events_of, serve
from small_service import SmallService, demo_model

from pshard.server.api.limits import DEFAULT_LIMITS
from pshard.server.http.bell import Bell
from pshard.server.http.inbox import Board, Inbox
from pshard.server.http.replies import Gone, Stream, send_stream
from pshard.server.jobs import Ended, Made, Progress
from pshard.server.routes.make_app import make_app

ROMEO = {"prompt": "ROMEO:\n", "max_tokens": 400, "temperature": 0}


@pytest.fixture(scope="module")
def url(service: SmallService) -> Iterator[str]:
    with serve(make_app(service, demo_model(), replace(DEFAULT_LIMITS, ping_seconds=0.1))) as found:
        yield found


@pytest.fixture
def held(service: SmallService) -> Iterator[None]:
    service.hold.set()
    yield
    service.hold.clear()


def wait_until(true: Callable[[], bool]) -> None:
    ends = time.monotonic() + 60
    while not true():
        assert time.monotonic() < ends
        time.sleep(0.005)


def post_and_leave(url: str, body: dict, after: Callable[[], bool]) -> None:
    """Send a request and close the connection when something has happened."""
    parts, data = urlsplit(url), json.dumps(body).encode()
    with socket.create_connection((parts.hostname, parts.port)) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        wait_until(after)


@pytest.mark.parametrize("stream", [False, True])
def test_a_closed_connection_ends_a_job_that_waits(url, service, held, stream) -> None:
    before = len(service.jobs)
    post_and_leave(url, ROMEO | {"stream": stream}, lambda: len(service.jobs) > before)
    wait_until(lambda: service.jobs[-1].id in service.cancelled)


@pytest.mark.parametrize("stream", [False, True])
def test_a_closed_connection_ends_a_job_that_runs_and_no_other(url, service, stream) -> None:
    service.delay = 0.01
    try:
        before = len(service.jobs)
        post_and_leave(url, ROMEO | {"n": 2, "stream": stream}, lambda: service.running.endswith("/0"))
        wait_until(lambda: {job.id for job in service.jobs[before:]} <= service.cancelled)
        wait_until(lambda: len(service.ended) == len(service.jobs))
    finally:
        service.delay = 0.0
    assert ask_once(url).status_code == 200
    assert service.jobs[-1].id not in service.cancelled


def send_raw(url: str, head: str, body: bytes = b"") -> tuple[int, bytes]:
    """The status and the rest of the answer to a request that is written out."""
    parts, found = urlsplit(url), b""
    with socket.create_connection((parts.hostname, parts.port), timeout=60) as connection:
        connection.sendall(head.replace("\n", "\r\n").encode() + b"\r\n\r\n" + body)
        while part := connection.recv(4096):
            found += part
            if found.startswith(b"HTTP/1.1 4"):
                break
    return int(found.split()[1]), found


def test_who_knows_no_host_is_answered_and_who_names_a_wrong_one_is_not(url) -> None:
    """HTTP/1.0 has no Host; a browser, which a page may have sent here under a name of its own, has one always."""
    assert send_raw(url, "GET /health HTTP/1.0")[0] == 200
    body = json.dumps(ROMEO | {"max_tokens": 2, "stream": True}).encode()
    status, told = send_raw(url, f"POST /v1/completions HTTP/1.0\nContent-Length: {len(body)}", body)
    assert status == 200 and told.endswith(b"data: [DONE]\n\n")
    for more in ("Host: evil.example", "Host:", "Origin: http://evil.example:8080", "Origin: null"):
        assert send_raw(url, f"GET /health HTTP/1.0\n{more}")[0] == 403, more
    assert send_raw(url, "GET /health HTTP/1.1\nConnection: close")[0] == 400


def test_a_host_that_has_to_be_there_and_is_not_is_told(service) -> None:
    """Also behind a server that lets it through."""
    sent = []

    async def send(message) -> None:
        sent.append(message)

    scope = {"type": "http", "http_version": "1.1", "method": "GET", "path": "/health", "headers": []}
    asyncio.run(make_app(service, demo_model())(scope, None, send))
    assert sent[0]["status"] == 400 and json.loads(sent[1]["body"])["error"]["code"] == "host_missing"


def test_a_client_that_goes_before_its_stream_begins_leaves_no_job(service, held) -> None:
    app, before = make_app(service, demo_model()), len(service.jobs)
    messages = [{"type": "http.request", "body": json.dumps(ROMEO | {"stream": True}).encode()}]

    async def receive():
        if messages:
            return messages.pop()
        await asyncio.sleep(0.05)
        return {"type": "http.disconnect"}

    async def send(message) -> None:
        await asyncio.sleep(60)  # the answer before is not taken yet

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [(b"host", b"localhost")]}
    asyncio.run(app(scope, receive, send))
    assert len(service.jobs) == before + 1
    wait_until(lambda: service.jobs[-1].id in service.cancelled)


def ask_once(url: str, **more) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json=ROMEO | {"max_tokens": 3} | more, timeout=60)


def test_a_stream_that_waits_has_its_headers_at_once_and_then_pings(url, service, held) -> None:
    body = ROMEO | {"stream": True, "max_tokens": 2}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        pings = [next(lines) for _ in range(8)]
        assert [line for line in pings if line] == [": still here"] * 4
        service.hold.clear()
        assert [line for line in lines if line][-1] == "data: [DONE]"


def test_a_stream_of_messages_pings_by_events_once_it_has_begun(url, service) -> None:
    service.delay = 0.3
    try:
        body = {"messages": [{"role": "user", "content": "ROMEO:"}], "max_tokens": 2, "stream": True}
        told = httpx.post(f"{url}/v1/messages", json=body, timeout=60).text
    finally:
        service.delay = 0.0
    assert 'event: ping\ndata: {"type":"ping"}' in told and told.index("message_start") < told.index("event: ping")
    assert told.rstrip().endswith('data: {"type":"message_stop"}')


def test_a_full_queue_is_told_with_the_time_to_come_back(service, held) -> None:
    app = make_app(service, demo_model())
    service.most = 0
    try:
        refused = ask(app, "/v1/completions", ROMEO)
    finally:
        service.most = 1000
    assert refused.status_code == 429 and refused.headers["retry-after"] == "3"
    assert refused.json()["error"]["type"] == "rate_limit_error"


def test_many_prompts_wait_for_each_other_where_the_queue_is_short(service) -> None:
    app = make_app(service, demo_model())
    service.most = 2
    try:
        found = ask(app, "/v1/completions", ROMEO | {"prompt": ["A", "B", "C", "D", "E", "F"], "max_tokens": 2})
    finally:
        service.most = 1000
    assert [choice["index"] for choice in found.json()["choices"]] == list(range(6))


def test_an_error_in_a_running_stream_is_its_last_event(service, monkeypatch) -> None:
    app = make_app(service, demo_model())
    monkeypatch.setattr(service, "_answer", lambda job, listener: listener.put(Made((5,))) or 1 / 0)
    *_, last = events_of(ask(app, "/v1/completions", ROMEO | {"stream": True}))
    assert last["error"]["type"] == "server_error"
    assert ask(app, "/v1/completions", ROMEO).status_code == 500


def test_what_was_asked_for_and_cannot_be_done_is_no_failure_of_the_server(service, monkeypatch) -> None:
    app, ended = make_app(service, demo_model()), Ended("error", "the schema cannot be followed", asked=True)
    monkeypatch.setattr(service, "_answer", lambda job, listener: listener.put(ended))
    found = ask(app, "/v1/completions", ROMEO)
    assert found.status_code == 400 and found.json()["error"]["message"] == "the schema cannot be followed"
    *_, last = events_of(ask(app, "/v1/completions", ROMEO | {"stream": True}))
    assert last["error"]["type"] == "invalid_request_error"


def test_a_body_beyond_the_limit_is_refused_while_it_comes(service) -> None:
    app = make_app(service, demo_model(), replace(DEFAULT_LIMITS, body=1000))
    sent = []

    async def parts():
        for _ in range(100):
            sent.append(1)
            yield b" " * 300

    assert ask(app, "/v1/completions", content=parts()).status_code == 413
    assert len(sent) <= 15
    large = {"content-length": "2000", "expect": "100-continue"}
    sent.clear()
    assert ask(app, "/v1/completions", content=parts(), headers=large).status_code == 413 and not sent
    found = ask(app, "/v1/completions", content=b" " * 2000)
    assert found.status_code == 413 and found.json()["error"]["code"] == "request_too_large"


def test_who_sends_too_much_sees_why(url) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:  # this client reads nothing before all is sent
        urllib.request.urlopen(f"{url}/v1/completions", b" " * (12 << 20), timeout=60)
    assert caught.value.code == 413 and b"8 MiB" in caught.value.read()


NO_OBJECTS = {
    "empty": b"",
    "broken": b"{",
    "list": b"[]",
    "nan": b'{"prompt": NaN}',
    "surrogate": b'{"prompt": "\\ud800"}',
    "bytes": b"\xff\xfe",
    "deep": b"[" * 200_000,
    "digits": b'{"a":' + b"9" * 5000 + b"}",
}


@pytest.mark.parametrize("body", NO_OBJECTS.values(), ids=NO_OBJECTS)
def test_what_is_no_json_object_is_refused(service, body) -> None:
    found = ask(make_app(service, demo_model()), "/v1/completions", content=body)
    assert found.status_code == 400 and found.json()["error"]["type"] == "invalid_request_error"


def test_a_body_that_never_comes_is_given_up() -> None:
    from pshard.server.api.faults import Fault
    from pshard.server.http.bodies import read_body

    async def never():
        await asyncio.sleep(60)

    with pytest.raises(Fault) as caught:
        asyncio.run(read_body({"headers": []}, never, replace(DEFAULT_LIMITS, body_seconds=0.05)))
    assert caught.value.status == 408


def test_events_that_nobody_reads_become_one(service) -> None:
    async def put_and_take():
        inbox = Inbox(Board())
        slot = inbox.listener(3)
        for done in (1, 2):
            slot.put(Progress(done, 2, 1))
        for token in range(1000):
            slot.put(Made((token,)))
        slot.put(Ended("length"))
        slot.wake()
        return await inbox.take(1), await inbox.take(0.01)

    events, none = asyncio.run(put_and_take())
    assert events == [(3, Progress(2, 2, 1)), (3, Made(tuple(range(1000)))), (3, Ended("length"))] and none == []


def test_a_reader_that_takes_nothing_is_given_up_and_its_stream_closed() -> None:
    closed = []

    async def pieces():
        try:
            while True:
                yield b"x"
        finally:
            closed.append(True)

    async def send(message) -> None:
        if message["type"] == "http.response.body":
            await asyncio.sleep(60)

    async def receive():
        await asyncio.sleep(60)

    with pytest.raises(Gone):
        asyncio.run(send_stream(receive, send, Stream(pieces(), lambda: closed.append(False)), 0.05))
    assert closed == [True, False]


def test_a_step_of_sixteen_streams_wakes_the_event_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    woken, ring = [], Bell.ring
    monkeypatch.setattr(Bell, "ring", lambda bell: woken.append(bell) or ring(bell))

    async def leave_and_take():
        board = Board()
        inboxes = [Inbox(board) for _ in range(16)]
        for step in range(2):
            slots = [inbox.listener(0) for inbox in inboxes]
            for slot in slots:
                slot.put(Made((step,)))
            for slot in slots:
                slot.wake()
            assert [await inbox.take(5) for inbox in inboxes] == [[(0, Made((step,)))]] * 16
        return len(woken)

    assert asyncio.run(leave_and_take()) == 2


def test_who_wakes_the_event_loop_keeps_pythons_lock() -> None:
    async def ring_and_look() -> tuple[int, int]:
        heard: list[int] = []
        bell, now = Bell(lambda: heard.append(1)), asyncio.get_running_loop()
        done, before = asyncio.Event(), sys.getswitchinterval()

        def ring() -> int:
            sys.setswitchinterval(10.0)  # a thread that wakes asks for the lock so much later
            early = 0
            for _ in range(50):
                time.sleep(0.002)  # the loop waits again
                count = len(heard)
                bell.ring()
                early += len(heard) > count
                wait_until(lambda before=count: len(heard) > before)
            sys.setswitchinterval(before)
            now.call_soon_threadsafe(done.set)
            return early

        early = await asyncio.to_thread(ring)
        await done.wait()
        return early, len(heard)

    early, heard = asyncio.run(ring_and_look())
    assert early == 0 and heard == 50


def test_a_bell_that_nobody_hears_is_harmless_and_gives_its_files_back() -> None:
    async def make() -> Bell:
        return Bell(lambda: None)

    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        bell = asyncio.run(make())
        for _ in range(2_000):
            bell.ring()
    for _ in range(70_000):  # more than there is room for
        bell.ring()
    del bell
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) < before + 25  # of 100; servers of other tests have theirs


def test_a_body_with_two_lengths_is_refused(url, service) -> None:
    before = len(service.jobs)
    head = "POST /v1/completions HTTP/1.1\nHost: localhost\nContent-Length: 5\nTransfer-Encoding: chunked"
    status, told = send_raw(url, head, b"0\r\n\r\n")
    assert status == 400 and b"connection: close" in told.lower() and len(service.jobs) == before
