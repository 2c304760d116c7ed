"""Local improvement of a tier's residency on simulated time: units of one class leave VRAM for those of another."""

from collections.abc import Iterator
from dataclasses import replace

from pshard.planner.price.draft import Room
from pshard.planner.price.tier_costs import TierCosts
from pshard.planner.program.coefficients import count_tier
from pshard.planner.program.counts import Counts
from pshard.planner.program.least_times import Floor
from pshard.planner.program.unit_classes import UnitClass
from pshard.planner.search.climb import CLOSE, Scored, TierSearch, TierState, state_of
from pshard.planner.search.residency_order import arrange_residency

STRIDE = 16  # a first exchange moves this part of the layers
LEAST_GAIN = 1e-4  # of the time: what an exchange must gain

Item = tuple[int, str]  # a class, and what of it is in VRAM: "pin" or "kv"


def exchange_memory(
    room: Room,
    classes: tuple[UnitClass, ...],
    costs: TierCosts,
    start: Scored,
    even: bool,
    evaluations: int,
    bound: float,
) -> Scored:
    """The tier after exchanges that helped, within so many simulations; `even` as in `order_residency`.

    What an exchange frees is filled; each that helps is tried again, of half as many units when it does not.
    """
    best, counts, floor = start, count_tier(classes, start.tier), Floor(room, classes, costs)
    stride = max(1, max(c.size for c in classes) // STRIDE)
    while stride and evaluations > 0 and best.seconds > bound * CLOSE:
        helped = False
        for give, take, to_cpu in _pairs(room, classes):
            while evaluations > 0 and (moved := _move(room, classes, counts, give, take, stride, to_cpu)):
                evaluations -= 1
                goal = best.seconds * (1 - LEAST_GAIN)
                if floor.reaches(moved, best.state.slots, goal):
                    break
                found = _score(room, classes, costs, moved, best.state, even)
                if found is None or found.seconds >= goal:
                    break
                best, counts, helped = found, moved, True
        stride = stride if helped else stride // 2
    return best


def _pairs(room: Room, classes: tuple[UnitClass, ...]) -> Iterator[tuple[Item, Item, bool]]:
    """What leaves, what comes instead, and whether the CPU computes from then on what leaves."""
    items: list[Item] = [(c, "pin") for c, cls in enumerate(classes) if not cls.kind.is_looked_up and cls.nbytes]
    items += [(c, "kv") for c, cls in enumerate(classes) if room.states[cls.units[0].name]]
    return (
        (give, take, to_cpu)
        for give in items
        for take in items
        for to_cpu in ((False, True) if give[1] == "pin" else (False,))
        if give != take
    )


def _move(
    room: Room,
    classes: tuple[UnitClass, ...],
    counts: tuple[Counts, ...],
    give: Item,
    take: Item,
    stride: int,
    to_cpu: bool,
) -> tuple[Counts, ...] | None:
    """The counts with `stride` of one item out of VRAM and what fits instead of another in; None when impossible."""
    sizes = {"pin": [c.nbytes for c in classes], "kv": [room.states[c.units[0].name] for c in classes]}
    out = min(stride, getattr(counts[give[0]], give[1]))
    freed = out * sizes[give[1]][give[0]]
    most = classes[take[0]].size - getattr(counts[take[0]], take[1])
    more = min(freed // sizes[take[1]][take[0]], most)
    if not out or not more:
        return None
    moved = list(counts)
    moved[give[0]] = replace(moved[give[0]], **{give[1]: getattr(moved[give[0]], give[1]) - out})
    moved[give[0]] = replace(moved[give[0]], cpu=moved[give[0]].cpu + (out if to_cpu else 0))
    moved[take[0]] = replace(moved[take[0]], **{take[1]: getattr(moved[take[0]], take[1]) + more})
    for c, cls in enumerate(classes):  # what is in VRAM is not computed on the CPU
        moved[c] = replace(moved[c], cpu=min(moved[c].cpu, cls.size - max(moved[c].pin, moved[c].kv)))
    return tuple(moved)


def _score(
    room: Room,
    classes: tuple[UnitClass, ...],
    costs: TierCosts,
    counts: tuple[Counts, ...],
    like: TierState,
    even: bool,
) -> Scored | None:
    """The counts as a tier, with as many runs and slots as another state."""
    residency = arrange_residency(room, classes, [counts], even)
    search = TierSearch(room, classes, residency, costs)
    return search.score(state_of(classes, counts, like.runs, like.slots))
