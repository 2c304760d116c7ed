"""Where the routed experts of a plan lie, layer by layer. No torch."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from pshard.cuts.rank_parts import cut_ranks
from pshard.homes import ON_CPU, ON_DISK, PINNED, STREAMED
from pshard.model import ModelSpec
from pshard.plan import Placement, TierPlan, Variant
from pshard.routing.expert_uses import Uses, chosen_share
from pshard.routing.order_experts import order_experts
from pshard.units.divide_unit import count_shares
from pshard.units.moe.expert_cache import ExpertCache
from pshard.units.unit import Unit

PLACES = (PINNED, STREAMED, "in_place", ON_CPU, ON_DISK)
LIKELY = 0.4  # slots with room for a share r of all experts find about r ** LIKELY of what texts use: docs/disk.md


@dataclass(frozen=True)
class LayerExperts:
    """How many experts of a layer lie where in one tier. `pinned`: in VRAM. `streamed`: all of them are copied there
    before use. `in_place`: the accelerator reads those that were chosen over the link. `cpu`: computed on the host.
    `disk`: read from there, all of them or those that were chosen. `hits`: the share of the layer's choices that those
    in VRAM are expected to serve, by a record; None without one."""

    layer: int
    pinned: int
    streamed: int
    in_place: int
    cpu: int
    disk: int = 0
    hits: float | None = None

    @property
    def counts(self) -> tuple[int, ...]:
        """In the order of PLACES."""
        return self.pinned, self.streamed, self.in_place, self.cpu, self.disk


@dataclass(frozen=True)
class TierExperts:
    """The experts of a tier. `link_nbytes`: what a micro-batch is expected to bring over the link, experts and all
    else. `served`: the share of tokens' choices that each of PLACES is expected to serve. Both by the popularity of
    experts where it is known; else every expert is chosen alike. `found`: of these choices the share that slots that
    follow use serve instead; none are counted under PLACES then."""

    tokens: int
    layers: tuple[LayerExperts, ...]
    link_nbytes: int
    served: tuple[float, ...] = ()
    found: float = 0.0


@dataclass(frozen=True)
class Slots:
    """Slots for experts that follow use: how many, for how many layers, how they go, how many experts come after a
    micro-batch at most, what share of these layers' choices is expected there, and how many experts and bytes are
    expected to be brought for each token. likely: of slots for experts on disk of which nothing was recorded, the share
    that published engines find of one token; else None, as where steps have several."""

    count: int
    layers: int
    policy: str
    admits: int
    found: float
    admitted: float
    nbytes: int
    likely: float | None = None


@dataclass(frozen=True)
class ExpertMap:
    """The experts of one rank's plan. Of `count` in a layer a token takes `used`. units: those that they are. slots:
    which of them may use, in tiers of few tokens."""

    model: str
    rank: int
    budget_mib: int
    terms: str
    count: int
    used: int
    units: tuple[str, ...]
    tiers: tuple[TierExperts, ...]
    slots: tuple[Slots, ...] = ()


def map_experts(spec: ModelSpec, variant: Variant) -> tuple[ExpertMap, ...]:
    """One map for each rank that has routed experts; none for a dense model. spec: the whole model."""
    rule = spec.config.experts
    if rule is None:
        return ()
    found, ordered = [], order_experts(spec, variant.popularity)
    for part, rank in zip(cut_ranks(ordered, variant.split), variant.ranks):
        units = [unit for unit in part.units if unit.kind.parts and unit.tensors]
        if units:
            part = replace(part, caches=rank.caches)
            tiers = tuple(_map_tier(part, tier, units) for tier in rank.tiers)
            names = tuple(unit.name for unit in units)
            slots = tuple(_describe_slots(cache, variant.popularity is not None) for cache in rank.caches)
            found.append(
                ExpertMap(
                    spec.name, rank.rank, rank.budget_mib, variant.terms, rule.count, rule.used, names, tiers,
                    slots=slots,
                )
            )  # fmt: skip
    return tuple(found)


def likely_share(room: float) -> float:
    """What share of one text's choices is likely found in slots on demand that have room for this share of experts."""
    return room**LIKELY


