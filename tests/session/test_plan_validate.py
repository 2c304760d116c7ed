"""Plans that are run before one is written: what is measured, which one wins, and what the profile learns from it."""

import io
import json
import math
import os
import random
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from cli_world import World, made_up_profile, make_world
from manual_clock import ManualClock
from planner_cases import DESKTOP, OWN, make_model, simulate_tier
from rich.console import Console
from short_searches import lengthen_searches

from pshard.batch import Batch
from pshard.commands import cli_plan
from pshard.errors import UserError
from pshard.models import open_model
from pshard.plan import Correction, Factor, Variant
from pshard.planner import make_plan
from pshard.planner.make_plan import plan_baseline, plan_several, plan_variant, same_placements
from pshard.planner.prepare_ranks import prepare_ranks, price_tiers
from pshard.planner.price.datasheet import profile_from_datasheet
from pshard.planner.price.fit_correction import Sample, fit_correction, is_off
from pshard.planner.price.predict_published import Predictor
from pshard.planner.price.profile_tables import Tables
from pshard.planner.price.tier_loads import TierLoad
from pshard.planner.published.strategies import IMPROVED, NAMES, place_strategy
from pshard.planner.rank_task import RankTask
from pshard.planner.search.candidates import Candidate, price_baseline
from pshard.planner.search.small import refine_units
from pshard.planner.show_plan import print_trials
from pshard.planner.shown.machine_words import words_for
from pshard.registries.codec import decode_registry, encode_registry
from pshard.registries.store import load_registry, save_variants
from pshard.session import try_plans as validating
from pshard.session.try_plans import Timed
from pshard.workload import Workload

pytestmark = pytest.mark.usefixtures("few_to_collect")
SPEC, PROFILE = make_model(layers=6), profile_from_datasheet(DESKTOP)
WORKLOAD = Workload((OWN + 40,), context=512, max_ubatch=128, prompt=256, generated=64)
(TASK,) = prepare_ranks(SPEC, PROFILE, WORKLOAD)
TRUTH = Correction(
    (
        Factor("acc", "attention", "small", 1.4),
        Factor("host", "ffn", "small", 1.8),
        Factor("link", "", "small", 1.3),
        Factor("acc", "ffn", "large", 2.5),
        Factor("link", "", "large", 0.7),
    )
)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.delenv("PSHARD_VALIDATE")
    monkeypatch.setattr(validating, "SAMPLE_SECONDS", 0.005)
    return make_world(tmp_path)


def plan(world: World, *more: object) -> int:
    return cli_plan.main(["-m", str(world.model), "-c", "128", "--vram", str(world.budget), *map(str, more)])


@pytest.fixture(scope="module")
def planned() -> Variant:
    """The plan for the made model."""
    return plan_variant(SPEC, PROFILE, WORKLOAD)


@pytest.fixture(scope="module")
def several() -> tuple[Variant, ...]:
    """The plans for it that are worth trying."""
    return plan_several(TASK, 5.0)


def run_on(machine: Correction, variant, workload: Workload = WORKLOAD):
    """A variant as if it had been run on a machine that differs from the profile by `machine`."""
    tiers = tuple(t.tokens for t in variant.ranks[0].tiers)
    (there,) = price_tiers(SPEC, Tables(PROFILE, machine), workload, tiers)
    return [
        Sample(variant.ranks[0], tier, cost.load, simulate_tier(there.room, tier, cost).seconds)
        for tier, cost in zip(variant.ranks[0].tiers, there.costs)
    ]


def test_fitted_factors_explain_what_was_measured(several):
    samples = [s for variant in several for s in run_on(TRUTH, variant)]
    before = [simulate_tier(TASK.room, s.tier, cost_of(TASK, s)).seconds / s.seconds - 1 for s in samples]
    found = fit_correction(TASK.room, PROFILE, samples)
    (fitted,) = price_tiers(SPEC, Tables(PROFILE, found), WORKLOAD, tuple(c.load.tokens for c in TASK.costs))
    after = [simulate_tier(TASK.room, s.tier, cost_of(fitted, s)).seconds / s.seconds - 1 for s in samples]
    assert max(map(abs, before)) > 0.15
    assert max(map(abs, after)) < 0.05
    assert all(f.value > 0 for f in found.factors)


