"""A load as people make it, over HTTP: 64 slots, clients that leave, that read slowly, that send what is no request."""

import asyncio
import json
import random
from collections import Counter
from urllib.parse import urlsplit

import psutil
import pytest
from http_client import serve
from served import EngineLoader
from small_service import demo_model
from test_engine_thread import PATIENCE, ready, wait_for

from pshard.server.page.show_parts import quantile_of
from pshard.server.routes.make_app import make_app
from pshard.server.scheduling.promises import Promises
from pshard.server.thread.engine_thread import EngineThread

SLOTS, CLIENTS, MOST, GAP = 64, 100, 24, 1.0
WORDS = (
    "the",
    "king",
    "of",
    "all",
    "England",
    "said",
    "that",
    "his",
    "brother",
    "would",
    "come",
    "in",
    "the",
    "morning",
)
KINDS = ("whole", "whole", "stream", "stream", "two", "slow", "leave", "drop", "bad")
BAD = (b"{", b"[]", b"\xff", b'{"prompt":7}', b'{"prompt":"a","n":99}', b'{"prompt":"a","max_tokens":-2}')


class Load:
    """Clients of one server. `wrong`: what they were told and should not have been."""

    def __init__(self, url: str, prompts: list[str]) -> None:
        self._parts, self.prompts = urlsplit(url), prompts
        self.known: dict[str, str] = {}
        self.count, self.wrong = Counter[str](), list[str]()

    async def send(self, body: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A request on a connection of its own."""
        reader, writer = await asyncio.open_connection(self._parts.hostname, self._parts.port, limit=4096)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}"
        writer.write(head.encode() + b"\r\n\r\n" + body)
        return reader, writer

    async def learn(self) -> None:
        """What each prompt is answered with alone."""
        for prompt in self.prompts:
            reader, writer = await self.send(write_body(prompt, "whole"))
            self.known[prompt] = json.loads((await reader.read()).partition(b"\r\n\r\n")[2])["choices"][0]["text"]
            writer.close()

    async def ask(self, number: int, places: asyncio.Semaphore) -> None:
        """One request of any kind."""
        rng = random.Random(number)
        kind, prompt = rng.choice(KINDS), rng.choice(self.prompts)
        async with places:
            reader, writer = await self.send(rng.choice(BAD) if kind == "bad" else write_body(prompt, kind))
            answer = await self._read(reader, kind, rng)
            writer.transport.abort()
        self.count[kind] += 1
        if answer is not None and (told := self._judge(kind, answer, self.known[prompt])):
            self.wrong.append(f"#{number} {kind} {prompt!r}: {told}")

    async def _read(self, reader: asyncio.StreamReader, kind: str, rng: random.Random) -> bytes | None:
        """The whole of an answer; None of one that is left."""
        if kind == "drop":
            return await asyncio.sleep(0.5 * rng.random())
        answer, least = b"", rng.randrange(3000)
        while piece := await reader.read(300 if kind == "slow" else 1 << 16):
            answer += piece
            if kind == "leave" and len(answer) > least:
                return None
            if kind == "slow":
                await asyncio.sleep(0.02)
        return answer

    def _judge(self, kind: str, answer: bytes, expected: str) -> str:
        """What is wrong with an answer."""
        head, _, body = answer.partition(b"\r\n\r\n")
        status = int(head.split()[1])
        if kind == "bad":
            return "" if 400 <= status < 500 else f"status {status}"
        if status != 200:
            return f"status {status}: {body[:200]!r}"
        if kind in ("whole", "two"):
            texts = [choice["text"] for choice in json.loads(body)["choices"]]
            return "" if texts == [expected] * (2 if kind == "two" else 1) else f"{texts} instead of {expected!r}"
        events = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")]
        text = "".join(json.loads(event)["choices"][0]["text"] for event in events if event != b"[DONE]")
        return "" if events[-1] == b"[DONE]" and text == expected else f"{text!r} instead of {expected!r}"


def write_body(prompt: str, kind: str) -> bytes:
    body = {"prompt": prompt, "max_tokens": MOST, "temperature": 0, "stream": kind in ("stream", "slow", "leave")}
    return json.dumps(body | ({"n": 2} if kind == "two" else {})).encode()


@pytest.mark.usefixtures("vectors_only")
@pytest.mark.parametrize(
    "count", [pytest.param(30, marks=pytest.mark.stand_in), pytest.param(200, marks=pytest.mark.slow)]
)
def test_nothing_is_lost_mixed_up_or_left_behind(count: int) -> None:
    rng = random.Random(3)
    loader = EngineLoader(sequences=SLOTS, context=16384, tokens=(1, 4, 16, 64, 128))
    thread = EngineThread(loader, Promises(gap=GAP, queue=2 * count))
    thread.start()
    ready(thread)
    with serve(make_app(thread, demo_model())) as url:
        load = Load(url, [" ".join(rng.choices(WORDS, k=rng.randrange(3, 60))) for _ in range(20)])

        async def ask_all(numbers: range) -> None:
            places = asyncio.Semaphore(CLIENTS)
            await asyncio.wait_for(asyncio.gather(*(load.ask(number, places) for number in numbers)), 10 * PATIENCE)

        asyncio.run(load.learn())
        asyncio.run(ask_all(range(10_000, 10_040)))  # buffers, pools of threads
        before = psutil.Process().memory_info().rss
        asyncio.run(ask_all(range(count)))
        wait_for(lambda: not thread.snapshot().running and not thread.snapshot().waiting)
        now, counts = thread.snapshot(), loader.machines[-1].pool.counts()
    assert not load.wrong, load.wrong[:5]
    assert load.count.total() == count + 40 and set(load.count) == set(KINDS)
    ended = dict(now.counters.ended)
    assert ended["error"] == 0 and ended["cancelled"] > 0 and not now.counters.refused
    assert now.counters.submitted == sum(ended.values())
    assert counts.used == 0 and counts.free + counts.cached == counts.total and len(loader.machines) == 1
    assert psutil.Process().memory_info().rss - before < 128 << 20
    slowest = quantile_of(now.distributions.gap, 0.99)
    assert slowest is not None and slowest <= 1.5 * GAP
    thread.drain(0)
    assert thread.join(PATIENCE) and thread.error is None
