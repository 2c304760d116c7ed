"""Complete plans of one rank, and the best of them: the integer program's, improved, and the published strategies'."""

import time
from dataclasses import dataclass, replace

from pshard.errors import UserError
from pshard.plan import TierPlan
from pshard.planner.baselines import STRATEGIES, place_strategy
from pshard.planner.classes import UnitClass
from pshard.planner.costs import TierCosts
from pshard.planner.draft import Room, draft_tier, simulate_tier
from pshard.planner.ilp import Solution, solve_tiers
from pshard.planner.order import Residency, order_residency
from pshard.planner.problem import tier_problem
from pshard.planner.search import SLOT_CHOICES, Scored, TierSearch

FLAVOURS = ((2, False), (2, True), (3, False), (3, True), (1, False))  # staging slots, whether all KV stays in VRAM
IMPROVED = 3  # solutions that are worth improving
EVALUATIONS = 48  # simulations of local improvement per tier


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
    """A solution of the program as simulated tiers, before they are improved."""

    solution: Solution
    searches: tuple[TierSearch, ...]
    tiers: tuple[Scored, ...]
    weighted: float


def rank_candidates(
    room: Room, classes: tuple[UnitClass, ...], costs: tuple[TierCosts, ...], time_limit: float
) -> tuple[Candidate, ...]:
    """The program's solutions, locally improved, and every published strategy; the fastest by simulated time first.

    What no coefficient says (lookahead, waits) is left to simulation: the program is solved in several flavours, and
    the most promising are improved. Raises UserError when nothing was found in time.
    """
    candidates = [c for name in STRATEGIES if (c := place_baseline(name, room, costs))]
    starts: list[Start] = []
    started = time.monotonic()
    for slots, kv_stays in FLAVOURS:
        left = time_limit - (time.monotonic() - started)
        if not starts or left > 0:
            starts += _solve(room, classes, costs, slots, kv_stays, max(left / 2, 0.5))
    starts.sort(key=lambda s: s.weighted)
    candidates += [_improve(room, costs, start) for start in starts[:IMPROVED]]
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
    solution = solve_tiers(problems, 1 / costs[0].tables.link_rate, kv_switch, time_limit, kv_stays=kv_stays)
    starts = []
    for even in (True, False) if solution.counts else ():
        residency = order_residency(classes, list(solution.counts), even)
        searches = tuple(TierSearch(room, classes, residency, cost) for cost in costs)
        tiers = [s.start(n, p.slots) for s, n, p in zip(searches, solution.counts, problems)]
        fitting = tuple(t for t in tiers if t)
        if len(fitting) == len(costs):
            weighted = sum(c.load.weight * t.seconds for c, t in zip(costs, fitting))
            starts.append(Start(solution, searches, fitting, weighted))
    return starts


def _improve(room: Room, costs: tuple[TierCosts, ...], start: Start) -> Candidate:
    """Every tier of a solution improved on simulated time."""
    best = [search.improve(tier, EVALUATIONS) for search, tier in zip(start.searches, start.tiers)]
    tiers = tuple(s.tier for s in best)
    seconds = tuple(simulate_tier(room, tier, cost).seconds for tier, cost in zip(tiers, costs))
    total = round_seconds(room, tiers, seconds, costs)
    return Candidate("ilp", start.searches[0].residency, tiers, seconds, total, start.solution)


def _affordable(room: Room, costs: TierCosts, slots: int) -> int:
    """At most `slots` staging slots, fewer when that many of a layer's largest unit do not fit beside the scratch."""
    largest = max(u.packed_nbytes for u in room.spec.units if u.layer >= 0)
    return max(1, min(slots, (room.arena - room.scratch(costs.load.tokens)) // max(largest, 1)))


def place_baseline(name: str, room: Room, costs: tuple[TierCosts, ...]) -> Candidate | None:
    """A published strategy as a candidate; None when it does not fit."""
    placed = place_strategy(name, room, tuple(c.load.tokens for c in costs))
    if placed is None:
        return None
    seconds = tuple(simulate_tier(room, tier, cost).seconds for tier, cost in zip(placed.tiers, costs))
    total = round_seconds(room, placed.tiers, seconds, costs)
    return Candidate(name, Residency(placed.pin_order, placed.kv_order), placed.tiers, seconds, total)


def keep_everything(room: Room, costs: tuple[TierCosts, ...]) -> Candidate:
    """Every unit pinned, the embedding looked up on the host, all KV in VRAM."""
    tiers = tuple(whole_tier(room, c.load.tokens) for c in costs)
    pins = tuple(u.name for u in room.spec.units if u.kind != "embedding")
    kv = tuple(u.name for u in room.spec.units if u.kind == "attention")
    seconds = tuple(simulate_tier(room, tier, cost).seconds for tier, cost in zip(tiers, costs))
    return Candidate("all in VRAM", Residency(pins, kv), tiers, seconds, round_seconds(room, tiers, seconds, costs))


def whole_tier(room: Room, tokens: int) -> TierPlan:
    """The tier that keeps everything but the embedding in VRAM, whether it fits or not."""
    where = {u.name: "cpu" if u.kind == "embedding" else "pinned" for u in room.spec.units}
    return draft_tier(room, tokens, where, frozenset(u.name for u in room.spec.units if u.kind == "attention"), 0)


def bound_seconds(room: Room, classes: tuple[UnitClass, ...], costs: TierCosts) -> float:
    """Seconds that no plan of this tier can beat, for any number of slots, with the tier free of the other ones."""
    bounds = []
    for slots, lookahead in ((1, 1), (2, max(SLOT_CHOICES))):
        problem = replace(tier_problem(room, classes, costs, slots), weight=1.0, lookahead=lookahead)
        bounds.append(solve_tiers((problem,), relaxed=True).bound)
    return min(bounds)


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
