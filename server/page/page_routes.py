"""Routes of the page: /, its scripts and its style, and /events."""

from collections.abc import AsyncIterator
from html import escape
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from pshard.server.page.look import MOST_WATCHERS, Watch
from pshard.server.page.show_parts import show_parts

if TYPE_CHECKING:
    from pshard.server.jobs import Service

ASSETS = {"/page/live.js": "text/javascript", "/page/live.chat.js": "text/javascript", "/page/live.css": "text/css"}
OPEN_PATHS = ("/", *ASSETS)  # need no key: they tell nothing of the server unless the one who asks has one
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def page_routes(service: "Service", model: str = "", keyed: bool = False) -> list[Route]:
    """Routes over a service, for a server's application.

    model: its name, for the title and the chat box. keyed: the server wants a key; then / shows its state only to those
    who gave one (who `request.state.key` names), and asks others for it.
    """
    watch = Watch(service)

    def show_page(request: Request) -> Response:
        known = not keyed or bool(getattr(request.state, "key", ""))
        return Response(write_page(service, model, known), media_type="text/html", headers=HEADERS)

    async def send_asset(request: Request) -> Response:
        return Response(read_asset(request.url.path), media_type=ASSETS[request.url.path], headers=HEADERS)

    async def send_events(request: Request) -> Response:
        if watch.watchers >= MOST_WATCHERS:
            error = {"message": "too many look at the page", "type": "unavailable", "param": None, "code": "watchers"}
            return JSONResponse({"error": error}, 503, {**HEADERS, "Retry-After": "10"})
        headers = {**HEADERS, "X-Accel-Buffering": "no"}
        return StreamingResponse(_closing(watch.stream()), media_type="text/event-stream", headers=headers)

    return [
        Route("/", show_page),
        *(Route(path, send_asset) for path in ASSETS),
        Route("/events", send_events),
    ]


async def _closing(events: AsyncIterator[str]) -> AsyncIterator[str]:
    """The events; their generator ends with the connection, not whenever Python finds it."""
    try:
        async for event in events:
            yield event
    finally:
        await events.aclose()  # type: ignore[attr-defined]


def write_page(service: "Service", model: str, known: bool) -> str:
    """The page as HTML. known: with what the server does now."""
    parts = show_parts(service.snapshot()) if known else {}
    template = Template(files("pshard.server.page").joinpath("live.html").read_text(encoding="utf-8"))
    places = {"state": "This server wants a key.", **dict.fromkeys(PLACES, ""), **parts}
    names = {name.replace("-", "_"): html for name, html in places.items()}
    return template.substitute(names, model=escape(model or "a model"))


PLACES = ("figures", "timeline", "last-step", "gap", "rate", "blocks", "running", "plan")


def read_asset(path: str) -> bytes:
    """A file of the page. Raises KeyError for another path."""
    if path not in ASSETS:
        raise KeyError(path)
    return files("pshard.server.page").joinpath(path.rsplit("/", 1)[1]).read_bytes()
