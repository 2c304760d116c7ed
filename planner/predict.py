"""Predicted time of a bench test: its very micro-batches, each simulated under the tier that will run it."""

from collections.abc import Sequence

from pshard.machine import MachineProfile
from pshard.model import ModelSpec
from pshard.plan import Variant
from pshard.planner.costs import Tables, tier_costs
from pshard.planner.load import TierLoad
from pshard.planner.simulate import simulate_together
from pshard.steps import StepShape, emit_steps

SAMPLED_STEPS = 5  # decode steps that are simulated; their mean stands for all, as time grows evenly with the context


class Predictor:
    """Predicts micro-batches of a variant on a machine, with its correction. `specs` has the slice of every rank."""

    def __init__(self, specs: Sequence[ModelSpec], profile: MachineProfile, variant: Variant) -> None:
        self._specs, self._tables, self._variant = specs, Tables(profile, variant.correction), variant

    def micro_batch(self, tokens: int, sequences: int, past: int) -> float:
        """Seconds of one micro-batch in the steady state: `past` cells of each sequence; ranks wait for each other."""
        load = TierLoad(tokens, sequences, past, sequences, 1.0)
        v = self._variant
        shape = StepShape(tokens, sequences * past, sequences, v.type_k, v.type_v, len(v.ranks))
        steps = [emit_steps(spec, rank.covering(tokens), shape) for spec, rank in zip(self._specs, v.ranks)]
        costs = [
            tier_costs(spec, self._tables.of_accelerator(i), load, v.workload, len(v.ranks))
            for i, spec in enumerate(self._specs)
        ]
        return simulate_together(steps, costs)[0].seconds

    def prefill(self, tokens: int, sequences: int = 1, depth: int = 0) -> float:
        """Seconds to prefill `tokens` tokens of each sequence after `depth` cells, in the engine's micro-batches."""
        total, largest = tokens * sequences, self._variant.ranks[0].tiers[-1].tokens
        seconds, done = 0.0, 0
        while done < total:
            take = min(largest, total - done)
            at_once = max(1, min(sequences, -(-take // tokens)))
            past = depth + (done % tokens if sequences > 1 else done)
            seconds += self.micro_batch(take, at_once, past if at_once == 1 else depth)
            done += take
        return seconds

    def decode(self, tokens: int, sequences: int = 1, depth: int = 0) -> float:
        """Seconds to decode `tokens` tokens of each sequence, one step after the other, from `depth` cells on."""
        n = min(tokens, SAMPLED_STEPS)
        pasts = [depth + (2 * i + 1) * tokens // (2 * n) for i in range(n)]
        return tokens * sum(self.micro_batch(sequences, sequences, past) for past in pasts) / n
