"""--ram: what host memory may not hold stays on disk, with the same tokens."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cli_world import World, make_world, write_profile
from latent_files import write_latent_folder
from qwen4exp_files import RECIPES, make_weights, write_qwen4exp

import pshard
from pshard.commands.cli_plan import main as plan
from pshard.commands.cli_run import main as run
from pshard.errors import UserError
from pshard.models import open_model
from pshard.on_disk import rows_nbytes
from pshard.planner.price import host_limits
from pshard.registries.store import registry_path

MIB = 1 << 20


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A model of 14 MiB, a disk of 1 GB/s whose reads arrive in random order, and a process that takes 4 MiB."""
    monkeypatch.setenv("PSHARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PSHARD_DISK", "fake:rate=1G,jitter=1ms")
    monkeypatch.setattr(host_limits, "PROCESS", {"cpu": 4 * MIB, "cuda": 4 * MIB})
    return make_world(tmp_path, n_layers=6)


def speak(world: World, ram: int) -> torch.Tensor:
    with pshard.load(world.model, ram=ram or None, type_k="f32", type_v="f32", kernels="plain") as engine:
        assert bool(engine.rank_plan.beyond_host) == bool(engine.memory().disk) == bool(ram)
        return torch.stack([engine.forward(list(range(40))), *(engine.forward([n]) for n in range(3))])


def test_no_memory_at_all_is_refused(world: World, capfd) -> None:
    for command in (plan, run):
        assert command(["-m", str(world.model), "--ram", "0"]) == 2
        assert capfd.readouterr().err.strip().startswith("error: argument --ram: '0' is no memory")
    with pytest.raises(UserError, match="ram is 0; it is a whole number of 1 or more"):
        pshard.load(world.model, ram=0)


