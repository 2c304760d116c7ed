"""No tier of a plan is slower than it would be with what another tier does with all that is not in VRAM."""

from dataclasses import replace

import pytest
from golden.machines import find_machine
from golden.shapes import make_shape
from hypothesis import strategies as st
from planner_cases import DENSE, expert_rules, few_or_many, machines, models, try_cases, workloads
from test_planner_plans import smallest_budget

from pshard.machine import MachineProfile
from pshard.model import ModelSpec
from pshard.plan import RankPlan, TierPlan
from pshard.planner.make_plan import plan_variant
from pshard.planner.prepare_ranks import price_tiers
from pshard.planner.price.datasheet import profile_from_datasheet
from pshard.planner.price.draft import Room, draft_tier, simulated_seconds
from pshard.planner.price.host_limits import holds
from pshard.planner.price.profile_tables import find_tables
from pshard.planner.price.tier_costs import TierCosts
from pshard.planner.search.climb import TierSearch, TierState
from pshard.planner.search.residency_order import Residency
from pshard.planner.search.round_times import enter_seconds, plan_seconds
from pshard.workload import Workload

OVER = 0.01  # of a tier's time with the switch into it: what another tier's placements may save


def find_slow_tiers(spec: ModelSpec, profile: MachineProfile, workload: Workload) -> list[str]:
    """Tiers of the plan with which a round takes longer than with another tier's placements there, and one to three
    slots: by more than 1% of the time in that tier, with the switch into it."""
    variant = plan_variant(spec, profile, workload)
    (rank,), tokens = variant.ranks, tuple(tier.tokens for tier in variant.ranks[0].tiers)
    workload = replace(workload, max_ubatch=tokens[-1])
    (task,) = price_tiers(spec, find_tables(profile, variant.correction), workload, tokens)
    room, costs = task.room, task.costs
    seconds = [simulated_seconds(room, tier, cost) for tier, cost in zip(rank.tiers, costs)]
    now = plan_seconds(room, rank.tiers, seconds, costs)
    rest = next(tier for tier, cost in zip(rank.tiers, costs) if not cost.load.rare)
    found = []
    for i, cost in enumerate(costs):
        entered = enter_seconds(room, rest, rank.tiers[i], cost) if cost.load.rare else 0.0
        for lender in rank.tiers[:i] + rank.tiers[i + 1 :]:
            for tier in borrow(room, rank, lender, cost):
                tiers = [*rank.tiers[:i], tier, *rank.tiers[i + 1 :]]
                took = simulated_seconds(room, tier, cost)
                saved = now - plan_seconds(room, tiers, [*seconds[:i], took, *seconds[i + 1 :]], costs)
                if saved > OVER * cost.load.weight * (seconds[i] + entered) and holds(room, tiers):
                    slots = tier.buffers.slots
                    found.append(f"{cost.load.tokens} tokens: {seconds[i]} s, as {lender.tokens} with {slots}: {took}")
    return found


def borrow(room: Room, rank: RankPlan, lender: TierPlan, cost: TierCosts) -> list[TierPlan]:
    """A tier with the lender's placements as they are, and one to three slots, where that is legal and fits."""
    where = {p.unit: p.where for p in lender.placements}
    shares = {p.unit: p.share for p in lender.placements if p.share}
    kv = frozenset(p.unit for p in lender.placements if p.kv == "vram")
    by_rows = any(share.cpu and not room.spec.unit(unit).kind.parts for unit, share in shares.items())
    if by_rows and cost.load.tokens > 64:
        return []
    ways = [way.in_place for way in cost.ways]
    drafts = [draft_tier(room, cost.load.tokens, where, kv, slots, shares, way) for slots in (1, 2, 3) for way in ways]
    return [tier for tier in drafts if tier.buffers.total <= room.arena]


@few_or_many
def test_no_tier_would_be_faster_as_another_one_is(cases: int) -> None:
    def check(data: st.DataObject) -> None:
        spec, rates = data.draw(models(12, st.one_of(DENSE, expert_rules()))), data.draw(machines())
        profile = profile_from_datasheet(rates)
        least = smallest_budget(spec, profile, Workload((1,), context=2048, sequences=3, max_ubatch=16, prompt=64))
        assert find_slow_tiers(spec, profile, data.draw(workloads(spec, least))) == []

    try_cases(cases, check, st.data())


@pytest.mark.parametrize(
    ("model", "machine", "mib"),
    [
        ("deepseek-v2-lite", "rtx4060", 1273),
        pytest.param("qwen3-30b-a3b", "rtx4060", 1228, marks=pytest.mark.slow),
        pytest.param("qwen3.5-27b", "h100", 2212, marks=pytest.mark.slow),
        pytest.param("qwen3.5-35b-a3b", "h100", 6000, marks=pytest.mark.slow),
        pytest.param("qwen3-32b", "rtx5080", 7000, marks=pytest.mark.slow),
        pytest.param("qwen3-next-80b-a3b", "rtx5080", 6000, marks=pytest.mark.slow),
    ],
)
def test_no_tier_of_a_real_shape_would_be_faster_as_another_one_is(model: str, machine: str, mib: int) -> None:
    """Prompts shorter than the expected one, too: the round hardly enters their tiers."""
    assert find_slow_tiers(make_shape(model), find_machine(machine), Workload((mib,))) == []


@pytest.mark.slow
def test_rare_tiers_of_one_placement_for_unlike_ranks_stream_with_the_slots_that_suit_them():
    """Such a plan is made within the memory that all ranks have for it, anew: its rare tiers are searched like those
    of other plans."""
    profile = find_machine("h100")
    (gpu,) = profile.accelerators
    profile = replace(profile, accelerators=(gpu, replace(gpu, index=1)))
    wanted = Workload((9000, 6000), split_mode="tensor", tensor_split=(3.0, 2.0))
    spec = make_shape("qwen3-32b", "Q4_0")
    variant = plan_variant(spec, profile, wanted)
    tokens = tuple(tier.tokens for tier in variant.ranks[0].tiers)
    tasks = price_tiers(spec, find_tables(profile), variant.workload, tokens)
    (cost, task, rank) = next((c, tasks[0], variant.ranks[0]) for c in tasks[0].costs if c.load.tokens == 128)
    assert cost.load.rare
    order = Residency(rank.pin_order, rank.kv_order)
    search, none = TierSearch(task.room, task.classes, order, cost), (0,) * len(task.classes)
    states = (TierState(0, len(rank.kv_order), none, 0, slots) for slots in (1, 2, 3, 4))
    streamed = [tier for state in states if (full := search.fill_most(state)) and (tier := search.build(full))]
    now = rank.covering(128)
    took = [
        simulated_seconds(task.room, tier, cost) + enter_seconds(task.room, rank.tiers[0], tier, cost)
        for tier in (now, *streamed)
    ]
    assert streamed and took[0] <= 1.02 * min(took[1:])
