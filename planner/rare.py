"""Counts of the tiers that the round hardly enters: each solved alone, its residency between that of the others."""

from pshard.planner.classes import UnitClass
from pshard.planner.costs import TierCosts
from pshard.planner.draft import Room
from pshard.planner.ilp import Counts, solve_tiers
from pshard.planner.problem import tier_problem
from pshard.planner.starts import Start, affordable_slots

GAP = 0.02  # of the solver


def count_rare(
    room: Room, classes: tuple[UnitClass, ...], costs: tuple[TierCosts, ...], start: Start
) -> list[tuple[Counts, ...]] | None:
    """Counts of all tiers: those of the entered ones as in `start`; None when a rare tier fits nowhere.

    All tiers' residency stays one chain, class by class: a tier between two others is between them, one below all
    others has all that any of them has, and one above has no more than any of them.
    """
    solved = iter(start.counts)
    fixed = {c.load.tokens: next(solved) for c in costs if not c.load.rare}
    every = tuple(c.size for c in classes), tuple(c.size if c.kind == "attention" else 0 for c in classes)
    counts: list[tuple[Counts, ...]] = []
    for cost in costs:
        later = [n for tokens, n in sorted(fixed.items()) if tokens >= cost.load.tokens]
        if cost.load.rare:
            chain = [*counts, *later, *(n for n in fixed.values() if n not in counts)]
            before, after = counts[-1] if counts else None, later[0] if later else None
            pins, kv = (
                _neighbours([of(n) for n in chain], before and of(before), after and of(after), most)
                for of, most in zip((_pins, _kv), every)
            )
            between = tuple(tuple(Counts(p, 0, v) for p, v in zip(*ends)) for ends in zip(pins, kv))
            problem = tier_problem(room, classes, cost, affordable_slots(room, cost, start.slots))
            found = solve_tiers((problem,), between=(between[0], between[1]), gap=GAP).counts
            if not found:
                return None
            counts.append(found[0])
        else:
            counts.append(fixed[cost.load.tokens])
    return counts


def _pins(counts: tuple[Counts, ...]) -> tuple[int, ...]:
    return tuple(n.pin for n in counts)


def _kv(counts: tuple[Counts, ...]) -> tuple[int, ...]:
    return tuple(n.kv for n in counts)


def _neighbours(
    chain: list[tuple[int, ...]],
    before: tuple[int, ...] | None,
    after: tuple[int, ...] | None,
    most: tuple[int, ...],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The two neighbours of a nested chain between which a tier belongs that comes after one member, before another."""
    if before is None:
        return max(chain, key=sum), most
    if after is None:
        return (0,) * len(most), min(chain, key=sum)
    low = min(before, after, key=sum)
    above = [m for m in chain if sum(low) < sum(m)] if sum(before) != sum(after) else []
    return low, min(above, key=sum, default=low)
