"""Ranks whose accelerators run ahead of the threads that launch: the bits of the plain walk.

The CPU is the accelerator, flags are in place of kernels that tell and await, and sums are made where GPUs make theirs.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from experts_file import WAYS
from family_files import write_family
from family_forward import family_logits
from flag_relay import open_late_on_flags, open_on_flags
from gemma4_files import MIXED, SMALL, Gemma4, gemma4_logits, make_gemma4, write_gemma4
from lane_ranks import use_lanes
from model_files import write_gguf
from plan_samples import make_tier
from thread_ranks import run_ranks

from pshard.model import ModelSpec
from pshard.plan import TierPlan
from pshard.runtime.engine import Engine
from pshard.runtime.executor import Executor
from pshard.runtime.kernels.cpu import native
from pshard.runtime.kernels.cpu.host import HostKernels
from pshard.runtime.texts.text import Piece
from pshard.runtime.walks.walk import Walk
from pshard.units.attention import ATTENTION
from pshard.units.moe.experts import EXPERTS
from pshard.units.unit import places_of

pytestmark = pytest.mark.skipif(not native.is_available(), reason="needs the C++ library")
CONTEXT, AT_ONCE = 128, 4
GROUPS = [("tensor", (1.0, 1.0)), ("tensor", (3.0, 1.0)), ("tensor", (1.0, 0.0, 2.0)), ("layer", (1.0, 1.0))]


def talk(engine: Engine) -> tuple[torch.Tensor, int]:
    """Logits of prompts and single tokens, and bytes over the link."""
    prompts = ([3, 4, 5], [6], [7], [8], list(range(9, 25)), [9], [1], [2])
    return torch.cat([engine.forward(ids, all_logits=True) for ids in prompts]), engine.link_bytes


def place_units(way: tuple, attention: str) -> Callable[[ModelSpec], tuple[TierPlan, ...]]:
    """way: of every second layer's experts. attention: where that of the last layer is computed."""

    def place(spec: ModelSpec) -> tuple[TierPlan, ...]:
        places: dict[str, Any] = {u.name: ("pinned", "vram" if u.kind.state else None) for u in spec.units}
        places |= {u.name: way for u in spec.units if u.kind is EXPERTS and u.layer % 2 and u.tensors}
        last = (attention, "vram" if attention == "pinned" else "host")
        places |= {u.name: last for u in spec.units if u.kind is ATTENTION and u.layer == 3 and u.tensors}
        places["embedding"] = ("cpu", None)
        return tuple(make_tier(spec, n, places, 2, CONTEXT, 1) for n in (AT_ONCE, 16))

    return place


