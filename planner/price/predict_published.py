"""Predicted time of a bench test: its very micro-batches, each simulated under the tier that will run it."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from pshard.batch import DECODE, VERIFY, Batch
from pshard.cuts.layer_cuts import join_seconds
from pshard.machine import MachineProfile
from pshard.model import ModelSpec
from pshard.plan import Variant
from pshard.planner.price.page_locks import staged_units
from pshard.planner.price.profile_tables import Tables
from pshard.planner.price.simulate import simulate_ranks, simulate_seconds
from pshard.planner.price.tier_costs import TierCosts, tier_costs
from pshard.planner.price.tier_loads import TierLoad
from pshard.speculation import PROGRAMS
from pshard.steps.emit import emit_steps
from pshard.steps.step import StepList, StepShape
from pshard.steps.sweep import sweep_steps
from pshard.units.moe.expert_cache import ExpertCache

SAMPLED_STEPS = 5  # decode steps that are simulated; their mean stands for all, as time grows evenly with the context


class Predictor:
    """Predicts micro-batches of a variant on a machine, with its correction. `specs` has the slice of every rank."""

    def __init__(self, specs: Sequence[ModelSpec], profile: MachineProfile, variant: Variant) -> None:
        self._specs, self._tables, self._variant = specs, Tables(profile, variant.correction), variant
        here = profile.ranks_here(len(variant.ranks))
        self._staged = [
            staged_units(spec, rank, variant.workload, profile.lockable_bytes, here)
            for spec, rank in zip(specs, variant.ranks)
        ]

    def micro_batch(self, tokens: int, sequences: int, past: int, kind: str = "") -> float:
        """Seconds of one micro-batch in the steady state, `past` cells of each sequence; ranks wait for each other, or
        come one after the other where they hold different layers. kind: see `Batch.even`."""
        batch = Batch.even(tokens, sequences, past, kind)
        return join_seconds(self._variant.workload.split_mode, [self.rank_seconds(batch)])

    def rank_seconds(self, batch: Batch, under: int = 0) -> list[float]:
        """Seconds of a micro-batch of texts that are alike on every rank. under: tokens by which the tier is chosen,
        where they are more."""
        steps, costs = self._price(batch, under)
        return [result.seconds for result in simulate_ranks(self._variant.workload.split_mode, steps, costs)]

    def sweep_seconds(self, batch: Batch, batches: int) -> float:
        """Seconds of so many such micro-batches of the largest tier in one sweep, on the only rank."""
        last = self._variant.ranks[0].tiers[-1]
        (steps,), (costs,) = self._price(batch, last.tokens)
        return simulate_seconds(sweep_steps(self._specs[0], steps, last.tokens, batches), costs)

    def _price(self, batch: Batch, under: int) -> tuple[list[StepList], list[TierCosts]]:
        """Every rank's steps of a micro-batch, and what they cost."""
        load = TierLoad(batch)
        v, w = self._variant, self._variant.workload
        on_host = self._tables.kind == "cpu"
        tiers = [rank.covering(max(load.tokens, under)) for rank in v.ranks]
        specs = [
            replace(spec, caches=tuple(_list_used(rank.caches, tier.tokens)))
            for spec, rank, tier in zip(self._specs, v.ranks, tiers)
        ]
        costs = [
            tier_costs(spec, self._tables.of_accelerator(w.device + i), load, w, len(v.ranks), self._staged[i])
            for i, spec in enumerate(specs)
        ]
        shape = StepShape(
            load.tokens, load.sequences * load.past, load.logit_rows, load.sequences, w.type_k, w.type_v, len(v.ranks),
            on_host, apart=min(cost.setting.apart for cost in costs),
        )  # fmt: skip
        return [emit_steps(spec, tier, shape) for spec, tier in zip(specs, tiers)], costs

    def prefill(self, tokens: int, sequences: int = 1, depth: int = 0) -> float:
        """Seconds to prefill `tokens` tokens of each sequence after `depth` cells, in the engine's micro-batches: in
        sweeps where the plan has them."""
        total, last = tokens * sequences, self._variant.ranks[0].tiers[-1]
        if last.sweep and total > last.tokens and self._variant.workload.drafting.kind not in PROGRAMS:
            return self._prefill_in_sweeps(tokens, sequences, depth)
        batches, done = [], 0
        while done < total:
            take = min(last.tokens, total - done)
            at_once = max(1, min(sequences, -(-take // tokens)))
            past = depth + (done % tokens if sequences > 1 else done)
            batches.append(self.rank_seconds(Batch.even(take, at_once, past if at_once == 1 else depth)))
            done += take
        return join_seconds(self._variant.workload.split_mode, batches)

    def _prefill_in_sweeps(self, tokens: int, sequences: int, depth: int) -> float:
        """The same in sweeps; the micro-batches of each are taken to be alike."""
        total, last, seconds, done = tokens * sequences, self._variant.ranks[0].tiers[-1], 0.0, 0
        while done < total:
            batches = min(last.most_swept, -(-(total - done) // last.tokens))
            take = -(-min(last.tokens * batches, total - done) // batches)
            at_once = max(1, min(sequences, take // tokens))
            past = (done % tokens) + take * (batches - 1) // 2 if at_once == 1 else 0
            seconds += self.sweep_seconds(Batch.even(take, at_once, depth + past), batches)
            done += last.tokens * batches
        return seconds

    def decode(self, tokens: int, sequences: int = 1, depth: int = 0) -> float:
        """Seconds to decode `tokens` tokens of each sequence, one step after the other, from `depth` cells on."""
        return tokens * self._mean_step(sequences, sequences, tokens, depth, DECODE)

    def verify(self, rows: int, tokens: int, depth: int = 0) -> float:
        """Mean seconds of a step of so many rows, in which one text verifies drafts, while `tokens` tokens of it are
        told from `depth` cells on."""
        return self._mean_step(rows, 1, tokens, depth, VERIFY)

    def _mean_step(self, rows: int, sequences: int, tokens: int, depth: int, kind: str) -> float:
        n = min(tokens, SAMPLED_STEPS)
        pasts = [depth + (2 * i + 1) * tokens // (2 * n) for i in range(n)]
        return sum(self.micro_batch(rows, sequences, past, kind) for past in pasts) / n


def _list_used(caches: Iterable[ExpertCache], tokens: int) -> Iterator[ExpertCache]:
    """Slots that count under a tier of so many tokens, however few it has: their experts are found there, or slots that
    no tier follows spare it reading from disk."""
    for cache in caches:
        if tokens <= cache.tokens:
            yield cache
        elif cache.is_on_demand:
            yield replace(cache, tokens=0)
