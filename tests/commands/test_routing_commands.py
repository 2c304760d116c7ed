"""Routing through the commands: recorded by a run, planned by, kept in the registry, measured by the next run."""

import json
import re
import shutil
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_world import World, edit_json, make_world, tokenizer_metadata, world_in
from report_samples import leave_undrawn

from pshard.commands import cli_bench, cli_plan, cli_report, cli_run
from pshard.planner.make_plan import plan_baseline
from pshard.registries.routing_file import read_routing
from pshard.registries.store import load_registry
from pshard.reports.figures.expert_hits import draw_hits
from pshard.routing.hits_over_time import HitCourse
from pshard.routing.record import RoutingRecord

ROUTED = {"arch": "qwen3moe", "n_layers": 4, "n_experts": 16, "n_used": 2, "d_expert": 128}
TEXT = [7919 * i % 258 for i in range(1, 60)]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return make_world(tmp_path, **ROUTED)


@pytest.fixture(scope="module")
def recorded_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A world with a plan and a record of a run, made once and copied by tests, and the run's tokens."""
    folder, said = tmp_path_factory.mktemp("recorded"), StringIO()
    world = make_world(folder, **ROUTED)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(said):  # conftest's own are for one test
        patch.setenv("PSHARD_CACHE", str(world.profile.parent))
        patch.setenv("PSHARD_VALIDATE", "0")
        assert plan(world) == run(world, "--record-routing", world.model.parent / "a.routing") == 0
    return folder, said.getvalue().splitlines()[-1]


@pytest.fixture
def recorded(recorded_once: tuple[Path, str], tmp_path: Path) -> World:
    shutil.copytree(recorded_once[0], tmp_path, dirs_exist_ok=True)
    return world_in(tmp_path)


def plan(world: World, *more: object) -> int:
    flags = ["-m", str(world.model), "-c", "256", "--vram", "3", "--no-validate", *map(str, more)]
    return cli_plan.main(flags)


def run(world: World, *more: object) -> int:
    prompt = ",".join(map(str, TEXT))
    return cli_run.main(["-m", str(world.model), "-p", prompt, "--tokens", "-n", "12", "--temp", "0", *map(str, more)])


def bench(world: World, *more: object) -> int:
    return cli_bench.main(["-m", str(world.model), "-p", "0", "-n", "1", "-r", "1", *map(str, more)])


def test_a_run_records_and_the_next_plan_and_run_start_with_the_right_experts(
    world: World, capsys: pytest.CaptureFixture
) -> None:
    path = world.model.parent / "a.routing"
    assert plan(world) == 0
    assert "note: no routing record: experts are priced as if all were chosen alike" in capsys.readouterr().err
    assert run(world, "--kernels", "plain") == 0
    plain = capsys.readouterr()
    assert "routing" not in plain.err
    assert run(world, "--kernels", "plain", "--record-routing", path) == 0
    said = capsys.readouterr()
    assert said.out == plain.out and f"routing record: {59 + 11} tokens in {path}; while decoding" in said.err
    record = read_routing(path)
    assert record.batches[-11:] == (1,) * 11 and sum(record.batches) == 70

    assert plan(world, "--routing", path) == 0
    said = capsys.readouterr()
    assert "no routing record" not in said.err
    assert re.search(r"LRU +\d+\.\d% ", said.out) and "by replay of 35 tokens" in said.out
    assert plan(world, "--routing", path, "--json") == 0
    routing = json.loads(capsys.readouterr().out)["routing"]
    assert {policy["policy"] for policy in routing["policies"]} == {"most popular, pinned", "LRU", "decayed frequency"}
    assert routing["experts"] == 16 and routing["places"] == [2, 4, 8, 12]
    (variant,) = load_registry(world.registry).variants
    assert variant.popularity and variant.popularity.tokens == 70
    path.unlink()

    again = world.model.parent / "b.routing"
    assert run(world, "--kernels", "plain", "--record-routing", again) == 0
    said = capsys.readouterr()
    assert said.out == plain.out  # who computes an expert changes no text here
    assert re.search(r"experts in VRAM served [0-9.]+% of what tokens used \([0-9.]+% expected\)", said.err)
    assert (read_routing(again).ids == record.ids).all()  # numbers are the model's, whatever the order

    assert run(world, "--vram", "64", "--replan") == 0
    assert [v.popularity for v in load_registry(world.registry).variants] == [variant.popularity] * 2


