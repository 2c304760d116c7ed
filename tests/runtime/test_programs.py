"""Steps as they are launched: by whom, in which order, and where an accelerator that runs ahead and the CPU meet."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import open_engine
from flag_relay import open_on_flags
from model_files import write_gguf
from plan_samples import make_tier

from pshard.models import open_model
from pshard.runtime.devices.device import CpuDevice
from pshard.runtime.devices.relay import Relay
from pshard.runtime.engine import Engine
from pshard.runtime.kernels.cpu import native
from pshard.runtime.kernels.cpu.host import HostKernels
from pshard.runtime.kernels.cpu.recording import Recordings
from pshard.runtime.walks.beside import CopiesBeside
from pshard.runtime.walks.program import Program, Units, compile_ahead, compile_steps
from pshard.runtime.walks.unit_runs import UnitRuns
from pshard.steps.move import bring_experts, bring_weights, fetch_state, hand_over, join_part, write_state
from pshard.steps.step import AllReduce, Compute, Free

EMBEDDING = Compute("embedding", "cpu", "host", position="first")
OUTPUT = Compute("output", "acc", "arena", position="last")
A, F = (Compute(name, "acc", "arena") for name in ("attention.0", "ffn.0"))
SUM_A, SUM_F = AllReduce("attention.0", 8), AllReduce("ffn.0", 8)
TO_ACC, TO_CPU = hand_over("acc", 8), hand_over("cpu", 8)


def divided(i: int, source: str = "arena") -> list:
    """A layer whose CPU computes a part."""
    name, slot = f"ffn.{i}", 0 if source == "slot" else None
    return [
        Compute(f"attention.{i}", "acc", "arena"), TO_CPU,
        Compute(name, "acc", source, slot, part="share", cpu_rows=3),
        Compute(name, "cpu", "host", part="share", cpu_rows=3),
        join_part(name, 8, 2), Compute(name, "acc", source, slot, part="rest", cpu_rows=3),
    ]  # fmt: skip


def show(*body) -> list[str]:
    return str(compile_steps(body)).splitlines()


def show_ahead(*body) -> list[str]:
    found = compile_ahead(body)
    return str(found).splitlines() if found else []


def test_graphs_begin_at_units_that_wait_and_end_at_what_is_not_the_accelerators() -> None:
    embedding, slot = replace(EMBEDDING, on="acc", source="arena"), replace(F, source="slot", slot=0)
    assert show(embedding, A, SUM_A, F, OUTPUT, TO_CPU) == [
        "graph: embedding, attention.0, sum of attention.0, ffn.0, output", "thread: hidden to cpu"
    ]  # fmt: skip
    assert show(A, slot, Free(0), bring_weights("ffn.0", 0, 8), OUTPUT) == [
        "graph: attention.0", "graph: ffn.0 from slot 0", "thread: free slot 0", "thread: ffn.0 to slot 0",
        "graph: output",
    ]  # fmt: skip
    staged = replace(A, state="host")
    assert show(fetch_state("attention.0"), F, staged, write_state("attention.0", 8), F) == [
        "thread: KV attention.0", "graph: ffn.0", "graph: attention.0", "thread: KV attention.0 back", "graph: ffn.0"
    ]  # fmt: skip


def test_graphs_bring_what_enters_and_what_the_host_takes_next() -> None:
    host, back = replace(F, on="cpu", source="host"), write_state("attention.0", 8)
    assert show(EMBEDDING, TO_ACC, A, SUM_A, F, SUM_F, OUTPUT, TO_CPU) == [
        "CPU: embedding", "graph: hidden to acc; attention.0, sum of attention.0, ffn.0, sum of ffn.0, output",
        "thread: hidden to cpu",
    ]  # fmt: skip
    # a CPU unit's part of a sum is all that enters before the sum; a hand-off alone stays one
    assert show(A, SUM_A, back, TO_CPU, host, TO_ACC, SUM_F, OUTPUT, TO_ACC, host) == [
        "graph: attention.0, sum of attention.0; hidden to cpu", "thread: KV attention.0 back", "thread: hidden to cpu",
        "CPU: ffn.0", "graph: branch to acc; sum of ffn.0, output", "thread: hidden to acc", "CPU: ffn.0",
    ]  # fmt: skip
    assert show(A, bring_experts(5), TO_CPU, host)[0] == "graph: attention.0", "slots that change are not passed over"


def test_units_on_the_cpu_that_follow_each_other_are_recorded_but_for_the_first_and_the_last() -> None:
    a, f = Compute("a", "cpu", "host"), Compute("f", "cpu", "host")
    first, last = EMBEDDING, replace(OUTPUT, on="cpu", source="host")
    (units,) = compile_steps((first, a, f, last)).body
    assert isinstance(units, Units)
    assert [(call.name, call.is_recorded) for call in units.calls] == [
        ("embedding", True), ("a, f", True), ("output", False)
    ]  # fmt: skip
    assert show(f, AllReduce("f", 8), a) == ["CPU: f", "thread: sum of f", "CPU: a"]


def test_all_of_a_token_is_one_graph_where_nothing_is_copied() -> None:
    steps = EMBEDDING, TO_ACC, *divided(0), *divided(1), OUTPUT, TO_CPU
    graph = (
        "graph: hidden to acc; attention.0; hidden to cpu; ask for run 0; ffn.0 share; await run 0; join ffn.0; "
        "ffn.0 rest, attention.1; hidden to cpu; ask for run 1; ffn.1 share; await run 1; join ffn.1; "
        "ffn.1 rest, output"
    )
    runs = ["run 0: ffn.0 share", "run 1: ffn.1 share"]
    assert show_ahead(*steps) == ["CPU: embedding", graph, *runs]
    # experts that follow use are moved before it
    assert show_ahead(bring_experts(5), *steps) == ["thread: new experts", "CPU: embedding", graph, *runs]


def test_activations_that_come_back_from_the_cpu_are_awaited() -> None:
    cpu, attention = Compute("ffn.0", "cpu", "host"), Compute("attention.1", "acc", "arena")
    assert show_ahead(EMBEDDING, TO_ACC, A, TO_CPU, cpu, TO_ACC, attention, OUTPUT, TO_CPU) == [
        "CPU: embedding",
        "graph: hidden to acc; attention.0; hidden to cpu; ask for run 0; await run 0; hidden to acc; attention.1, "
        "output",
        "run 0: ffn.0",
    ]


def test_a_unit_that_waits_for_its_copy_begins_a_graph() -> None:
    copy = bring_weights("ffn.1", 0, 9)
    found = show_ahead(
        EMBEDDING, TO_ACC, *divided(0, "slot"), Free(0), copy, *divided(1, "slot"), OUTPUT, TO_CPU
    )  # fmt: skip
    assert found == [
        "CPU: embedding", "graph: hidden to acc; attention.0; hidden to cpu; ask for run 0",
        "graph: ffn.0 share from slot 0; await run 0; join ffn.0", "graph: ffn.0 rest from slot 0",
        "thread: free slot 0", "thread: ffn.1 to slot 0", "graph: attention.1; hidden to cpu; ask for run 1",
        "graph: ffn.1 share from slot 0; await run 1; join ffn.1", "graph: ffn.1 rest from slot 0, output",
        "run 0: ffn.0 share", "run 1: ffn.1 share",
    ]  # fmt: skip


def test_what_needs_the_launching_thread_is_not_run_ahead() -> None:
    on_cpu = replace(OUTPUT, on="cpu", source="host")
    assert not show_ahead(EMBEDDING, TO_ACC, *divided(0), TO_CPU, on_cpu)
    assert not show_ahead(EMBEDDING, TO_ACC, A, OUTPUT, TO_CPU)
    host = replace(F, on="cpu", source="host")
    assert not show_ahead(EMBEDDING, TO_ACC, A, TO_CPU, host, SUM_F, TO_ACC, OUTPUT, TO_CPU)


def watch_launches(monkeypatch: pytest.MonkeyPatch, engine: Engine, joined: str) -> list[str]:
    """Lines as a program prints them, as they are launched. joined: the one unit that both sides compute."""
    executor, lines, parts, graphs = engine._executor, list[str](), list[str](), list[tuple]()
    tier = executor.enter(executor.plan.covering(1), lambda: ())
    spaces = tier.side.space, executor.host.side.space
    places = {space.rows(name, 1).data_ptr(): name for space in spaces for name in ("hidden", "branch")}

    def name_sent(there: torch.Tensor, here: torch.Tensor) -> str | None:
        name = places.get(there.data_ptr())
        return f"join {joined}" if there.data_ptr() == tier.carved.row_stage.data_ptr() else name and f"{name} to acc"

    def watch(owner: type, name: str, tell: Callable[..., str | None], doer: str = "thread") -> None:
        act = getattr(owner, name)

        def told(self: Any, *given: Any) -> Any:
            if said := tell(*given):
                parts.append(said) if graphs else lines.append(f"{doer}: {said}")
            return act(self, *given)

        monkeypatch.setattr(owner, name, told)

    def repeat(device: CpuDevice, key: tuple, worth_it: bool, work: Callable[[], Any]) -> None:
        graphs.append(key)
        work()
        graphs.clear()
        lines.append(f"graph: {'; '.join(parts)}")
        parts.clear()

    monkeypatch.setattr(CpuDevice, "repeat", repeat)
    monkeypatch.setattr(engine.device, "kind", "cuda")  # whose units are given to kernels all at once
    watch(CpuDevice, "send", name_sent)
    watch(CpuDevice, "bring", lambda here, there: graphs and f"{places[there.data_ptr()]} to cpu")
    watch(CpuDevice, "host_wait", lambda event: "hidden to cpu")  # or the logits, at the end
    watch(UnitRuns, "run_all", lambda steps: graphs and Units(steps).name)
    watch(Recordings, "run", lambda key, work: key[0], "CPU")
    watch(CopiesBeside, "start", lambda step, tokens: str(Program((step,))).removeprefix("thread: "))
    watch(CopiesBeside, "free", lambda: "free slot 0")
    watch(Relay, "tell", lambda run: f"ask for run {run}")
    watch(Relay, "wait", lambda run: f"await run {run}")
    return lines


@pytest.mark.skipif(not native.is_available(), reason="needs the C++ library")
@pytest.mark.parametrize("ahead", [False, True])
def test_what_is_printed_is_what_is_launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: bool) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen3", qtype="Q4_0", n_layers=4)
    with open_model(path) as file:
        spec = file.spec
    places: dict[str, tuple] = {u.name: ("pinned", "vram" if u.kind.state else None) for u in spec.units}
    places |= {"embedding": ("cpu", None), "blk.1.ffn": ("cpu", None), "blk.3.ffn": ("pinned", None, 32)}
    places |= {"blk.0.ffn": ("streamed", None), "blk.2.ffn": ("streamed", None), "blk.3.attention": ("pinned", "host")}
    monkeypatch.setattr(HostKernels, "repeatable", True)
    if ahead:
        monkeypatch.setattr("pshard.runtime.executor.open_relay", open_on_flags)
    with open_engine(path, (make_tier(spec, 4, places, 1, 128, 1),), "fast") as engine:
        for token in range(3):  # of which the first is written down
            engine.forward([token])
        executor = engine._executor
        program = executor.program(executor.plan.covering(1), True)[ahead]
        assert program is not None and len(program.runs) == 2 * ahead
        lines = watch_launches(monkeypatch, engine, "blk.3.ffn")
        engine.forward([3])
    printed = [line for line in str(program).splitlines() if not line.startswith("run ")]
    assert lines == ([*printed, "thread: hidden to cpu"] if ahead else printed), "there the logits end no step"
