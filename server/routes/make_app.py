"""The server's ASGI application."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from pshard.runtime.sampling import Sampling
from pshard.server.api.faults import Fault
from pshard.server.api.limits import DEFAULT_LIMITS, Limits
from pshard.server.http.desk import Desk
from pshard.server.http.endpoints import Endpoint, Handler, tell_fault
from pshard.server.http.guards import Door, Guard
from pshard.server.jobs import Service
from pshard.server.page.page_routes import OPEN_PATHS, page_routes
from pshard.server.routes import (
    chat_routes,
    completion_routes,
    gap_routes,
    message_routes,
    ollama_routes,
    response_routes,
    state_routes,
    token_routes,
)
from pshard.server.snapshot import ServedModel

ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("GET", "/health", state_routes.tell_health),
    ("GET", "/v1/models", state_routes.list_models),
    ("GET", "/v1/models/{name:path}", state_routes.tell_model),
    ("GET", "/props", state_routes.tell_props),
    ("GET", "/slots", state_routes.tell_slots),
    ("GET", "/metrics", state_routes.tell_metrics),
    ("GET", "/openapi.json", state_routes.tell_openapi),
    ("POST", "/budget", state_routes.move_budget),
    ("POST", "/tokenize", token_routes.tokenize),
    ("POST", "/detokenize", token_routes.detokenize),
    ("POST", "/apply-template", token_routes.apply_template),
    ("GET", "/tokenizer_info", token_routes.tell_tokenizer),
    ("POST", "/v1/chat/completions", chat_routes.chat),
    ("POST", "/v1/completions", completion_routes.complete),
    ("POST", "/v1/responses", response_routes.respond),
    ("POST", "/v1/responses/input_tokens", response_routes.count_tokens),
    ("POST", "/infill", gap_routes.fill_gap),
    ("POST", "/v1/messages", message_routes.send_message),
    ("POST", "/v1/messages/count_tokens", message_routes.count_tokens),
    ("GET", "/api/tags", ollama_routes.list_tags),
    ("GET", "/api/ps", ollama_routes.list_loaded),
    ("GET", "/api/version", ollama_routes.tell_version),
    ("POST", "/api/show", ollama_routes.show_model),
    ("POST", "/api/chat", ollama_routes.chat),
    ("POST", "/api/generate", ollama_routes.generate),
    *(("DELETE" if "delete" in path else "POST", path, ollama_routes.refuse) for path in ollama_routes.REFUSED),
)


class ServerApp(Starlette):
    """The application.

    Attributes:
        prepare: does what takes seconds and no request is to wait for; from any thread.
    """

    prepare: Callable[[], None]


def make_app(
    service: Service,
    model: ServedModel,
    limits: Limits = DEFAULT_LIMITS,
    *,
    door: Door | None = None,
    usual: Sampling | None = None,
    aliases: tuple[str, ...] = (),
    more: Sequence[BaseRoute] = (),
) -> ServerApp:
    """The application over a service.

    door: keys, hosts and origins; usual: how tokens are drawn where a request does not say; aliases: other names of the
    model; more: routes of others, behind the same door.
    """
    desk, door = Desk(service, model, limits, usual or Sampling(), aliases), door or Door()
    desk.apart = len(set(door.keys)) > 1
    door = replace(door, open_paths=(*door.open_paths, *OPEN_PATHS))
    routes = [Route(path, Endpoint(desk, handle, method), methods=[method]) for method, path, handle in ROUTES]
    app = ServerApp(
        routes=[*routes, *page_routes(service, model.name, bool(door.keys)), *more],
        middleware=[Middleware(Guard, door=door)],
        exception_handlers={HTTPException: _tell_http},
    )
    app.prepare = desk.guides.prepare
    return app


def _tell_http(request: Request, error: Exception) -> Response:
    """Paths and methods that there are not, in the shape of other errors."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:100]
    words = {404: f"there is no {path}", 405: f"{request.method} is not for {path}"}
    codes = {404: "not_found", 405: "method_not_allowed"}
    fault = Fault(error.status_code, words.get(error.status_code, error.detail), code=codes.get(error.status_code))
    reply = tell_fault(fault, request.url.path)
    return Response(reply.data, reply.status, {**reply.headers, **(error.headers or {})})
