"""Which way of summing between ranks is the fastest for a message, from a profile's timings. No torch."""

from collections.abc import Collection, Iterable

from pshard.curves import curve_through, interpolate
from pshard.machine import CollectiveTiming


def fastest_collective(
    timings: Iterable[CollectiveTiming],
    ranks: int,
    nbytes: int,
    dtype: str = "f32",
    copies: bool = False,
    among: Collection[str] | None = None,
) -> tuple[str, float] | None:
    """(backend, seconds) of the fastest all-reduce of `nbytes` of float32; None when nothing suitable was timed.

    Args:
        dtype: what parts are rounded to ("f32", "bf16", "f16"); f16 takes bf16's timings, and a backend that was timed
            with f32 only takes those.
        copies: while weights are copied to the device; backends that were only timed alone take those timings.
        among: the backends that may be chosen; None for all.

    Another number of ranks than the timed ones takes the nearest.
    """
    rows = [t for t in timings if among is None or t.backend in among]
    if not rows:
        return None
    nearest = min({t.ranks for t in rows}, key=lambda n: (abs(n - ranks), n))
    wire = "bf16" if dtype == "f16" else dtype
    found = []
    for backend in dict.fromkeys(t.backend for t in rows):
        mine = [t for t in rows if t.backend == backend and t.ranks == nearest]
        mine = [t for t in mine if t.dtype == wire] or [t for t in mine if t.dtype == "f32"]
        mine = [t for t in mine if t.copies == copies] or mine
        if mine:
            found.append((interpolate(curve_through((t.nbytes, t.seconds) for t in mine), nbytes), backend))
    if not found:
        return None
    seconds, backend = min(found)
    return backend, seconds
