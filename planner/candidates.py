"""Complete plans of one rank, and the best of them: the integer program's, improved, and the published strategies'."""

import time
from dataclasses import dataclass, replace

from pshard.errors import UserError
from pshard.plan import TierPlan
from pshard.planner.baselines import STRATEGIES, Baseline, place_strategy
from pshard.planner.classes import UnitClass
from pshard.planner.costs import TierCosts
from pshard.planner.draft import Room, draft_tier, tier_seconds
from pshard.planner.ilp import Counts, Solution, fluid_seconds, relaxation_bound, solve_tiers
from pshard.planner.order import Residency, order_residency
from pshard.planner.problem import count_tier, tier_problem
from pshard.planner.search import SLOT_CHOICES, TierSearch

FLAVOURS = ((2, False), (2, True), (3, False), (3, True), (1, False))  # staging slots, whether all KV stays in VRAM
GAP = 5e-3  # of the solver: what units gain by their order is worth more than the rest of it
RARE_GAP = 0.02
IMPROVED = 2  # solutions that are worth improving
EVALUATIONS = 40  # simulations of local improvement of a tier that the round enters
RARE_EVALUATIONS = 16  # and of one that it hardly enters


@dataclass(frozen=True)
class Candidate:
    """A complete plan of one rank before it is written down. `total`: seconds of one round of the workload."""

    strategy: str
    residency: Residency
    tiers: tuple[TierPlan, ...]
    seconds: tuple[float, ...]
    total: float
    solution: Solution | None = None


@dataclass(frozen=True)
class Start:
    """A solution of the program with its tiers simulated in one order, before anything is improved.

    `costs` and `counts` are of the tiers that the round enters; `even` is for `order_residency`.
    """

    solution: Solution
    slots: int
    even: bool
    weighted: float


def rank_candidates(
    room: Room,
    classes: tuple[UnitClass, ...],
    costs: tuple[TierCosts, ...],
    bounds: tuple[float, ...],
    time_limit: float,
) -> tuple[Candidate, ...]:
    """The program's solutions, locally improved, and the best published strategies; the fastest by simulation first.

    What no coefficient says (lookahead, waits) is left to simulation: the program is solved in several flavours, and
    the most promising are improved. `bounds` in seconds by tier: what reaches them needs no improvement. Raises
    UserError when nothing was found in time.
    """
    candidates = place_best_baselines(room, classes, costs)
    entered = tuple(c for c in costs if not c.load.rare)
    starts: list[Start] = []
    started = time.monotonic()
    for slots, kv_stays in FLAVOURS:
        left = time_limit - (time.monotonic() - started)
        if not starts or left > 0:
            starts += _solve(room, classes, entered, slots, kv_stays, max(left / 2, 0.5))
    starts.sort(key=lambda s: s.weighted)
    candidates += [c for s in starts[:IMPROVED] if (c := _improve(room, classes, costs, bounds, s))]
    if not candidates:
        raise UserError(f"no plan for {room.spec.name} found within {time_limit:g} s; raise the time limit")
    return tuple(sorted(candidates, key=lambda c: c.total))


def _solve(
    room: Room,
    classes: tuple[UnitClass, ...],
    costs: tuple[TierCosts, ...],
    slots: int,
    kv_stays: bool,
    time_limit: float,
) -> list[Start]:
    """One flavour of the program, in both orders; empty when it has no solution."""
    problems = tuple(tier_problem(room, classes, c, _affordable(room, c, slots)) for c in costs)
    kv_switch = tuple(costs[0].units[c.units[0].name].kv_fetch for c in classes)
    solution = solve_tiers(problems, 1 / costs[0].tables.link_rate, kv_switch, time_limit, kv_stays=kv_stays, gap=GAP)
    starts = []
    for even in (True, False) if solution.counts else ():
        residency = order_residency(classes, list(solution.counts), even)
        tiers = [
            TierSearch(room, classes, residency, cost).start(n, p.slots)
            for cost, n, p in zip(costs, solution.counts, problems)
        ]
        if all(tiers):
            weighted = sum(c.load.weight * t.seconds for c, t in zip(costs, tiers) if t)
            starts.append(Start(solution, slots, even, weighted))
    return starts


