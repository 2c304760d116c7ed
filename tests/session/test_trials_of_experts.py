"""Plans of experts that are run before one is written: by the routing record, slots that follow use among them."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
from cli_world import World, made_up_profile, make_world
from routing_samples import make_drifting_record

from pshard.models import open_model
from pshard.plan import Trial, Variant
from pshard.planner.make_plan import plan_baseline
from pshard.routing.measure_popularity import measure_popularity
from pshard.routing.order_experts import order_experts
from pshard.routing.record import RoutingRecord
from pshard.session import try_plans
from pshard.session.try_plans import UNTRIED_SLOTS, Timed
from pshard.workload import Workload

pytestmark = pytest.mark.usefixtures("few_to_collect")
ROUTED = {"arch": "qwen3moe", "n_layers": 4, "n_experts": 16, "n_used": 2, "d_expert": 128}
RECORD = make_drifting_record(400, layers=4)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """Where slots are always predicted to be faster: those of a published strategy."""

    def find_slots(spec, profile, workload, variant, record, time_limit):
        assert record is RECORD and workload.max_ubatch == 16
        return plan_baseline("expert-lru", spec, profile, workload, variant.correction, record)

    monkeypatch.setattr("pshard.planner.routing.plan_slots.plan_slots", find_slots)
    return make_world(tmp_path, **ROUTED)


def choose(world: World, seconds: float = 60.0) -> tuple[Variant, tuple[Trial, ...], list[str]]:
    said: list[str] = []
    with open_model(world.model) as file:
        file.spec = order_experts(file.spec, measure_popularity(RECORD))
        workload = Workload((26,), context=128, max_ubatch=16, prompt=16, generated=100)
        chosen = try_plans.choose_by_trial(file, made_up_profile(), workload, 5.0, seconds, said.append, RECORD)
    return *chosen, said


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> "Callable[[float], list[RoutingRecord | None]]":
    """How many times as long as the fastest other plan one with slots takes; returns what trials were told to play."""
    played: list[RoutingRecord | None] = []

    def tell(slots: float) -> list[RoutingRecord | None]:
        def load(opened: object, variant: Variant, checkpoints: bool = True, plays: RoutingRecord | None = None):
            played.append(plays)
            factor = slots if variant.ranks[0].caches else 1.0
            return nullcontext({t.tokens: Timed(0.01 * factor) for t in variant.ranks[0].tiers})

        monkeypatch.setattr("pshard.session.start_engine.start_engine", load)
        monkeypatch.setattr(try_plans, "measure_tiers", lambda engine, loads, deadline: engine)
        return played

    return tell


def test_trials_play_the_record_and_slots_win_where_they_are_measured_faster(world: World, script) -> None:
    played = script(0.5)
    chosen, trials, _ = choose(world)
    assert played and all(record is RECORD for record in played)
    assert chosen.ranks[0].caches and trials[0].name.endswith("with slots")
    assert chosen.ranks[0].tiers[0].prediction.measured_seconds == 0.005


def test_slots_that_are_measured_slower_are_not_taken(world: World, script) -> None:
    script(1.5)
    chosen, trials, _ = choose(world)
    assert not chosen.ranks[0].caches and trials[-1].name.endswith("with slots")


def test_slots_that_no_time_is_left_to_try_are_taken_by_prediction_and_a_line_says_so(world: World, script) -> None:
    script(0.5)
    chosen, trials, said = choose(world, 0.0)
    assert chosen.ranks[0].caches and len(trials) == 1 and UNTRIED_SLOTS in said


def test_a_trial_runs_for_real_with_slots(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(try_plans, "SAMPLE_SECONDS", 0.005)
    _, trials, _ = choose(world)
    assert any(trial.name.endswith("with slots") and trial.seconds > 0 for trial in trials)
