"""Complete plans of one rank, and the best of them: the integer program's, improved, and the published strategies'."""

from dataclasses import dataclass, replace
from math import inf

from pshard.errors import Shortage, UserError
from pshard.homes import ON_CPU, PINNED
from pshard.plan import RankPlan, TierPlan
from pshard.planner.price.draft import Room, draft_tier, simulated_seconds
from pshard.planner.price.host_limits import holds
from pshard.planner.price.page_locks import locked, stage_by
from pshard.planner.price.tier_costs import TierCosts
from pshard.planner.program.coefficients import count_tier, tier_problem
from pshard.planner.program.fluid import fluid_seconds
from pshard.planner.program.solve_tiers import Solution
from pshard.planner.program.unit_classes import UnitClass, group_units
from pshard.planner.published.strategies import Baseline, list_strategies, place_strategy
from pshard.planner.search.climb import Scored, TierSearch
from pshard.planner.search.exchange import exchange_memory
from pshard.planner.search.other_tiers import EVALUATIONS, place_others
from pshard.planner.search.program_starts import Start, StartFinder
from pshard.planner.search.residency_order import Residency, arrange_residency
from pshard.planner.search.round_times import plan_seconds, steps_seconds
from pshard.planner.search.rounds.borrow_placements import borrow_placements
from pshard.planner.solver.cpu_clock import cpu_seconds

IMPROVED = 3  # starts that are worth improving
EXCHANGES = 60  # simulations of exchanges of what is in VRAM


@dataclass(frozen=True)
class Candidate:
    """A complete plan of one rank before it is written down. `total`: seconds of one round of the workload.

    most: seconds that micro-batches of the round may take at most, whatever a switch between them would save.
    """

    strategy: str
    residency: Residency
    tiers: tuple[TierPlan, ...]
    seconds: tuple[float, ...]
    total: float
    solution: Solution | None = None
    most: float = inf

    def keeps(self, costs: tuple[TierCosts, ...]) -> bool:
        """Whether the micro-batches take no more than they may."""
        return steps_seconds(self.seconds, costs) <= self.most

    def promise(self, costs: tuple[TierCosts, ...]) -> float:
        """Seconds of a round once tiers that it hardly enters do with what is not in VRAM what larger ones do, where
        that is faster: so candidates are told apart before `share_placements`."""
        total, least = self.total, inf
        for cost, seconds in reversed(list(zip(costs, self.seconds))):
            total -= cost.load.weight * max(0.0, seconds - least) if cost.load.rare else 0.0
            least = min(least, seconds)
        return total


def rank_candidates(
    room: Room,
    classes: tuple[UnitClass, ...],
    costs: tuple[TierCosts, ...],
    bounds: tuple[float, ...],
    time_limit: float,
    programs: int,
) -> tuple[Candidate, ...]:
    """`programs` solutions of the program, locally improved, and the best published strategies; the fastest by
    simulation first.

    What no coefficient says (lookahead, waits) is left to simulation: the program is solved in several flavours, and
    the most promising are improved. `bounds` in seconds by tier: what reaches them needs no improvement. Where memory
    can be page-locked up to a limit only, plans are also made as if there were none: theirs may lie below it. Raises
    Shortage when nothing keeps within host memory, UserError when nothing was found in time.
    """
    whole = locked(costs)
    candidates = place_best_baselines(room, classes, whole)
    candidates += _solve_and_improve(room, classes, costs, bounds, time_limit, programs)
    if costs[0].staged:
        candidates += _solve_and_improve(room, group_units(room.spec, whole), whole, bounds, time_limit, programs)
    if not candidates and room.host is not None:
        why = (
            f"no plan found for {room.spec.name} that keeps at most {room.host >> 20} MiB of weights and KV cache in "
            "host memory"
        )
        raise Shortage(why, 1, max(room.workload.vram_mib) + 1)
    if not candidates:
        raise UserError(f"no plan for {room.spec.name} found within {time_limit:g} s; raise the time limit")
    return tuple(sorted((restage_candidate(room, costs, c) for c in candidates), key=lambda c: c.promise(costs)))


def _solve_and_improve(
    room: Room,
    classes: tuple[UnitClass, ...],
    costs: tuple[TierCosts, ...],
    bounds: tuple[float, ...],
    time_limit: float,
    programs: int,
) -> list[Candidate]:
    """At most `programs` solutions of the program, improved."""
    candidates: list[Candidate] = []
    entered = [(c, bound) for c, bound in zip(costs, bounds) if not c.load.rare]
    finder = StartFinder(room, classes, tuple(c for c, _ in entered), cpu_seconds() + time_limit)
    improved = [_improve(room, classes, entered, start) for start in finder.find(IMPROVED)[:IMPROVED]]
    improved = [_exchange(room, classes, entered, start) for start in improved]
    for start in sorted(improved, key=lambda s: s.weighted):
        if programs and (complete := _complete(room, classes, costs, start)):
            candidates.append(complete)
            programs -= 1
    return candidates


