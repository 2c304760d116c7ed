"""uvicorn as a server uses it: patience with headers, an end that lets requests finish."""

import signal
import socket
import threading
import time
from contextlib import contextmanager

import pytest

from pshard.errors import UserError
from pshard.server.life.late_app import LateApp
from pshard.server.life.web_server import PatientProtocol, WebServer, open_port

GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


@contextmanager
def running(app, seconds=5.0, on_stop=lambda: None):
    listener = open_port("127.0.0.1", 0)
    server = WebServer(app, seconds, on_stop)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield server, listener.getsockname()[1]
    finally:
        server.stop()
        thread.join(20)
        assert not thread.is_alive()


def read_all(line: socket.socket) -> bytes:
    line.settimeout(10)
    found = b""
    while part := line.recv(4096):
        found += part
    return found


def test_all_is_503_until_the_application_is_there():
    app = LateApp()
    with running(app) as (_, port), socket.create_connection(("127.0.0.1", port)) as line:
        line.sendall(GET)
        assert b" 503 " in read_all(line).splitlines()[0] + b" "

        async def inner(scope, receive, send):
            await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
            await send({"type": "http.response.body", "body": b"there"})

        app.inner = inner
        with socket.create_connection(("127.0.0.1", port)) as other:
            other.sendall(GET)
            assert read_all(other).endswith(b"there\r\n0\r\n\r\n")


@pytest.mark.parametrize("begun", [b"", b"GET /health HTT", b"GET /health HTTP/1.1\r\nHost: x\r\nX-A: b\r\n"])
def test_headers_that_never_end_are_let_go(monkeypatch, begun):
    monkeypatch.setattr(PatientProtocol, "header_seconds", 0.3)
    with running(LateApp()) as (_, port), socket.create_connection(("127.0.0.1", port)) as line:
        line.sendall(begun)
        start = time.monotonic()
        assert read_all(line) == b"" and time.monotonic() - start < 5


def test_a_slow_answer_is_not_taken_for_slow_headers(monkeypatch):
    import asyncio

    monkeypatch.setattr(PatientProtocol, "header_seconds", 0.2)

    async def slow(scope, receive, send):
        await asyncio.sleep(0.6)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
        await send({"type": "http.response.body", "body": b"late"})

    with running(slow) as (_, port), socket.create_connection(("127.0.0.1", port)) as line:
        line.sendall(GET)
        assert b"late" in read_all(line)


def test_a_stop_takes_no_more_and_lets_streams_end():
    import asyncio

    ending = threading.Event()

    async def stream(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        while not ending.is_set():
            await asyncio.sleep(0.02)
        await send({"type": "http.response.body", "body": b"ended"})

    later = threading.Timer(0.4, ending.set)
    with running(stream, on_stop=later.start) as (server, port), socket.create_connection(("127.0.0.1", port)) as line:
        line.sendall(GET)
        assert b"200" in line.recv(4096)
        server.stop()
        assert b"ended" in read_all(line)
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=1).close()


def test_a_port_that_is_taken_is_said_in_one_line():
    with open_port("127.0.0.1", 0) as taken, pytest.raises(UserError, match="choose another --port"):
        open_port("127.0.0.1", taken.getsockname()[1])


def test_a_signal_waits_for_no_lock_of_whom_it_interrupts():
    lock, got = threading.Lock(), []
    with running(LateApp(), on_stop=lambda: got.append(lock.acquire(timeout=2))) as (server, _), lock:
        server.handle_exit(signal.SIGTERM, None)
    assert got == [True]


def test_a_reader_that_takes_nothing_of_an_answer_is_cut_off(monkeypatch):
    monkeypatch.setattr(PatientProtocol, "write_seconds", 0.2)

    async def large(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(32 << 20)})

    with running(large) as (server, port), socket.create_connection(("127.0.0.1", port)) as line:
        line.sendall(GET)
        begin = time.monotonic()
        seen = False
        while time.monotonic() - begin < 5 and not (seen and not server.server_state.connections):
            seen = seen or bool(server.server_state.connections)
            time.sleep(0.01)
        assert seen and not server.server_state.connections


def test_no_part_of_an_answer_waits_for_the_one_before_to_be_acknowledged():
    with running(LateApp()) as (server, port), socket.create_connection(("127.0.0.1", port)) as line:
        line.sendall(GET[:9])
        while not server.server_state.connections:
            time.sleep(0.005)
        (connection,) = server.server_state.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
