"""The published planner's search: in every tier the best of four schemes, whatever the other tiers take.

After llama.cpp PR 22691. A scheme pins layers from the front until memory is full, the last one in part. Here the pins
of two tiers must lie within each other, so the tiers choose together, and what a switch moves is paid for.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from pshard.homes import ON_CPU, PINNED, STREAMED
from pshard.plan import TierPlan
from pshard.planner.price.draft import Room, draft_tier, simulated_seconds
from pshard.planner.price.host_limits import holds
from pshard.planner.price.tier_costs import TierCosts
from pshard.planner.program.coefficients import count_tier, tier_problem
from pshard.planner.program.fluid import fluid_seconds
from pshard.planner.program.unit_classes import UnitClass
from pshard.planner.published.strategies import PER_TIER, SLOTS
from pshard.planner.search.candidates import Candidate
from pshard.planner.search.residency_order import order_nested
from pshard.planner.search.round_times import plan_seconds
from pshard.quant import ROW_BLOCK
from pshard.units.divide_unit import count_shares, divided_sizes
from pshard.units.share import Share
from pshard.units.unit import Unit


@dataclass(frozen=True)
class Scheme:
    """Units that enter VRAM one after the other, those with a state with it, and where each is that does not.

    least: how many of them it needs. by_layer: whether a layer's units follow each other. streams: whether the rest of
    a layer that is pinned in part is streamed.
    """

    order: tuple[Unit, ...]
    rest: Mapping[str, str]
    least: int = 0
    by_layer: bool = False
    streams: bool = True


@dataclass
class Choice:
    """A tier under one scheme. Its seconds are those that it takes at least until it is simulated (`known`)."""

    tier: TierPlan
    pins: Mapping[str, Share]
    kv: frozenset[str]
    seconds: float = 0.0
    known: bool = False

    def goes_with(self, other: "Choice") -> bool:
        """Whether both can be prefixes of the same orders, with the same bytes of each unit."""
        small, large = sorted((self.pins, other.pins), key=len)
        return small.items() <= large.items() and (self.kv <= other.kv or other.kv <= self.kv)


def list_schemes(units: Sequence[Unit]) -> tuple[Scheme, ...]:
    """In the published names: LAYERPIN_LAYERSTREAM, ATTNPIN_FFNSTREAM, FFNCPU_ATTNSTREAM, ATTNPRIO."""
    first, bulk, head = ([u for u in units if u.kind.strategy == how] for how in ("first", "bulk", "head"))
    layers = tuple(sorted((*first, *bulk), key=lambda u: u.layer))  # stable: in a layer the order of execution
    on_host = {u.name: ON_CPU for u in units}
    streamed = on_host | {u.name: STREAMED for u in layers}
    return (
        Scheme(layers, streamed, by_layer=True),
        Scheme((*first, *bulk), streamed, least=len(first)),
        Scheme(layers, on_host | {u.name: STREAMED for u in first}, by_layer=True),
        Scheme((*first, *bulk, *head), on_host, streams=False),
    )


def place_per_tier(
    room: Room,
    classes: tuple[UnitClass, ...],
    costs: tuple[TierCosts, ...],
    bounds: Sequence[float],
    most: float = inf,
    steps: float = inf,
    listed: dict[int, list[Choice]] | None = None,
) -> Candidate | None:
    """The round's fastest mix of schemes; None when none takes less than `most` seconds or fits, when the micro-batches
    of every mix surely take `steps` seconds or more, and for one of several ranks or beside a program that drafts,
    which the published planner does not know.

    A choice is simulated when a mix that has it looks best by what counts take at least. Tiers that the round hardly
    enters choose once the others can be fast enough. bounds: by tier, seconds that nothing beats. listed: choices by
    tier of earlier calls with the same costs; these are added.
    """
    if room.ranks > 1 or room.spec.neighbours or room.spec.keeps_states:
        return None
    entered = [cost for cost in costs if not cost.load.rare]
    others = sum(cost.load.weight * bound for cost, bound in zip(costs, bounds) if cost.load.rare)
    found = {} if listed is None else listed

    def choices_of(cost: TierCosts) -> list[Choice]:
        if cost.load.tokens not in found:
            found[cost.load.tokens] = list_choices(room, classes, cost)
        return found[cost.load.tokens]

    few = [choices_of(cost) for cost in entered]
    if sum(c.load.weight * min((o.seconds for o in of), default=inf) for c, of in zip(entered, few)) >= steps:
        return None
    if not _settle(room, entered, few, most - others):
        return None
    mix = _settle(room, costs, [choices_of(cost) for cost in costs], most)
    if mix is None:
        return None
    tiers, seconds = tuple(choice.tier for choice in mix), tuple(choice.seconds for choice in mix)
    return Candidate(PER_TIER, order_nested(room, tiers), tiers, seconds, plan_seconds(room, tiers, seconds, costs))


def _settle(
    room: Room, costs: Sequence[TierCosts], choices: Sequence[list[Choice]], most: float
) -> tuple[Choice, ...] | None:
    """The fastest mix that is simulated all through; None when none takes less than `most`."""
    while mix := _best_mix(room, costs, choices, most):
        unknown = [(choice, cost) for choice, cost in zip(mix, costs) if not choice.known]
        if not unknown:
            return mix
        for choice, cost in unknown:
            choice.seconds, choice.known = simulated_seconds(room, choice.tier, cost), True
    return None


def _best_mix(
    room: Room, costs: Sequence[TierCosts], choices: Sequence[list[Choice]], most: float
) -> tuple[Choice, ...] | None:
    """The mix of choices that go with each other with the shortest round below `most`, by their seconds as known."""
    weights, best = [cost.load.weight for cost in costs], most
    ranked = [sorted(of_tier, key=lambda choice: choice.seconds) for of_tier in choices]
    least = [weight * min((c.seconds for c in of_tier), default=inf) for weight, of_tier in zip(weights, ranked)]
    order = sorted(range(len(costs)), key=lambda i: costs[i].load.rare)  # the choices that matter come first
    rest = [sum(least[i] for i in order[at:]) for at in range(len(order) + 1)]
    found: tuple[Choice, ...] | None = None

    def descend(taken: tuple[Choice, ...], seconds: float) -> None:
        nonlocal best, found
        at = len(taken)
        if at == len(order):
            mix = tuple(choice for _, choice in sorted(zip(order, taken), key=lambda pair: pair[0]))
            tiers = tuple(choice.tier for choice in mix)
            total = plan_seconds(room, tiers, tuple(choice.seconds for choice in mix), tuple(costs))
            if total < best and holds(room, tiers):
                best, found = total, mix
            return
        for choice in ranked[order[at]]:
            more = seconds + weights[order[at]] * choice.seconds
            if more + rest[at + 1] >= best:
                return
            if all(choice.goes_with(other) for other in taken):
                descend((*taken, choice), more)

    descend((), 0.0)
    return found


def list_choices(room: Room, classes: tuple[UnitClass, ...], cost: TierCosts) -> list[Choice]:
    """The tier under every scheme that fits, different ones once, each with the least that its counts can take."""
    found: dict[tuple, Choice] = {}
    for scheme in list_schemes(room.spec.units):
        for tier in _list_tiers(room, cost.load.tokens, scheme):
            if tier.placements not in found and tier.buffers.total <= room.arena:
                pins = {p.unit: p.share for p in tier.placements if p.in_arena}
                kv = frozenset(p.unit for p in tier.placements if p.has_state_in_vram)
                problem = tier_problem(room, classes, cost, max(tier.buffers.slots, 1))
                least = fluid_seconds(problem, count_tier(classes, tier), relaxed=True)
                found[tier.placements] = Choice(tier, pins, kv, least)
    return list(found.values())


def _list_tiers(room: Room, tokens: int, scheme: Scheme) -> Iterator[TierPlan]:
    """As many units pinned as fit, with and without what fits of the layer at the boundary."""
    length = _longest(room, tokens, scheme)
    if length < scheme.least:
        return
    yield _draft(room, tokens, scheme, length)
    if not scheme.streams or length == len(scheme.order):
        return
    if scheme.by_layer and length and scheme.order[length - 1].layer == scheme.order[length].layer:
        yield _draft(room, tokens, scheme, length - 1)
    edge = scheme.order[length]
    yield _draft(room, tokens, scheme, length, {edge.name: STREAMED})
    may_keep = edge.kind.keep and room.host is None  # the host has a copy of all that is pinned after such a unit
    if may_keep and (tier := _keep_rows(room, tokens, scheme, length)):
        yield tier


def _longest(room: Room, tokens: int, scheme: Scheme) -> int:
    """The longest prefix of the order that fits; -1 when none does."""
    low, over = -1, len(scheme.order) + 1
    tried = over - 1  # all of it first: without staging slots it may fit though less does not
    while over - low > 1:
        fits = _draft(room, tokens, scheme, tried).buffers.total <= room.arena
        low, over = (tried, over) if fits else (low, tried)
        tried = (low + over) // 2
    return low


def _keep_rows(room: Room, tokens: int, scheme: Scheme, length: int) -> TierPlan | None:
    """With as many rows of the unit at the boundary kept in VRAM as fit; None when that is none."""
    edge = scheme.order[length]
    rows = (count_shares(edge) - 1) // ROW_BLOCK
    if rows < 1:
        return None
    left = room.arena - _draft(room, tokens, scheme, length, {edge.name: STREAMED}).buffers.total
    one, all_of_them = (divided_sizes(edge, Share(kept=n * ROW_BLOCK)).kept for n in (1, rows))
    each = (all_of_them - one) / max(1, rows - 1)
    most = rows if left >= all_of_them else 1 + int((left - one) / max(each, 1.0))
    for blocks in (most, most - 1):  # one less where alignment takes the rest
        if blocks >= 1 and left >= one:
            kept = Share(kept=blocks * ROW_BLOCK)
            tier = _draft(room, tokens, scheme, length, {edge.name: STREAMED}, {edge.name: kept})
            if tier.buffers.total <= room.arena:
                return tier
    return None


def _draft(
    room: Room,
    tokens: int,
    scheme: Scheme,
    length: int,
    edge: Mapping[str, str] | None = None,
    shares: Mapping[str, Share] | None = None,
) -> TierPlan:
    pinned = scheme.order[:length]
    where = {**scheme.rest, **(edge or {}), **dict.fromkeys((u.name for u in pinned), PINNED)}
    return draft_tier(room, tokens, where, frozenset(u.name for u in pinned if u.kind.state), SLOTS, shares or {})
