"""Layers with a window cost and hold what the window does, however long the context is."""

from dataclasses import replace

import pytest
from planner_cases import DESKTOP, OWN
from toy_kinds import WINDOW, ToyFile

from pshard.batch import Batch
from pshard.model import ModelSpec
from pshard.planner.check_plan import check_variant
from pshard.planner.make_plan import plan_variant
from pshard.planner.price.datasheet import profile_from_datasheet
from pshard.planner.price.price_operations import OneSide, price_operations
from pshard.planner.price.profile_tables import Tables
from pshard.planner.price.tier_loads import TierLoad
from pshard.planner.price.unit_costs import Setting, unit_cost
from pshard.units.attention import WINDOWED_ATTENTION
from pshard.units.operations import Attend
from pshard.units.state import StateShape
from pshard.workload import Workload

PROFILE = profile_from_datasheet(DESKTOP)
HEADS = (64, 8, 64)


def seconds(window: int, tokens: int, past: int, side: str, sequences: int = 1) -> float:
    load = TierLoad(Batch.even(tokens, sequences, past))
    return price_operations([Attend(*HEADS, window)], OneSide(side, Tables(PROFILE), load, tokens, "bf16"))


@pytest.mark.parametrize("side", ["acc", "host"])
@pytest.mark.parametrize(("tokens", "sequences"), [(1, 1), (16, 16), (4, 1), (64, 1), (512, 1), (4096, 1), (512, 4)])
def test_attention_over_a_window_takes_as_long_in_any_context(side: str, tokens: int, sequences: int) -> None:
    first, *others = (seconds(128, tokens, past, side, sequences) for past in (128, 4096, 131072))
    assert others == [first, first]
    assert first < seconds(0, tokens, 131072, side, sequences) / 3


@pytest.mark.parametrize("side", ["acc", "host"])
@pytest.mark.parametrize("tokens", [1, 16, 512])
def test_a_window_that_holds_all_costs_what_all_does(side: str, tokens: int) -> None:
    assert seconds(1 << 20, tokens, 1000, side) == pytest.approx(seconds(0, tokens, 1000, side))


def test_long_prompts_take_longer_by_their_tokens_and_not_by_pairs_of_them() -> None:
    assert seconds(128, 4096, 0, "acc") < 1.2 * 4096 / 1024 * seconds(128, 1024, 0, "acc")


@pytest.mark.parametrize("side", ["acc", "host"])
def test_a_prompt_sees_its_window_and_the_tokens_that_are_attended_with_it(side: str) -> None:
    """Not so much more of a window: 1152 and 256 cells a token."""
    large, small = (seconds(window, 2048, 131072, side) for window in (1024, 128))
    assert large / small == pytest.approx((1024 + 128) / (128 + 128), rel=0.1)


def make_spec(context: int) -> ModelSpec:
    spec = ToyFile("wawa", d_model=256, d_ffn=1024).spec
    return replace(spec, config=replace(spec.config, context=context))


def test_what_crosses_the_link_and_what_the_cpu_reads_is_the_window() -> None:
    spec = make_spec(1 << 17)
    workload = Workload((1000,), context=1 << 17, prompt=100000, generated=100)
    setting = Setting(spec, Tables(PROFILE), TierLoad(Batch.even(1, 1, 100000)), workload)
    windowed, whole = (unit_cost(spec.unit(f"blk.{i}.attention"), setting) for i in (0, 1))
    cell = 2 * 2 * 32
    assert whole.kv_fetch_bytes == 100000 * cell
    assert WINDOW * cell - cell <= windowed.kv_fetch_bytes < (WINDOW + 64) * cell
    assert windowed.cpu_reads < whole.cpu_reads - 99000 * cell


@pytest.mark.quick("40")
@pytest.mark.parametrize("arena", [9, 12, 40])
def test_plans_count_what_is_really_held(arena: int) -> None:
    spec = make_spec(1 << 15)
    workload = Workload((OWN + arena,), context=1 << 15, max_ubatch=128, prompt=20000, generated=200)
    variant = plan_variant(spec, PROFILE, workload)
    check_variant((spec,), variant, "cuda")
    sizes = spec.state_sizes(StateShape(1 << 15, 1, "bf16", "bf16", 128))
    for tier in variant.ranks[0].tiers:
        assert tier.buffers.kv == sum(sizes[p.unit] for p in tier.placements if p.kv == "vram")
    windowed = [u.name for u in spec.units if u.kind is WINDOWED_ATTENTION]
    assert all(sizes[name] < sizes["blk.1.attention"] / 20 for name in windowed)
