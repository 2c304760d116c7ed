"""uvicorn as a server uses it: patience with headers, an end that lets requests finish."""

import http.client
import signal
import socket
import threading
import time
from contextlib import contextmanager

import pytest

from pshard.errors import UserError
from pshard.server.life.late_app import LateApp
from pshard.server.life.web_server import HEADER_SECONDS, PatientProtocol, WebServer, open_port

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
        thread.join(60)
        assert not thread.is_alive()


def read_all(line: socket.socket) -> bytes:
    line.settimeout(60)
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
        assert read_all(line) == b"" and time.monotonic() - start < HEADER_SECONDS / 2


def test_a_slow_answer_is_not_taken_for_slow_headers(monkeypatch):
    import asyncio

    monkeypatch.setattr(PatientProtocol, "header_seconds", 0.5)

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

    with running(stream) as (server, port), socket.create_connection(("127.0.0.1", port)) as line:
        line.sendall(GET)
        assert b"200" in line.recv(4096)
        server.stop()
        with pytest.raises(ConnectionRefusedError):
            while True:
                socket.create_connection(("127.0.0.1", port)).close()
        ending.set()
        assert b"ended" in read_all(line)


def test_a_port_that_is_taken_is_said_in_one_line():
    with open_port("127.0.0.1", 0) as taken, pytest.raises(UserError, match="choose another --port"):
        open_port("127.0.0.1", taken.getsockname()[1])


def test_a_signal_waits_for_no_lock_of_whom_it_interrupts():
    lock, got = threading.Lock(), []
    with running(LateApp(), on_stop=lambda: got.append(lock.acquire(timeout=60))) as (server, _), lock:
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
        while time.monotonic() - begin < 60 and not (seen and not server.server_state.connections):
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


HALF = b"POST /slow HTTP/%s\r\nHost: x\r\nContent-Length: 2\r\n\r\nok"


def waiting_app(gone: threading.Event, go_on: threading.Event):
    """Reads a request, and answers when it may; sets `gone` when the client is gone before."""
    import asyncio

    async def answer(scope, receive, send):
        assert (await receive())["body"] == b"ok"
        leaves = asyncio.ensure_future(receive())
        while not go_on.is_set():
            await asyncio.sleep(0.01)
            if leaves.done():
                return gone.set()
        leaves.cancel()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
        await send({"type": "http.response.body", "body": b"late"})

    return answer


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
def test_who_has_closed_one_side_gets_the_answer(version):
    gone, go_on = threading.Event(), threading.Event()
    with running(waiting_app(gone, go_on)) as (_, port), socket.create_connection(("127.0.0.1", port)) as line:
        line.sendall(HALF % version)
        line.shutdown(socket.SHUT_WR)
        threading.Timer(0.4, go_on.set).start()
        told = read_all(line)
        assert told.endswith(b"late") and told.count(b" 200 ") == 1 and not gone.is_set()
        assert (b" 100 Continue" in told) == (version == b"1.1")


def test_python_s_own_client_passes_over_what_is_sent_meanwhile():
    gone, go_on = threading.Event(), threading.Event()
    with running(waiting_app(gone, go_on)) as (_, port):
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        client.request("POST", "/slow", b"ok")
        client.sock.shutdown(socket.SHUT_WR)
        threading.Timer(0.3, go_on.set).start()
        answer = client.getresponse()
        assert answer.status == 200 and answer.read() == b"late"
        client.close()


def test_who_has_closed_both_sides_is_noticed_without_an_answer():
    gone, go_on = threading.Event(), threading.Event()
    with running(waiting_app(gone, go_on)) as (server, port):
        with socket.create_connection(("127.0.0.1", port)) as line:
            line.sendall(HALF % b"1.1")
            while not server.server_state.tasks:
                time.sleep(0.005)
        assert gone.wait(60)


def test_half_of_a_request_gets_no_answer():
    with running(LateApp()) as (server, port), socket.create_connection(("127.0.0.1", port)) as line:
        line.sendall(b"POST /slow HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nok")
        line.shutdown(socket.SHUT_WR)
        read_all(line)  # to its end


def test_a_body_in_chunks_of_a_letter_lets_other_clients_have_their_turns():
    async def read(scope, receive, send):
        while (message := await receive()).get("more_body"):
            pass
        assert message["type"] == "http.request"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    def longest_wait(port: int) -> float:
        """Of another client, as a part of the time that the body takes."""
        done, waits = threading.Event(), []

        def upload() -> None:
            with socket.create_connection(("127.0.0.1", port)) as slow:
                slow.sendall(b"POST /slow HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
                slow.sendall(b"1\r\na\r\n" * 43_000 + b"0\r\n\r\n")
                assert b"200" in slow.recv(4096)
                done.set()

        quick = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        begun = time.monotonic()
        thread = threading.Thread(target=upload)
        thread.start()
        while thread.is_alive():
            now = time.monotonic()
            quick.request("GET", "/quick")
            assert quick.getresponse().read() == b"ok"
            waits.append(time.monotonic() - now)
        quick.close()
        assert done.is_set()
        return max(waits) / (time.monotonic() - begun)

    with running(read) as (_, port):
        assert any(longest_wait(port) < 1 / 3 for _ in range(10))  # in one that no other program disturbs
