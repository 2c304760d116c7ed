"""What of a plan the scheduler decides by, and what people are told of it."""

from collections.abc import Sequence
from dataclasses import replace

from pshard.batch_sizes import SMALL_BATCH
from pshard.machine import MachineProfile
from pshard.model import ModelSpec
from pshard.plan import TierPlan, Variant
from pshard.planner.price.profile_tables import Tables
from pshard.server.scheduling.served_machine import PlanFacts
from pshard.server.snapshot import PlanInForce, TierNow
from pshard.times.predicted_times import tier_seconds
from pshard.units.divide_unit import arena_portion
from pshard.units.kv_cells import longest_sequence
from pshard.units.moe.followed import under_plan


def read_facts(
    spec: ModelSpec, profile: MachineProfile, variant: Variant, budgets: tuple[int, ...], notes: tuple[str, ...]
) -> PlanFacts:
    """Facts of a variant. budgets: of the plans that there are; notes: of the engine that runs it."""
    seconds, workload = tier_seconds(variant), variant.workload
    tiers = tuple(sorted(seconds))
    plans = {tier.tokens: tier for tier in variant.ranks[0].tiers}
    longest = longest_sequence(spec.config, workload.context)
    return PlanFacts(
        tiers=tiers,
        seconds=tuple(seconds[tokens] for tokens in tiers),
        sequences=min(workload.sequences, tiers[-1]),  # a step has a token of each
        longest=longest,
        vocab=spec.config.vocab,
        shown=PlanInForce(
            vram_mib=workload.vram_mib,
            context=workload.context,
            longest=longest,
            sequences=min(workload.sequences, tiers[-1]),
            type_k=workload.type_k,
            type_v=workload.type_v,
            split_mode=workload.split_mode,
            way=f"{sum(workload.vram_mib)} MiB, {variant.way}, {variant.terms}",
            tiers=tuple(_show_tier(plans[tokens], seconds[tokens]) for tokens in tiers),
            budgets=budgets,
            notes=notes,
        ),
        switch=price_switches(under_plan(spec, variant), profile, variant),
        busy={tokens: plans[tokens].prediction.busy for tokens in tiers},
    )


def keep_one_tier(facts: PlanFacts) -> PlanFacts:
    """Facts by which every step, of prompts too, runs in the same places with the same kernels: under the largest tier
    whose steps are small batches. A text then has the same bits alone and in company, where the rows of these kernels
    do not depend on how many there are."""
    tier = max(tokens for tokens in facts.tiers if tokens <= SMALL_BATCH or tokens == facts.tiers[0])
    shown = replace(
        facts.shown,
        sequences=min(facts.sequences, tier),
        tiers=tuple(known for known in facts.shown.tiers if known.tokens == tier),
    )
    return replace(
        facts,
        tiers=(tier,),
        seconds=(facts.seconds[facts.tiers.index(tier)],),
        sequences=min(facts.sequences, tier),
        shown=shown,
        switch={},
    )


def _show_tier(tier: TierPlan, seconds: float) -> TierNow:
    return TierNow(tier.tokens, 1e3 * seconds, 1e3 * seconds, 0, tier.prediction.binds)


def price_switches(spec: ModelSpec, profile: MachineProfile, variant: Variant) -> dict[tuple[int, int], float]:
    """Seconds of going from each tier to each other: what the new one has in VRAM that the old one has not passes the
    link, and so does half of a full KV cache where it changes sides.

    Of several ranks the first: they go at the same time, with parts of like size.
    """
    tiers, tables = variant.ranks[0].tiers, Tables(profile, variant.correction)
    held = {tier.tokens: _held_bytes(spec, tier) for tier in tiers}
    shape, share = variant.workload.state_shape, variant.ranks[0].share
    states = {unit.name: share * unit.state_nbytes(spec.config, shape) / 2 for unit in spec.units if unit.kind.state}
    sides = {tier.tokens: {p.unit: p.kv for p in tier.placements} for tier in tiers}
    costs = {}
    for old in held:
        for new in held:
            if old == new:
                continue
            weights = sum(max(0, n - held[old].get(name, 0)) for name, n in held[new].items())
            cells = sum(n for name, n in states.items() if sides[old].get(name) != sides[new].get(name))
            costs[old, new] = (share * weights + cells) / tables.link_rate
    return costs


def _held_bytes(spec: ModelSpec, tier: TierPlan) -> dict[str, int]:
    """Bytes that each unit has in the arena."""
    units: Sequence = spec.units
    known = {p.unit: p for p in tier.placements}
    portions = {
        unit.name: arena_portion(unit, known[unit.name].where, known[unit.name].share)
        for unit in units
        if unit.name in known and known[unit.name].in_arena
    }
    return {name: portion.nbytes for name, portion in portions.items() if portion}
