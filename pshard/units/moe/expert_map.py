"""Where the routed experts of a plan lie, layer by layer. No torch."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pshard.cuts.rank_parts import cut_ranks
from pshard.model import ModelSpec
from pshard.plan import Placement, TierPlan, Variant
from pshard.units.divide_unit import count_shares, divide_unit
from pshard.units.moe.in_place import reads_in_place, used_nbytes
from pshard.units.unit import Unit

PLACES = ("pinned", "streamed", "in_place", "cpu")


@dataclass(frozen=True)
class LayerExperts:
    """How many experts of a layer lie where in one tier. `pinned`: in VRAM. `streamed`: all of them are copied there
    before use. `in_place`: the accelerator reads those that were chosen over the link. `cpu`: computed on the host."""

    layer: int
    pinned: int
    streamed: int
    in_place: int
    cpu: int

    @property
    def counts(self) -> tuple[int, ...]:
        """In the order of PLACES."""
        return self.pinned, self.streamed, self.in_place, self.cpu


@dataclass(frozen=True)
class TierExperts:
    """The experts of a tier. `link_nbytes`: what a micro-batch brings over the link, experts and all else, if every
    expert is chosen alike."""

    tokens: int
    layers: tuple[LayerExperts, ...]
    link_nbytes: int

    def shares(self) -> tuple[float, ...]:
        """The share of all experts that each of PLACES has."""
        total = sum(sum(layer.counts) for layer in self.layers)
        return tuple(sum(of) / total for of in zip(*(layer.counts for layer in self.layers)))


@dataclass(frozen=True)
class ExpertMap:
    """The experts of one rank's plan. Of `count` in a layer a token takes `used`. units: those that they are."""

    model: str
    rank: int
    budget_mib: int
    terms: str
    count: int
    used: int
    units: tuple[str, ...]
    tiers: tuple[TierExperts, ...]


def map_experts(spec: ModelSpec, variant: Variant) -> tuple[ExpertMap, ...]:
    """One map for each rank that has routed experts; none for a dense model. spec: the whole model."""
    rule = spec.config.experts
    if rule is None:
        return ()
    found = []
    for part, rank in zip(cut_ranks(spec, variant.split), variant.ranks):
        units = [unit for unit in part.units if unit.kind.parts and unit.tensors]
        if units:
            tiers = tuple(_map_tier(part, tier, units) for tier in rank.tiers)
            names = tuple(unit.name for unit in units)
            found.append(
                ExpertMap(
                    spec.name, rank.rank, rank.budget_mib, variant.terms, rule.count, rule.used, names, tiers
                )
            )  # fmt: skip
    return tuple(found)


def group_layers(layers: Iterable[LayerExperts]) -> Iterator[tuple[str, LayerExperts]]:
    """Layers that have the same, as "0-3, 8" with one of them, in order of their first layer."""
    alike: dict[tuple[int, ...], list[LayerExperts]] = {}
    for each in layers:
        alike.setdefault(each.counts, []).append(each)
    for members in alike.values():
        yield _name_layers([each.layer for each in members]), members[0]


def _map_tier(spec: ModelSpec, tier: TierPlan, units: list[Unit]) -> TierExperts:
    read, layers = 0, []
    for unit in units:
        place = tier.placement(unit.name)
        layers.append(_count_places(unit, place, tier.tokens))
        if layers[-1].in_place:
            read += used_nbytes(divide_unit(unit, place.share).brought.unit, spec.config, tier.tokens)
    return TierExperts(tier.tokens, tuple(layers), tier.prediction.link_bytes + read)


def _count_places(unit: Unit, place: Placement, tokens: int) -> LayerExperts:
    total = count_shares(unit)
    if place.where == "cpu":
        return LayerExperts(unit.layer, 0, 0, 0, total)
    on_acc = total - place.cpu_rows
    if place.where == "pinned":
        return LayerExperts(unit.layer, on_acc, 0, 0, place.cpu_rows)
    brought = on_acc - place.kept_parts
    streamed, in_place = (0, brought) if reads_in_place(unit.kind, tokens) else (brought, 0)
    return LayerExperts(unit.layer, place.kept_parts, streamed, in_place, place.cpu_rows)


def _name_layers(layers: list[int]) -> str:
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
