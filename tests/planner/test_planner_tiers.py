"""Tiers that a workload hardly enters: what decoding has in VRAM must not make them slow."""

from functools import cache
from io import StringIO

import pytest
from golden.machines import find_machine
from golden.shapes import make_shape
from rich.console import Console

from pshard.plan import Variant
from pshard.planner.make_plan import plan_variant
from pshard.planner.prepare_ranks import prepare_ranks
from pshard.planner.price.draft import simulated_seconds
from pshard.planner.published.strategies import list_strategies, place_strategy
from pshard.planner.show_plan import print_explanation
from pshard.planner.tier_alone import TierAlone, compare_alone
from pshard.workload import Workload


@cache
def plan(model: str, machine: str, mib: int) -> Variant:
    return plan_variant(make_shape(model), find_machine(machine), Workload((mib,)))


@pytest.mark.parametrize(
    ("model", "machine", "mib"),
    [
        ("qwen3-32b", "rtx4060", 7000),
        pytest.param("qwen3-32b", "rtx4060", 12000, marks=pytest.mark.slow),
        pytest.param("llama3-8b", "rtx4060", 2500, marks=pytest.mark.slow),
        pytest.param("llama3-8b", "rtx5080", 4000, marks=pytest.mark.slow),
    ],
)
def test_no_tier_is_slower_than_a_published_strategy_for_that_tier_alone(model: str, machine: str, mib: int) -> None:
    """3% at most, also where decoding divides FFNs: their rows on the CPU are streamed for larger micro-batches."""
    (task,) = prepare_ranks(make_shape(model), find_machine(machine), Workload((mib,)))
    for tier, costs in zip(plan(model, machine, mib).ranks[0].tiers, task.costs, strict=True):
        for name in list_strategies(task.room.spec):
            alone = place_strategy(name, task.room, (tier.tokens,))
            if alone:
                best = simulated_seconds(task.room, alone.tiers[0], costs)
                assert tier.prediction.seconds <= 1.03 * best, (tier.tokens, name)


def test_what_decoding_divides_is_used_by_prompts_too() -> None:
    """The rows in VRAM stay there, and only the others are copied: a tier of 128 tokens streams no FFN whole that
    decoding has in VRAM in part."""
    (rank,) = plan("qwen3-32b", "rtx4060", 7000).ranks
    decode, prompt = rank.covering(1), rank.covering(128)
    partly = [p.unit for p in decode.placements if p.where == "pinned" and p.cpu_rows]
    kept = [p.unit for p in prompt.placements if p.kept_parts]
    assert partly and set(kept) <= set(partly) and len(kept) > len(partly) // 2
    beside = prompt.buffers.scratch + prompt.buffers.slots * prompt.buffers.slot_bytes  # what it needs more
    assert prompt.buffers.pinned + beside > 0.98 * decode.buffers.pinned


def test_a_tier_that_is_slower_than_alone_says_what_the_switch_would_cost() -> None:
    """Prompts of 16 and 128 tokens want other units in VRAM than decoding, which bringing in takes longer than it
    wins."""
    spec, profile = make_shape("llama3-8b"), find_machine("rtx4060")
    variant = plan("llama3-8b", "rtx4060", 4000)
    found = compare_alone(spec, profile, Workload((4000,)), variant)
    assert [each.tokens for each in found] == [tier.tokens for tier in variant.ranks[0].tiers[1:]]
    assert all(each.over >= 0 for each in found)  # alone it may be as it is in the plan
    slow = [each for each in found if each.over > 0.1]
    assert slow and not any(each.worth_a_switch for each in slow)
    console = Console(file=StringIO(), width=300)
    print_explanation(variant, (), found, console)
    for each in slow:
        assert f"tier {each.tokens} shares VRAM with the other tiers: {each.over:.0%} slower" in console.file.getvalue()
    assert "less than the" in slow[0].in_words()
    assert "less than" not in TierAlone(16, 2.0, 1.0, 0.5).in_words()
    assert TierAlone(16, 2.0, 1.0, -0.5).in_words().endswith("would take no longer than the plan's own")


@pytest.mark.slow  # of one text above
def test_a_tier_alone_is_planned_without_the_others_and_with_its_own_load() -> None:
    """Of a server's load too: as many texts at a time as the tier is for, each with its share of the cells."""
    spec, profile = make_shape("qwen3-30b-a3b"), find_machine("h100")
    workload = Workload((6000,), context=4096, sequences=2, prompt=128, concurrency=2, max_ubatch=16)
    variant = plan_variant(spec, profile, workload)
    found = compare_alone(spec, profile, workload, variant)
    assert [each.tokens for each in found] == [tier.tokens for tier in variant.ranks[0].tiers[1:]]
    assert any(each.over > 0 for each in found) and all(each.over >= 0 for each in found)
    for each, tier in zip(found, variant.ranks[0].tiers[1:]):
        assert each.seconds == pytest.approx(tier.prediction.seconds)