def restage_candidate(room: Room, costs: tuple[TierCosts, ...], candidate: Candidate) -> Candidate:
    """The candidate priced with the copies staged that are under it; as it is where all memory can be page-locked."""
    if costs[0].tables.profile.lockable_bytes is None:
        return candidate
    tiers, priced = candidate.tiers, stage_under(candidate, costs)
    seconds = tuple(simulated_seconds(room, tier, cost) for tier, cost in zip(tiers, priced))
    return replace(candidate, seconds=seconds, total=plan_seconds(room, tiers, seconds, priced))


def stage_under(candidate: Candidate, costs: tuple[TierCosts, ...]) -> tuple[TierCosts, ...]:
    """The costs with the copies staged that are under a candidate."""
    order = candidate.residency
    return stage_by(RankPlan(0, 0, 1.0, order.pin_order, order.kv_order, candidate.tiers), costs)


def reads_unlocked(candidate: Candidate, costs: tuple[TierCosts, ...]) -> bool:
    """Whether a GPU would read units in place that lie beyond the limit of page-locking, where none reaches them."""
    if costs[0].tables.kind == "cpu":
        return False
    return any(
        placed.moves_each_step and placed.unit in cost.staged and cost.spec.unit(placed.unit).kind.parts
        for tier, cost in zip(candidate.tiers, stage_under(candidate, costs))
        if tier.in_place
        for placed in tier.placements
    )


def _improve(room: Room, classes: tuple[UnitClass, ...], entered: list[tuple[TierCosts, float]], start: Start) -> Start:
    """The start with every tier improved on simulated time; `entered`: costs and bounds of its tiers."""
    residency = arrange_residency(room, classes, start.counts, start.even)
    tiers = tuple(
        TierSearch(room, classes, residency, cost).improve(tier, EVALUATIONS, bound)
        for (cost, bound), tier in zip(entered, start.tiers)
    )
    return _weigh(classes, entered, start, tiers)


def _exchange(
    room: Room, classes: tuple[UnitClass, ...], entered: list[tuple[TierCosts, float]], start: Start
) -> Start:
    """The start with the residency of its most important tier improved and the others arranged around it, if better."""
    main = max(range(len(entered)), key=lambda i: entered[i][0].load.weight * start.tiers[i].seconds)
    cost, bound = entered[main]
    found = exchange_memory(room, classes, cost, start.tiers[main], start.even, EXCHANGES, bound)
    if found is start.tiers[main]:
        return start
    counts = count_tier(classes, found.tier)
    residency = arrange_residency(room, classes, [counts], start.even)
    search = TierSearch(room, classes, residency, cost)
    found = search.improve(found, EVALUATIONS, bound)
    alone = replace(start, spaced=(counts,), counts=(count_tier(classes, found.tier),), tiers=(found,))
    placed = place_others(room, classes, tuple(c for c, _ in entered), alone)
    return min(start, _weigh(classes, entered, alone, placed[1]), key=lambda s: s.weighted) if placed else start


def _weigh(
    classes: tuple[UnitClass, ...], entered: list[tuple[TierCosts, float]], start: Start, tiers: tuple[Scored, ...]
) -> Start:
    weighted = sum(cost.load.weight * t.seconds for (cost, _), t in zip(entered, tiers))
    return replace(start, counts=tuple(count_tier(classes, t.tier) for t in tiers), tiers=tiers, weighted=weighted)


def _complete(
    room: Room, classes: tuple[UnitClass, ...], costs: tuple[TierCosts, ...], start: Start
) -> Candidate | None:
    """All tiers, rare ones arranged around the others; None when one of these, or what all keep on the host, does not
    fit."""
    placed = place_others(room, classes, costs, start)
    if placed is None:
        return None
    residency, tiers = placed[0], tuple(t.tier for t in placed[1])
    if not holds(room, tiers):
        return None
    seconds = tuple(simulated_seconds(room, tier, cost) for tier, cost in zip(tiers, costs))
    total = plan_seconds(room, tiers, seconds, costs)
    return Candidate("ilp", residency, tiers, seconds, total, start.solution)