def _improve(
    room: Room,
    classes: tuple[UnitClass, ...],
    costs: tuple[TierCosts, ...],
    bounds: tuple[float, ...],
    start: Start,
) -> Candidate | None:
    """Every tier of a solution improved on simulated time, rare ones arranged around the others; None when one of
    these does not fit."""
    counts = _count_rare(room, classes, costs, start)
    if counts is None:
        return None
    residency = order_residency(classes, counts, start.even)
    tiers = []
    for cost, bound, n in zip(costs, bounds, counts):
        search = TierSearch(room, classes, residency, cost)
        found = search.start(n, _affordable(room, cost, start.slots))
        if found is None:
            return None
        tiers.append(search.improve(found, RARE_EVALUATIONS if cost.load.rare else EVALUATIONS, bound).tier)
    seconds = tuple(tier_seconds(room, tier, cost) for tier, cost in zip(tiers, costs))
    total = round_seconds(room, tuple(tiers), seconds, costs)
    return Candidate("ilp", residency, tuple(tiers), seconds, total, start.solution)


def _count_rare(
    room: Room, classes: tuple[UnitClass, ...], costs: tuple[TierCosts, ...], start: Start
) -> list[tuple[Counts, ...]] | None:
    """Counts of all tiers: rare ones are solved alone, their residency between that of the entered tiers around
    them."""
    solved = iter(start.solution.counts)
    fixed = {c.load.tokens: next(solved) for c in costs if not c.load.rare}
    most = tuple(Counts(c.size, c.size, c.size if c.kind == "attention" else 0) for c in classes)  # smaller tiers' pins
    counts = []
    for cost in costs:
        tokens, least = cost.load.tokens, tuple(Counts(0, 0, 0) for _ in classes)
        least = next((n for t, n in sorted(fixed.items()) if t >= tokens), least)
        if cost.load.rare:
            low = tuple(Counts(b.pin, 0, min(a.kv, b.kv)) for a, b in zip(most, least))
            high = tuple(Counts(a.pin, 0, max(a.kv, b.kv)) for a, b in zip(most, least))
            problem = tier_problem(room, classes, cost, _affordable(room, cost, start.slots))
            found = solve_tiers((problem,), between=(low, high), gap=RARE_GAP).counts
            if not found:
                return None
            least = found[0]
        counts.append(least)
        most = least
    return counts


