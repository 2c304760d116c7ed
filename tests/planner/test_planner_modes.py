"""-sm auto: one device, layers or tensors, the fastest as predicted by one simulator, and why is written down."""

from dataclasses import replace
from functools import cache

import pytest
from planner_cases import OWN
from test_planner_ratios import PAIR, SPEC, unlike, workload

from pshard.cuts.rank_parts import cut_ranks
from pshard.errors import BudgetTooSmall
from pshard.machine import MachineProfile
from pshard.plan import Variant
from pshard.planner import make_plan
from pshard.planner.check_plan import check_variant
from pshard.planner.choose_mode import MORE_DEVICES_SHARE, plan_mode
from pshard.planner.make_plan import plan_variant
from pshard.planner.price.datasheet import profile_from_datasheet
from pshard.planner.search.small import refine_units
from pshard.predicted_times import first_token_seconds, round_seconds
from pshard.workload import Split, Workload

LINKED = replace(PAIR, collective_rate=100e9, copy_seconds=2e-6)
FAST = profile_from_datasheet(LINKED)
SLOW = profile_from_datasheet(replace(PAIR, collective_rate=0.05e9))


@cache
def chosen_way(profile: MachineProfile, wanted: Workload, search: int) -> tuple[Variant, set[str]]:
    """The plan of `-sm auto`, and the split modes whose plans were refined; made once for searches of one length."""
    refined = set()
    refine = make_plan.refine_ranks
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            make_plan,
            "refine_ranks",
            lambda *rough: refined.add(rough[0][0].room.workload.split_mode) or refine(*rough),
        )
        return plan_mode(SPEC, profile, wanted, auto_ratios=False), refined


@pytest.mark.quick("quick-profile0-budgets0-200-tensor")
@pytest.mark.parametrize(
    ("profile", "budgets", "generated", "mode"),
    [
        (FAST, (900, 900), 200, "tensor"),  # everything fits: half of the weights are read by each
        (SLOW, (900, 900), 200, "none"),  # sums cost more than they save, and turns save nothing
        (SLOW, (100, 100), 200, "layer"),  # two devices hold what one must stream
    ],
)
@pytest.mark.usefixtures("search")
def test_the_fastest_way_is_taken(profile, budgets, generated, mode):
    wanted = replace(workload(*budgets), generated=generated)
    best, _ = chosen_way(profile, wanted, refine_units.MOST_UNITS)
    assert best.workload.split_mode == mode
    check_variant(cut_ranks(SPEC, best.split), best, "cuda")
    one = plan_variant(SPEC, profile, replace(wanted, vram_mib=wanted.vram_mib[:1], split_mode="none"))
    every = [one, *(plan_variant(SPEC, profile, wanted.under(Split(m, ()))) for m in ("layer", "tensor"))]
    assert round_seconds(best) * MORE_DEVICES_SHARE <= min(map(round_seconds, every))
    said = {way.way.split(",")[0].split(" -ts")[0]: way for way in best.considered}
    assert set(said) == {"-sm none", "-sm layer", "-sm tensor"}
    for variant in every:
        way = said[f"-sm {variant.workload.split_mode}"]
        assert way.seconds == pytest.approx(round_seconds(variant), rel=0.02)  # the solver may stop elsewhere
        assert way.first_token == pytest.approx(first_token_seconds(variant), rel=0.05)
    assert best.considered[0] is said[f"-sm {mode}"]
    assert "sums take" in said["-sm tensor"].why and "take turns" in said["-sm layer"].why
    assert "decode is" in said["-sm none"].why


@pytest.mark.parametrize("auto_ratios", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_tensors_are_cut_over_fewer_devices_where_sums_of_all_take_too_long(auto_ratios):
    rows = [replace(c, ranks=n) for n in (2, 4) for c in FAST.collectives]
    slow = [replace(c, seconds=c.seconds + 1e-3 * (c.ranks == 4)) for c in rows]
    wanted = replace(workload(900, 900, 900, 900), generated=200)
    few, all_four = (
        plan_mode(SPEC, replace(FAST, collectives=tuple(timed)), wanted, auto_ratios) for timed in (slow, rows)
    )
    assert (few.workload.split_mode, few.workload.vram_mib) == ("tensor", wanted.vram_mib[:2])
    assert (all_four.workload.split_mode, all_four.workload.vram_mib) == ("tensor", wanted.vram_mib)
    assert {w.way.count(",") for w in few.considered if "tensor" in w.way} == {1, 3}
    check_variant(cut_ranks(SPEC, few.split), few, "cuda")


def test_given_ratios_are_for_all_devices():
    wanted = replace(workload(900, 900, 900), tensor_split=(0.5, 0.3, 0.2))
    best = plan_mode(SPEC, FAST, wanted, auto_ratios=False)
    assert {w.way.split(" -ts ")[1] for w in best.considered if " -ts " in w.way} == {"0.5,0.3,0.2"}


def test_one_of_unlike_devices_may_do_best_alone(search):
    slow = replace(PAIR, acc_memory=PAIR.acc_memory / 30, acc_flops=PAIR.acc_flops / 30)
    best = plan_mode(SPEC, unlike(slow, PAIR), workload(800, 900), auto_ratios=False)
    chosen = best.workload
    assert (chosen.split_mode, chosen.device, chosen.vram_mib) == ("none", 1, (OWN + 900,))
    assert best.considered[0].way == "-sm none, device 1"
    assert best.considered[0].seconds == round_seconds(best)


def test_a_way_that_does_not_fit_is_listed():
    best = plan_mode(SPEC, FAST, workload(900, 1 - OWN), auto_ratios=False)
    assert best.workload.split_mode == "none"
    assert [w.way for w in best.considered if w.seconds is None] == ["-sm layer", "-sm tensor"]
    with pytest.raises(BudgetTooSmall):
        plan_mode(SPEC, FAST, workload(1 - OWN, 1 - OWN), auto_ratios=False)


def test_ratios_are_chosen_for_both_splits(search):
    slower = replace(LINKED, acc_memory=LINKED.acc_memory / 1.5, acc_flops=LINKED.acc_flops / 1.5)
    wanted = replace(workload(900, 900), max_tp=(("output", 1),), generated=200)
    best = plan_mode(SPEC, unlike(LINKED, slower), wanted, auto_ratios=True)
    split = best.split
    assert split.mode == "tensor" and split.shares[0] > 0.55 and split.limits == (("output", 1),)
    ways = [w.way for w in best.considered]
    tensors = [w for w in ways if w.startswith("-sm tensor")]
    assert len(tensors) > 1 and all(w.endswith("--max-tp head=1") for w in tensors)
    alone = {"-sm none, device 0", "-sm none, device 1"}
    assert {w.split(" -ts")[0] for w in ways} == {*alone, "-sm layer", "-sm tensor"}
    assert [w.seconds for w in best.considered[1:]] == sorted(w.seconds for w in best.considered[1:])


def test_one_budget_is_one_device():
    best = plan_mode(SPEC, FAST, Workload((OWN + 900,), 512, prompt=256), auto_ratios=True)
    assert best.workload.split_mode == "none" and len(best.considered) == 1


@pytest.mark.slow
def test_ways_that_no_refinement_could_bring_to_the_front_are_not_refined():
    best, refined = chosen_way(SLOW, workload(100, 100, generated=200), refine_units.MOST_UNITS)
    assert best.workload.split_mode == "layer"
    assert "layer" in refined and "tensor" not in refined
