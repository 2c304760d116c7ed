"""A small OpenAI server whose tokens come at known times, with the faults that a test wants. No model, no framework."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class FakeServer:
    """first, gap: seconds until the first token, and between two. chunk_bytes: events are cut into chunks of so many
    bytes; 0: whole. refuse: HTTP statuses of the first requests for texts. cut_after: the connection is closed after so
    many tokens; fail_after: an error event comes then. takes_ids, takes_ignore_eos, counts: what it understands, and
    whether it sends usage. key: that it wants.

    Seen: bodies of the requests for texts; gone: requests whose client left; `most` at once."""

    first: float = 0.03
    gap: float = 0.01
    chunk_bytes: int = 0
    refuse: list[int] = field(default_factory=list)
    cut_after: int | None = None
    fail_after: int | None = None
    takes_ids: bool = True
    takes_ignore_eos: bool = True
    counts: bool = True
    key: str = ""
    url: str = ""
    seen: list[dict[str, Any]] = field(default_factory=list)
    gone: int = 0
    now: int = 0
    most: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection: one request."""
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            lines = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
            body = await reader.readexactly(int(lines.get("content-length", 0)))
            await self._answer(head.split()[1], json.loads(body or "{}"), lines, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            self.gone += 1
        finally:
            writer.close()

    async def _answer(self, path: str, body: dict, headers: dict, writer: asyncio.StreamWriter) -> None:
        if self.key and headers.get("authorization") != f"bearer {self.key}".lower():
            return _send(writer, 401, {"error": {"message": "a key is missing"}})
        if path == "/v1/models":
            return _send(writer, 200, {"object": "list", "data": [{"id": "fake", "object": "model"}]})
        if path == "/tokenize":
            return _send(writer, 200, {"tokens": [len(w) * 7 + i for i, w in enumerate(body["content"].split())]})
        refusal = self._refuse(path, body)
        if refusal:
            return _send(writer, refusal, {"error": {"message": "not\nthis way"}})
        if not body.get("stream"):
            return _send(writer, 200, {"choices": [{"text": "x", "finish_reason": "length"}]})
        self.seen.append(body)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await self._stream(path, body, writer)
        finally:
            self.now -= 1

    def _refuse(self, path: str, body: dict) -> int:
        if path not in ("/v1/completions", "/v1/chat/completions"):
            return 404
        if not self.takes_ids and isinstance(body.get("prompt"), list):
            return 400
        if not self.takes_ignore_eos and "ignore_eos" in body:
            return 400
        return self.refuse.pop(0) if self.refuse and body.get("stream") else 0

    async def _stream(self, path: str, body: dict, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        self._chunk(writer, b": ping\n\n")
        loop, tokens = asyncio.get_running_loop(), body["max_tokens"]
        due = loop.time() + self.first
        for i in range(tokens):
            await asyncio.sleep(max(0.0, due - loop.time()))
            due += self.gap
            if i == self.cut_after:
                writer.transport.abort()
                return
            if i == self.fail_after:
                self._chunk(writer, _event({"error": {"message": "the engine is gone"}}))
                return
            choice = {"delta": {"content": "x "}} if "chat" in path else {"text": "x "}
            self._chunk(writer, _event({"choices": [{"index": 0, **choice}]}))
            await writer.drain()
        self._chunk(writer, _event({"choices": [{"index": 0, "finish_reason": "length"}]}))
        if self.counts:
            length = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 7
            usage = {
                "prompt_tokens": length,
                "completion_tokens": tokens,
                "prompt_tokens_details": {"cached_tokens": 3},
            }
            self._chunk(writer, _event({"choices": [], "usage": usage}))
        self._chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    def _chunk(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        if writer.transport.is_closing():
            raise ConnectionResetError
        size = self.chunk_bytes or len(data)
        parts = [data[i : i + size] for i in range(0, len(data), size)]
        writer.write(b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts))


def _event(data: dict) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def _send(writer: asyncio.StreamWriter, status: int, data: dict) -> None:
    body = json.dumps(data).encode()
    writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body))


@contextmanager
def fake_server(**what: Any) -> Iterator[FakeServer]:
    """Serve on a free port, in a thread, until the block ends."""
    fake, started, ends = FakeServer(**what), threading.Event(), list[Callable[[], None]]()

    async def run() -> None:
        over, loop = asyncio.Event(), asyncio.get_running_loop()
        ends.append(lambda: loop.call_soon_threadsafe(over.set))
        server = await asyncio.start_server(fake.serve, "127.0.0.1", 0)
        fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        started.set()
        await over.wait()
        server.close()

    thread = threading.Thread(target=asyncio.run, args=(run(),), daemon=True)
    thread.start()
    started.wait(10)
    try:
        yield fake
    finally:
        ends[0]()
        thread.join(10)
