"""How ranks sum: in which type parts travel, and which way is the fastest by a profile's timings. No torch."""

from collections.abc import Collection, Iterable
from math import inf, isinf

from pshard.batch_sizes import SMALL_BATCH
from pshard.machine import CollectiveTiming
from pshard.times.curves import curve_through, interpolate

REDUCE_DTYPES = ("auto", "f32", "bf16", "f16")
EXCHANGED = 8192  # bytes of a part that a program of a GPU exchanges at once
BY_ROWS, MANY_ROWS = "rows", "many-rows"  # ways that take the norm that follows along
PUSHED = "pushed"  # sums by rows whose part, one row of float32, leaves for the peers from the product that makes it
NORMED = "normed"  # no sum: what one by rows takes longer that is normalised before it is added


def wire_type(reduce_dtype: str, tokens: int, on_gpu: bool) -> str:
    """What ranks' parts of so many tokens are rounded to before they are summed: "f32", "bf16" or "f16".

    reduce_dtype: one of REDUCE_DTYPES. "auto": prompts between GPUs travel in bf16, as bytes are what their sums take,
    and all else in f32: few rows take as long in either, and CPUs sum through memory that all of them read.
    """
    if reduce_dtype != "auto":
        return reduce_dtype
    return "bf16" if on_gpu and tokens > SMALL_BATCH else "f32"


def describe_sums(reduce_dtype: str) -> str:
    """In which type ranks' parts are summed, for people."""
    if reduce_dtype != "auto":
        return reduce_dtype
    return f"f32, between GPUs in bf16 when they have more than {SMALL_BATCH} tokens"


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
        copies: the seconds are those while weights are copied to the device, where they were timed. The backend is the
            fastest without copies all the same: a run has one for each size.
        among: the backends that may be chosen; None for all that are for every sum.

    Another number of ranks than the timed ones takes the nearest.
    """
    rows = [t for t in timings if (t.backend not in (PUSHED, NORMED) if among is None else t.backend in among)]
    if not rows:
        return None
    nearest = min({t.ranks for t in rows}, key=lambda n: (abs(n - ranks), n))
    wire = "bf16" if dtype == "f16" else dtype

    def seconds_of(backend: str, beside_copies: bool) -> float:
        mine = [t for t in rows if t.backend == backend and t.ranks == nearest]
        mine = [t for t in mine if t.dtype == wire] or [t for t in mine if t.dtype == "f32"]
        mine = [t for t in mine if t.copies == beside_copies] or mine
        return interpolate(curve_through((t.nbytes, t.seconds) for t in mine), nbytes) if mine else inf

    seconds, backend = min((seconds_of(b, False), b) for b in dict.fromkeys(t.backend for t in rows))
    return None if isinf(seconds) else (backend, seconds_of(backend, True) if copies else seconds)


def elements_at_once(wire: str) -> int:
    """Elements of a wire's type ("f32", "bf16", "f16") that a program exchanges at once: as many bytes of each."""
    return EXCHANGED // (4 if wire == "f32" else 2)


def widest_row(wire: str) -> int:
    """Columns of the longest rows that the way by many rows takes: twice of what programs of other ways exchange at
    once; of float32, of which registers would not hold as many, just that."""
    return elements_at_once(wire) * (1 if wire == "f32" else 2)


def norm_seconds(
    timings: Collection[CollectiveTiming], ranks: int, tokens: int, columns: int, dtype: str = "f32"
) -> float | None:
    """Seconds by which a sum of [tokens, columns] takes longer that is normalised before it is added; None where that
    was not timed, or where another kernel does so after the sum. Other arguments as of `fastest_collective`."""
    nbytes = 4 * tokens * columns
    if tokens > SMALL_BATCH:  # a run takes that way wherever it fits
        fits = columns <= widest_row(dtype)
        along = fits and any(t.backend == MANY_ROWS and t.ranks == ranks for t in timings)
    else:
        fastest = fastest_collective(timings, ranks, nbytes, dtype)
        along = fastest is not None and fastest[0] == BY_ROWS
    timed = fastest_collective(timings, ranks, nbytes, dtype, among=(NORMED,)) if along else None
    return timed[1] if timed else None
