"""What drafts over ranks is planned on those that have some of it, by their times, and where a run may have it."""

from dataclasses import replace
from pathlib import Path

import pytest
from head_files import write_headed
from planner_cases import DESKTOP, OWN

from pshard.cuts.rank_parts import cut_ranks
from pshard.machine import ElementwiseTiming
from pshard.model import ModelSpec
from pshard.models import open_model
from pshard.plan import RankPlan, Variant
from pshard.planner.check_plan import PlanError, check_runnable
from pshard.planner.choose_drafts import choose_drafts, keep_drafts
from pshard.planner.make_plan import plan_roughly
from pshard.planner.place_head import launches_at_once, place_head, plan_head
from pshard.planner.prepare_ranks import for_drafts
from pshard.planner.price.datasheet import profile_from_datasheet
from pshard.planner.shown.memory_use import measure_use
from pshard.speculation import DRAFT, MTP, Acceptance, DraftQuestion
from pshard.units.state import StateShape
from pshard.workload import Split, Workload

PROFILE = profile_from_datasheet(DESKTOP)
WORK = Workload((OWN + 8,) * 2, context=256, prompt=64, generated=32, split_mode="layer", tensor_split=(0.5, 0.5))
ALL = DraftQuestion(MTP, Acceptance((0.9,)), (3,))


@pytest.fixture
def like() -> str:
    return "llama"


@pytest.fixture
def spec(like: str, tmp_path: Path) -> ModelSpec:
    write_headed(tmp_path / "m.gguf", like, own=like == "glm")
    with open_model(tmp_path / "m.gguf") as model:
        return model.spec


def choose(spec: ModelSpec, workload: Workload, kind: str = MTP) -> Variant:
    def plan(asked: Workload) -> Variant:
        return plan_roughly(spec, PROFILE, asked).variant

    chosen = choose_drafts(plan, spec, PROFILE, workload, replace(ALL, kind=kind))
    return keep_drafts(spec, PROFILE, chosen, chosen)


def check(spec: ModelSpec, variant: Variant) -> None:
    check_runnable(cut_ranks(for_drafts(spec, variant.workload), variant.split), variant, "cuda")


@pytest.mark.parametrize(("mode", "like"), [("layer", "moe"), ("tensor", "glm"), ("tensor", "moe")])
def test_a_head_is_planned_where_it_is_and_others_give_up_no_budget(spec: ModelSpec, mode: str) -> None:
    """GPUs that sum have routers, and what every rank computes whole, on themselves."""
    work = replace(WORK, split_mode=mode)
    chosen = choose(spec, work)
    check(spec, chosen)
    assert [plan.rank for plan in chosen.drafters] == ([0, 1] if mode == "tensor" else [1])
    said = chosen.speculation.planned[-1]
    assert said.drafts == 3 and said.drafting > 0
    room, alone = (measure_use(spec, PROFILE, v).vram_mib for v in (chosen, replace(chosen, drafter=None)))
    given = [more - less for more, less in zip(room, alone)]
    assert given == [chosen.workload.drafter_mib * (chosen.drafter_on(rank) is not None) for rank in range(2)]
    for in_vram in (True, False):
        found = plan_head(spec, PROFILE, work, in_vram)
        assert (found.told > 0) == (mode == "layer") and found.further <= found.first
        check(spec, replace(chosen, drafter=found.plans[0], drafter_parts=found.plans[1:]))


@pytest.mark.parametrize("like", ["llama", "glm", "moe"])
def test_a_cut_heads_draft_takes_the_sums_of_its_ranks(spec: ModelSpec) -> None:
    slow = replace(PROFILE, handoff_seconds=PROFILE.handoff_seconds + 1e-3)
    times = [plan_head(spec, p, replace(WORK, split_mode="tensor"), True).seconds for p in (PROFILE, slow)]
    assert times[1] - times[0] > 2.9e-3  # of attention, of what follows it, and of the logits


@pytest.mark.parametrize(("in_vram", "at_once"), [(True, True), (False, False)])
def test_gpus_that_share_a_head_launch_its_drafts_at_once_where_all_of_it_is_in_vram(
    spec: ModelSpec, in_vram: bool, at_once: bool
) -> None:
    rows = (ElementwiseTiming("acc", "draft", 1, 1, 5e-4), ElementwiseTiming("acc", "follow", 1, 1, 1e-5))
    profile = replace(PROFILE, elementwise=(*PROFILE.elementwise, *rows))
    found = plan_head(spec, profile, replace(WORK, split_mode="tensor"), in_vram)
    assert (found.further == 1e-5) == at_once and found.first >= 5e-4


