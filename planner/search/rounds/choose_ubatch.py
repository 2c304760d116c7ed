"""The largest micro-batch: the one with which the prompt takes least, by bounds, and by plans where these are near.

Bounds forget that a slot has to fit as a whole, and what waits for it. So a tier whose bound may win is planned alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf

from pshard.planner.program.coefficients import tier_problem
from pshard.planner.program.joint_program import Question
from pshard.planner.program.solve_tiers import solve_tiers
from pshard.planner.rank_task import RankTask
from pshard.planner.search.climb import TierSearch
from pshard.planner.search.polish_tiers import rank_starts
from pshard.planner.search.program_starts import START_GAP, affordable_slots
from pshard.planner.search.residency_order import arrange_residency
from pshard.predicted_times import prefill_seconds
from pshard.workload import Workload

SMALLER_BATCH_SHARE = 0.99  # of a prompt's time: what smaller micro-batches must stay below
SURE = 1.25  # times as long by its bound as the fastest: no plan is looked at, where...
ROOMY = 4  # ...so many slots fit beside the scratch of the largest micro-batch
SLOTS = (1, 2)
SECONDS = 2.0  # limit of the solver
EVALUATIONS = 24  # simulations of one tier's improvement


def choose_ubatch(tasks: Sequence[RankTask], workload: Workload) -> int:
    """Tokens of the largest micro-batch that is (nearly) the fastest for the prompt."""
    bounds = {cost.load.tokens: [task.rough_bounds[i] for task in tasks] for i, cost in enumerate(tasks[0].costs)}
    choices = [tokens for tokens in bounds if tokens >= workload.answer_rows]
    by_bounds = {tokens: _prefill(bounds, workload, tokens) for tokens in choices}
    first, *others = sorted(choices, key=by_bounds.__getitem__)
    if not others or (_has_room(tasks, first) and by_bounds[others[0]] > SURE * by_bounds[first]):
        return _largest_of(by_bounds)
    planned: dict[int, float] = {}
    for largest in (first, *others):
        most = min(planned.values(), default=inf) / SMALLER_BATCH_SHARE
        if by_bounds[largest] > most:
            break
        planned[largest] = _plan_prompt(tasks, replace(workload, max_ubatch=largest), bounds, most)
    return _largest_of(planned)


def _prefill(seconds: Mapping[int, Sequence[float]], workload: Workload, largest: int) -> float:
    """Seconds of the prompt in micro-batches of so many tokens."""
    return prefill_seconds(workload.split_mode, seconds, workload.prompt_tokens, largest)


def _plan_prompt(
    tasks: Sequence[RankTask], workload: Workload, bounds: Mapping[int, Sequence[float]], most: float
) -> float:
    """Seconds of the prompt in micro-batches as large as may be, with its tiers planned alone; at least so many where
    the slower ranks alone tell that it takes more than `most`."""
    largest, seconds = workload.max_ubatch, {tokens: [*by_rank] for tokens, by_rank in bounds.items()}
    tail = workload.prompt_tokens % largest
    for tokens in {largest, min(t for t in seconds if t >= tail)} if tail else {largest}:
        at = next(i for i, cost in enumerate(tasks[0].costs) if cost.load.tokens == tokens)
        planned: list[int] = []
        for rank in sorted(range(len(tasks)), key=lambda rank: -bounds[tokens][rank]):
            if planned and _prefill(seconds, workload, largest) > most:
                break
            like = next((other for other in planned if tasks[other].is_like(tasks[rank])), None)
            seconds[tokens][rank] = _plan_alone(tasks[rank], at, workload) if like is None else seconds[tokens][like]
            planned.append(rank)
    return _prefill(seconds, workload, largest)


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


def _plan_alone(task: RankTask, at: int, workload: Workload) -> float:
    """Seconds of a rank's tier number `at` as it is where there is no other: the best of some starts, improved;
    infinite where no plan of it was found."""
    room, classes, costs, best = replace(task.room, workload=workload), task.classes, task.costs[at], inf
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
                best = min(best, search.improve(start, EVALUATIONS, task.rough_bounds[at]).seconds)
    return best
