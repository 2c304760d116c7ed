"""Units divided between CPU and accelerator: the plan with them, where it is faster than one of whole units.

FFNs are divided in the smallest tier that the round enters, experts in larger ones too.
"""

from dataclasses import replace

from pshard.plan import TierPlan
from pshard.planner.price.draft import Room, simulated_seconds
from pshard.planner.price.host_limits import holds
from pshard.planner.price.tier_costs import TierCosts
from pshard.planner.program.coefficients import count_tier, may_divide, offered_shares, tier_problem
from pshard.planner.program.counts import Counts
from pshard.planner.program.joint_program import Question
from pshard.planner.program.solve_tiers import Solution, relaxation_bound, solve_tiers
from pshard.planner.program.tier_problems import ClassCost, TierProblem
from pshard.planner.program.unit_classes import UnitClass
from pshard.planner.search.candidates import EVALUATIONS, Candidate
from pshard.planner.search.climb import TierSearch, state_of
from pshard.planner.search.polish_tiers import polish_tiers, rank_starts
from pshard.planner.search.program_starts import START_GAP, affordable_slots
from pshard.planner.search.residency_order import arrange_residency
from pshard.planner.search.round_times import plan_seconds

SECONDS = 2.0  # limit of the solver
BOUND_MUST_FALL = 1.005  # with divided FFNs by so much, before any are looked for


def divide_candidate(
    room: Room, classes: tuple[UnitClass, ...], costs: tuple[TierCosts, ...], found: Candidate
) -> Candidate:
    """The fastest plan found that divides units in entered tiers; `found` where none is faster.

    Where nothing can be divided nothing else is tried either: what a plan with divided units must beat is one without.
    """
    entered = [i for i, c in enumerate(costs) if not c.load.rare]
    main, some = entered[0], [i for i in entered if _is_divisible(costs[i], classes, i == entered[0])]
    if not some:
        return found
    best = none_kept = found
    if any(_may_gain(room, classes, costs[i], max(found.tiers[i].buffers.slots, 1)) for i in some):
        for least in (1, 2):
            slots = {
                c.load.tokens: affordable_slots(room, c, max(t.buffers.slots, 2) if least == 2 else 1)
                for c, t in zip(costs, found.tiers)
            }
            for keeps in (True, False):
                solution = _solve(room, classes, [costs[i] for i in entered], slots, keeps)
                for even in (True, False) if any(n.n_divided for tier in solution.counts for n in tier) else ():
                    placed = _place(room, classes, costs, found, solution, slots, even)
                    best = placed if placed and placed.total < best.total else best
                    if not keeps and placed and placed.total < none_kept.total:
                        none_kept = placed
                if not _keeps_parts(classes, solution):
                    break
    if none_kept is not found and none_kept is not best:
        best = min((_balance_parts(room, classes, costs, c, main) for c in (best, none_kept)), key=lambda c: c.total)
    return best if any(p.share for t in best.tiers for p in t.placements) else found


def _balance_parts(
    room: Room, classes: tuple[UnitClass, ...], costs: tuple[TierCosts, ...], placed: Candidate, main: int
) -> Candidate:
    """The candidate with its main tier's parts moved one by one, which the program moves by quarters: what keeps none
    of a layer's parts in VRAM has more to gain by that."""
    bounds = tuple(0.0 if i == main else seconds for i, seconds in enumerate(placed.seconds))
    return polish_tiers(room, classes, costs, placed, bounds)


def _is_divisible(costs: TierCosts, classes: tuple[UnitClass, ...], smallest: bool) -> bool:
    """Whether the program may divide units of an entered tier."""
    return (smallest or not may_divide(costs)) and any(offered_shares(cls, costs) for cls in classes)


def _may_gain(room: Room, classes: tuple[UnitClass, ...], costs: TierCosts, slots: int) -> bool:
    """Whether the bound of the tier falls enough with divided FFNs."""
    whole, divided = (relaxation_bound((tier_problem(room, classes, costs, slots, d),)) for d in (False, True))
    return whole > divided * BOUND_MUST_FALL


def _keeps_parts(classes: tuple[UnitClass, ...], solution: Solution) -> bool:
    """Whether it has units with parts of which some are kept in VRAM. To the program more whole units are often as
    good there; but the search moves no parts that are kept, so both ways are tried."""
    return any(
        share.kept and there
        for tier in solution.counts
        for cls, n in zip(classes, tier)
        for share, (there, _) in zip(cls.shares if cls.kind.parts else (), n.divided)
    )