def count_walks_ahead(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have sums made where GPUs make theirs and launches repeat; an item for each walk that runs ahead."""
    real, ahead, walk_ahead = Executor.shape_of, list[int](), Walk.walk_ahead
    monkeypatch.setattr(Executor, "shape_of", lambda *given: replace(real(*given), sums_on_host=False))
    monkeypatch.setattr(HostKernels, "repeatable", True)
    monkeypatch.setattr(Walk, "walk_ahead", lambda self, *rest: ahead.append(1) or walk_ahead(self, *rest))
    return ahead


@pytest.mark.quick("layer-shares13-way13-cpu")
@pytest.mark.parametrize(  # each way of experts, and attention, in turn
    ("mode", "shares", "way", "attention"),
    [
        pytest.param(*group, way, attention, marks=[pytest.mark.slow] if (i + n) % 4 else [])
        for i, group in enumerate(GROUPS)
        for n, way in enumerate((WAYS[2], WAYS[3], WAYS[4], WAYS[6]))
        for m, attention in enumerate(("pinned", "cpu"))
        if m == (i + n // 2) % 2
    ],
)
def test_ranks_that_run_ahead_give_the_bits_and_bytes_of_the_plain_walk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, shares: tuple[float, ...], way: tuple, attention: str
) -> None:
    """way, attention: see `place_units`."""
    path = write_gguf(tmp_path / "m.gguf", "qwen3moe", qtype="Q4_0", n_layers=4, d_expert=192)
    ahead = count_walks_ahead(monkeypatch)
    options: Any = {"tiers": place_units(way, attention), "mode": mode, "kernels": "fast"}
    expected = run_ranks(path, shares, talk, CONTEXT, **options)
    assert not ahead
    monkeypatch.setattr("pshard.runtime.executor.open_relay", open_on_flags)
    got = run_ranks(path, shares, talk, CONTEXT, **options)
    assert len(ahead) >= AT_ONCE * sum(share > 0 for share in shares)
    for (logits, nbytes), (wanted, moved) in zip(got, expected, strict=True):
        assert torch.equal(logits, wanted) and nbytes == moved


@pytest.mark.parametrize("recipe", [MIXED, SMALL], ids=["experts beside FFNs", "cells of others"])
@pytest.mark.usefixtures("exact_gelu")
def test_what_stands_beside_the_stream_is_summed_where_gpus_sum_it(
    recipe: Gemma4, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def place(spec: ModelSpec) -> tuple[TierPlan, ...]:
        """All that the CPU may have of every second layer is there."""
        places: dict[str, Any] = {u.name: ("pinned", "vram" if u.kind.state else None) for u in spec.units}
        for unit in spec.units:
            to_host = "cpu", "host" if unit.kind.state else None
            if unit.layer > 0 and unit.layer % 2 and unit.tensors and to_host in places_of(unit.kind, True):
                places[unit.name] = to_host
        return tuple(make_tier(spec, n, places, 2, CONTEXT, 1) for n in (AT_ONCE, 16))

    ahead, weights = count_walks_ahead(monkeypatch), make_gemma4(recipe)
    options: Any = {"tiers": place, "kernels": "fast"}
    wanted = gemma4_logits(recipe, weights, [3, 4, 5, 6, 7, 8, *range(9, 25), 9, 1, 2])
    exact = write_gemma4(tmp_path / "exact.gguf", recipe, weights)
    for logits, _ in run_ranks(exact, (1.0, 0.0, 2.0), talk, CONTEXT, **options):
        assert abs(logits.numpy() - wanted).max() < 3e-5 * wanted.std()
    small = write_gemma4(tmp_path / "small.gguf", recipe, weights, "Q8_0")  # of F32 the CPU's runs are not one call
    expected = run_ranks(small, (1.0, 0.0, 2.0), talk, CONTEXT, **options)
    assert not ahead
    monkeypatch.setattr("pshard.runtime.executor.open_relay", open_on_flags)
    got = run_ranks(small, (1.0, 0.0, 2.0), talk, CONTEXT, **options)
    assert ahead
    assert all(torch.equal(one, other) for (one, _), (other, _) in zip(got, expected, strict=True))


@pytest.mark.quick("olmo3")
@pytest.mark.parametrize("family", ["olmo2", "olmo3", "minimax-m2"])
def test_squares_are_summed_where_gpus_sum_them_whoever_computes_attention(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of ranks with attention of every second layer on the CPU, each of other layers."""

    def place(spec: ModelSpec) -> tuple[TierPlan, ...]:
        places: dict[str, Any] = {u.name: ("pinned", "vram" if u.kind.state else None) for u in spec.units}
        turn = sum(len(unit.tensors) for unit in spec.units) % 2
        for unit in spec.units:
            if unit.kind.state and unit.layer % 2 == turn and unit.tensors:
                places[unit.name] = ("cpu", "host")
        places["embedding"] = ("cpu", None)
        return tuple(make_tier(spec, n, places, 2, CONTEXT, 1) for n in (AT_ONCE, 16))

    ahead = count_walks_ahead(monkeypatch)
    recipe, weights, exact = write_family(tmp_path / "exact.gguf", family)
    options: Any = {"tiers": place, "kernels": "fast"}
    wanted = family_logits(recipe, weights, [3, 4, 5, 6, 7, 8, *range(9, 25), 9, 1, 2])
    for logits, _ in run_ranks(exact, (1.0, 0.0, 1.0), talk, CONTEXT, **options):
        assert abs(logits.numpy() - wanted).max() < 1e-5 * wanted.std()
    small = write_family(tmp_path / "small.gguf", family, "Q8_0").path  # of F32 the CPU's runs are not one call
    expected = run_ranks(small, (1.0, 0.0, 1.0), talk, CONTEXT, **options)
    assert not ahead
    monkeypatch.setattr("pshard.runtime.executor.open_relay", open_on_flags)
    got = run_ranks(small, (1.0, 0.0, 1.0), talk, CONTEXT, **options)
    assert ahead
    assert all(torch.equal(one, other) for (one, _), (other, _) in zip(got, expected, strict=True))


def talk_of_all_kinds(engine: Engine) -> tuple[list[list[float]], int]:
    """As `talk`, of micro-batches whose sizes, logits and wishes take turns, and a prompt of several; again and again,
    so that each is captured and replayed."""
    said, prompts = list[torch.Tensor](), ([3, 4, 5], [6], [7], list(range(9, 25)), [9, 2, 3], [9], [1])
    for turn in range(3):
        said += [engine.forward([token + turn for token in ids], all_logits=True) for ids in prompts]
        said += [engine.forward(ids) for ids in ([5, 4, turn], [6 + turn], [7, 1, 2])]
        said += [engine.forward(ids, best_only=True) for ids in ([turn], [7, 1, 2])]
        said.append(engine.forward(list(range(turn, turn + 58))))  # four micro-batches, of which the last gives logits
        engine.reset(0)
    nbytes, text = engine.link_bytes, engine.texts.open([1])
    for token in range(6):
        ids = (token, 3, 5) if token % 2 else (token,)
        (rows,) = engine.texts.step([Piece(text, ids, best=1 + token % 3, full=token > 3)])
        said += [torch.tensor([*row.ids, *row.logits, *(() if row.full is None else row.full)]) for row in rows]
    engine.texts.close(text)
    return [each.flatten().tolist() for each in said], nbytes


@pytest.mark.parametrize(
    ("mode", "shares", "way", "attention", "gathers"),
    [
        pytest.param("tensor", (3.0, 1.0), WAYS[2], "cpu", True, marks=pytest.mark.slow),
        pytest.param("tensor", (1.0, 0.0, 2.0), WAYS[6], "pinned", True, marks=pytest.mark.slow),
        ("layer", (1.0, 1.0), WAYS[2], "pinned", False),
        pytest.param("layer", (1.0, 0.0, 1.0), WAYS[4], "cpu", True, marks=pytest.mark.slow),
    ],
)
def test_lanes_that_are_behind_their_threads_and_replay_what_was_captured_give_these_bits_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, shares: tuple[float, ...], way: tuple, attention: str,
    gathers: bool,
) -> None:  # fmt: skip
    """gathers: whether the accelerators put logits together."""
    path = write_gguf(tmp_path / "m.gguf", "qwen3moe", qtype="Q4_0", n_layers=4, d_expert=192)
    ahead = count_walks_ahead(monkeypatch)
    options: Any = {"tiers": place_units(way, attention), "mode": mode, "kernels": "fast"}
    expected = run_ranks(path, shares, talk_of_all_kinds, CONTEXT, **options)
    monkeypatch.setattr("pshard.runtime.executor.open_relay", open_late_on_flags)
    devices = use_lanes(monkeypatch, gathers)
    assert run_ranks(path, shares, talk_of_all_kinds, CONTEXT, **options) == expected
    assert len(ahead) >= 20 and sum(device.replayed >= 20 for device in devices) >= 2