def _describe_slots(cache: ExpertCache, is_recorded: bool) -> Slots:
    brought = round(cache.admitted * cache.slot_bytes)
    likely = likely_share(cache.found) if cache.is_on_demand and cache.width == 1 and not is_recorded else None
    return Slots(
        cache.slots, len(cache.units), cache.policy, cache.admits, cache.found, cache.admitted, brought, likely
    )


def group_layers(layers: Iterable[LayerExperts]) -> Iterator[tuple[str, LayerExperts]]:
    """Layers that have the same, as "0-3, 8" with one of them and the mean of their hits, in order of their first
    layer."""
    alike: dict[tuple[int, ...], list[LayerExperts]] = {}
    for each in layers:
        alike.setdefault(each.counts, []).append(each)
    for members in alike.values():
        hits = [each.hits for each in members if each.hits is not None]
        mean = sum(hits) / len(hits) if hits else None
        yield _name_layers([each.layer for each in members]), replace(members[0], hits=mean)


def _map_tier(spec: ModelSpec, tier: TierPlan, units: list[Unit]) -> TierExperts:
    layers, served, found = [], [], 0.0
    for unit in units:
        uses = spec.popularity.uses_of(unit.layer) if spec.popularity else ()
        counted = _count_places(unit, tier.placement(unit.name), tier.in_place)
        served.append(_share_choices(counted, uses))
        layers.append(replace(counted, hits=served[-1][0]) if uses else counted)
        hits = _hits_of(spec, tier, unit)
        if hits:
            served[-1] = _share_choices(counted, uses, hits)
            found += 1 - sum(served[-1])
    means = tuple(sum(each) / len(units) for each in zip(*served))
    return TierExperts(tier.tokens, tuple(layers), tier.prediction.link_bytes, means, found / len(units))


def _hits_of(spec: ModelSpec, tier: TierPlan, unit: Unit) -> tuple[float, ...]:
    """By place the share of choices of a unit that find their expert in a slot; none where a tier uses no slots."""
    place = tier.placement(unit.name)
    if place.is_whole_in_arena or not (place.site.is_on_acc or place.site.is_beyond_host):
        return ()
    return next((c.hits_by_place for c in spec.caches if unit.name in c.units and tier.tokens <= c.tokens), ())


def _share_choices(layer: LayerExperts, uses: Uses, hits: tuple[float, ...] = ()) -> tuple[float, ...]:
    """The share of a layer's choices that each of PLACES serves: the first experts are in VRAM, the last the CPU's.
    hits: by place, the share that slots take of those that are not in VRAM."""
    shares, first, total = [], 0, sum(layer.counts)
    for in_vram, count in zip((True, False, False, False, False), layer.counts):
        places = range(first, first + count)
        outside = () if in_vram or not hits else places
        taken = sum(hits[at] * chosen_share(range(at, at + 1), total, uses) for at in outside)
        shares.append(chosen_share(places, total, uses) - taken)
        first += count
    return tuple(shares)


def _count_places(unit: Unit, place: Placement, reads: bool) -> LayerExperts:
    total = count_shares(unit)
    if not place.site.is_on_acc:
        return LayerExperts(unit.layer, 0, 0, 0, *((0, total) if place.site.is_beyond_host else (total, 0)))
    on_acc = total - place.cpu_rows
    if place.site.in_arena:
        return LayerExperts(unit.layer, on_acc, 0, 0, place.cpu_rows)
    brought = on_acc - place.kept_parts
    if place.site.is_beyond_host:
        return LayerExperts(unit.layer, place.kept_parts, 0, 0, place.cpu_rows, brought)
    streamed, in_place = (0, brought) if reads else (brought, 0)
    return LayerExperts(unit.layer, place.kept_parts, streamed, in_place, place.cpu_rows)


def _name_layers(layers: list[int]) -> str:
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