def cost_of(task, sample: Sample):
    return next(c for c in task.costs if c.load.tokens == sample.load.tokens)


def test_a_right_profile_needs_no_factors(several):
    samples = run_on(Correction(), several[0])
    assert all(abs(f.value - 1) < 0.01 for f in fit_correction(TASK.room, PROFILE, samples).factors)


def test_factors_scale_small_and_large_micro_batches_apart():
    tiers = (1, 128)
    plain, scaled = (price_tiers(SPEC, Tables(PROFILE, c), WORKLOAD, tiers)[0].costs for c in (Correction(), TRUTH))
    for tier, attention, ffn, link in ((0, 1.4, 1.0, 1.3), (1, 1.0, 2.5, 0.7)):
        assert scaled[tier].units["attention.0"].acc == pytest.approx(attention * plain[tier].units["attention.0"].acc)
        assert scaled[tier].units["ffn.0"].acc == pytest.approx(ffn * plain[tier].units["ffn.0"].acc)
        assert scaled[tier].units["ffn.0"].link == pytest.approx(link * plain[tier].units["ffn.0"].link)


def test_a_stored_correction_gives_the_bench_the_plans_own_prediction(tmp_path, planned):
    variant = plan_variant(SPEC, PROFILE, WORKLOAD, correction=TRUTH)
    path = tmp_path / "plans.json"
    save_variants(path, SPEC.name, (("model", "made"),), [variant])
    (stored,) = load_registry(path).variants
    assert stored == variant and stored.correction == TRUTH
    decode = stored.ranks[0].tiers[0].prediction
    predictor = Predictor([SPEC], PROFILE, stored)
    assert predictor.micro_batch(1, 1, decode.past) == pytest.approx(decode.seconds, rel=1e-6)
    assert planned.ranks[0].tiers[0].prediction.seconds != decode.seconds


def test_registries_without_optional_fields_are_read(tmp_path, planned):
    path = tmp_path / "plans.json"
    save_variants(path, SPEC.name, (("model", "made"),), [planned])
    registry = load_registry(path)
    data = json.loads(encode_registry(registry))
    for variant in data["sets"][0]["variants"]:
        del variant["correction"]
        for tier in variant["ranks"][0]["tiers"]:
            for field in ("measured_seconds", "disturbed", "profile_seconds"):
                del tier["prediction"][field]
    assert decode_registry(json.dumps(data)) == registry


def test_what_is_worth_trying_differs_and_begins_with_the_planners_choice(planned, several):
    assert [t.placements for t in several[0].ranks[0].tiers] == [t.placements for t in planned.ranks[0].tiers]
    made = {tuple((t.placements, t.buffers) for t in v.ranks[0].tiers) for v in several}
    assert len(made) == len(several) >= 2
    assert sum(v.ranks[0].tiers[0].solve.strategy != "ilp" for v in several) == 1


def test_a_published_plan_is_called_improved_exactly_where_other_things_are_placed(several: tuple[Variant, ...]):
    """It stood beside the strategy's own figures under the strategy's name, with others."""
    (other,) = (v for v in several if v.ranks[0].tiers[0].solve.strategy != "ilp")
    made = other.ranks[0].tiers[0].solve.strategy
    published = plan_baseline(made.removeprefix(IMPROVED), SPEC, PROFILE, other.workload)
    assert same_placements(other.ranks[0].tiers, published.ranks[0].tiers) == (made in NAMES)
    placed = price_published(TASK, made.removeprefix(IMPROVED))
    (improved,) = make_plan.refine_ranks((TASK,), (placed,))
    assert not same_placements(improved.tiers, placed.tiers) and improved.strategy.startswith(IMPROVED)


