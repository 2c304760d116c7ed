"""Counts of the tiers that the round hardly enters: each solved alone, its residency between that of the others."""

from pshard.planner.classes import UnitClass
from pshard.planner.costs import TierCosts
from pshard.planner.draft import Room
from pshard.planner.ilp import Counts, solve_tiers
from pshard.planner.problem import tier_problem
from pshard.planner.starts import Start, affordable_slots

GAP = 0.02  # of the solver

Numbers = tuple[int, ...]  # of units by class


def count_rare(
    room: Room, classes: tuple[UnitClass, ...], costs: tuple[TierCosts, ...], start: Start
) -> list[tuple[Counts, ...]] | None:
    """Counts of all tiers: those of the entered ones as in `start`; None when a rare tier fits nowhere.

    All tiers' residency stays one chain, class by class: a tier between two others lies between them, or, where that
    does not fit, below all others.
    """
    solved = iter(start.counts)
    fixed = {c.load.tokens: next(solved) for c in costs if not c.load.rare}
    sizes = tuple(c.size for c in classes), tuple(c.size if c.kind == "attention" else 0 for c in classes)
    counts: list[tuple[Counts, ...]] = []
    for cost in costs:
        tokens = cost.load.tokens
        if not cost.load.rare:
            counts.append(fixed[tokens])
            continue
        before = _numbers(counts[-1]) if counts else None
        after = next((_numbers(n) for t, n in sorted(fixed.items()) if t > tokens), None)
        chains = [_numbers(n) for n in (*counts, *fixed.values())]
        ranges = [
            (_between(chain, before[i] if before else None, after[i] if after else None, size), _below(chain))
            for i, (chain, size) in enumerate(zip(zip(*chains), sizes))
        ]
        problem = tier_problem(room, classes, cost, affordable_slots(room, cost, start.slots))
        for pins, kv in zip(*ranges):
            low, high = (tuple(Counts(p, 0, v) for p, v in zip(*ends)) for ends in zip(pins, kv))
            if found := solve_tiers((problem,), between=(low, high), gap=GAP).counts:
                counts.append(found[0])
                break
        else:
            return None
    return counts


def _numbers(counts: tuple[Counts, ...]) -> tuple[Numbers, Numbers]:
    """Pins by class, layers with KV in VRAM by class."""
    return tuple(n.pin for n in counts), tuple(n.kv for n in counts)


def _between(
    chain: tuple[Numbers, ...], before: Numbers | None, after: Numbers | None, size: Numbers
) -> tuple[Numbers, Numbers]:
    """Neighbours in a nested chain, between which a tier lies that comes after one member and before another."""
    ends = [n for n in (before, after) if n]
    low = (0,) * len(size) if after is None and before == min(chain, key=sum) else min(ends, key=sum)
    above = [n for n in chain if sum(n) > sum(low)]
    return low, min(above, key=sum, default=size if before is None else low)


def _below(chain: tuple[Numbers, ...]) -> tuple[Numbers, Numbers]:
    least = min(chain, key=sum)
    return (0,) * len(least), least
