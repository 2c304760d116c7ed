"""KV of many sequences between host and accelerator: few copies, and the same logits as with all of it in VRAM."""

import random
from pathlib import Path

import pytest
import torch
from engines import open_engine, pinned_everywhere
from hypothesis import given
from hypothesis import strategies as st
from model_files import write_gguf
from plan_samples import make_tier

from pshard.batch_sizes import SMALL_BATCH
from pshard.buffers import scratch_buffers
from pshard.models import open_model
from pshard.runtime import executor
from pshard.runtime.memory.kv_cache import CellRun, find_cell_runs
from pshard.units.attention import ATTENTION, decode_pieces
from pshard.units.kv_cells import KV_BLOCK
from pshard.units.state import StateShape

CONTEXT, SEQUENCES = 5 * 64, 5
WHERE = {"embedding": "cpu", "attention": "streamed", "ffn": "pinned", "output": "pinned"}


@given(st.lists(st.tuples(st.integers(0, 90), st.integers(1, 9)), max_size=12), st.integers(0, 40), st.data())
def test_runs_cover_what_was_asked_once_and_no_block_of_others(gaps, most: int, data: st.DataObject) -> None:
    spans, at = [], 0
    for gap, cells in gaps:
        at += gap
        spans.append((at, at + cells))
        at += cells
    asked = {cell for start, stop in spans for cell in range(start, stop)}
    touched = {cell // KV_BLOCK for cell in asked}
    ours = touched | data.draw(st.sets(st.integers(0, 20)))
    runs = find_cell_runs(data.draw(st.permutations(spans)), most, ours)
    covered = [p.start + row * p.stride + i for p in runs for row in range(p.rows) for i in range(p.cells)]
    assert asked <= set(covered) and len(covered) == len(set(covered))
    assert {cell // KV_BLOCK for cell in covered} <= ours
    assert len(covered) + most * len(runs) <= len(asked) + most * len(spans)


def test_few_runs_where_sequences_lie_in_order() -> None:
    decode = [(s * 17 * KV_BLOCK + 1000, s * 17 * KV_BLOCK + 1001) for s in range(64)]
    assert find_cell_runs(decode, 100) == (CellRun(1000, 1, 64, 17 * KV_BLOCK),)
    filled = [(s * KV_BLOCK, s * KV_BLOCK + used) for s, used in enumerate((64, 64, 60, 64, 30, 64, 1))]
    assert find_cell_runs(filled, 100) == (CellRun(0, 6 * KV_BLOCK + 1),)
    assert len(find_cell_runs(filled, 0)) < len(filled)


def test_cells_that_sequences_share_are_copied_once_and_none_is_left_out() -> None:
    assert find_cell_runs([(0, 192), (64, 128), (0, 64)], 100) == (CellRun(0, 192),)
    assert find_cell_runs([(0, 64), (32, 100), (500, 510)], 0) == (CellRun(0, 100), CellRun(500, 10))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("kv") / "m.gguf", "qwen3", qtype="Q4_0", n_layers=3)


def converse(engine) -> list[torch.Tensor]:
    """Sequences of unequal length that pause, leave and begin anew between steps."""
    rng = random.Random(9)
    turns = [(7, 0, 12, 3, 1), (1, 1, 1, 1, 1), (0, 1, 1, 0, 1), (1, 1, 1, 1, 1), (2, 9, 1, 0, 1)]
    found = []
    with engine:
        for turn, sizes in enumerate(turns):
            if turn == 3:
                engine.reset(2)
            found += engine.forward([[rng.randrange(320) for _ in range(n)] for n in sizes])
    return found


@pytest.mark.quick("0")
@pytest.mark.parametrize("join_bytes", [0, 4096, 512 << 10])
def test_host_kv_gives_the_logits_of_kv_in_vram(model: Path, join_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "JOIN_BYTES", join_bytes)
    spec = open_model(model).spec
    places = {u.name: (WHERE[u.kind.name], "host" if u.kind is ATTENTION else None) for u in spec.units}
    tiers = tuple(make_tier(spec, n, places, 2, CONTEXT, SEQUENCES) for n in (5, 16))
    sizes = dict(context=CONTEXT, sequences=SEQUENCES)
    expected = converse(open_engine(model, pinned_everywhere(spec, (5, 16), **sizes), **sizes))
    got = converse(open_engine(model, tiers, **sizes))
    assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))


def test_others_in_the_batch_do_not_change_a_sequence(model: Path) -> None:
    spec = open_model(model).spec
    places = {u.name: (WHERE[u.kind.name], "host" if u.kind is ATTENTION else None) for u in spec.units}
    sizes = dict(context=CONTEXT, sequences=SEQUENCES)
    tiers = (make_tier(spec, 5, places, 2, CONTEXT, SEQUENCES),)

    def speak(others: list[list[list[int]]]) -> list[torch.Tensor]:
        with open_engine(model, tiers, **sizes) as engine:
            return [engine.forward([[], [7 + i], *more])[1] for i, more in enumerate(others)]

    quiet = speak([[[], []], [[], []], [[], []]])
    busy = speak([[[1, 2], [3]], [[], [4]], [[5], []]])
    for a, b in zip(quiet, busy, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_a_decode_step_copies_a_layer_in_two_copies_each_way(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = open_model(model).spec
    places = {u.name: ("pinned", "host" if u.kind is ATTENTION else None) for u in spec.units}
    places["embedding"] = ("cpu", None)
    tiers = tuple(make_tier(spec, n, places, 0, CONTEXT, SEQUENCES) for n in (5, 16))
    counts = {"in": 0, "out": 0}

    def counted(name: str, copy):
        def run(*args):
            counts[name] += 1
            return copy(*args)

        return run

    with open_engine(model, tiers, context=CONTEXT, sequences=SEQUENCES) as engine:
        engine.forward([[1] * n for n in (7, 3, 9, 5, 2)])
        engine.forward([[1]] * SEQUENCES)
        monkeypatch.setattr(engine.device, "copy_in", counted("in", engine.device.copy_in))
        monkeypatch.setattr(engine.device, "copy_out", counted("out", engine.device.copy_out))
        engine.forward([[1]] * SEQUENCES)
    assert counts == {"in": 2 * 3, "out": 2 * 3}


def test_every_tier_has_room_for_the_pieces_of_small_batches(model: Path) -> None:
    spec = open_model(model).spec
    config, states = spec.config, StateShape(CONTEXT, 4, "f32", "f32")
    for tier in (1, 7, 64, 512):
        shape = next(b.shape for b in scratch_buffers(spec, tier, states) if b.name == "partial")
        for tokens in range(1, min(tier, SMALL_BATCH) + 1):
            assert tokens * decode_pieces(tokens, config.n_kv_heads) <= shape[0]