def price_published(task: RankTask, name: str) -> Candidate:
    """A published strategy as the search begins with it."""
    placed = place_strategy(name, task.room, tuple(cost.load.tokens for cost in task.costs))
    priced = price_baseline(name, task.room, task.costs, placed) if placed else None
    assert priced
    return priced


class Scripted:
    """Stands in for engines: the n-th plan that is loaded takes its seconds per tier, or so many times what was
    predicted, or fails. A plan that is loaded again takes what `again` says for it, else what it took before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *script: "dict[int, float] | float | Exception") -> None:
        self.script, self.variants, self.repeated, self.took, self.again = list(script), [], [], [], {}
        self.disturbed = 0.0
        monkeypatch.setattr(validating, "gc", SimpleNamespace(collect=lambda: 0))  # no engine leaves anything behind
        monkeypatch.setattr("pshard.session.start_engine.start_engine", self.load)
        monkeypatch.setattr(validating, "measure_tiers", lambda engine, loads, deadline: self.time(engine))

    def time(self, seconds: "dict[int, float | Timed]") -> "dict[int, Timed]":
        return {n: s if isinstance(s, Timed) else Timed(s, self.disturbed) for n, s in seconds.items()}

    def load(self, opened, variant, checkpoints=True, plays=None):
        known = [placements(v) for v in self.variants]
        if placements(variant) in known:
            nth = known.index(placements(variant))
            self.repeated.append(nth)
            result = self.again.get(nth, self.took[nth])
            if isinstance(result, Exception):
                raise result
            return nullcontext(result)
        self.variants.append(variant)
        result = self.script.pop(0)
        if isinstance(result, Exception):
            self.took.append(result)
            raise result
        if isinstance(result, float):
            result = {t.tokens: result * t.prediction.seconds for t in variant.ranks[0].tiers}
        self.took.append(result)
        return nullcontext(result)


_PLANNED: dict[tuple, tuple[Variant, ...]] = {}


def plan_once(task: RankTask, time_limit: float, programs: int = 2) -> tuple[Variant, ...]:
    """`plan_several`, for the model and the machine of all worlds: what is solved does not depend on what was tried.
    The whole search finds more plans to try than a short one; with fitted times the first is tried alone."""
    correction = task.costs[0].tables.correction
    key = task.room.workload, correction, programs
    if key not in _PLANNED:
        with pytest.MonkeyPatch.context() as patch:
            if not correction.factors:
                lengthen_searches(patch)
            patch.setattr(refine_units, "MOST_EFFORT", 1)
            _PLANNED[key] = plan_several(task, time_limit, programs)
    return _PLANNED[key]


def choose(world: World, seconds: float = 60.0):
    said: list[str] = []
    with open_model(world.model) as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr(make_plan, "plan_several", plan_once)
        workload = Workload((world.budget,), context=128, prompt=64, generated=32)
        found = validating.choose_by_trial(file, made_up_profile(), workload, 5.0, seconds, said.append)
    return *found, said


def times(decode: float, prefill: float = 0.01) -> dict[int, float]:
    return {1: decode, 128: prefill}


def test_the_plan_that_is_measured_fastest_is_chosen(world, monkeypatch):
    engines = Scripted(monkeypatch, times(0.02), times(0.01), times(0.03), times(0.04))
    chosen, trials, said = choose(world)
    assert placements(chosen) == placements(engines.variants[1])
    assert trials[0].seconds == min(t.seconds for t in trials) and not said
    assert chosen.ranks[0].covering(1).prediction.measured_seconds == 0.01
    assert chosen.ranks[0].covering(16).prediction.measured_seconds is None


def test_a_slow_spell_of_the_machine_is_not_blamed_on_the_plan_that_ran_in_it(world, monkeypatch):
    engines = Scripted(monkeypatch, times(0.02), times(0.012), times(0.05), times(0.06))
    engines.again[0] = times(0.011)
    chosen, trials, _ = choose(world)
    assert placements(chosen) == placements(engines.variants[0])
    assert engines.repeated[:2] == [0, 1] and 2 not in engines.repeated
    assert chosen.ranks[0].covering(1).prediction.measured_seconds == 0.011


def placements(variant):
    return [t.placements for t in variant.ranks[0].tiers]


def test_the_planners_own_choice_stays_when_the_difference_is_noise(world, monkeypatch):
    engines = Scripted(monkeypatch, times(0.02), times(0.02 * 0.996), times(0.03), times(0.04))
    chosen, _, _ = choose(world)
    assert placements(chosen) == placements(engines.variants[0])


def test_a_prediction_that_is_off_is_fitted_and_what_is_solved_anew_is_tried(world, monkeypatch):
    engines = Scripted(monkeypatch, times(0.02), times(0.025), times(0.03), times(0.001, 0.001))
    chosen, trials, _ = choose(world)
    assert is_off(trials[-1].variant)
    assert len(engines.variants) == 4 and placements(chosen) == placements(engines.variants[3])
    assert trials[0].name.endswith("refitted") and chosen.correction.factors
    assert chosen.ranks[0].covering(1).prediction.measured_seconds == 0.001


def test_plans_that_do_not_run_are_left_out(world, monkeypatch):
    out_of_memory = UserError("cannot allocate 6 MiB")
    Scripted(monkeypatch, out_of_memory, times(0.02), times(0.03), out_of_memory)
    chosen, trials, said = choose(world)
    assert len(trials) == 2 and "does not run: cannot allocate 6 MiB" in said[0]
    assert chosen.ranks[0].tiers[0].prediction.measured_seconds == 0.02


def test_a_plan_that_does_not_run_again_keeps_its_first_time(world, monkeypatch):
    engines = Scripted(monkeypatch, times(0.02), times(0.019), times(0.05), times(0.06))
    engines.again[1] = UserError("cannot allocate 6 MiB")
    chosen, _, said = choose(world)
    assert placements(chosen) == placements(engines.variants[1])
    assert chosen.ranks[0].covering(1).prediction.measured_seconds == 0.019
    assert "was run only once, it does not run again: cannot allocate 6 MiB" in said[0]


def test_nothing_that_runs_means_the_planners_choice_as_predicted(world, monkeypatch):
    engines = Scripted(monkeypatch, *[UserError("cannot allocate 6 MiB")] * 3)
    chosen, trials, said = choose(world)
    assert chosen == engines.variants[0] and trials == () and len(said) == len(engines.variants) >= 2


def test_no_further_plan_is_tried_when_the_time_is_spent(world, monkeypatch):
    engines = Scripted(monkeypatch, times(0.02))
    _, trials, said = choose(world, seconds=1e-9)
    assert len(trials) == len(engines.variants) == 1
    assert all("was not tried" in line for line in said) and said


def test_the_command_runs_plans_and_stores_what_was_measured(world, capsys):
    assert plan(world) == 0
    out, err = capsys.readouterr()
    assert "Plans that were run" in out and "not validated" not in err
    (variant,) = load_registry(world.registry).variants
    measured = {t.tokens: t.prediction.measured_seconds for t in variant.ranks[0].tiers}
    assert measured[1] and measured[128 if 128 in measured else max(measured)] and not all(measured.values())
    assert f"{measured[1] * 1e3:.2f}" in out


@pytest.mark.slow
def test_several_sequences_are_measured_together(world):
    assert plan(world, "-np", 3, "-c", 384, "--prompt", 50, "--generated", 20) == 0
    (variant,) = load_registry(world.registry).variants
    measured = {t.tokens: t.prediction.measured_seconds for t in variant.ranks[0].tiers}
    assert variant.workload.sequences == 3 and measured[3] and measured[max(measured)] and measured[1] is None


def test_a_slower_machines_predictions_are_close_to_what_it_measured_beside_what_the_profile_predicts(
    world, monkeypatch
):
    Scripted(monkeypatch, 2.0, 2.0, 2.0, 1.0)
    chosen, trials, _ = choose(world)
    for trial in trials:
        for tier in (1, 128):
            p = trial.refitted.ranks[0].covering(tier).prediction
            assert p.seconds == pytest.approx(p.measured_seconds, rel=0.1)
    assert chosen.correction.factors
    alone = [t.variant for t in trials if not t.name.endswith("refitted")]
    for trial, variant in zip((t for t in trials if t.variant in alone), alone, strict=True):
        assert [t.prediction.profile_seconds for t in trial.refitted.ranks[0].tiers] == pytest.approx(
            [t.prediction.seconds for t in variant.ranks[0].tiers]
        )
    assert all(t.prediction.profile_seconds != t.prediction.seconds for t in chosen.ranks[0].tiers)


def test_times_that_other_programs_disturbed_are_kept_and_told_but_not_learnt_from(world, monkeypatch):
    engines = Scripted(monkeypatch, 2.0, 2.0, 2.0)
    engines.disturbed = 0.3
    chosen, trials, said = choose(world)
    decode = chosen.ranks[0].covering(1).prediction
    assert is_off(replace_all(chosen, disturbed=0.0)) and not is_off(chosen)
    assert not chosen.correction.factors and len(trials) == 3
    assert decode.measured_seconds == pytest.approx(2 * decode.seconds) and decode.disturbed == 0.3
    assert any("ilp (30%)" in line and "idle" in line for line in said)


def test_a_note_on_trials_names_a_plan_as_its_table_does(world, monkeypatch, capfd):
    """A machine without a GPU was told of 'all in VRAM', beside a table with 'all in the budget'."""
    monkeypatch.setattr(validating, "disturbed_share", lambda *_: 0.5)
    assert cli_plan.main(["-m", str(world.model), "-c", "128", "--vram", str(world.roomy)]) == 0
    said = capfd.readouterr()
    (note,) = (line for line in said.err.splitlines() if "while plans were run" in line)
    name = words_for(made_up_profile()).say("all in VRAM")
    assert f"while plans were run: {name} (50%)" in note and f"\n{name} " in said.out


def test_an_undisturbed_time_counts_more_than_a_faster_disturbed_one():
    assert validating._best([Timed(0.02), Timed(0.01, 0.5)]) == Timed(0.02)
    assert validating._best([Timed(0.02), Timed(0.01, 0.01)]) == Timed(0.01, 0.01)
    assert validating._best([Timed(0.02, 0.5), Timed(0.03)]) == Timed(0.03)


def timed(seconds: float, disturbed: float = 0.0, spread: float = 0.0) -> dict[int, Timed]:
    return {tokens: Timed(seconds, disturbed, spread * seconds) for tokens in (1, 128)}


@pytest.mark.parametrize(
    ("own", "other", "taken", "why"),
    [
        (Timed(0.02, 0.3), Timed(0.01), 0, "others had cores meanwhile"),
        (Timed(0.02, 0.3), Timed(0.01, 0.4), 0, "others had cores meanwhile"),
        (Timed(0.02, 0.0, 0.002), Timed(0.018, 0.0, 0.0018), 0, "their samples overlap"),
        (Timed(0.02, 0.0, 0.002), Timed(0.012, 0.0, 0.0012), 1, ""),
        (Timed(0.02), Timed(0.012, 0.3), 1, ""),  # no slower than that, whatever others cost it
        (Timed(0.012, 0.3), Timed(0.02), 0, ""),
    ],
)
def test_a_plan_is_preferred_only_where_the_planners_choice_is_surely_slower(several, own, other, taken, why):
    trials = [make_trial(variant, time) for variant, time in zip(several, (own, other, Timed(1.0)))]
    told: list[str] = []
    assert validating.choose_trial(trials, told.append) is trials[taken]
    assert len(told) == bool(why) and all(why in line and "planner's choice is kept" in line for line in told)


def make_trial(variant: Variant, time: Timed) -> validating.Trial:
    """A plan all of whose tiers took a time."""
    variant = validating._with_measured(variant, {tier.tokens: time for tier in variant.ranks[0].tiers})
    return validating.Trial("made", variant, variant, time.seconds, time.spread)


def test_the_spread_of_the_samples_of_all_tiers_decides_if_plans_can_be_told_apart(world, monkeypatch):
    slow = timed(1.0)
    engines = Scripted(monkeypatch, timed(0.02, spread=0.1), timed(0.018, spread=0.1), slow, slow)
    chosen, trials, said = choose(world)
    assert placements(chosen) == placements(trials[0].variant) == placements(engines.variants[0])
    (told,) = (line for line in said if "too busy to tell" in line)
    assert "their samples overlap" in told


@pytest.mark.slow
def test_noise_on_a_busy_machine_does_not_change_the_plan(world, monkeypatch):
    rng, chosen = random.Random(1), []
    for _ in range(10):
        engines = Scripted(monkeypatch, *(timed(rng.uniform(0.001, 0.02), 0.4, 0.3) for _ in range(3)))
        engines.again = {n: timed(rng.uniform(0.001, 0.02), 0.4, 0.3) for n in range(3)}
        found, _, said = choose(world)
        assert not found.correction.factors
        chosen.append(placements(found))
    assert all(places == chosen[0] for places in chosen)


def test_the_spread_of_a_sample_is_how_far_its_runs_were_from_the_middle(monkeypatch):
    took = iter([0.011, 0.010, 0.014])
    monkeypatch.setattr(validating, "_time_runs", lambda engine, new, past, repeats: next(took))
    monkeypatch.setattr(validating, "disturbed_share", lambda before, after: 0.0)
    assert validating._sample(None, [[0]], 0, 1, math.inf) == Timed(0.011, 0.0, pytest.approx(0.003))


def test_what_is_computed_again_to_go_back_is_no_part_of_a_run(monkeypatch):
    """A state that cannot be cut back makes that take longer than the run."""
    clock = ManualClock()
    monkeypatch.setattr(validating, "time", clock)
    engine = SimpleNamespace(reset=lambda length: clock.sleep(1.0), forward=lambda new: clock.sleep(0.01))
    assert validating._time_runs(engine, [[0]], 7, 3) == pytest.approx(0.01)
    assert validating._warm_up(engine, [[0]], 7) == 1  # as many as fit in a sample with the way back


@pytest.mark.parametrize(
    ("lost", "best"),
    [((0.0,), 1), ((0.3, 0.01), 2), ((0.3, 0.2, 0.6), 1), ((0.3, 0.2, 0.6, 0.0), 1)],
)
def test_disturbed_samples_are_taken_again_up_to_three_times(monkeypatch, lost, best):
    shares, sampled = iter(lost), []
    monkeypatch.setattr(validating, "disturbed_share", lambda before, after: next(shares))
    monkeypatch.setattr(validating, "_fill", lambda engine, load: None)
    monkeypatch.setattr(validating, "_new_tokens", lambda engine, load: [[0]])

    def time_runs(engine, new, past, repeats):
        sampled.append(1 + max(0, len(sampled) - 2) // validating.SAMPLES)  # two warm-ups, then which try it is
        return 0.01 * sampled[-1]

    monkeypatch.setattr(validating, "_time_runs", time_runs)
    found = validating.measure_tiers(None, [TierLoad(Batch.even(1, 1))], math.inf)
    assert found == {1: Timed(0.01 * best, lost[best - 1])}
    assert len(sampled) == 2 + validating.SAMPLES * min(3, len(lost))


def replace_all(variant, **fields):
    """The variant with these fields of every prediction."""
    (rank,) = variant.ranks
    tiers = tuple(replace(t, prediction=replace(t.prediction, **fields)) for t in rank.tiers)
    return replace(variant, ranks=(replace(rank, tiers=tiers),))


@pytest.mark.slow
def test_auto_runs_what_it_settles_on_when_that_is_one_device(world, capsys):
    assert plan(world, "--validate") == 0
    assert cli_plan.main(["-m", str(world.model), "-c", "128", "--vram", "6,6", "-sm", "auto"]) == 0
    out, err = capsys.readouterr()
    (variant,) = load_registry(world.registry).variants
    assert variant.validated and len(variant.considered) > 1 and variant.workload.vram_mib == (6,)
    assert out.count("Plans that were run") == 2 and "not validated" not in err and "predicted only" not in err


@pytest.mark.slow
def test_a_plan_that_was_run_does_not_give_way_to_a_predicted_one_silently(world, capsys):
    assert plan(world, "--validate") == 0 and "predicted only" not in capsys.readouterr().err
    assert plan(world, "--no-validate") == 0
    assert "note: the plan for 6 MiB, -c 128, -sm none, device 0 had been run" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [("--no-validate",), ("--strategy", "fit"), ("--sweep",)])
def test_validation_can_be_left_out(world, capsys, flags):
    words = ["-m", str(world.model), "-c", "128"]
    words += ["--sweep", "6:8:2"] if flags == ("--sweep",) else ["--vram", "6", *flags]
    assert cli_plan.main(words) == 0
    out, err = capsys.readouterr()
    assert "Plans that were run" not in out
    assert ("not validated" in err) == (flags != ("--no-validate",))
    for variant in load_registry(world.registry).variants:
        assert all(t.prediction.measured_seconds is None for t in variant.ranks[0].tiers)


def test_the_environment_turns_validation_off_and_the_command_line_wins(world, capsys, monkeypatch):
    monkeypatch.setenv("PSHARD_VALIDATE", "0")
    assert plan(world) == 0 and "Plans that were run" not in capsys.readouterr().out
    monkeypatch.setenv("PSHARD_VALIDATE", "perhaps")
    assert plan(world) == 2 and "PSHARD_VALIDATE" in capsys.readouterr().err
    monkeypatch.setenv("PSHARD_VALIDATE", "0")
    monkeypatch.setattr(validating, "find_spec", lambda name: None)
    assert plan(world, "--validate") == 2
    assert "--validate is not possible: torch is not installed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--validate", "--strategy", "fit"), "exclude each other"),
        (("--validate", "-sm", "tensor", "-ts", "1,1"), "several processes"),
        (("--validate-seconds", "0"), "number of seconds"),
    ],
)
def test_impossible_validation_is_refused_in_one_line(world, capsys, flags, complaint):
    assert plan(world, *flags) == 2
    err = capsys.readouterr().err
    assert complaint in err and err.count("\n") == 1
    assert not os.path.exists(world.registry)


def test_without_torch_a_plan_is_predicted_only(world, capsys, monkeypatch):
    """The profile is of this machine, so plans would be run."""
    monkeypatch.setattr(validating, "find_spec", lambda name: None)
    assert plan(world) == 0 and "note: not validated: torch is not installed" in capsys.readouterr().err


def test_a_profile_of_another_machine_is_planned_for_but_not_run(world, capsys, tmp_path):
    from pshard.registries.profile_store import save_profile

    here = made_up_profile()
    other = save_profile(replace(here, host=replace(here.host, isa="neon")), tmp_path / "other.json")
    assert plan(world, "--profile", other) == 0
    assert "not validated: the machine profile is of another machine" in capsys.readouterr().err
    assert plan(world, "--profile", other, "--validate") == 2


def test_large_models_without_a_gpu_are_run_only_on_request():
    assert validating.why_not_worthwhile(made_up_profile(), 100 << 20) is None
    assert "2.0 GiB takes long" in (validating.why_not_worthwhile(made_up_profile(), 2 << 30) or "")
    assert validating.why_not_worthwhile(profile_from_datasheet(DESKTOP), 20 << 30) is None


def test_tables_are_whole_on_a_narrow_pipe(planned):
    measured = validating._with_measured(planned, {t.tokens: Timed(1.0) for t in planned.ranks[0].tiers})
    trial = validating.Trial("an unusually long name of a strategy", measured, measured, 1.0)
    pipe = io.StringIO()
    print_trials((trial,), Console(file=pipe, width=40))
    text = pipe.getvalue()
    assert "round s" in text and trial.name in text and "…" not in text
