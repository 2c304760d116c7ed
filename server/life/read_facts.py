"""What of a plan the scheduler decides by, and what people are told of it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pshard.batch_sizes import SMALL_BATCH
from pshard.machine import MachineProfile
from pshard.model import ModelSpec
from pshard.plan import TierPlan, Variant
from pshard.planner.serving.promise import promise_times
from pshard.planner.serving.step_times import StepTimes, time_steps
from pshard.predicted_times import decode_rate, first_token_seconds, tier_seconds
from pshard.routing.followed import under_plan
from pshard.runtime.speculation.speculator import DraftSettings
from pshard.server.scheduling.served_machine import PlanFacts
from pshard.server.snapshot import BudgetRate, PlanInForce, TierNow
from pshard.speculation import NONE
from pshard.units.kv_cells import longest_sequence
from pshard.workload import Workload


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
        times=time_steps(under_plan(spec, variant), profile, variant),
        busy={tokens: plans[tokens].prediction.busy for tokens in tiers},
        swept=variant.ranks[0].tiers[-1].most_swept,
    )


def keep_one_tier(facts: PlanFacts) -> PlanFacts:
    """Facts by which every step, of prompts too, runs in the same places with the same kernels: under the largest tier
    whose steps are small batches. A text then has the same bits alone and in company, where the rows of these kernels
    do not depend on how many there are."""
    (tier,) = served_tiers(facts.tiers, deterministic=True)
    place = facts.tiers.index(tier)
    shown = replace(
        facts.shown,
        sequences=min(facts.sequences, tier),
        tiers=tuple(known for known in facts.shown.tiers if known.tokens == tier),
    )
    return replace(
        facts,
        tiers=(tier,),
        seconds=(facts.seconds[place],),
        sequences=min(facts.sequences, tier),
        shown=shown,
        times=StepTimes((facts.times.tiers[place],), ((0.0,),)),
        swept=1,
    )


def plan_drafts(facts: PlanFacts, drafts: DraftSettings) -> PlanFacts:
    """Facts of a server whose texts have drafts: so many a step as its largest step has rows for."""
    drafts = replace(drafts, most=min(drafts.most, facts.tiers[-1] - 1))
    return replace(facts, drafts=drafts, shown=replace(facts.shown, drafter=drafts.kind, drafts=drafts.most))


def allow_drafts(facts: PlanFacts, rows: int) -> PlanFacts:
    """Facts of an engine in which drafts of a step can have so many rows, see `TextPool.most_rows`."""
    if rows > 1 or not facts.drafts.most:
        return replace(facts, open_rows=rows)
    why = "no drafts: their rows cannot be held back from the model's states"
    shown = replace(facts.shown, drafter=NONE, drafts=0, notes=(*facts.shown.notes, why))
    return replace(facts, drafts=DraftSettings(), shown=shown)


def limit_sweeps(facts: PlanFacts, most: int) -> PlanFacts:
    """Facts of an engine whose steps have so many micro-batches at most, see `TextPool.most_swept`."""
    if most >= facts.swept:
        return facts
    return replace(facts, swept=most, times=replace(facts.times, sweep=facts.times.sweep if most > 1 else ()))


def served_tiers(tiers: Sequence[int], deterministic: bool) -> tuple[int, ...]:
    """Of a plan's tiers, by their tokens, those that steps run under: all, or the largest one of small batches."""
    if not deterministic:
        return tuple(tiers)
    return (max(tokens for tokens in tiers if tokens <= SMALL_BATCH or tokens == tiers[0]),)


def add_promise(facts: PlanFacts, workload: Workload, gap: float) -> PlanFacts:
    """Facts with what the plan is predicted to give to its load; gap: seconds that steps with prompts keep."""
    return replace(facts, shown=replace(facts.shown, promise=promise_times(workload, facts.times, gap)))


def rate_budgets(variants: Mapping[int, Variant]) -> tuple[BudgetRate, ...]:
    """What the plan of each budget is predicted to give to one request alone."""
    return tuple(
        BudgetRate(mib, v.workload.prompt_tokens, first_token_seconds(v), decode_rate(v))
        for mib, v in sorted(variants.items())
    )


def _show_tier(tier: TierPlan, seconds: float) -> TierNow:
    return TierNow(tier.tokens, 1e3 * seconds, 1e3 * seconds, 0, tier.prediction.binds)