def _solve(
    room: Room, classes: tuple[UnitClass, ...], entered: list[TierCosts], slots: dict[int, int], keeps: bool
) -> Solution:
    """The program that may divide FFNs of the smallest entered tier, and experts of it and of large ones. keeps: also
    with some of a unit's parts in VRAM."""
    problems = [
        tier_problem(room, classes, c, slots[c.load.tokens], _is_divisible(c, classes, c is entered[0]))
        for c in entered
    ]
    problems = problems if keeps else [_keep_none(problem) for problem in problems]
    kv_switch = tuple(entered[0].units[cls.units[0].name].kv_fetch for cls in classes)
    asked = Question(tuple(problems), 1 / entered[0].tables.link_rate, kv_switch, between=_keep_routers(classes))
    return solve_tiers(asked, SECONDS, START_GAP)


def _keep_none(problem: TierProblem) -> TierProblem:
    """The tier without units of which some parts are kept in VRAM."""

    def limit(cost: ClassCost) -> ClassCost:
        divided = (replace(d, lies=False, streams=False) if d.kept else d for d in cost.divided)
        return replace(cost, divided=tuple(divided)) if cost.kind.parts else cost

    return replace(problem, classes=tuple(map(limit, problem.classes)))


def _keep_routers(classes: tuple[UnitClass, ...]) -> tuple[tuple[Counts, ...], tuple[Counts, ...]] | None:
    """Fewest and most pins of a program that divides experts: routers stay in VRAM. They are small, and the program
    does not see that a copy of one takes a slot from experts."""
    if not any(cls.kind.parts for cls in classes):
        return None
    most = tuple(Counts(cls.size, cls.size, cls.size) for cls in classes)
    return tuple(Counts(cls.size if cls.kind.routes else 0, 0) for cls in classes), most


def _place(
    room: Room,
    classes: tuple[UnitClass, ...],
    costs: tuple[TierCosts, ...],
    found: Candidate,
    solution: Solution,
    slots: dict[int, int],
    even: bool,
) -> Candidate | None:
    """A solution as a plan: its tiers improved on simulated time, rare ones from the best start (`polish_tiers.py`
    improves those of the plan that is taken); None when a tier does not fit, or the tiers that were solved have become
    no faster."""
    residency = arrange_residency(room, classes, solution.counts, even)
    counts = iter(solution.counts)
    searches = [TierSearch(room, classes, residency, cost, divides=True) for cost in costs]
    tiers: dict[int, TierPlan] = {}
    saved = 0.0  # seconds of a round
    for i, cost in enumerate(costs):
        if not cost.load.rare:
            start = searches[i].start(next(counts), slots[cost.load.tokens])
            if start is None:
                return None
            improved = searches[i].improve(start, EVALUATIONS)
            tiers[i] = improved.tier
            saved += cost.load.weight * (found.seconds[i] - improved.seconds)
    if saved <= 0:
        return None
    small = tiers[min(tiers)]
    for i, before in enumerate(found.tiers):
        if costs[i].load.rare:  # like the smallest entered one where the order pins what `before` has elsewhere
            starts = rank_starts(searches[i], sum(p.has_state_in_vram for p in before.placements))
            tier = starts[0].tier if starts else _arrange_tier(searches[i], classes, small)
            if tier is None:
                return None
            tiers[i] = tier
    placed = tuple(tiers[i] for i in range(len(costs)))
    if not holds(room, placed):
        return None
    seconds = tuple(simulated_seconds(room, tier, cost) for tier, cost in zip(placed, costs))
    total = plan_seconds(room, placed, seconds, costs)
    return replace(
        found, strategy="ilp", residency=residency, tiers=placed, seconds=seconds, total=total, solution=solution
    )


def _arrange_tier(search: TierSearch, classes: tuple[UnitClass, ...], tier: TierPlan) -> TierPlan | None:
    """A tier with about the same counts under another residency order, improved."""
    counts = count_tier(classes, tier)
    state = state_of(classes, counts, 0, max(tier.buffers.slots, 1))
    filled = search.fill(replace(state, pins=min(state.pins, search.most_pins), runs=max(state.cpu), divided=()))
    start = search.score(filled) if filled else None
    return search.improve(start, EVALUATIONS).tier if start else None
