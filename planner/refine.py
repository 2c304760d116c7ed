"""Unit by unit: small models have few units of a class, and which one goes where matters. Simulated annealing."""

from dataclasses import replace
from math import exp
from random import Random

from pshard.plan import TierPlan
from pshard.planner.candidates import EVALUATIONS, Candidate, round_seconds
from pshard.planner.classes import UnitClass
from pshard.planner.costs import TierCosts
from pshard.planner.draft import Room, draft_tier, tier_seconds
from pshard.planner.order import order_around
from pshard.planner.problem import count_tier
from pshard.planner.search import SEARCH_ROUNDS, SLOT_CHOICES, TierSearch, TierState

MOST_UNITS = 48  # above, one unit more or less hardly matters, and counts have said it all
MOST_EVICTED = 3  # units that may leave VRAM to make room for a step
TRIES = 2000  # random steps of each pass
HEATS = (0.02, 0.15, 0.02, 0.15, 0.02)  # by pass, of the tier's time: how much slower a step may be at first

CHOICES = {
    "embedding": (("cpu", False), ("pinned", False)),
    "attention": (("pinned", True), ("pinned", False), ("streamed", True), ("streamed", False), ("cpu", False)),
    "ffn": (("pinned", False), ("streamed", False), ("cpu", False)),
    "output": (("pinned", False), ("streamed", False), ("cpu", False)),
}


def refine_candidate(
    room: Room, classes: tuple[UnitClass, ...], costs: tuple[TierCosts, ...], found: Candidate
) -> Candidate:
    """The candidate with its most important tier refined unit by unit and the others arranged around it, if better."""
    if len(room.spec.units) > MOST_UNITS:
        return found
    main = max(range(len(costs)), key=lambda i: costs[i].load.weight * found.seconds[i])
    refined = anneal_tier(room, found.tiers[main], costs[main])
    counts = [count_tier(classes, tier) for tier in found.tiers]
    counts[main] = count_tier(classes, refined)
    pinned = {p.unit for p in refined.placements if p.where == "pinned"}
    residency = order_around(classes, counts, pinned, {p.unit for p in refined.placements if p.kv == "vram"})
    tiers = []
    for i, (tier, cost) in enumerate(zip(found.tiers, costs)):
        arranged = refined if i == main else _arrange(TierSearch(room, classes, residency, cost), classes, tier)
        if arranged is None:
            return found
        tiers.append(arranged)
    seconds = tuple(tier_seconds(room, tier, cost) for tier, cost in zip(tiers, costs))
    total = round_seconds(room, tuple(tiers), seconds, costs)
    if total >= found.total:
        return found
    return replace(found, residency=residency, tiers=tuple(tiers), seconds=seconds, total=total)


def _arrange(search: TierSearch, classes: tuple[UnitClass, ...], tier: TierPlan) -> TierPlan | None:
    """A tier with about the same counts under another residency order, improved."""
    counts = count_tier(classes, tier)
    cpu = tuple(0 if c.kind == "embedding" else n.cpu for c, n in zip(classes, counts))
    state = TierState(sum(n.pin for n in counts), sum(n.kv for n in counts), cpu, max(cpu), max(tier.buffers.slots, 1))
    filled = search.fill(state)
    start = search.score(filled) if filled else None
    return search.improve(start, EVALUATIONS).tier if start else None


def anneal_tier(room: Room, tier: TierPlan, costs: TierCosts) -> TierPlan:
    """The best tier found by passes of random steps, each pass from the best one yet.

    A hot pass leaves the neighbourhood that the counts led to, where few units make all the difference; cold ones
    polish, which matters where there are many.
    """
    for seed, heat in enumerate(HEATS):
        tier = _anneal(room, tier, costs, heat, Random(seed))
    return tier


def _anneal(room: Room, tier: TierPlan, costs: TierCosts, heat: float, rng: Random) -> TierPlan:
    """The best of TRIES random steps from a tier: one unit placed otherwise, two units swapped, other slots."""
    units = room.spec.units
    now = [(p.where, p.kv == "vram") for p in tier.placements]
    slots, tokens = max(1, tier.buffers.slots), tier.tokens
    best, best_seconds = tier, tier_seconds(room, tier, costs, SEARCH_ROUNDS)
    seconds = first = best_seconds
    for i in range(TRIES):
        tried, tried_slots = list(now), slots
        kind = rng.random()
        if kind < 0.1:
            tried_slots = rng.choice(SLOT_CHOICES)
        elif kind < 0.5:
            at = rng.randrange(len(units))
            tried[at] = rng.choice(CHOICES[units[at].kind])
        else:
            _swap(rng, units, tried)
        draft = _make_fit(rng, room, tokens, tried, tried_slots)
        if draft is None:
            continue
        took = tier_seconds(room, draft, costs, SEARCH_ROUNDS)
        warmth = heat * first * (1 - i / TRIES)
        if took < seconds or rng.random() < exp((seconds - took) / warmth):
            now, slots, seconds = tried, tried_slots, took
            if took < best_seconds:
                best, best_seconds = draft, took
    return best


def _make_fit(rng: Random, room: Room, tokens: int, tried: list[tuple[str, bool]], slots: int) -> TierPlan | None:
    """The places as a tier; random units leave VRAM until it fits. None when that takes too many."""
    units = room.spec.units
    for _ in range(MOST_EVICTED + 1):
        where = {u.name: place for u, (place, _) in zip(units, tried)}
        kv = frozenset(u.name for u, (_, vram) in zip(units, tried) if vram)
        draft = draft_tier(room, tokens, where, kv, slots)
        if draft.buffers.total <= room.arena:
            return draft
        inside = [i for i, (place, vram) in enumerate(tried) if place == "pinned" or vram]
        if not inside:
            return None
        out = rng.choice(inside)
        tried[out] = ("cpu" if units[out].kind == "embedding" else rng.choice(("cpu", "streamed")), False)
    return None


def _swap(rng: Random, units, tried: list[tuple[str, bool]]) -> None:
    """Exchange two units' placements; KV stays with the attention unit it belongs to where the new place allows it."""
    a, b = rng.randrange(len(units)), rng.randrange(len(units))
    if "embedding" in (units[a].kind, units[b].kind):
        return
    if units[a].kind == units[b].kind:
        tried[a], tried[b] = tried[b], tried[a]
        return
    for at, place in ((a, tried[b][0]), (b, tried[a][0])):
        tried[at] = (place, tried[at][1] and place != "cpu")