@pytest.mark.parametrize(
    ("on_cpu", "asks", "at_once"),
    [
        ((), False, True),
        (("experts",), True, True),
        (("router", "shared", "experts"), True, True),
        (("experts",), False, False),
        (("attention",), True, False),
        (("join",), True, False),
        (("output",), True, False),
    ],
)
@pytest.mark.parametrize("like", ["moe"])
def test_drafts_are_launched_at_once_where_a_gpu_can_ask_the_cpu_for_the_rest(
    spec: ModelSpec, on_cpu: tuple[str, ...], asks: bool, at_once: bool
) -> None:
    """What the CPU computes first, or last, or with cells of the text, no kernel can wait for."""
    assert spec.head is not None
    names = {unit.name for unit in spec.head.units if not unit.name.endswith(on_cpu or "-")}
    plan = place_head(spec.head, WORK.state_shape, 4, names - {"embedding"})
    assert len(plan.tiers[0].placements) - len(names) == len(on_cpu)
    assert launches_at_once(spec.head, plan.tiers[0], asks) == at_once


@pytest.mark.parametrize("like", ["moe"])
def test_a_gpu_that_asks_for_a_heads_experts_takes_two_hand_offs_a_draft_more(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = (ElementwiseTiming("acc", "draft", 1, 1, 5e-4), ElementwiseTiming("acc", "follow", 1, 1, 1e-5))
    profile = replace(PROFILE, elementwise=(*PROFILE.elementwise, *rows), handoff_seconds=1e-4)
    work, place = Workload((OWN + 8,), context=256, prompt=64, generated=32), place_head

    def keep_experts_out(head: ModelSpec, states: StateShape, nbytes: int, here: set[str], rank: int) -> RankPlan:
        return place(head, states, nbytes, {name for name in here if not name.endswith("experts")}, rank)

    alone = plan_head(spec, profile, work, True)
    monkeypatch.setattr("pshard.planner.place_head.place_head", keep_experts_out)
    asked = plan_head(spec, profile, work, True)
    assert alone.further == pytest.approx(1e-5) and asked.further == pytest.approx(1e-5 + 1e-4)
    assert asked.first - alone.first == pytest.approx(1e-4)


@pytest.mark.parametrize("like", ["moe"])
def test_a_draft_model_is_planned_on_rank_0_whatever_it_is_made_of(spec: ModelSpec) -> None:
    """Its routers may be on the CPU, as nothing of it is summed."""
    drafted = replace(spec, head=replace(spec, head=None))
    for mode in ("layer", "tensor"):
        chosen = choose(drafted, replace(WORK, split_mode=mode), DRAFT)
        check(drafted, chosen)
        assert [plan.rank for plan in chosen.drafters] == [0]
        on_cpu = plan_head(drafted, PROFILE, replace(WORK, split_mode=mode), False)
        check(drafted, replace(chosen, drafter=on_cpu.plans[0]))


def test_a_plan_that_lacks_a_ranks_part_of_what_drafts_is_refused(spec: ModelSpec) -> None:
    chosen = choose(spec, replace(WORK, split_mode="tensor"))
    with pytest.raises(PlanError, match="rank 1 has no plan of what drafts"):
        check(spec, replace(chosen, drafter_parts=()))
    elsewhere = replace(chosen.drafter, rank=0)
    with pytest.raises(PlanError, match="rank 0 has a plan of what drafts"):
        check(spec, replace(choose(spec, WORK), drafter=elsewhere))


def test_the_way_is_chosen_without_drafts_where_it_is_left_open(spec: ModelSpec) -> None:
    asked = list[Workload]()

    def plan(work: Workload) -> Variant:
        asked.append(work)
        split = (
            Split("tensor", (0.25, 0.75)) if work.split_mode == "auto" else Split(work.split_mode, work.tensor_split)
        )
        return plan_roughly(spec, PROFILE, work.under(split)).variant

    chosen = choose_drafts(plan, spec, PROFILE, replace(WORK, split_mode="auto", tensor_split=()), ALL)
    assert asked[0].split_mode == "auto" and not asked[0].drafting.drafts
    assert all(work.tensor_split == (0.25, 0.75) for work in asked[1:]) and len(chosen.drafters) == 2
