"""Where a tier has experts of a layer, and what share of the choices each place is expected to serve, and did."""

from dataclasses import dataclass

import numpy as np

from pshard.model import ModelSpec
from pshard.plan import Placement, RankPlan, TierPlan
from pshard.planner.price.experts.expert_uses import Uses, chosen_share
from pshard.routing.record import RoutingRecord
from pshard.units.divide_unit import count_shares
from pshard.units.unit import Unit


@dataclass(frozen=True)
class ExpertPlaces:
    """So many layers with as many experts in VRAM, over the link, and on the CPU, and the shares of their choices that
    each place is expected to serve."""

    layers: int
    counts: tuple[int, int, int]
    shares: tuple[float, float, float]


def list_expert_places(spec: ModelSpec, tier: TierPlan) -> tuple[ExpertPlaces, ...]:
    """Layers with as many experts in each place together, those with most in VRAM first. spec: what the rank holds."""
    alike: dict[tuple[int, int, int], list[tuple[float, float, float]]] = {}
    for unit in _list_experts(spec):
        counts = count_places(unit, tier.placement(unit.name))
        uses = spec.popularity.uses_of(unit.layer) if spec.popularity else ()
        alike.setdefault(counts, []).append(_share(counts, uses))
    return tuple(ExpertPlaces(len(alike[counts]), counts, _mean(alike[counts])) for counts in sorted(alike)[::-1])


def count_places(unit: Unit, place: Placement) -> tuple[int, int, int]:
    """How many of a unit's parts are in VRAM, come over the link, and are the CPU's; in this order of its places."""
    total, cpu = count_shares(unit), place.cpu_rows
    if place.where == "cpu":
        return 0, 0, total
    kept = total - cpu if place.where == "pinned" else place.kept_parts
    return kept, total - cpu - kept, cpu


def expect_hits(spec: ModelSpec, tier: TierPlan) -> float:
    """The share of all layers' choices that experts in VRAM are expected to serve."""
    places = list_expert_places(spec, tier)
    return sum(p.layers * p.shares[0] for p in places) / sum(p.layers for p in places)


def measure_hits(record: RoutingRecord, spec: ModelSpec, plan: RankPlan) -> float | None:
    """The share that they did serve in a run's micro-batches of the smallest tier; None where it ran none.

    spec: the model in the run's order of experts.
    """
    tier, ends = plan.tiers[0], np.cumsum(record.batches)
    decoded = [np.arange(end - n, end) for n, end in zip(record.batches, ends) if n <= tier.tokens]
    if not decoded:
        return None
    ids, hits = record.ids[np.concatenate(decoded)], 0
    for i, unit in enumerate(_list_experts(spec)):
        in_vram = count_places(unit, tier.placement(unit.name))[0]
        numbers = unit.order or tuple(range(record.experts))
        hits += int(np.isin(ids[:, i], numbers[:in_vram]).sum())
    return hits / ids.size


def _list_experts(spec: ModelSpec) -> list[Unit]:
    return [unit for unit in spec.units if unit.kind.parts and unit.tensors]


def _mean(shares: list[tuple[float, float, float]]) -> tuple[float, float, float]:
    kept, brought, cpu = (sum(each) / len(shares) for each in zip(*shares))
    return kept, brought, cpu


def _share(counts: tuple[int, int, int], uses: Uses) -> tuple[float, float, float]:
    """Of the choices, by place: the first experts are in VRAM, the next come over the link, the last are the CPU's."""
    kept, brought, cpu = counts
    of = kept + brought + cpu
    ends = range(kept), range(kept, kept + brought), range(kept + brought, of)
    first, second, third = (chosen_share(places, of, uses) for places in ends)
    return first, second, third
