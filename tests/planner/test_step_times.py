"""Seconds of a server's steps under a plan: as stored where they were predicted, rising with what a step does."""

import pytest
from golden.machines import find_machine
from golden.shapes import make_shape
from hypothesis import strategies as st
from planner_cases import few_or_many, machines, models, try_cases, workloads

from pshard.cuts.rank_parts import cut_ranks
from pshard.errors import BudgetTooSmall
from pshard.machine import MachineProfile
from pshard.model import ModelSpec
from pshard.plan import Variant
from pshard.planner.make_plan import plan_variant
from pshard.planner.price.datasheet import profile_from_datasheet
from pshard.planner.price.predict_published import Predictor
from pshard.planner.price.tier_loads import tier_loads
from pshard.planner.serving.step_times import time_steps
from pshard.workload import Workload


@pytest.fixture(scope="module", name="plan")
def _plan() -> tuple[ModelSpec, MachineProfile, Variant]:
    """A model of which most is streamed, for four texts."""
    spec, profile = make_shape("llama3-8b", "Q4_0"), find_machine("rtx4060")
    return spec, profile, plan_variant(spec, profile, Workload((2500,), 16384, 4, max_ubatch=1024, prompt=1024))


def test_a_full_step_takes_what_is_stored_with_its_tier(plan):
    times = time_steps(*plan)
    tiers = plan[2].ranks[0].tiers
    loads = tier_loads(plan[2].workload, tuple(t.tokens for t in tiers))
    for tier, load in zip(tiers, loads, strict=True):
        if load.is_decode:
            seconds = times.seconds(load.tokens, load.tokens * load.past)
        elif load.sequences == 1:
            seconds = times.seconds(0, 0, load.tokens, load.past)
        else:
            continue
        assert seconds == pytest.approx(tier.prediction.seconds, rel=1e-9)


def test_decodes_at_other_depths_take_what_a_simulation_of_them_says(plan):
    spec, profile, variant = plan
    times, predictor = time_steps(*plan), Predictor(cut_ranks(spec, variant.split), profile, variant)
    for texts, depth in ((1, 100), (1, 9000), (4, 300), (4, 3000), (3, 1024)):
        assert times.seconds(texts, texts * depth) == pytest.approx(predictor.micro_batch(texts, texts, depth), rel=0.1)


def test_decodes_beside_a_prompt_cost_no_more_than_a_step_of_their_own(plan):
    times = time_steps(*plan)
    alone = times.seconds(0, 0, 500)
    together = times.seconds(4, 4096, 500)
    assert alone <= together <= alone + times.seconds(4, 4096)


def test_a_switch_costs_the_bytes_that_come_in(plan):
    times = time_steps(*plan)
    first, last = plan[2].ranks[0].tiers[0], plan[2].ranks[0].tiers[-1]
    assert times.switch_seconds(1, 1) == times.switch_seconds(900, 1024) == 0
    assert sum(p.in_arena for p in first.placements) > sum(p.in_arena for p in last.placements)
    assert 0 < times.switch_seconds(1024, 1) < 1
    assert times.switch_seconds(1024, 1) > times.switch_seconds(1, 1024)


def test_steps_that_no_tier_covers_are_refused(plan):
    times = time_steps(*plan)
    for tokens in (0, 1025):
        with pytest.raises(ValueError, match=f"no tier covers {tokens} tokens; the largest is 1024"):
            times.seconds(0, 0, tokens)


@few_or_many
def test_a_step_never_takes_less_for_more_cells_or_more_tokens_of_its_tier(cases):
    def check(data) -> None:
        spec, profile = data.draw(models(4)), profile_from_datasheet(data.draw(machines()))
        try:
            plan_variant(spec, profile, Workload((1,), 128, prompt=64, generated=32, max_ubatch=16))
            least = 1
        except BudgetTooSmall as error:
            least = error.smallest_mib
        workload = data.draw(workloads(spec, least))
        try:
            variant = plan_variant(spec, profile, workload)
        except BudgetTooSmall:
            return
        times, below = time_steps(spec, profile, variant), 0
        for tier in variant.ranks[0].tiers:
            decodes = min(tier.tokens, workload.sequences)
            few, many = (data.draw(st.integers(0, workload.context)) for _ in range(2))
            few, many = sorted((few, many))
            rest = tier.tokens - decodes
            assert 0 < times.seconds(decodes, few, rest) <= times.seconds(decodes, many, rest)
            assert times.seconds(decodes, 0, rest, few) <= times.seconds(decodes, 0, rest, many)
            assert times.seconds(0, 0, below + 1) <= times.seconds(0, 0, tier.tokens)
            below = tier.tokens

    try_cases(cases, check, st.data())
