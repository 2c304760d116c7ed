"""A service that tells of moving steps, and the page over it on a real port, with a chat that answers in pieces."""

import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from pshard.jsonio import to_json
from pshard.server.snapshot import (
    Blocks,
    BudgetRate,
    Counters,
    Distributions,
    Histogram,
    PlanInForce,
    Snapshot,
    StepSeen,
    TextNow,
    TierNow,
    WaitingJob,
)

NASTY = "<img src=x onerror=alert(1)>"


def make_snapshot(now: float = 100.0, **what: Any) -> Snapshot:
    """A busy server, 0.1 s a step."""
    last = int(now * 10)
    steps = tuple(
        StepSeen(n, n / 10, 0.1, 16, 12, 400 if n % 4 == 0 else 0, 50_000_000, (("link", 0.09), ("acc", 0.04)))
        for n in range(max(0, last - 300), last)
    )
    empty = Histogram((0.1, 0.5), (0, 0, 0), 0.0)
    snapshot = Snapshot(
        state="ready",
        reason="",
        now=now,
        gap_ms=200.0,
        queue=64,
        plan=PlanInForce(
            (12000,), 40960, 40960, 64, "f16", "f16", "none", "layers streamed", budgets=(6000, 12000), notes=(NASTY,),
            rates=(BudgetRate(6000, 4096, 1.25, 4.5), BudgetRate(12000, 4096, 0.5, 9.0)),
            tiers=(TierNow(1, 67.0, 67.0, 0, "link"), TierNow(16, 145.0, 151.2, 40, "link")),
        ),
        running=(
            TextNow(0, "a", "decode", 512, 512, 64, 37, 128, 9.5, 4.2),
            TextNow(1, "b", "prompt", 16384, 2048, 0, 0, 128, 0.0, 1.0),
        ),
        waiting=(WaitingJob("c", 9, 0.2),),
        blocks=Blocks(640, 200, 100, 340),
        counters=Counters(made_tokens=int(now * 10), prompt_tokens=5000, ended=(("stop", 7), ("error", 1)), steps=last),
        distributions=Distributions(
            empty, replace(empty, counts=(60, 38, 2)), empty, empty, empty
        ),
        steps=steps,
        rate=120.0,
    )  # fmt: skip
    return replace(snapshot, **what)


class LookedAt:
    """A service that only tells. Attributes: `what`, fields of its snapshot; `looks`, how often it was asked."""

    def __init__(self, **what: Any) -> None:
        self.what, self.looks, self._began = what, 0, time.monotonic()

    def snapshot(self) -> Snapshot:
        self.looks += 1
        return make_snapshot(100.0 + time.monotonic() - self._began, **self.what)


@contextmanager
def page_server(service: LookedAt, key: str = "") -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The page's address, and the bodies of the chats that were asked for. A chat answers word by word, without an end
    when it is asked to go on."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.requests import Request
    from starlette.responses import JSONResponse, StreamingResponse
    from starlette.routing import Route

    from pshard.server.page.page_routes import OPEN_PATHS, page_routes

    asked: list[dict[str, Any]] = []

    async def chat(request: Request) -> StreamingResponse | JSONResponse:
        body = await request.json()
        asked.append(body)
        word = body["messages"][-1]["content"]
        if word == "fail":
            return JSONResponse({"error": {"message": "too long <b>"}}, 400)
        return StreamingResponse(_answer(word), media_type="text/event-stream")

    async def props(request: Request) -> JSONResponse:
        plan = service.snapshot().plan
        return JSONResponse({"plan": to_json(plan) if plan else None})

    async def budget(request: Request) -> JSONResponse:
        asked.append(await request.json())
        return JSONResponse({"plan": f"{asked[-1]['vram_mib']} MiB: moved"})

    class Guard:
        """As the server's: what is not open wants the key."""

        def __init__(self, app: Any) -> None:
            self.app = app

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http":
                given = dict(scope["headers"]).get(b"authorization", b"").decode() == f"Bearer {key}"
                scope.setdefault("state", {})["key"] = "key-1" if given and key else ""
                if key and not given and scope["path"] not in OPEN_PATHS:
                    await JSONResponse({"error": {"message": "no key"}}, 401)(scope, receive, send)
                    return
            await self.app(scope, receive, send)

    routes = [*page_routes(service, "demo <1>", bool(key)), Route("/v1/chat/completions", chat, methods=["POST"])]  # type: ignore[arg-type]
    routes += [Route("/props", props), Route("/budget", budget, methods=["POST"])]
    app = Starlette(routes=routes, middleware=[Middleware(Guard)])
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until = time.monotonic() + 60
    while not server.started and time.monotonic() < until:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", asked
    finally:
        server.should_exit = True
        thread.join(10)


async def _answer(word: str) -> AsyncIterator[str]:
    import asyncio

    def chunk(delta: dict[str, Any]) -> str:
        return f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta}]})}\n\n"

    yield ": ping\n\n"
    yield chunk({"reasoning_content": "well"})
    for piece in ("You ", "said ", f"{word}. ", NASTY):
        yield chunk({"content": piece})
    while word == "go on":
        await asyncio.sleep(0.05)
        yield chunk({"content": "and on "})
    yield "data: [DONE]\n\n"
