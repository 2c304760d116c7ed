"""Predicted time of a bench test: its very micro-batches, each simulated under the tier that will run it."""

from collections.abc import Sequence
from dataclasses import replace

from pshard.batch import Batch
from pshard.cuts.layer_cuts import join_seconds
from pshard.machine import MachineProfile
from pshard.model import ModelSpec
from pshard.plan import Variant
from pshard.planner.price.page_locks import staged_units
from pshard.planner.price.profile_tables import Tables
from pshard.planner.price.simulate import simulate_ranks
from pshard.planner.price.tier_costs import tier_costs
from pshard.planner.price.tier_loads import TierLoad
from pshard.steps.emit import emit_steps
from pshard.steps.step import StepShape

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

    def micro_batch(self, tokens: int, sequences: int, past: int) -> float:
        """Seconds of one micro-batch in the steady state, `past` cells of each sequence; ranks wait for each other, or
        come one after the other where they hold different layers."""
        return join_seconds(self._variant.workload.split_mode, [self.rank_seconds(Batch.even(tokens, sequences, past))])

    def rank_seconds(self, batch: Batch, under: int = 0) -> list[float]:
        """Seconds of a micro-batch of texts that are alike on every rank. under: tokens by which the tier is chosen,
        where they are more."""
        load = TierLoad(batch)
        v, w = self._variant, self._variant.workload
        on_host = self._tables.kind == "cpu"
        shape = StepShape(
            load.tokens, load.sequences * load.past, load.logit_rows, load.sequences, w.type_k, w.type_v, len(v.ranks),
            on_host,
        )  # fmt: skip
        tiers = [rank.covering(max(load.tokens, under)) for rank in v.ranks]
        specs = [
            replace(spec, caches=tuple(cache for cache in rank.caches if tier.tokens <= cache.tokens))
            for spec, rank, tier in zip(self._specs, v.ranks, tiers)
        ]
        steps = [emit_steps(spec, tier, shape) for spec, tier in zip(specs, tiers)]
        costs = [
            tier_costs(spec, self._tables.of_accelerator(w.device + i), load, w, len(v.ranks), self._staged[i])
            for i, spec in enumerate(specs)
        ]
        return [result.seconds for result in simulate_ranks(w.split_mode, steps, costs)]

    def prefill(self, tokens: int, sequences: int = 1, depth: int = 0) -> float:
        """Seconds to prefill `tokens` tokens of each sequence after `depth` cells, in the engine's micro-batches."""
        total, largest = tokens * sequences, self._variant.ranks[0].tiers[-1].tokens
        batches, done = [], 0
        while done < total:
            take = min(largest, total - done)
            at_once = max(1, min(sequences, -(-take // tokens)))
            past = depth + (done % tokens if sequences > 1 else done)
            batches.append(self.rank_seconds(Batch.even(take, at_once, past if at_once == 1 else depth)))
            done += take
        return join_seconds(self._variant.workload.split_mode, batches)

    def decode(self, tokens: int, sequences: int = 1, depth: int = 0) -> float:
        """Seconds to decode `tokens` tokens of each sequence, one step after the other, from `depth` cells on."""
        n = min(tokens, SAMPLED_STEPS)
        pasts = [depth + (2 * i + 1) * tokens // (2 * n) for i in range(n)]
        return tokens * sum(self.micro_batch(sequences, sequences, past) for past in pasts) / n
