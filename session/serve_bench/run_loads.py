"""Puts a server under one load after the other, and says what clients saw."""

import asyncio
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import SplitResult

from pshard.session.serve_bench.arrivals import Pattern
from pshard.session.serve_bench.drive import Bounds, drive
from pshard.session.serve_bench.lengths import Lengths, Wanted, choose_lengths
from pshard.session.serve_bench.sum_up import sum_up
from pshard.session.serve_bench.target import Target, find_target
from pshard.session.serve_bench.write_prompts import Misbehaviour, Planned, SharedPrefix, write_requests
from pshard.times.server_load import LoadPoint, ServerLoad

PAUSE = 0.5  # seconds between loads: what the last one left behind ends


@dataclass(frozen=True)
class LoadSetting:
    """What all loads of a server have in common. model: as the server calls it; None: its first. lines: requests of a
    file, instead of drawn lengths. requests: of each load; None: as `requests_of` says. warm_up: requests before each
    load that do not count. promise: in ms, by the names in PROMISES."""

    address: SplitResult
    name: str
    key: str
    model: str | None
    api: str
    prompts: Lengths
    answers: Lengths
    lines: list[Wanted]
    prefix: SharedPrefix
    odd: Misbehaviour
    requests: int | None
    warm_up: int
    bounds: Bounds
    promise: dict[str, float]
    seed: int
    command: str


def requests_of(setting: LoadSetting, pattern: Pattern) -> int:
    """How many requests a load has: of a closed loop four rounds, so that clients are at unlike places of theirs."""
    return setting.requests or max(32, 4 * pattern.clients)


def run_loads(
    setting: LoadSetting, patterns: Sequence[Pattern], tell: Callable[[str], None], done: Callable[[LoadPoint], None]
) -> ServerLoad:
    """Measure each load; `done` is called after each, `tell` with lines for people. Raises UserError where the server
    cannot be driven."""
    return asyncio.run(_run(setting, patterns, tell, done))


async def _run(
    setting: LoadSetting, patterns: Sequence[Pattern], tell: Callable[[str], None], done: Callable[[LoadPoint], None]
) -> ServerLoad:
    target = await find_target(setting.address, setting.key, setting.model, setting.api)
    for note in target.notes:
        tell(note)
    points = []
    for number, pattern in enumerate(patterns):
        part = f"{number} {pattern.kind} {pattern.load:g}"
        if number:
            await asyncio.sleep(PAUSE)
        if setting.warm_up:
            warm = _write(setting, target, setting.warm_up, f"warm {part}")
            await drive(target.address, warm, Pattern(clients=1), setting.bounds, "")
        planned = _write(setting, target, requests_of(setting, pattern), part)
        driven = await drive(target.address, planned, pattern, setting.bounds, f"{setting.seed} {part}")
        point, errors = sum_up(pattern, driven, setting.promise)
        for line in errors:
            tell(line)
        points.append(point)
        done(point)
    return _describe(setting, target, points)


def _write(setting: LoadSetting, target: Target, n: int, part: str) -> list[Planned]:
    lengths = choose_lengths(setting.prompts, setting.answers, setting.lines, n, f"{setting.seed} {part}")
    return write_requests(target, lengths, setting.prefix, setting.odd, setting.seed, part)


def _describe(setting: LoadSetting, target: Target, points: list[LoadPoint]) -> ServerLoad:
    from pshard import __version__

    return ServerLoad(
        server=setting.name or target.address.netloc.rpartition("@")[2],
        model=target.model,
        api=target.api,
        prompts="of a file" if setting.lines else str(setting.prompts),
        answers="of a file" if setting.lines else str(setting.answers),
        shared_prefix=str(setting.prefix),
        promise=tuple(setting.promise.items()),
        seed=setting.seed,
        points=tuple(points),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=setting.command,
        environment=(("client", platform.platform()), ("python", platform.python_version()), ("pshard", __version__)),
        notes=target.notes,
    )
