"""Walks that run ahead, with the CPU as accelerator: flags in place of kernels that tell and await."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from engines import open_engine
from experts_file import WAYS
from flag_relay import open_on_flags
from gemma4_files import MIXED, make_gemma4, write_gemma4
from model_files import write_gguf
from plan_samples import make_tier

from pshard.models import open_model
from pshard.runtime.devices.device import open_device
from pshard.runtime.kernels.cpu import native
from pshard.runtime.kernels.cpu.host import HostKernels
from pshard.runtime.kernels.cpu.recording import record
from pshard.runtime.texts.text import Piece
from pshard.runtime.walks.program import Stretch
from pshard.runtime.walks.walk import ACTS, Walk
from pshard.steps.emit import emit_steps
from pshard.steps.move import Activations, Move, hand_over
from pshard.steps.step import Compute, Step, StepList
from pshard.units.moe.experts import EXPERTS

pytestmark = pytest.mark.skipif(not native.is_available(), reason="needs the C++ library")


def talk(path: Path, tiers) -> tuple[torch.Tensor, int]:
    """Logits of prompts and single tokens, and bytes over the link."""
    with open_engine(path, tiers, "fast", 128) as engine:
        parts = [
            engine.forward(ids, all_logits=True) for ids in ([3, 4, 5], [6], [7], [8], list(range(9, 40)), [9], [1])
        ]
        return torch.cat(parts), engine.link_bytes


@pytest.mark.quick("('streamed', None, 3)")
@pytest.mark.parametrize("way", [WAYS[2], WAYS[3], WAYS[4]], ids=str)
def test_what_runs_ahead_gives_the_bits_and_bytes_of_the_plain_walk(tmp_path: Path, monkeypatch, way: tuple) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen3moe", qtype="Q4_0", n_layers=3)
    with open_model(path) as file:
        spec = file.spec
    places = {u.name: ("pinned", "vram" if u.kind.state else None) for u in spec.units}
    places |= {u.name: way for u in spec.units if u.kind is EXPERTS}
    tiers = tuple(make_tier(spec, n, places, 2, 128, 1) for n in (4, 40))
    expected, nbytes = talk(path, tiers)
    ahead, walk_ahead = [], Walk.walk_ahead
    monkeypatch.setattr("pshard.runtime.executor.open_relay", open_on_flags)
    monkeypatch.setattr(HostKernels, "repeatable", True)
    monkeypatch.setattr(Walk, "walk_ahead", lambda self, *rest: ahead.append(1) or walk_ahead(self, *rest))
    got, moved = talk(path, tiers)
    assert len(ahead) >= 2, "single tokens run ahead from the second on"
    assert torch.equal(got, expected) and moved == nbytes


def test_a_step_behind_a_switch_runs_ahead_once_its_tier_was_there_before(tmp_path: Path, monkeypatch) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen3moe", qtype="Q4_0", n_layers=3)
    with open_model(path) as file:
        spec = file.spec
    places = {u.name: ("pinned", "vram" if u.kind.state else None) for u in spec.units}
    places |= {u.name: WAYS[2] for u in spec.units if u.kind is EXPERTS}
    first = next(u.name for u in spec.units if u.kind is EXPERTS)
    few = make_tier(spec, 1, places, 2, 128, 1)
    more = make_tier(spec, 4, places | {first: ("pinned", None)}, 2, 128, 1)
    steps = [[3], [4], [5, 6, 7], [8, 9, 10], [1], [2], [3, 4, 5], [6], [7, 8, 9], [2]]

    def run() -> tuple[torch.Tensor, int, int]:
        with open_engine(path, (few, more), "fast", 128) as engine:
            parts = [engine.forward(ids, all_logits=True) for ids in steps]
            return torch.cat(parts), engine.link_bytes, engine.switches

    expected = run()
    ahead, walk_ahead = [], Walk.walk_ahead
    monkeypatch.setattr("pshard.runtime.executor.open_relay", open_on_flags)
    monkeypatch.setattr(HostKernels, "repeatable", True)

    def note(walk: Walk, *rest) -> list:
        ahead.append(dict(walk._tier.arriving))
        kept = walk_ahead(walk, *rest)
        assert not walk._tier.arriving
        return kept

    monkeypatch.setattr(Walk, "walk_ahead", note)
    got = run()
    assert torch.equal(got[0], expected[0]) and got[1:] == expected[1:]
    assert got[2] == 6
    assert len(ahead) == len(steps) - 2, "all but the first of each tier"
    assert any(first in arriving for arriving in ahead), "some of them behind a switch that brings weights"


def emit_with_hand_offs_apart(before: str, *given) -> StepList:
    """Steps in which routes come to the CPU by themselves before a unit there, not with what its first one takes."""
    steps, body, late = emit_steps(*given), list[Step](), list[Step]()
    for step in steps.body:
        if isinstance(step, Move) and step.takes_back(Activations) and len(step.activations) > 1:
            body.append(hand_over("cpu", step.nbytes))
            late.append(hand_over("cpu", step.nbytes, ("routed",)))
            continue
        if isinstance(step, Compute) and step.unit.endswith(before):
            body += late
            late.clear()
        body.append(step)
    assert len(body) > len(steps.body) and not late
    return StepList(steps.enter, tuple(body))


@pytest.mark.parametrize(("before", "ahead"), [("ffn", True), ("experts", False), ("experts", True)])
def test_the_cpu_gets_two_hand_offs_between_what_the_accelerator_computes(
    tmp_path: Path, monkeypatch, before: str, ahead: bool
) -> None:
    path = write_gemma4(tmp_path / "m.gguf", MIXED, make_gemma4(MIXED))
    with open_model(path) as file:
        spec = file.spec
    places = {u.name: ("pinned", "vram" if u.kind.state else None) for u in spec.units}
    places |= {u.name: ("cpu", None) for u in spec.units if u.name.endswith(("ffn", "experts"))}
    tiers = tuple(make_tier(spec, n, places, 2, 128, 1) for n in (4, 40))
    expected, _ = talk(path, tiers)
    monkeypatch.setattr("pshard.runtime.executor.emit_steps", partial(emit_with_hand_offs_apart, before))
    runs, walk_ahead = [], Walk.walk_ahead
    monkeypatch.setattr(Walk, "walk_ahead", lambda self, *rest: runs.append(1) or walk_ahead(self, *rest))
    if ahead:
        monkeypatch.setattr("pshard.runtime.executor.open_relay", open_on_flags)
        monkeypatch.setattr(HostKernels, "repeatable", True)
    assert torch.equal(talk(path, tiers)[0], expected)
    assert len(runs) >= 2 * ahead


def test_rows_are_chosen_where_the_walk_runs_ahead_and_where_launches_repeat(tmp_path: Path, monkeypatch) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen3moe", qtype="Q4_0", n_layers=2)
    with open_model(path) as file:
        spec = file.spec
    places = {u.name: ("pinned", "vram" if u.kind.state else None) for u in spec.units}
    places |= {u.name: WAYS[2] for u in spec.units if u.kind is EXPERTS}
    tiers = tuple(make_tier(spec, n, places, 2, 256, 2) for n in (4, 40))

    def choose() -> list:
        with open_engine(path, tiers, "fast", 256, 2) as engine:
            first, other = engine.texts.open([1]), engine.texts.open([1])
            found = []
            for token in range(6):
                pieces = [Piece(first, (token, 3), best=3 * (token % 2) + 1), Piece(other, (token,), full=token > 3)]
                found += [(row.ids, row.logits, row.full) for rows in engine.texts.step(pieces) for row in rows]
            return found

    expected = choose()
    ahead, walk_ahead = [], Walk.walk_ahead
    monkeypatch.setattr("pshard.runtime.executor.open_relay", open_on_flags)
    monkeypatch.setattr(HostKernels, "repeatable", True)
    monkeypatch.setattr(Walk, "walk_ahead", lambda self, *rest: ahead.append(1) or walk_ahead(self, *rest))
    for got, wanted in zip(choose(), expected, strict=True):
        for one, other in zip(got, wanted):
            assert (one is None and other is None) or one.tolist() == other.tolist()
    assert len(ahead) >= 2


def test_units_that_are_all_on_the_cpu_wait_for_no_accelerator(tmp_path: Path, monkeypatch) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen3moe", qtype="Q4_0", n_layers=2)
    with open_model(path) as file:
        spec = file.spec
    places = {u.name: ("cpu", "host" if u.kind.state else None) for u in spec.units}
    tiers = tuple(make_tier(spec, n, places, 2, 128, 1) for n in (4, 40))
    expected, _ = talk(path, tiers)
    monkeypatch.setattr("pshard.runtime.executor.open_relay", open_on_flags)
    monkeypatch.setattr(HostKernels, "repeatable", True)
    monkeypatch.setattr(Walk, "walk_ahead", lambda *_: pytest.fail("the CPU waits for a question that never comes"))
    assert torch.equal(talk(path, tiers)[0], expected)


def test_a_question_that_never_comes_is_an_error(monkeypatch) -> None:
    monkeypatch.setattr("pshard.runtime.devices.relay.PATIENCE", 0.02)
    relay = open_on_flags(open_device("cpu"), 2)
    calls = record(lambda: None)
    assert calls is not None
    relay.start([calls, calls])
    relay.tell(0)
    with pytest.raises(RuntimeError, match="did not ask"):
        relay.finish()
    relay.give_up()
    relay.start([calls])  # and the next micro-batch begins anew
    relay.tell(0)
    relay.finish()
    relay.close()


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_turn_that_is_given_up_frees_who_waits_for_a_run_several_times(monkeypatch, interrupted: bool) -> None:
    """Also where whoever gives it up is interrupted at that."""
    device = open_device("cpu")
    relay = open_on_flags(device, 1)
    waits = threading.Thread(target=lambda: [relay.wait(0) for _ in range(3)], daemon=True)  # the accelerator
    asked = list[object]()

    def happened(mark: object) -> bool:
        asked.append(mark)
        if interrupted and len(asked) == 1:
            raise KeyboardInterrupt
        return not waits.is_alive()

    monkeypatch.setattr(device, "happened", happened)
    monkeypatch.setattr(device, "synchronize", lambda: waits.join(5))
    waits.start()
    with pytest.raises(KeyboardInterrupt) if interrupted else nullcontext():
        relay.give_up()
    assert not waits.is_alive() and not relay._flags.any()
    relay.close()


@pytest.mark.parametrize("during", ["start", "give_up"])
def test_an_engine_closes_after_an_interrupt_at_any_moment_of_a_turn(tmp_path: Path, monkeypatch, during: str) -> None:
    """In the call that begins the turn, or, after another, in the one that leaves it."""
    path = write_gguf(tmp_path / "m.gguf", "qwen3moe", qtype="Q4_0", n_layers=2)
    with open_model(path) as file:
        spec = file.spec
    places = {u.name: ("pinned", "vram" if u.kind.state else None) for u in spec.units}
    places |= {u.name: WAYS[2] for u in spec.units if u.kind is EXPERTS}
    monkeypatch.setattr("pshard.runtime.executor.open_relay", open_on_flags)
    monkeypatch.setattr(HostKernels, "repeatable", True)
    start, give_up, left = native.Relay.start, native.Relay.give_up, [1]

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def start_and_interrupt(relay: native.Relay, turn: object) -> None:
        start(relay, turn)
        raise KeyboardInterrupt

    def interrupt_once(relay: native.Relay) -> None:
        if left:
            left.pop()
            raise KeyboardInterrupt
        give_up(relay)

    with open_engine(path, tuple(make_tier(spec, n, places, 2, 128, 1) for n in (4, 40)), "fast", 128) as engine:
        engine.forward([3])
        engine.forward([4])
        if during == "start":
            monkeypatch.setattr(native.Relay, "start", start_and_interrupt)
        else:
            monkeypatch.setitem(ACTS, Stretch, interrupt)
            monkeypatch.setattr(native.Relay, "give_up", interrupt_once)
        with pytest.raises(KeyboardInterrupt):
            engine.forward([5])


def test_an_engine_is_closed_in_the_devices_context(tmp_path: Path, monkeypatch) -> None:
    """A thread that the device has not met can neither record an event nor ask for it."""
    path = write_gguf(tmp_path / "m.gguf", "qwen3moe", qtype="Q4_0", n_layers=2)
    monkeypatch.setattr("pshard.runtime.executor.open_relay", open_on_flags)
    engine, entered, marks = open_engine(path), list[bool](), list[bool]()
    device, mark = engine.device, engine.device.mark

    @contextmanager
    def enter() -> Iterator[None]:
        entered.append(True)
        yield
        entered.pop()

    monkeypatch.setattr(device, "current", enter)
    monkeypatch.setattr(device, "mark", lambda: marks.append(bool(entered)) or mark())
    engine.close()
    assert marks and all(marks) and not entered
