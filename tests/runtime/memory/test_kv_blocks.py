"""Sequences share a pool of KV blocks: none is lost or held twice, and where blocks lie does not show in the logits."""

import random
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from engines import open_engine, pinned_everywhere
from hypothesis import given
from hypothesis import strategies as st
from model_files import write_gguf
from plan_samples import make_tier, random_places, shrink_places

from pshard.errors import UserError
from pshard.models import open_model
from pshard.runtime.kernels.kv_codec import gather_cells
from pshard.runtime.memory.kv_blocks import BlockPool, blocks_of, pool_spans
from pshard.units.kv_cells import KV_BLOCK

CONTEXT, SEQUENCES = 576, 4  # equal shares are 144 cells; sequences take more and fewer


@given(
    st.integers(1, 12),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5 * KV_BLOCK)), max_size=40),
)
def test_no_block_is_lost_or_held_twice(pool: int, steps: list[tuple[int, int]]) -> None:
    blocks, lengths = BlockPool(pool), [0] * 4
    held: list[list[int]] = [[] for _ in range(4)]
    for sequence, cells in steps:
        before = [[*h] for h in held]
        wanted = [cells if s == sequence else n for s, n in enumerate(lengths)]
        missing = sum(map(blocks_of, wanted)) - pool
        assert blocks.missing(zip(held, wanted)) == max(0, missing)
        assert blocks.missing([(held[sequence], cells)]) == max(0, missing)  # the others stay as they are
        if missing > 0:
            with pytest.raises(ValueError, match="blocks are needed"):
                blocks.resize(held[sequence], cells)
            assert held == before
            continue
        blocks.resize(held[sequence], cells)
        lengths = wanted
        assert [len(h) for h in held] == [blocks_of(n) for n in lengths]
        everything = [b for h in held for b in h]
        assert len(set(everything)) == len(everything) and set(everything) <= set(range(pool))
        kept = min(len(before[sequence]), len(held[sequence]))
        assert held[sequence][:kept] == before[sequence][:kept]  # what a sequence has stays where it is


def test_blocks_that_come_free_are_taken_lowest_first() -> None:
    blocks = BlockPool(6)
    held: list[list[int]] = [[] for _ in range(3)]
    for own in held:
        blocks.resize(own, 2 * KV_BLOCK)
    blocks.resize(held[1], 0)
    blocks.resize(held[0], 3 * KV_BLOCK)
    assert held == [[0, 1, 2], [], [4, 5]]


@given(st.permutations(range(6)), st.integers(0, 6 * KV_BLOCK), st.integers(0, 6 * KV_BLOCK))
def test_spans_are_the_cells_in_order(blocks: list[int], a: int, b: int) -> None:
    start, stop = min(a, b), max(a, b)
    spans = pool_spans(blocks, start, stop)
    cells = [cell for first, last in spans for cell in range(first, last)]
    assert cells == [blocks[i // KV_BLOCK] * KV_BLOCK + i % KV_BLOCK for i in range(start, stop)]
    assert all(one[1] != two[0] for one, two in pairwise(spans))
    cache = torch.arange(6 * KV_BLOCK).view(6, KV_BLOCK, 1)
    assert gather_cells(cache, blocks, stop).flatten().tolist()[start:] == cells


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("model") / "m.gguf", "qwen3", qtype="Q8_0", n_layers=3)


def scatter(engine) -> None:
    """Leave the pool's free blocks in no order, and the sequences empty."""
    for sequence, n in ((0, 70), (1, 10), (2, 130), (3, 100), (1, 80)):
        engine.forward([[] if s != sequence else [1] * n for s in range(SEQUENCES)])
    engine.texts._blocks.pool._free.reverse()
    engine.reset()
    engine.texts._blocks.pool._free.reverse()


def talk(engine, mixed_up: bool) -> list[torch.Tensor]:
    rng, found = random.Random(5), []
    with engine:
        if mixed_up:
            scatter(engine)
        for turn, sizes in enumerate([(160, 0, 90, 3), (7, 70, 1, 1), (1, 1, 1, 1), (1, 60, 0, 1), (66, 1, 2, 1)]):
            if turn == 3:
                engine.reset(2, 65)
            found += engine.forward([[rng.randrange(320) for _ in range(n)] for n in sizes])
    return found


@pytest.mark.quick("1-fast")
@pytest.mark.parametrize(("seed", "kernels"), [(0, "plain"), (1, "fast")])
def test_where_blocks_lie_does_not_matter(model: Path, kernels: str, seed: int) -> None:
    spec, rng = open_model(model).spec, random.Random(seed)
    decode = random_places(spec, rng)
    tiers = tuple(
        make_tier(spec, n, places, 2, CONTEXT, SEQUENCES)
        for n, places in ((4, decode), (80, shrink_places(spec, decode, rng)))
    )
    pinned = pinned_everywhere(spec, (4, 80), CONTEXT, SEQUENCES)
    expected = talk(open_engine(model, pinned, kernels, CONTEXT, SEQUENCES), False)
    got = talk(open_engine(model, tiers, kernels, CONTEXT, SEQUENCES), True)
    assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))


def test_what_does_not_fit_the_pool_is_refused_before_anything_runs(model: Path) -> None:
    with open_engine(model, context=256, sequences=2) as engine:
        engine.forward([[1] * 190, [2] * 60])  # three blocks and one
        first = engine.forward([[], [3]])[1]
        with pytest.raises(UserError, match="of 256 cells in all do not fit the KV cache of 4 blocks of 64 cells"):
            engine.forward([[], [3] * 5])
        assert engine.lengths == (190, 61)
        engine.reset(0)
        engine.forward([[], [3] * 80])
        with pytest.raises(UserError, match="141 \\+ 116 tokens exceed the context of 256"):
            engine.forward([[], [3] * 116])
        engine.reset(1)
        engine.forward([[], [2] * 60])
        torch.testing.assert_close(engine.forward([[], [3]])[1], first, rtol=1e-4, atol=1e-4)


def test_text_ends_where_the_pool_does(model: Path) -> None:
    with open_engine(model, context=256, sequences=2) as engine:
        engine.forward([[], [1] * 129])
        assert len(list(engine.generate([5] * 60, 100, text=False))) == 5  # the last one needs no cell


def test_a_saved_sequence_finds_other_blocks(model: Path, tmp_path: Path) -> None:
    with open_engine(model, context=CONTEXT, sequences=SEQUENCES) as engine:
        engine.forward([[1] * 100])
        engine.save(tmp_path / "cache")
        expected = engine.forward([[7]])[0]
        engine.reset()
        scatter(engine)
        engine.load(tmp_path / "cache", 2)
        assert engine._sequences._texts[2].blocks != [0, 1]
        assert torch.equal(engine.forward([[], [], [7]])[2], expected)
        engine.reset()
        engine.forward([[1] * 512, [1] * 200])
        with pytest.raises(UserError, match="do not fit the KV cache"):
            engine.load(tmp_path / "cache", 2)
        assert engine.lengths == (512, 200, 0, 0) and 2 not in engine._sequences._texts