@pytest.mark.slow
def test_plans_that_are_made_again_have_the_record_that_they_were_made_by(
    recorded: World, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, path, seen = recorded, recorded.model.parent / "a.routing", list[RoutingRecord | None]()
    assert plan(world, "--routing", path) == 0
    record, kept = read_routing(path), world.registry.with_name(f"{world.registry.name}.routing")
    path.unlink()

    def plan_slots(spec, profile, workload, variant, record):
        seen.append(record)
        return plan_baseline("expert-lru", spec, profile, workload, record=record)

    monkeypatch.setattr("pshard.planner.routing.plan_slots.plan_slots", plan_slots)
    capsys.readouterr()
    assert run(world, "--vram", "26", "--replan") == 0
    assert seen[0] is not None and (seen[0].ids == record.ids).all() and seen[0].layers == record.layers
    said = capsys.readouterr().err
    assert "planned without slots" not in said and re.search(r"slots: [0-9.]+% of the choices", said)
    for damage, says in (
        (kept.unlink, "as no routing record is kept beside"),
        (lambda: kept.write_text("x"), "is no r"),
    ):
        damage()
        assert run(world, "--vram", "27", "--replan") == 0 and seen[-1] is None
        assert says in capsys.readouterr().err


def refused(code: int, capsys: pytest.CaptureFixture, says: str) -> None:
    said = capsys.readouterr().err.strip().splitlines()
    assert code == 2 and says in said[-1] and sum(line.startswith("error") for line in said) == 1


def test_records_that_cannot_be_used_are_refused_in_one_line(
    recorded: World, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    world, path = recorded, recorded.model.parent / "a.routing"
    before = world.registry.read_text()
    (other := tmp_path / "other").mkdir()
    theirs = make_world(other, **ROUTED, seed=1)
    refused(plan(theirs, "--routing", path, "--profile", world.profile), capsys, "of another model")
    refused(plan(world, "--routing", world.model), capsys, "is no routing record")
    refused(plan(world, "--routing", tmp_path / "none"), capsys, "cannot read the routing record")
    refused(run(world, "--record-routing", tmp_path / "no" / "folder"), capsys, "there is no folder")
    refused(run(world, "--record-routing", tmp_path), capsys, "is a folder; give a file name")
    assert world.registry.read_text() == before
    (dense := tmp_path / "dense").mkdir()
    plain = make_world(dense)
    assert plan(plain, "--profile", world.profile, "--vram", "6") == 0
    refused(plan(plain, "--routing", path, "--profile", world.profile), capsys, "leave out --routing")
    flags = ("--record-routing", tmp_path / "x", "--profile", world.profile)
    refused(run(plain, *flags), capsys, "leave out --record-routing")


def test_a_registry_with_damaged_popularity_is_refused(recorded: World, capsys: pytest.CaptureFixture) -> None:
    world = recorded
    assert plan(world, "--routing", world.model.parent / "a.routing") == 0
    text = world.registry.read_text()
    others = json.loads(text)["sets"][0]["variants"][0]["popularity"]["layers"][1:]
    where = ("sets", 0, "variants", 0, "popularity")
    for keys, value, says in (
        (("experts",), 15, "does not name each of 15 experts"),
        (("layers", 0, "order"), "AAAA", "does not name each"),
        (("layers", 0, "layer"), 7, "do not ascend"),
        (
            ("layers",),
            others,
            "says nothing of layer 0",
        ),
    ):
        edit_json(world.registry, *where, *keys, value=value)
        refused(run(world), capsys, says)
        world.registry.write_text(text)


def test_slots_that_follow_use_are_planned_explained_run_and_measured(
    recorded: World, recorded_once: tuple[Path, str], capsys: pytest.CaptureFixture
) -> None:
    """By the published strategy, which has them whatever a record says."""
    world, (_, text), path = recorded, recorded_once, recorded.model.parent / "a.routing"
    assert plan(world, "--strategy", "expert-lru", "--routing", path, "--explain", "--vram", "26") == 0
    said = capsys.readouterr().out
    assert re.search(
        r"slots +\d+ in the budget for experts of 4 layers, the longest unused goes; \d+% of their choices", said
    )
    assert re.search(r"of its 2 experts in a layer [0-9.]+ in slots, ", said) and "experts that follow use" in said
    (cache,) = load_registry(world.registry).variants[-1].ranks[0].caches
    assert cache.policy == "lru" and cache.found > 0
    hits = r"slots: [0-9.]+% of the choices found their expert there \([0-9.]+% expected\), (\d+) were brought in"
    for flags, brought in (((), True), (("--deterministic",), False)):
        assert run(world, *flags) == 0
        said = capsys.readouterr()
        found = re.search(hits, said.err)
        assert said.out.splitlines()[-1] == text and found and bool(int(found[1])) == brought
    assert bench(world, "-n", "8", "-o", "json") == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert 0 < row["slot_hits"] <= 1 and row["slot_hits_expected"] == cache.found


def test_a_report_follows_a_runs_hits_over_time(
    recorded: World, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shares of its stretches are those that the run itself has told."""
    leave_undrawn(monkeypatch)
    world, path, seen = recorded, recorded.model.parent / "a.routing", list[HitCourse]()
    assert plan(world, "--strategy", "expert-lru", "--routing", path, "--vram", "26") == 0
    world.registry.write_text(json.dumps(only_last_variant(json.loads(world.registry.read_text()))))
    capsys.readouterr()
    assert run(world, "--record-routing", path) == 0
    told = re.search(r"slots: ([0-9.]+)% of the choices", capsys.readouterr().err)
    monkeypatch.setattr("pshard.reports.sections.draw_hits", lambda course: seen.append(course) or draw_hits(course))
    files = [str(world.registry), str(path), "--profile", str(world.profile), "-o", str(tmp_path / "report")]
    assert cli_report.main([*files, "-m", str(world.model)]) == 0
    (course,) = seen
    assert course.ends == tuple(range(1, 12)) and len(course.slots) == 11 and set(course.stay) == {0.0}
    assert told and 100 * np.mean(course.slots) == pytest.approx(float(told[1]), abs=0.06)
    assert (tmp_path / "report" / "expert-hits.png").exists()
    refused(cli_report.main(files), capsys, "is a routing record: give the model that made it with -m")
    (other := tmp_path / "other").mkdir()
    theirs = make_world(other, **ROUTED, seed=1)
    refused(cli_report.main([*files, "-m", str(theirs.model)]), capsys, "of another model")
    (dense := tmp_path / "dense").mkdir()
    refused(cli_report.main([*files, "-m", str(make_world(dense).model)]), capsys, "has no routed experts; leave out")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["tensor", "layer"])
def test_ranks_record_plan_explain_run_and_measure_slots(
    mode: str, world: World, tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes: one record of all layers, slots on each rank, and its own hits told beside what is expected."""
    path, one, seen = tmp_path / "a.routing", tmp_path / "one.routing", list[HitCourse]()
    assert plan(world) == run(world, "--kernels", "plain", "--record-routing", one) == 0
    text = capfd.readouterr().out.splitlines()[-1]
    split = ("-sm", mode, "--vram", "26,16", "-ts", "2,1")
    assert plan(world, *split) == run(world, *split, "--kernels", "plain", "--record-routing", path) == 0
    said = capfd.readouterr()
    assert said.out.splitlines()[-1] == text and f"routing record: {59 + 11} tokens in {path}; while" in said.err
    assert all(f"experts in VRAM of rank {rank} served" in said.err for rank in range(2))
    record, alone = read_routing(path), read_routing(one)
    assert record.layers == alone.layers == (0, 1, 2, 3) and record.fingerprint == alone.fingerprint
    assert (record.ids == alone.ids).mean() > 0.99  # parts of a sum are added in another order

    assert plan(world, *split, "--routing", path, "--strategy", "expert-lru", "--explain") == 0
    said = capfd.readouterr()
    assert "no slots" not in said.err and len(re.findall(r"slots +\d+ in the budget for experts", said.out)) >= 2
    ranks = load_registry(world.registry).variants[-1].ranks
    assert all(rank.caches for rank in ranks)
    again = tmp_path / "b.routing"
    assert run(world, *split, "--record-routing", again) == 0
    said = capfd.readouterr()
    assert said.out.splitlines()[-1] == text
    told = re.findall(r"slots of rank (\d): ([0-9.]+)% of the choices found .* \([0-9.]+% expected\)", said.err)
    assert [rank for rank, _ in told] == ["0", "1"]
    world.registry.write_text(json.dumps(only_last_variant(json.loads(world.registry.read_text()))))
    monkeypatch.setattr("pshard.reports.sections.draw_hits", lambda course: seen.append(course) or draw_hits(course))
    files = [str(world.registry), str(again), "--profile", str(world.profile), "-o", str(tmp_path / "report")]
    assert cli_report.main([*files, "-m", str(world.model)]) == 0
    titles = [f"b.routing within {mib} MiB of rank {rank}" for rank, mib in ((0, 26), (1, 16))]
    assert [course.title for course in seen] == titles
    for (_, share), course in zip(told, seen, strict=True):
        assert 100 * np.mean(course.slots) == pytest.approx(float(share), abs=0.06)
    capfd.readouterr()
    assert bench(world, *split, "-n", "8", "-o", "json") == 0
    (row,) = json.loads(capfd.readouterr().out)
    assert 0 < row["slot_hits"] <= 1 and 0 < row["slot_hits_expected"] <= 1


def only_last_variant(registry: dict) -> dict:
    """A registry with the newest plan alone."""
    for plans in registry["sets"]:
        plans["variants"] = plans["variants"][-1:]
    return registry


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ({"metadata": {**tokenizer_metadata(), "qwen3moe.expert_used_count": 17}}, "a token takes 17 of 16 experts"),
        ({"extra": {"blk.0.ffn_up_exps.weight": np.zeros((16 * 128, 256), np.float32)}}, "has shape [2048, 256], not"),
        ({"extra": {"blk.1.ffn_gate_inp.weight": np.zeros((16 * 256,), np.float32)}}, "has shape [4096], not"),
    ],
)
def test_files_whose_experts_do_not_fit_are_refused_in_one_line(
    recorded: World, model: dict[str, Any], says: str, capsys: pytest.CaptureFixture
) -> None:
    """By each command, before anything is planned or loaded."""
    world = recorded
    before = world.registry.read_text()
    make_world(world.model.parent.parent, **ROUTED, **model)
    for command in (plan, run, bench):
        refused(command(world), capsys, says)
    assert world.registry.read_text() == before


def test_budgets_that_do_not_hold_an_expert_of_each_layer_are_refused_in_one_line(
    recorded: World, capsys: pytest.CaptureFixture
) -> None:
    """Where the strategy needs one there; the budget that is named, or a larger one, is enough."""
    world = recorded
    for name, says in (
        ("hot-experts", "has no room in 3 MiB for one expert of each layer"),
        ("expert-lru", "does not fit 3 MiB; raise --vram"),
    ):
        capsys.readouterr()
        refused(plan(world, "--strategy", name, "--vram", "3"), capsys, f"strategy {name!r} {says}")
        assert bench(world, "--vram", "3", "--strategy", name) == 0  # the plan is measured all the same
        assert f"baseline {name} is left out: strategy {name!r} {says}" in capsys.readouterr().err
        assert plan(world, "--strategy", name, "--vram", "26") == 0
