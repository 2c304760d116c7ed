"""The largest micro-batch: the one with which the prompt takes least, by bounds, and by plans where these are near.

Bounds forget that a slot has to fit as a whole, and what waits for it. So a tier whose bound may win is planned alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf

from pshard.planner.price.draft import Room
from pshard.planner.price.tier_costs import TierCosts
from pshard.planner.program.coefficients import tier_problem
from pshard.planner.program.joint_program import Question
from pshard.planner.program.solve_tiers import solve_tiers
from pshard.planner.program.unit_classes import UnitClass
from pshard.planner.rank_task import RankTask
from pshard.planner.search.climb import TierSearch
from pshard.planner.search.polish_tiers import rank_starts
from pshard.planner.search.program_starts import START_GAP, affordable_slots
from pshard.planner.search.residency_order import arrange_residency
from pshard.times.predicted_times import prefill_seconds
from pshard.workload import Workload

SMALLER_BATCH_SHARE = 0.99  # of a prompt's time: what smaller micro-batches must stay below
SURE = 1.25  # times as long by its bound as the fastest: no plan is looked at, where...
ROOMY = 4  # ...so many slots fit beside the scratch of the largest micro-batch
SLOTS = (1, 2)
SECONDS = 2.0  # limit of the solver
EVALUATIONS = 24  # simulations of one tier's improvement


def choose_ubatch(tasks: Sequence[RankTask], workload: Workload) -> int:
    """Tokens of the largest micro-batch that is (nearly) the fastest for the prompt."""
    seconds = {cost.load.tokens: [task.bounds[i] for task in tasks] for i, cost in enumerate(tasks[0].costs)}

    def prefill(largest: int) -> float:
        return prefill_seconds(workload.split_mode, seconds, workload.prompt_tokens, largest)

    choices = [tokens for tokens in seconds if tokens >= workload.sequences]
    by_bounds = {tokens: prefill(tokens) for tokens in choices}
    first, *others = sorted(choices, key=by_bounds.__getitem__)
    if not others or (_has_room(tasks, first) and by_bounds[others[0]] > SURE * by_bounds[first]):
        return _largest_of(by_bounds)
    planned: dict[int, float] = {}
    for largest in (first, *others):
        if by_bounds[largest] * SMALLER_BATCH_SHARE > min(planned.values(), default=inf):
            break
        tail = workload.prompt_tokens % largest
        for tokens in {largest, min(t for t in seconds if t >= tail)} if tail else {largest}:
            seconds[tokens] = _plan_alone(tasks, tokens, replace(workload, max_ubatch=largest))
        planned[largest] = prefill(largest)
    return _largest_of(planned)


def _largest_of(seconds: Mapping[int, float]) -> int:
    """The fastest of some numbers of tokens, or a larger one that is nearly as fast."""
    return max(t for t in seconds if seconds[t] * SMALLER_BATCH_SHARE <= min(seconds.values()))


def _has_room(tasks: Sequence[RankTask], tokens: int) -> bool:
    """Whether slots are few beside what there is for the weights of every rank."""
    for task in tasks:
        largest = max((u.packed_nbytes for u in task.room.spec.units if u.layer >= 0), default=0)
        if task.room.arena - task.room.scratch(tokens) < ROOMY * largest:
            return False
    return True


def _plan_alone(tasks: Sequence[RankTask], tokens: int, workload: Workload) -> list[float]:
    """By rank, seconds of the tier as it is where there is no other; infinite where no plan of it was found."""
    found: list[float] = []
    for task in tasks:
        alike = next((s for other, s in zip(tasks, found) if other.is_like(task)), None)
        i = next(i for i, cost in enumerate(task.costs) if cost.load.tokens == tokens)
        room = replace(task.room, workload=workload)
        found.append(_seconds_alone(room, task.classes, task.costs[i], task.bounds[i]) if alike is None else alike)
    return found


def _seconds_alone(room: Room, classes: tuple[UnitClass, ...], costs: TierCosts, bound: float) -> float:
    """Seconds of the best of some starts, improved."""
    best = inf
    for slots in {affordable_slots(room, costs, n) for n in SLOTS}:
        problem = replace(tier_problem(room, classes, costs, slots), weight=1.0)
        solution = solve_tiers(Question((problem,)), SECONDS, START_GAP)
        if not solution.counts:
            continue
        residency = arrange_residency(room, classes, solution.counts, even=True)
        for way in costs.ways:
            search = TierSearch(room, classes, residency, way, divides=True)
            begun = search.start(solution.counts[0], slots)
            starts = [*([begun] if begun else []), *rank_starts(search, sum(n.kv for n in solution.counts[0]))[:1]]
            if starts:
                start = min(starts, key=lambda s: s.seconds)
                best = min(best, search.improve(start, EVALUATIONS, bound).seconds)
    return best
