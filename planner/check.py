"""Checks a finished variant with code that the solver and the search do not use. Slow and obvious."""

from pshard import buffers
from pshard.model import ModelSpec
from pshard.plan import RankPlan, TierPlan, Variant

LEGAL: dict[str, set[tuple[str, str | None]]] = {
    "embedding": {("cpu", None), ("pinned", None)},
    "attention": {
        ("pinned", "vram"), ("pinned", "host"), ("streamed", "vram"), ("streamed", "host"), ("cpu", "host"),
    },
    "ffn": {("pinned", None), ("streamed", None), ("cpu", None)},
    "output": {("pinned", None), ("streamed", None), ("cpu", None)},
}  # fmt: skip


class PlanError(ValueError):
    """A plan breaks a rule; the message names it."""


def check_variant(specs: tuple[ModelSpec, ...], variant: Variant, kind: str) -> None:
    """Raise PlanError unless every rank's plan of its slice is legal, complete, honest and within its budget.

    specs: the ranks' slices of the model. kind: "cuda" or "cpu".
    """
    if len(specs) != len(variant.ranks) or len(variant.vram_mib) != len(variant.ranks):
        raise PlanError(f"{len(variant.ranks)} rank plans for {len(specs)} slices and {len(variant.vram_mib)} budgets")
    for spec, rank in zip(specs, variant.ranks):
        tokens = [t.tokens for t in rank.tiers]
        if not tokens or tokens != sorted(set(tokens)) or tokens[-1] != variant.max_ubatch:
            raise PlanError(f"rank {rank.rank}: tiers {tokens} do not ascend to {variant.max_ubatch}")
        for tier in rank.tiers:
            _check_tier(spec, variant, rank, tier, kind)
        _check_prefixes(spec, rank)


def _check_prefixes(spec: ModelSpec, rank: RankPlan) -> None:
    """Pins and KV in VRAM of every tier are prefixes of the rank's orders, so that residency never moves."""
    for name, order, sets in (
        ("pin", rank.pin_order, [{p.unit for p in t.placements if p.where == "pinned"} for t in rank.tiers]),
        ("KV", rank.kv_order, [{p.unit for p in t.placements if p.kv == "vram"} for t in rank.tiers]),
    ):
        if len(set(order)) != len(order):
            raise PlanError(f"rank {rank.rank}: the {name} order names a unit twice")
        for tier, units in zip(rank.tiers, sets):
            if set(order[: len(units)]) != units:
                raise PlanError(f"rank {rank.rank}, tier {tier.tokens}: {name} residency is not a prefix of the order")


def _check_tier(spec: ModelSpec, variant: Variant, rank: RankPlan, tier: TierPlan, kind: str) -> None:
    where = f"rank {rank.rank}, tier {tier.tokens}"
    if [p.unit for p in tier.placements] != [u.name for u in spec.units]:
        raise PlanError(f"{where}: placements are not the model's units, each once, in order")
    for unit, place in zip(spec.units, tier.placements):
        if (place.where, place.kv) not in LEGAL[unit.kind]:
            raise PlanError(f"{where}: {unit.name} cannot be {place.where} with KV {place.kv}")
    act, w = 2 if kind == "cuda" else 4, variant
    by_name = {u.name: u for u in spec.units}
    pinned = sum(by_name[p.unit].packed_nbytes for p in tier.placements if p.where == "pinned")
    streamed = [by_name[p.unit].packed_nbytes for p in tier.placements if p.where == "streamed"]
    layer = buffers.kv_layer_bytes(spec.config, w.context, w.sequences, w.type_k, w.type_v)
    kv = layer * sum(p.kv == "vram" for p in tier.placements)
    scratch = buffers.scratch_bytes(spec, tier.tokens, w.sequences, act, w.context)
    if any(p.kv == "host" and p.where != "cpu" for p in tier.placements):
        scratch += buffers.kv_stage_bytes(spec.config, w.context, w.sequences, w.type_k, w.type_v)
    b = tier.buffers
    for name, said, is_ in (("pinned", b.pinned, pinned), ("KV", b.kv, kv), ("scratch", b.scratch, scratch)):
        if said != is_:
            raise PlanError(f"{where}: buffers say {said} bytes of {name}, the placements need {is_}")
    if streamed and (b.slots < 1 or b.slot_bytes < max(streamed)):
        raise PlanError(f"{where}: {b.slots} slots of {b.slot_bytes} bytes do not hold what is streamed")
    arena = buffers.arena_bytes(rank.budget_mib, kind)
    if pinned + kv + scratch + b.slots * b.slot_bytes > arena:
        raise PlanError(f"{where}: {b.total} bytes are over the arena of {arena}")
    if not 0 < tier.prediction.bound_seconds <= tier.prediction.seconds:
        raise PlanError(f"{where}: predicted {tier.prediction.seconds} s is below its bound")
