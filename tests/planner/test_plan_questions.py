"""`pshard-plan --steps` and `--why`: the steps of a tier with their times, and where else a layer could be."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from planner_cases import make_model

from pshard.commands.cli_plan import main
from pshard.homes import SITES
from pshard.machine import MachineProfile
from pshard.model import ModelSpec
from pshard.plan import Variant
from pshard.planner.make_plan import plan_variant
from pshard.planner.other_places import OtherPlace, compare_places, find_layer
from pshard.planner.price.draft import draft_tier, simulated_seconds
from pshard.planner.price_plan import price_plan
from pshard.planner.time_steps import time_steps
from pshard.registries.profile_store import load_profile
from pshard.workload import Workload

ROOT = Path(__file__).resolve().parents[2]
SHEET = ROOT / "registries" / "examples" / "rtx5080-xeon-w5-3425.json"


@pytest.fixture(scope="module")
def planned() -> tuple[ModelSpec, MachineProfile, Variant]:
    """A model of six layers of which half lie outside VRAM."""
    spec, profile = make_model(6, d_model=2048, d_ffn=8192), load_profile(SHEET)
    spare = spec.packed_nbytes // 2 >> 20
    return spec, profile, plan_variant(spec, profile, Workload((350 + spare,), 1024, max_ubatch=512))


def test_steps_are_those_that_run_with_the_times_of_their_lanes(planned) -> None:
    spec, profile, variant = planned
    (timed,) = time_steps(spec, profile, variant, 1)
    (tier,) = [tier for tier in price_plan(spec, profile, variant) if tier.tokens == 1]
    ((steps, result),) = tier.simulate()
    assert [step.step for step in timed.steps] == [type(step).__name__ for step in steps.body]
    assert timed.seconds == result.seconds
    for lane in ("acc", "cpu"):  # of which each does one thing at a time, in the order of issue
        runs = [(s.start, s.end) for s in timed.steps if s.lane == lane]
        assert all(before[1] <= after[0] + 1e-9 for before, after in pairwise(runs))
        busy = sum(end - start for start, end in runs)
        assert busy == pytest.approx(result.busy[lane])
    untimed = {step.step for step in timed.steps if step.lane is None}
    assert untimed <= {"Free", "Move"}  # a copy for the next token may not have begun
    assert {step.step for step in timed.steps} >= {"Compute", "Move"}


def test_the_tier_that_covers_so_many_tokens_is_listed(planned) -> None:
    spec, profile, variant = planned
    assert time_steps(spec, profile, variant, 300)[0].tokens == 512


def test_another_place_costs_what_the_tier_with_it_is_simulated_to_take(planned) -> None:
    spec, profile, variant = planned
    found = compare_places(spec, profile, variant, find_layer(spec, "3"))
    assert {why.unit for why in found} == {u.name for u in spec.units if u.layer == 3}
    tiers = {tier.tokens: tier for tier in price_plan(spec, profile, variant)}
    assert {why.tokens for why in found} == set(tiers)
    others = [(why, other) for why in found for other in (why.next_best, why.too_large) if other]
    assert others
    for why, other in others:
        tier = tiers[why.tokens]
        assert why.place == tier.tiers[0].placement(why.unit) != other.place
        assert why.seconds == pytest.approx(tier.simulate()[0][1].seconds)
        moved = {p.unit: p for p in tier.tiers[0].placements} | {why.unit: other.place}
        room, slots = tier.rooms[0], max(1, tier.tiers[0].buffers.slots)
        again = draft_tier(
            room,
            why.tokens,
            {name: p.where for name, p in moved.items()},
            frozenset(name for name, p in moved.items() if p.kv == "vram"),
            slots,
            {name: p.share for name, p in moved.items() if p.share},
        )
        assert again.placement(why.unit) == other.place
        assert other.seconds == pytest.approx(simulated_seconds(room, again, tier.costs[0]))
        assert other.lacks == max(0, again.buffers.total - room.arena)
        assert other.arena == again.buffers.total - tier.tiers[0].buffers.total


def test_no_legal_place_that_fits_is_faster_than_the_next_best(planned) -> None:
    spec, profile, variant = planned
    tier = next(price_plan(spec, profile, variant))
    for why in compare_places(
        spec, profile, variant, find_layer(spec, next(u.name for u in spec.units if u.layer == 2 and not u.kind.state))
    ):
        if why.tokens != tier.tokens or why.next_best is None:
            continue
        best, now = why.next_best, {p.unit: p for p in tier.tiers[0].placements}
        for at in SITES:
            where = {name: p.where for name, p in now.items()} | {why.unit: at}
            kv = frozenset(name for name, p in now.items() if p.kv == "vram")
            shares = {name: p.share for name, p in now.items() if p.share and name != why.unit}
            other = draft_tier(tier.rooms[0], 1, where, kv, max(1, tier.tiers[0].buffers.slots), shares)
            if other.placement(why.unit) != why.place and other.buffers.total <= tier.rooms[0].arena:
                assert best.seconds <= simulated_seconds(tier.rooms[0], other, tier.costs[0]) * (1 + 1e-9)


@pytest.mark.parametrize("mode", ["layer", "tensor"])
def test_units_move_on_every_rank_that_holds_them(planned, mode) -> None:
    spec, profile, _ = planned
    spare = spec.packed_nbytes // 4 >> 20
    variant = plan_variant(spec, profile, Workload((350 + spare,) * 2, 1024, max_ubatch=128, split_mode=mode))
    timed = time_steps(spec, profile, variant, 1)
    assert [each.rank for each in timed] == [0, 1] and all(each.steps for each in timed)
    units = [u for u in spec.units if u.layer in (0, 5)]  # of a pipeline the first rank has one and the last the other
    found = compare_places(spec, profile, variant, tuple(units))
    assert {why.unit for why in found} == {u.name for u in units}
    for tier in price_plan(spec, profile, variant):
        alone = [result.seconds for _, result in tier.simulate()]
        whole = sum(alone) if mode == "layer" else max(alone)
        assert all(why.seconds == pytest.approx(whole) for why in found if why.tokens == tier.tokens)


def test_what_is_faster_and_lacks_room_says_how_much(planned) -> None:
    spec, profile, variant = planned
    found = compare_places(spec, profile, variant, spec.units)
    lacking = [why.too_large for why in found if why.too_large]
    assert lacking and all(isinstance(other, OtherPlace) and other.lacks > 0 for other in lacking)
    assert all(why.too_large.seconds < why.seconds for why in found if why.too_large)
    assert all(why.next_best.lacks == 0 for why in found if why.next_best)


def test_the_command_prints_both_and_json_has_them(tmp_path, capsys, bundled) -> None:
    words = ["-m", str(bundled), "--profile", str(SHEET), "--vram", "324", "-c", "256", "--steps", "--why", "1"]
    assert main([*words, "--registry", str(tmp_path / "r.json")]) == 0
    out = capsys.readouterr().out
    assert "Steps of 1 token, simulated" in out and "blk.1.ffn" in out and "Where else" in out
    assert main([*words, "--registry", str(tmp_path / "r.json"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["steps"][0][0]["tokens"] == 1 and said["steps"][0][0]["steps"]
    assert {why["unit"] for why in said["why"][0]} == {"blk.1.attention", "blk.1.ffn"}


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--why", "99"], "has no such unit; give a layer from 0 to"),
        (["--why", "blk.0.nothing"], "has no such unit; give a layer from 0 to"),
        (["--steps", "100000"], "no tier covers so many tokens; give at most"),
        (["--steps", "--emit", "llama.cpp"], "leave out --steps and --why"),
    ],
)
def test_what_there_is_not_is_told_and_nothing_is_written(flags, line, tmp_path, capsys, bundled) -> None:
    registry = tmp_path / "r.json"
    words = ["-m", str(bundled), "--profile", str(SHEET), "--vram", "324", "-c", "256", "--registry", str(registry)]
    assert main([*words, *flags]) == 2
    assert line in capsys.readouterr().err and not registry.exists()


@pytest.fixture
def bundled() -> Path:
    """The bundled model."""
    path = ROOT / "examples" / "demo.gguf"
    if not path.exists():
        pytest.skip("the bundled model is not here")
    return path
