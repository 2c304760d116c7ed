"""Plans for a server: widths weighted by how often they occur, room for so many requests, and what is promised."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from golden.machines import find_machine
from golden.shapes import make_shape
from hypothesis import strategies as st
from planner_cases import few_or_many, machines, models, rival_variants, try_cases, workloads

from pshard.errors import BudgetTooSmall, UserError
from pshard.jsonio import from_json, to_json
from pshard.plan import PlanSet
from pshard.planner.make_plan import plan_baseline, plan_variant
from pshard.planner.price.datasheet import profile_from_datasheet
from pshard.planner.price.tier_loads import tier_loads
from pshard.planner.serving.promise import USUAL_GAP, promise, promise_times
from pshard.planner.serving.show_promise import describe_promise, show_rate
from pshard.planner.serving.size_load import size_load
from pshard.planner.serving.step_times import StepTimes, time_steps
from pshard.planner.shown.memory_use import measure_use
from pshard.predicted_times import decode_rate, first_token_seconds, round_seconds, tier_seconds
from pshard.registries.choose import choose_variant, plan_command
from pshard.registries.store import variant_key
from pshard.session.open_plan import describe_made
from pshard.times.running_requests import covered_requests, running_shares, suggest_slots
from pshard.workload import Workload

LOAD = Workload((2500,), 8192, 8, max_ubatch=1024, prompt=512, generated=128, concurrency=4)


@pytest.fixture(scope="module", name="made")
def _made():
    """A model of which most is streamed, planned for a few requests at once."""
    spec, profile = make_shape("llama3-8b", "Q4_0"), find_machine("rtx4060")
    return spec, profile, plan_variant(spec, profile, LOAD)


@pytest.mark.parametrize("mean", [1, 2, 4, 16, 40, 1000])
def test_as_many_requests_run_on_average_as_were_said(mean):
    shares = running_shares(mean, 4 * mean + 16)
    assert sum(shares) == pytest.approx(1)
    assert sum(n * share for n, share in enumerate(shares, 1)) == pytest.approx(mean, rel=0.01)


def test_requests_beyond_the_slots_wait_so_that_all_slots_are_busy():
    few, many = running_shares(8, 8), running_shares(8, 64)
    assert few[:7] == pytest.approx(many[:7], rel=0.01)
    assert few[7] == pytest.approx(sum(many[7:]), rel=0.01)


def test_one_request_at_a_time_is_never_two():
    assert running_shares(1, 4) == (1.0,)
    assert LOAD.answer_steps() != ((8, 128),) == replace(LOAD, concurrency=0).answer_steps()


def test_a_load_has_a_tier_for_each_width_and_prompts_as_before():
    assert LOAD.tiers() == (1, 2, 4, 8, 16, 128, 512, 1024)
    assert replace(LOAD, concurrency=0).tiers() == (1, 8, 16, 128, 512, 1024)


def test_widths_weigh_as_often_as_they_occur():
    loads = {load.tokens: load for load in tier_loads(LOAD)}
    shares = running_shares(4, 8)
    by_tier = {1: shares[:1], 2: shares[1:2], 4: shares[2:4], 8: shares[4:]}
    for tokens, of in by_tier.items():
        assert loads[tokens].weight == pytest.approx(128 * sum(of))
        assert loads[tokens].past == 512 + 64
    assert loads[512].weight == 4  # each request's own prompt


def test_a_load_of_one_text_is_planned_as_one_text():
    spec, profile = make_shape("llama3-8b", "Q4_0"), find_machine("rtx4060")
    alone = Workload((2500,), 1024, max_ubatch=128, prompt=512)
    one, other = (plan_variant(spec, profile, replace(alone, concurrency=n)).ranks[0].tiers for n in (1, 0))
    assert [(t.placements, t.prediction) for t in one] == [(t.placements, t.prediction) for t in other]


@pytest.mark.slow
def test_a_plan_for_a_load_serves_it_faster_than_one_for_all_slots_at_once(made):
    spec, profile, variant = made
    other = plan_variant(spec, profile, replace(LOAD, concurrency=0))
    assert round_seconds(variant) < round_seconds(replace(other, workload=LOAD))


@few_or_many
def test_a_plan_for_a_load_is_not_slower_than_published_strategies(cases):
    def check(data) -> None:
        spec, profile = data.draw(models(4)), profile_from_datasheet(data.draw(machines()))
        concurrency = data.draw(st.integers(1, 6))
        load = {"sequences": concurrency + data.draw(st.integers(0, 6)), "concurrency": concurrency}
        try:
            plan_variant(spec, profile, Workload((1,), 128, prompt=64, generated=32, max_ubatch=16, **load))
            least = 1
        except BudgetTooSmall as error:
            least = error.smallest_mib
        workload = replace(data.draw(workloads(spec, least)), **load)
        try:
            variant = plan_variant(spec, profile, workload)
        except BudgetTooSmall:
            return
        for name, published in rival_variants(spec, profile, workload, variant):
            assert round_seconds(variant) <= round_seconds(published) * (1 + 1e-9), name
        told = promise(spec, profile, variant)
        for fewer, more in zip(told.paces, told.paces[1:]):
            assert fewer.requests < more.requests <= told.at_once <= workload.sequences
        assert all(0 < pace.gap <= pace.longest_gap for pace in told.paces)

    try_cases(cases, check, st.data())


def test_a_promise_is_what_the_tiers_are_predicted_to_take(made):
    told, seconds = promise(*made), tier_seconds(made[2])
    assert told.at_once == 8 and [pace.requests for pace in told.paces] == [1, 2, 4, 8]
    for pace in told.paces:
        assert pace.gap == pytest.approx(seconds[pace.requests], rel=1e-6)
        assert pace.rate < pace.requests / pace.gap  # prompts take their time too
    assert told.paces[0].first_token == pytest.approx(first_token_seconds(made[2]), rel=1e-6)
    assert told.paces[0].gap <= made[2].workload.concurrency / decode_rate(made[2]) <= told.paces[-1].gap
    assert max(pace.longest_gap for pace in told.paces) <= USUAL_GAP


def test_what_a_server_promises_keeps_its_own_gap_and_is_told_in_a_line(made):
    variant, times = made[2], time_steps(*made)
    usual, quick = (promise_times(variant.workload, times, gap) for gap in (USUAL_GAP, 0.21))
    assert quick.chunk < usual.chunk and quick.paces[-1].longest_gap <= 0.21 < usual.paces[-1].longest_gap
    pace = next(pace for pace in quick.paces if pace.requests == 4)
    line = describe_promise(quick)
    assert "512 + 128 tokens, of which 8 have room: 4 requests at once get" in line
    assert "tokens, of which 1 has room: " in describe_promise(replace(quick, at_once=1))
    assert f"get {show_rate(pace.rate)} tok/s, a token every {1e3 * pace.gap:.0f} ms" in line
    assert (show_rate(9.4567), show_rate(1107.6), show_rate(23456.7)) == ("9.457", "1108", "23457")
    one_tier = StepTimes(times.tiers[2:3], ((0.0,),))
    assert promise_times(variant.workload, one_tier, 1.0).at_once == times.tiers[2].tokens < 8


@pytest.mark.slow
def test_ranks_promise_what_they_reach_together(made):
    spec, profile, _ = made
    two = replace(profile, accelerators=tuple(replace(profile.accelerators[0], index=i) for i in range(2)))
    variant = plan_baseline("layer-stream", spec, two, replace(LOAD, vram_mib=(1500, 1500), split_mode="layer"))
    told, seconds = promise(spec, two, variant), tier_seconds(variant)
    assert [pace.gap for pace in told.paces] == pytest.approx([seconds[n] for n in (1, 2, 4, 8)], rel=1e-6)


def test_room_bounds_the_requests_that_are_promised(made):
    spec, profile, variant = made
    cells = replace(variant, workload=replace(LOAD, context=2000))
    assert promise(spec, profile, cells).at_once == 3  # of 640 cells each


def test_a_line_on_a_plan_that_was_made_says_that_its_rate_is_of_all_requests(made):
    spec, profile, variant = made
    line = describe_made(variant, measure_use(spec, profile, variant), True, Path("m.json"), "pshard-plan -m m")
    rate = show_rate(decode_rate(variant))
    assert f"predicted are {rate} tok/s of all with 4 requests running on average after " in line
    alone = replace(variant, workload=replace(variant.workload, concurrency=0))
    assert " tok/s after " in describe_made(alone, measure_use(spec, profile, alone), True, Path("m.json"), "")


def test_sizes_hold_as_many_requests_as_nearly_always_run():
    sizes = size_load(16, 40960, prompt=512, generated=128)
    assert sizes.sequences == suggest_slots(16) == 32
    assert sizes.context == covered_requests(16) * 640 > 16 * 640
    assert size_load(1, 2048).context == 2048 and size_load(1, None).sequences == 4
    assert size_load(4, 40960, 6, 1000, 100, 10).context == 1000
    with pytest.raises(UserError, match="-np 3 texts at once are fewer than --concurrency 4"):
        size_load(4, 40960, 3)
    with pytest.raises(UserError, match="--prompt 100 and --generated 50 do not fit the context of 128; give -c 150"):
        size_load(4, 40960, None, 128, 100, 50)
    with pytest.raises(UserError, match="more than the model's context of 128"):
        size_load(4, 128, None, None, 100, 50)


def test_a_workload_of_before_there_were_loads_has_none():
    data = to_json(replace(LOAD, concurrency=0))
    del data["concurrency"]
    assert from_json(Workload, json.loads(json.dumps(data))) == replace(LOAD, concurrency=0)


def test_a_server_takes_the_plan_of_its_load_and_a_run_takes_the_other(made):
    load = made[2]
    all_at_once = replace(load, workload=replace(load.workload, concurrency=0))
    many = replace(load, workload=replace(load.workload, concurrency=8))
    assert len({variant_key(v) for v in (load, all_at_once, many)}) == 3
    plans = PlanSet("", (), "made", "", (all_at_once, load, many))

    def chosen(concurrency: int):
        want = Workload((2500,), 1, concurrency=concurrency)
        return choose_variant(plans, want, "").variant

    assert chosen(0) is all_at_once and chosen(3) is load and chosen(100) is many
    assert plan_command("m", load.workload).endswith("--serve --concurrency 4")


def test_a_few_mebibytes_more_do_not_outweigh_the_load_and_many_do(made):
    def plan(mib: int, concurrency: int):
        return replace(made[2], workload=replace(made[2].workload, vram_mib=(mib,), concurrency=concurrency))

    def chosen(*variants, concurrency: int):
        want = Workload((2500,), 1, concurrency=concurrency)
        return choose_variant(PlanSet("", (), "made", "", variants), want, "").variant.workload

    few, many, small = plan(2000, 2), plan(1900, 8), plan(1200, 8)
    assert chosen(few, many, small, concurrency=8) == many.workload
    assert chosen(few, many, small, concurrency=2) == few.workload
    assert chosen(few, small, concurrency=8) == few.workload  # two fifths of the memory would lie idle
    assert chosen(many, plan(1950, 8), concurrency=8).vram_mib == (1950,)
