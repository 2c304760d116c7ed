"""One placement for all ranks. Those that sum after every unit wait for the slowest: what is slow on one of them, like
a unit on the CPU, should be slow on all at once. Plans that each rank chose for itself have it in different layers."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf

from pshard.errors import UserError
from pshard.plan import TierPlan
from pshard.planner.price.draft import draft_tier
from pshard.planner.price.host_limits import holds
from pshard.planner.program.unit_classes import SIXTEENTHS
from pshard.planner.rank_task import RankTask
from pshard.planner.search.candidates import Candidate, rank_candidates, share_placements
from pshard.planner.search.polish_tiers import polish_tiers
from pshard.units.divide_unit import list_shares, without_cpu
from pshard.units.share import Share
from pshard.units.unit import Unit

SPARE = 0.99  # of the room that is left for a plan of all: units of other ranks are not of the same sizes
SECONDS = 2.0  # limit of the solver


def common_plans(tasks: Sequence[RankTask], chosen: Sequence[Candidate]) -> Iterator[tuple[Candidate, ...]]:
    """The ranks' plans with every rank's own placements for all, where these fit; those of the slowest rank are made
    anew where they do not, within the memory that all have for them."""
    own = [i for i, task in enumerate(tasks) if task.room.spec.packed_nbytes]
    order = sorted(own, key=lambda i: -chosen[i].total)
    for i in order:
        if any(tasks[i].is_like(tasks[j]) for j in order[: order.index(i)]):
            continue
        adopted = _adopt_all(tasks, chosen, tasks[i], chosen[i])
        if adopted is None and i == order[0] and (less := _plan_within(tasks, tasks[i], chosen[i])):
            adopted = _adopt_all(tasks, chosen, tasks[i], less)
        if adopted:
            yield adopted


def _adopt_all(
    tasks: Sequence[RankTask], chosen: Sequence[Candidate], owner: RankTask, plan: Candidate
) -> tuple[Candidate, ...] | None:
    """None where one of the ranks lacks the memory. A rank without a part of the model keeps its plan."""
    adopted = []
    for task, own in zip(tasks, chosen):
        if not task.room.spec.packed_nbytes:
            adopted.append(own)
            continue
        tiers = _adopt(task, owner, plan)
        if tiers is None or any(t.buffers.total > task.room.arena for t in tiers) or not holds(task.room, tiers):
            return None
        adopted.append(replace(plan, tiers=tiers, seconds=(), total=inf))  # alone, which nobody asks: not simulated
    return tuple(adopted)


def _adopt(task: RankTask, owner: RankTask, plan: Candidate) -> tuple[TierPlan, ...] | None:
    """The tiers of another rank's plan for the units of this one, whether they fit or not; None where FFNs are divided
    that cannot be here."""
    tiers = []
    for tier in plan.tiers:
        shares = {}
        for place in tier.placements:
            if place.share:
                same = _same_shares(owner.room.spec.unit(place.unit), task.room.spec.unit(place.unit))
                if place.share not in same:
                    return None
                shares[place.unit] = same[place.share]
        where = {p.unit: p.where for p in tier.placements}
        kv = frozenset(p.unit for p in tier.placements if p.has_state_in_vram)
        tiers.append(draft_tier(task.room, tier.tokens, where, kv, tier.buffers.slots, shares, tier.in_place))
    return tuple(tiers)


def _same_shares(theirs: Unit, mine: Unit) -> dict[Share, Share]:
    """How a unit of another rank may be divided, and what that is of this rank's; none where theirs are more or fewer.

    What the CPU has in a small tier is streamed in a large one, beside as many rows in the arena.
    """
    pairs = list_shares(theirs, SIXTEENTHS), list_shares(mine, SIXTEENTHS)
    if len(pairs[0]) != len(pairs[1]):
        return {}
    found = dict(zip(*pairs))
    for one, other in zip(*pairs):
        kept, here = without_cpu(theirs, one), without_cpu(mine, other)
        if kept and here:
            found.setdefault(kept, here)
    return found


def _plan_within(tasks: Sequence[RankTask], owner: RankTask, plan: Candidate) -> Candidate | None:
    """A plan of the owner in so much less of its arena that all ranks should have room for it; None when there is
    none."""
    share = 1.0
    for task in tasks:
        for tier in (_adopt(task, owner, plan) or ()) if task.room.spec.packed_nbytes else ():
            scratch = tier.buffers.scratch
            share = min(share, (task.room.arena - scratch) / max(1, tier.buffers.total - scratch))
    scratch = max(t.buffers.scratch for t in plan.tiers)
    arena = scratch + int(SPARE * share * (owner.room.arena - scratch))
    room = replace(owner.room, arena=arena)
    how = room, owner.classes, owner.costs
    try:
        found = rank_candidates(*how, owner.bounds, SECONDS, 1)[0]
    except UserError:
        return None
    if owner.costs[0].tables.profile.lockable_bytes is not None:  # improvements guess which copies are staged
        return found
    return share_placements(*how, polish_tiers(*how, found, owner.bounds), owner.bounds)
