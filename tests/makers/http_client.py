"""Asks an ASGI application in tests: through httpx, and through a real uvicorn where connections matter."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn


def ask(app: Any, path: str, body: Any = None, **settings: Any) -> httpx.Response:
    """One request without a network. body: JSON, None for GET."""
    import asyncio

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
            method = settings.pop("method", None) or ("GET" if body is None and "content" not in settings else "POST")
            return await client.request(method, path, json=body, **settings)

    return asyncio.run(send())


def events_of(response: httpx.Response) -> list[Any]:
    """The data of server-sent events; "[DONE]" as it is."""
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


@contextmanager
def serve(app: Any) -> Iterator[str]:
    """The application on a port of this machine: its URL."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join(10)