def _affordable(room: Room, costs: TierCosts, slots: int) -> int:
    """At most `slots` staging slots, fewer when that many of a layer's largest unit do not fit beside the scratch."""
    largest = max((u.packed_nbytes for u in room.spec.units if u.layer >= 0), default=0)
    return max(1, min(slots, (room.arena - room.scratch(costs.load.tokens)) // max(largest, 1)))


def place_best_baselines(room: Room, classes: tuple[UnitClass, ...], costs: tuple[TierCosts, ...]) -> list[Candidate]:
    """Published strategies, the most promising first, until none that is left can be faster than one of them.

    What a strategy's counts take at least, whatever their order, tells which need no simulation.
    """
    placed = []
    for name in STRATEGIES:
        if baseline := place_strategy(name, room, tuple(c.load.tokens for c in costs)):
            problems = [tier_problem(room, classes, c, max(t.buffers.slots, 1)) for c, t in zip(costs, baseline.tiers)]
            least = tuple(
                fluid_seconds(problem, count_tier(classes, tier), relaxed=True)
                for problem, tier in zip(problems, baseline.tiers)
            )
            placed.append((round_seconds(room, baseline.tiers, least, costs), name, baseline))
    found: list[Candidate] = []
    for least_total, name, baseline in sorted(placed, key=lambda p: p[0]):
        if not found or least_total < min(c.total for c in found):
            found.append(_price_baseline(name, room, costs, baseline))
    return found


def place_baseline(name: str, room: Room, costs: tuple[TierCosts, ...]) -> Candidate | None:
    """A published strategy as a candidate; None when it does not fit."""
    placed = place_strategy(name, room, tuple(c.load.tokens for c in costs))
    return _price_baseline(name, room, costs, placed) if placed else None


def _price_baseline(name: str, room: Room, costs: tuple[TierCosts, ...], placed: Baseline) -> Candidate:
    seconds = tuple(tier_seconds(room, tier, cost) for tier, cost in zip(placed.tiers, costs))
    total = round_seconds(room, placed.tiers, seconds, costs)
    return Candidate(name, Residency(placed.pin_order, placed.kv_order), placed.tiers, seconds, total)


def keep_everything(room: Room, costs: tuple[TierCosts, ...]) -> Candidate:
    """Every unit pinned, the embedding looked up on the host, all KV in VRAM."""
    tiers = tuple(whole_tier(room, c.load.tokens) for c in costs)
    pins = tuple(u.name for u in room.spec.units if u.kind != "embedding")
    kv = tuple(u.name for u in room.spec.units if u.kind == "attention")
    seconds = tuple(tier_seconds(room, tier, cost) for tier, cost in zip(tiers, costs))
    return Candidate("all in VRAM", Residency(pins, kv), tiers, seconds, round_seconds(room, tiers, seconds, costs))


def whole_tier(room: Room, tokens: int) -> TierPlan:
    """The tier that keeps everything but the embedding in VRAM, whether it fits or not."""
    where = {u.name: "cpu" if u.kind == "embedding" else "pinned" for u in room.spec.units}
    return draft_tier(room, tokens, where, frozenset(u.name for u in room.spec.units if u.kind == "attention"), 0)


def bound_seconds(room: Room, classes: tuple[UnitClass, ...], costs: TierCosts) -> float:
    """Seconds that no plan of this tier can beat, for any number of slots, with the tier free of the other ones."""
    problem = replace(tier_problem(room, classes, costs, 2), weight=1.0, lookahead=max(SLOT_CHOICES))
    several = solve_tiers((problem,), relaxed=True, gap=GAP).bound
    one = replace(problem, slots=1, lookahead=1)
    return (
        several if relaxation_bound(one) >= several else min(several, solve_tiers((one,), relaxed=True, gap=GAP).bound)
    )


def relaxed_seconds(room: Room, classes: tuple[UnitClass, ...], costs: TierCosts) -> float:
    """A lower bound than `bound_seconds`, in a twentieth of the time: to compare cuts of a model."""
    problem = tier_problem(room, classes, costs, 2)
    return relaxation_bound(replace(problem, weight=1.0, lookahead=max(SLOT_CHOICES)))


def round_seconds(
    room: Room, tiers: tuple[TierPlan, ...], seconds: tuple[float, ...], costs: tuple[TierCosts, ...]
) -> float:
    """Seconds of one round of the workload: every tier as often as it runs, and the switches between them."""
    return sum(c.load.weight * s for c, s in zip(costs, seconds)) + switch_seconds(room, tiers, costs)


def switch_seconds(room: Room, tiers: tuple[TierPlan, ...], costs: tuple[TierCosts, ...]) -> float:
    """Seconds of going from the largest tier to the smallest and back once: pins brought in, used KV cells moved."""
    nbytes = seconds = 0.0
    for unit, small, large in zip(room.spec.units, tiers[0].placements, tiers[-1].placements):
        if (small.where == "pinned") != (large.where == "pinned"):
            nbytes += unit.packed_nbytes
        if small.kv != large.kv:
            seconds += costs[0].units[unit.name].kv_fetch
    return nbytes / costs[0].tables.link_rate + seconds
