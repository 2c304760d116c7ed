"""The largest micro-batch is the one with which the plan, and not its bound, brings the first token soonest."""

from dataclasses import replace

import pytest
from golden.machines import find_machine
from golden.shapes import make_shape

from pshard.planner.make_plan import plan_variant
from pshard.predicted_times import first_token_seconds
from pshard.workload import Workload

NEAR = 1.01  # of the fastest: a larger one may take so much longer


@pytest.mark.parametrize(
    ("model", "machine", "mib"),
    [
        pytest.param("deepseek-v2-lite", "rtx4060", 900, marks=pytest.mark.slow),
        ("llama3-8b", "rtx5080", 700),
    ],
)
def test_no_smaller_micro_batch_brings_the_first_token_sooner(model: str, machine: str, mib: int) -> None:
    """Where a slot for a layer's experts hardly fits beside the scratch, too: bounds let parts of one fit."""
    spec, profile, workload = make_shape(model), find_machine(machine), Workload((mib,))
    chosen = plan_variant(spec, profile, workload)
    smaller = [tier.tokens for tier in chosen.ranks[0].tiers[:-1] if tier.tokens >= 128]
    larger = [n for n in (1024, 2048, 4096) if n > chosen.workload.max_ubatch]
    for tokens in smaller[-1:] + larger[:1]:
        other = plan_variant(spec, profile, replace(workload, max_ubatch=tokens))
        assert first_token_seconds(chosen) <= NEAR * first_token_seconds(other), tokens
