"""Who may ask at all: the Host header, origins of web pages, the key. One guard before all routes."""

import hmac
from dataclasses import dataclass
from hashlib import sha256
from ipaddress import ip_address

from starlette.types import ASGIApp, Receive, Scope, Send

from pshard.server.api.faults import Fault, show_fault_at
from pshard.server.http.replies import Whole, reply_json, send_whole

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
OPEN = ("/health",)
METHODS = "GET, POST, OPTIONS"
FRAMING = "ambiguous_length"


@dataclass(frozen=True)
class Door:
    """keys: any of them opens; none: no key is asked for. hosts: names under which the server is reached, "*": any;
    addresses: and by addresses, which no web page can have for a name of its own. origins: of web pages that may ask,
    "*": all. open_paths: what needs no key."""

    keys: tuple[str, ...] = ()
    hosts: tuple[str, ...] = LOCAL_HOSTS
    addresses: bool = False
    origins: tuple[str, ...] = ()
    open_paths: tuple[str, ...] = OPEN


class Guard:
    """Lets through what may pass, with the one who asks as `scope["state"]["key"]`."""

    def __init__(self, app: ASGIApp, door: Door) -> None:
        self._app, self._door = app, door
        self._keys = [(key.encode(), f"key-{sha256(key.encode()).hexdigest()[:12]}") for key in door.keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value for name, value in scope["headers"]}
        origin = headers.get("origin", b"").decode("latin-1")
        try:
            _check_framing(headers)
            self._check_host(headers, scope)
            self._check_origin(headers, origin)
            if scope["method"] == "OPTIONS" and origin and "access-control-request-method" in headers:
                allowed = {"access-control-allow-methods": METHODS, "access-control-allow-headers": "*"}
                await send_whole(send, Whole(b"", 204, {**self._tell_origin(origin), **allowed}))
                return
            scope.setdefault("state", {})["key"] = self._check_key(scope["path"], headers)
        except Fault as fault:
            more = {"www-authenticate": "Bearer"} if fault.status == 401 else {}
            if fault.code == FRAMING:
                more = {"connection": "close"}  # what follows may be a body or another request
            told = {**more, **(self._tell_origin(origin) if origin and fault.status == 401 else {})}
            await send_whole(send, reply_json(show_fault_at(scope["path"], fault), fault.status, told))
            return
        await self._app(scope, receive, self._add_origin(send, origin) if origin else send)

    def _check_host(self, headers: dict[str, bytes], scope: Scope) -> None:
        """Raises Fault for a Host under which nobody reaches this server: a page elsewhere may have made its name point
        here. HTTP/1.0 has no Host, and browsers always send one: what comes without is of no page."""
        if "host" not in headers:
            if scope["http_version"] == "1.0":
                return
            raise Fault(400, "the Host header is missing, which HTTP/1.1 asks for", code="host_missing")
        host = headers["host"].decode("latin-1").lower()
        name = host[1 : host.find("]")] if host.startswith("[") else host.partition(":")[0]
        name = name.removesuffix(".")  # the same name, written out to its root
        named = "*" in self._door.hosts or name in self._door.hosts
        if not named and not (self._door.addresses and _is_address(name)):
            told = "the Host header names another server; start this one with --allow-host to be reached by that name"
            raise Fault(403, told, code="host_not_allowed")

    def _check_origin(self, headers: dict[str, bytes], origin: str) -> None:
        """Raises Fault for a web page of another server, unless it is allowed: browsers send some requests at once.
        Without a Host no page is of this server; a page of no server, whose origin is "null", never is."""
        own = headers.get("host", b"").decode("latin-1").lower()
        allowed = "*" in self._door.origins or origin in self._door.origins
        if origin and not allowed and not (own and origin.lower().partition("://")[2] == own):
            told = "web pages of other servers may not ask; start the server with --cors-origins to let them"
            raise Fault(403, told, code="origin_not_allowed")

    def _check_key(self, path: str, headers: dict[str, bytes]) -> str:
        """Who asks. Raises Fault 401 without a right key. All keys are compared, in constant time."""
        if not self._keys:
            return ""
        given = headers.get("x-api-key", b"")
        scheme, _, token = headers.get("authorization", b"").partition(b" ")
        if scheme.lower() == b"bearer":
            given = token.strip()
        found = ""
        for key, name in self._keys:
            if hmac.compare_digest(given, key):
                found = name
        if not found and path not in self._door.open_paths:
            raise Fault(401, "the API key is missing or wrong", code="invalid_api_key")
        return found

    def _tell_origin(self, origin: str) -> dict[str, str]:
        """What lets a page of that origin read the answer: never with credentials."""
        if "*" in self._door.origins:
            return {"access-control-allow-origin": "*"}
        return {"access-control-allow-origin": origin, "vary": "origin"} if origin in self._door.origins else {}

    def _add_origin(self, send: Send, origin: str) -> Send:
        told = [(name.encode(), value.encode()) for name, value in self._tell_origin(origin).items()]

        async def send_with(message: dict) -> None:  # type: ignore[type-arg]
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *told]}
            await send(message)

        return send_with  # type: ignore[return-value]


def _check_framing(headers: dict[str, bytes]) -> None:
    """Raises Fault for a body with two lengths: a proxy before this server may go by the other one, and take the rest
    for a request of somebody else."""
    if "transfer-encoding" in headers and "content-length" in headers:
        told = "Transfer-Encoding and Content-Length are both there; send one of them"
        raise Fault(400, told, param="content-length", code=FRAMING)


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