def test_what_the_disk_brings_is_said_where_a_plan_is_made_and_not_beside_an_error(
    world: World, capfd, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["-m", str(world.model), "-c", "128", "-ctk", "f32", "-ctv", "f32"]
    for module in ("commands.cli_plan", "session.open_plan"):  # to find what would do takes seconds
        monkeypatch.setattr(f"pshard.{module}.name_least_ram", lambda error, *_: error)
    for command, more in ((plan, ["--no-validate"]), (run, ["-p", "a", "-n", "1"])):
        for ram, brings in (("1", False), ("14", True)):
            write_profile(world.profile)  # which knows no disk
            assert command([*flags, *more, "--ram", ram]) == (0 if brings else 2)
            lines = capfd.readouterr().err.strip().splitlines()
            assert any(line.startswith("disk: fake disk of 1000 MB/s, ") for line in lines) == brings
            assert brings or (len(lines) == 1 and lines[0].startswith("error: "))


@pytest.mark.parametrize(("fault", "why"), [("dead@3", "Input/output error"), ("short@3", "was cut while in use")])
def test_a_disk_that_fails_while_it_is_timed_is_one_line(
    fault: str, why: str, world: World, capfd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was a traceback."""
    monkeypatch.setenv("PSHARD_DISK", f"fake:rate=1G,fault={fault}")
    for command, more in ((plan, ["--no-validate"]), (run, ["-p", "a", "-n", "1"])):
        assert command(["-m", str(world.model), "--ram", "14", *more]) == 2
        (line,) = capfd.readouterr().err.strip().splitlines()
        assert line.startswith("error: fake disk of 1000 MB/s cannot be timed: ") and why in line
        assert not registry_path(world.model).exists()


@pytest.mark.slow
def test_the_least_ram_gives_the_logits_of_all_in_memory(world: World, capfd) -> None:
    flags = ["-m", str(world.model), "-c", "128", "-ctk", "f32", "-ctv", "f32"]
    assert plan([*flags, "--ram", "1"]) == 2
    *_, line = capfd.readouterr().err.strip().splitlines()
    assert line.startswith("error: --ram 1 MiB is too little for tiny; give ")
    least = int(line.split("give ")[1].split()[0])
    plan(flags)
    right = speak(world, 0)
    assert plan([*flags, "--ram", str(least)]) == 0
    assert torch.equal(speak(world, least), right)


@pytest.mark.slow  # the test above has the least without a budget
def test_the_least_ram_that_is_named_loads_with_the_budget_that_was_given(world: World, capfd) -> None:
    flags = ["-m", str(world.model), "-c", "512", "-ctk", "f32", "-ctv", "f32", "--vram", "9", "--no-validate"]
    assert plan([*flags, "--ram", "12"]) == 2
    least = capfd.readouterr().err.split("give ")[1].split()[0]
    assert plan([*flags, "--ram", least]) == 0


def test_cells_as_large_as_the_weights_send_weights_to_the_disk(tmp_path: Path, world: World) -> None:
    """A run of less context, which needs no disk itself, takes that plan."""
    folder = tmp_path / "long"
    folder.mkdir()
    model, kv = make_world(folder, n_layers=6, context=4096).model, ("-ctk", "f32", "-ctv", "f32", "--ram", "24")
    for context in ("1024", "2048"):  # 6 and 12 MiB of cells; micro-batches of 1024 would leave slots no room
        assert plan(["-m", str(model), *kv, "-c", context, "--no-validate"]) == 0
    made = registry_path(model).read_bytes()
    with pshard.load(model, ram=24, type_k="f32", type_v="f32") as engine:
        assert engine.rank_plan.beyond_host and engine.memory().disk
    assert registry_path(model).read_bytes() == made


@pytest.mark.slow
def test_a_table_of_n_grams_larger_than_ram_stays_on_disk(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    """Of each token its rows are read, as many as were planned; for which it waits longer than it computes."""
    monkeypatch.setenv("PSHARD_DISK", "fake:rate=1G,latency=5ms")
    recipe = replace(RECIPES["plain"], table=50_000)
    path = write_qwen4exp(tmp_path / "m.gguf", recipe, make_weights(recipe))
    with open_model(path) as file:
        spec = file.spec
    with pshard.load(path, context=128, type_k="f32", type_v="f32", kernels="plain") as engine:
        assert not engine.rank_plan.beyond_host
        right = [engine.forward(list(range(40))), engine.forward([7])]
    with pshard.load(path, ram=30, context=128, type_k="f32", type_v="f32", kernels="plain") as engine:
        far, memory = engine.rank_plan.beyond_host, engine.memory()
        assert "rows" in far and memory.host_weights + memory.arena < 26 * MIB < spec.unit("rows").packed_nbytes
        found = [engine.forward(list(range(40)))]
        before = engine.memory().read
        found.append(engine.forward([7]))
        planned = sum(rows_nbytes(spec.unit(name), spec.config, 1) for name in far)
        assert engine.memory().read - before == planned
    assert torch.equal(torch.stack(found), torch.stack(right))
    flags = ["--ram", "30", "-c", "128", "-ctk", "f32", "-ctv", "f32", "--explain", "--no-validate"]
    assert plan(["-m", str(path), *flags]) == 0
    told = capfd.readouterr().out
    assert "    rows       d\n" in told and "tier 1: bound by reads from disk" in told
    assert "no plan is needed" not in told


@pytest.mark.slow  # test_three_homes.py has the mark and the plan apart
def test_what_a_folder_does_not_hold_as_it_is_used_stays_in_memory(world: World, tmp_path: Path) -> None:
    """Keys and values of latent attention are made of a matrix of both, which no read from disk brings."""
    write_latent_folder(tmp_path / "m", "lite", 6)
    with open_model(tmp_path / "m") as file:
        ram = file.spec.packed_nbytes // MIB + 3
    with pshard.load(tmp_path / "m", ram=ram, context=128) as engine:
        kinds = {name.rpartition(".")[2] for name in engine.rank_plan.beyond_host}
        assert "experts" in kinds and "attention" not in kinds
        engine.forward([1, 2, 3])


@pytest.mark.slow  # test_experts_on_disk.py has slots by hand
def test_experts_in_slots_give_the_logits_of_all_in_memory_for_every_ram(world: World, tmp_path: Path) -> None:
    folder = tmp_path / "mixture"
    folder.mkdir()
    mixture = make_world(folder, arch="qwen3moe", n_layers=4, n_experts=16, d_expert=128)
    with open_model(mixture.model) as file:
        whole = file.spec.packed_nbytes // MIB
    right, slots = speak(mixture, 0), []
    for ram in (19, 23, whole):
        assert plan(["-m", str(mixture.model), "-c", "128", "-ctk", "f32", "-ctv", "f32", "--ram", str(ram)]) == 0
        with pshard.load(mixture.model, ram=ram, type_k="f32", type_v="f32", kernels="plain") as engine:
            slots.append(sum(cache.slots for cache in engine.rank_plan.caches))
            rows = [engine.forward(list(range(40))), *(engine.forward([n]) for n in range(3))]
        assert torch.equal(torch.stack(rows), right)
    assert max(slots) >= 8
