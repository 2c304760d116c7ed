"""An application that says 503 until the real one is there: the port is open before the model is known."""

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Protocol

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class PreparedApp(Protocol):
    """An application that is ready after `prepare`, which takes seconds and may run in any thread."""

    prepare: Callable[[], None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


LOADING = {"message": "the model is being loaded; try again", "type": "unavailable", "param": None, "code": "loading"}


class LateApp:
    """An ASGI application.

    Attributes:
        inner: what answers from now on; None: 503 for all.
    """

    def __init__(self) -> None:
        self.inner: App | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if self.inner is not None:
            await self.inner(scope, receive, send)
        elif scope["type"] == "http":
            body = json.dumps({"type": "error", "status": "loading", "state": "loading", "error": LOADING}).encode()
            headers = [(b"content-type", b"application/json"), (b"retry-after", b"5"), (b"connection", b"close")]
            await send({"type": "http.response.start", "status": 503, "headers": headers})
            await send({"type": "http.response.body", "body": body})