def share_placements(
    room: Room,
    classes: tuple[UnitClass, ...],
    costs: tuple[TierCosts, ...],
    found: Candidate,
    bounds: tuple[float, ...],
) -> Candidate:
    """The candidate with tiers that take over other tiers' placements where that shortens its round. bounds: by tier,
    seconds that nothing beats."""
    borrowed = borrow_placements(room, classes, costs, found.residency, found.tiers, found.seconds, bounds)
    total = plan_seconds(room, *borrowed, costs)
    if total >= found.total:
        return found
    return replace(found, tiers=borrowed[0], seconds=borrowed[1], total=total)


def place_best_baselines(room: Room, classes: tuple[UnitClass, ...], costs: tuple[TierCosts, ...]) -> list[Candidate]:
    """Published strategies, the most promising first, until none that is left can be faster than one of them.

    What its counts take at least in the tiers that the round enters, whatever their order, tells whether a strategy
    needs to be simulated.
    """
    placed = []
    for name in list_strategies(room.spec):
        baseline = place_strategy(name, room, tuple(c.load.tokens for c in costs))
        if baseline and holds(room, baseline.tiers):
            placed.append((least_steps(room, classes, costs, baseline), name, baseline))
    found: list[Candidate] = []
    for least, name, baseline in sorted(placed, key=lambda p: p[:2]):
        best = min((c.total for c in found), default=inf)
        if least < best and (candidate := price_baseline(name, room, costs, baseline, best)):
            found.append(candidate)
    return found


def least_steps(room: Room, classes: tuple[UnitClass, ...], costs: tuple[TierCosts, ...], placed: Baseline) -> float:
    """Seconds that the micro-batches of a round take at least under a published strategy, by its counts."""
    least = 0.0
    for cost, tier in zip(costs, placed.tiers):
        if not cost.load.rare and not placed.shares:  # counts know only some ways to divide
            problem = tier_problem(room, classes, cost, max(tier.buffers.slots, 1))
            least += cost.load.weight * fluid_seconds(problem, count_tier(classes, tier), relaxed=True)
    return least


def place_baseline(name: str, room: Room, costs: tuple[TierCosts, ...]) -> Candidate | None:
    """A published strategy as a candidate that is not simulated; None when it does not fit."""
    placed = place_strategy(name, room, tuple(c.load.tokens for c in costs))
    if not placed or not holds(room, placed.tiers):
        return None
    return Candidate(name, _residency_of(placed), placed.tiers, (), inf)


def _residency_of(placed: Baseline) -> Residency:
    return Residency(placed.pin_order, placed.kv_order, placed.shares)


def price_baseline(
    name: str, room: Room, costs: tuple[TierCosts, ...], placed: Baseline, most: float = inf
) -> Candidate | None:
    """A placed strategy as a candidate; None when its round takes `most` seconds or more before its last tier is
    simulated: those that the round enters come first."""
    seconds, spent = dict[int, float](), 0.0
    for i in sorted(range(len(costs)), key=lambda i: costs[i].load.rare):
        if spent >= most:
            return None
        seconds[i] = simulated_seconds(room, placed.tiers[i], costs[i])
        spent += costs[i].load.weight * seconds[i]
    in_order = tuple(seconds[i] for i in range(len(costs)))
    total = plan_seconds(room, placed.tiers, in_order, costs)
    return Candidate(name, _residency_of(placed), placed.tiers, in_order, total)


def keep_everything(room: Room, costs: tuple[TierCosts, ...]) -> Candidate:
    """Every unit pinned, all KV in VRAM; the embedding too where it fits and its rows are faster looked up there."""
    found = []
    for embedding in (ON_CPU, PINNED):
        tiers = tuple(whole_tier(room, c.load.tokens, embedding) for c in costs)
        if embedding == PINNED and any(tier.buffers.total > room.arena for tier in tiers):
            break
        pins = tuple(u.name for u in room.spec.units if not u.kind.is_looked_up or embedding == PINNED)
        kv = tuple(u.name for u in room.spec.units if u.kind.state)
        seconds = tuple(simulated_seconds(room, tier, cost) for tier, cost in zip(tiers, costs))
        total = plan_seconds(room, tiers, seconds, costs)
        found.append(Candidate("all in VRAM", Residency(pins, kv), tiers, seconds, total))
    return min(found, key=lambda candidate: candidate.total)


def whole_tier(room: Room, tokens: int, embedding: str = ON_CPU) -> TierPlan:
    """The tier that keeps everything in VRAM, but for an embedding that is on the host, whether it fits or not."""
    where = {u.name: embedding if u.kind.is_looked_up else PINNED for u in room.spec.units}
    return draft_tier(room, tokens, where, frozenset(u.name for u in room.spec.units if u.kind.state), 0)
