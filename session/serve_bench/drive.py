"""Sends planned requests as a pattern says, and collects what came back."""

import asyncio
import gc
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter, perf_counter_ns
from urllib.parse import SplitResult

from pshard.session.serve_bench.arrivals import Pattern, draw_arrivals
from pshard.session.serve_bench.timed_exchange import Reply, exchange
from pshard.session.serve_bench.write_prompts import Planned

AFTER_ERROR = 1.0  # seconds that a client of a closed loop waits after an error: it would only hammer on


@dataclass(frozen=True)
class Driven:
    """Requests that were sent with their replies, in the order in which they were begun. last_sent: perf_counter_ns of
    the last; late_ms: how far behind its own plan the client was, at most."""

    pairs: tuple[tuple[Planned, Reply], ...]
    last_sent: int
    late_ms: float


@dataclass(frozen=True)
class Bounds:
    """seconds: requests that were not begun by then are left out. timeout: seconds for each answer."""

    seconds: float
    timeout: float


async def drive(
    address: SplitResult, planned: Sequence[Planned], pattern: Pattern, bounds: Bounds, seed: str
) -> Driven:
    """Run one load; returns when the last answer has ended. Python's collector rests meanwhile: it would take several
    milliseconds in the middle of arrivals."""
    pairs: list[tuple[Planned, Reply]] = []
    late = [0.0]
    began = perf_counter()

    async def send(each: Planned, due: float | None = None) -> Reply:
        if due is not None:
            late.append(perf_counter() - began - due)
        reply = await exchange(address, each.message, bounds.timeout, each.manner)
        pairs.append((each, reply))
        return reply

    gc.collect()
    gc.disable()
    try:
        if pattern.clients:
            waiting = iter(planned)
            loops = [_loop(waiting, send, began + bounds.seconds) for _ in range(pattern.clients)]
            await asyncio.gather(*loops)
        else:
            tasks = []
            for each, due in zip(planned, draw_arrivals(pattern, len(planned), seed)):
                if due > bounds.seconds:
                    break
                await asyncio.sleep(began + due - perf_counter())
                tasks.append(asyncio.create_task(send(each, due)))
            await asyncio.gather(*tasks)
    finally:
        gc.enable()
    pairs.sort(key=lambda pair: pair[1].began)
    last = pairs[-1][1].began if pairs else perf_counter_ns()
    return Driven(tuple(pairs), last, 1e3 * max(late))


async def _loop(waiting: Iterator[Planned], send: Callable[[Planned], Awaitable[Reply]], until: float) -> None:
    """One client: the next request when the last one has ended."""
    for each in waiting:
        if perf_counter() > until:
            return
        reply = await send(each)
        if reply.failure not in ("", "left") or reply.status >= 400:
            await asyncio.sleep(AFTER_ERROR)
