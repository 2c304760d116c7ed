"""Published plans that no plan may be slower than in its micro-batches alone.

The search goes by the whole round: with a switch, and with a little for tiers that the round does not enter. What
these save could outweigh slower micro-batches, which are what predictions tell and benchmarks measure.
"""

from math import inf

from pshard.planner.price.draft import Room
from pshard.planner.price.host_limits import holds
from pshard.planner.price.page_locks import locked
from pshard.planner.price.tier_costs import TierCosts
from pshard.planner.published.per_tier import place_per_tier
from pshard.planner.published.strategies import list_strategies, place_strategy
from pshard.planner.rank_task import RankTask
from pshard.planner.search.candidates import (
    Candidate,
    least_steps,
    price_baseline,
    reads_unlocked,
    restage_candidate,
)
from pshard.planner.search.round_times import steps_seconds

SAME = 1 - 1e-9  # of a time: what takes no less is not faster


def fastest_rival(task: RankTask, than: Candidate) -> Candidate | None:
    """The published plan whose micro-batches take least, as `plan_baseline` makes it; None where none takes less `than`
    the candidate's."""
    room, costs, whole = task.room, task.costs, locked(task.costs)
    most, fastest = steps_seconds(than.seconds, costs) * SAME, None
    for name in list_strategies(room.spec):
        placed = place_strategy(name, room, tuple(c.load.tokens for c in costs))
        if not placed or not holds(room, placed.tiers) or least_steps(room, task.classes, whole, placed) >= most:
            continue
        rival = price_baseline(name, room, costs, placed)
        if rival and (took := _steps_of(room, costs, rival)) < most:
            most, fastest = took, rival
    limited = costs[0].tables.profile.lockable_bytes is not None  # then what is staged is known of a finished plan only
    steps, listed = (inf, None) if limited else (most, task.choices)
    mix = place_per_tier(room, task.classes, costs, task.bounds, steps=steps, listed=listed)
    if mix and _steps_of(room, costs, mix) < most:
        fastest = mix
    return restage_candidate(room, costs, fastest) if fastest else None


def _steps_of(room: Room, costs: tuple[TierCosts, ...], rival: Candidate) -> float:
    """Seconds of its micro-batches; infinite where it would read what is not page-locked."""
    return inf if reads_unlocked(rival, costs) else steps_seconds(restage_candidate(room, costs, rival).seconds, costs)
