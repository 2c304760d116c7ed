"""Bodies of requests, counted while they are read."""

import asyncio

from starlette.types import Receive, Scope

from pshard.server.api.faults import Fault
from pshard.server.api.limits import Limits
from pshard.server.http.replies import Gone

SPARE = 4  # so many times the limit are read, and thrown away: who is still sending sees no answer, but a broken line


async def read_body(scope: Scope, receive: Receive, limits: Limits) -> bytes:
    """The body of a request. Raises Fault 413 when it is too large, 408 when it does not come, 415 when
    it is compressed; Gone."""
    headers = dict(scope["headers"])
    told = headers.get(b"content-length", b"0")
    coding = headers.get(b"content-encoding", b"identity").decode("latin-1")
    if coding.strip().lower() not in ("", "identity"):
        told = f"bodies in Content-Encoding {coding[:40]!r} are not read here; send them as they are"
        raise Fault(415, told, param="content-encoding", code="unsupported_encoding")
    waits = b"expect" in headers  # for a word before it sends
    if told.isdigit() and int(told[:20]) > (limits.body if waits else SPARE * limits.body):
        raise _too_large(limits)
    parts, size = list[bytes](), 0
    try:
        async with asyncio.timeout(limits.body_seconds):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Gone
                part, more = message.get("body", b""), message.get("more_body", False)
                size += len(part)
                if size > limits.body:
                    parts.clear()
                    if size > SPARE * limits.body or not more:
                        raise _too_large(limits)
                    continue
                parts.append(part)
                if not more:
                    return b"".join(parts)
    except TimeoutError:
        raise Fault(408, f"the body did not come within {limits.body_seconds:.0f} seconds") from None


def _too_large(limits: Limits) -> Fault:
    return Fault(413, f"the body is larger than {limits.body >> 20} MiB", code="request_too_large")
