"""Where ranges of one thing over the ranks begin and end: pure arithmetic, tested without any model. No torch."""

from functools import lru_cache
from itertools import pairwise
from math import inf, lcm

from pshard.quant import QUANT_TYPES, ROW_BLOCK
from pshard.tensor import TensorSpec

Targets = tuple[float | None, ...]  # by rank, how much it should have; None: nothing at all


def place_rows(total: int, granule: int, targets: Targets) -> tuple[int, ...]:
    """Bounds of consecutive ranges of whole granules (the last may be short) nearest to the targets.

    Largest remainder: everyone gets the whole granules of his target, who was cut short most gets one more.
    """
    granules = -(-total // granule)
    wanted = [max(0.0, t or 0.0) for t in targets]
    wanted = [w * granules / sum(wanted) for w in wanted]
    got = [int(w) for w in wanted]
    for i in sorted(range(len(got)), key=lambda i: got[i] - wanted[i])[: granules - sum(got)]:
        got[i] += 1
    bounds = [0]
    for n in got:
        bounds.append(bounds[-1] + n)
    return tuple(min(b * granule, total) for b in bounds)


def place_inner(total: int, down: TensorSpec | None, targets: Targets) -> tuple[int, ...]:
    """Bounds of ranges of the rows of gate and up, which are the columns of `down`: between records of the packed
    layout and between quant blocks."""
    block = QUANT_TYPES[down.qtype].block if down else 1
    return place_rows(total, lcm(ROW_BLOCK, block), targets)


@lru_cache(maxsize=4096)
def place_heads(heads: int, group: int, step: int, targets: Targets) -> tuple[int, ...]:
    """Bounds of consecutive ranges of q heads nearest to the targets (least squares, then fewest copies of KV heads).

    A range is whole KV groups of `group` heads, or lies inside one group (its KV head is then on several ranks), so
    that each rank has equally many q heads per KV head. Bounds are multiples of `step` heads: the columns of the
    output projection are cut between quant blocks. Dynamic programming over (rank, bound).
    """
    most = _miss(
        place_rows(heads, lcm(group, step), targets), targets
    )  # of ranges that are possible: none need be worse
    best: dict[int, tuple[float, int, tuple[int, ...]]] = {0: (0.0, 0, (0,))}
    for target in targets:
        reached: dict[int, tuple[float, int, tuple[int, ...]]] = {}
        for start, (error, copies, bounds) in best.items():
            for stop in (start,) if target is None else _list_stops(start, heads, group, step):
                kv_heads = -(-stop // group) - start // group if stop > start else 0
                missed = 0.0 if target is None else (stop - start - target) ** 2
                if error + missed > most + 1e-5:
                    continue
                found = (round(error + missed, 6), copies + kv_heads, (*bounds, stop))
                if stop not in reached or found < reached[stop]:
                    reached[stop] = found
        best = reached
    return best[heads][2]


def _miss(bounds: tuple[int, ...], targets: Targets) -> float:
    """By how much ranges miss the targets, in squares; infinite where a rank has something that should have nothing."""
    sizes = [stop - start for start, stop in pairwise(bounds)]
    if any(size and target is None for size, target in zip(sizes, targets)):
        return inf
    return sum((size - target) ** 2 for size, target in zip(sizes, targets) if target is not None)


@lru_cache(maxsize=4096)
def _list_stops(start: int, heads: int, group: int, step: int) -> tuple[int, ...]:
    """Where a range that begins at `start` may end: inside its KV group, or after whole groups."""
    return tuple(
        stop
        for stop in range(start, heads + 1, step)
        if -(-stop // group) - start // group < 2 or not (start % group or stop % group)
    )
