"""Texts on a CUDA GPU: the same logits as lists give, chosen on the device, within the budget. Skipped without one."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from engines import open_engine, pinned_everywhere
from model_files import write_gguf
from plan_samples import make_tier, random_places, shrink_places
from test_choose_rows import make_mask
from test_text_pool import feed, some_ids

from pshard.models import open_model
from pshard.runtime.texts.choose_rows import find_largest
from pshard.runtime.texts.text import Piece

pytestmark = pytest.mark.gpu
CONTEXT, SEQUENCES = 2048, 4


def error(got: np.ndarray, expected: np.ndarray) -> float:
    """Normalised mean square error."""
    return float(((got - expected) ** 2).mean() / (expected**2).mean())


@pytest.mark.parametrize("seed", range(4))
def test_shared_blocks_give_the_reference_logits_under_random_plans(tmp_path: Path, seed: int) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen3", qtype="Q4_0", n_layers=3)
    rng = random.Random(seed)
    with open_model(path) as file:
        spec = file.spec
    small = random_places(spec, rng)
    tiers = tuple(
        make_tier(spec, n, places, 2, CONTEXT, SEQUENCES)
        for n, places in ((SEQUENCES, small), (128, shrink_places(spec, small, rng)))
    )
    ids = [some_ids(280, seed), some_ids(280, seed + 50)]
    ids.append(ids[0][:200] + ids[1][:80])
    with open_engine(path, pinned_everywhere(spec, (1, 128), 512), context=512) as reference:
        expected = []
        for whole in ids:
            reference.reset()
            reference.forward(whole[:250])
            expected.append([reference.forward([token]).numpy() for token in whole[250:258]])
    with open_engine(path, tiers, "fast", CONTEXT, SEQUENCES, device="cuda") as engine:
        for turn in range(2):
            texts = [engine.texts.open(whole[:250]) for whole in ids]
            assert [text.cached for text in texts] == [192 if turn else 0] * 3
            for text, whole in zip(texts, ids):
                feed(engine, text, whole[:250], 128)
            for at in range(8):  # the first one's launches are captured, others are replayed
                rows = engine.texts.step([Piece(t, (i[250 + at],), full=True) for t, i in zip(texts, ids)])
                for (row,), wanted in zip(rows, expected):
                    assert not row.bad and error(row.full, wanted[at]) < 2e-3
            for text in texts:
                engine.texts.close(text)
        assert engine.texts.counts().used == 0


def test_rows_are_chosen_as_numpy_does_under_the_same_graph(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen3", qtype="Q8_0", n_layers=2, vocab=2000)
    with open_model(path) as file:
        tiers = pinned_everywhere(file.spec, (SEQUENCES, 128), CONTEXT, SEQUENCES)
    with open_engine(path, tiers, "fast", CONTEXT, SEQUENCES, device="cuda") as engine:
        texts = [engine.texts.open([1]) for _ in range(SEQUENCES)]
        engine.texts.step([Piece(text, tuple(some_ids(20, 1)), "none") for text in texts])
        mask = make_mask([7, 1999], 2000)
        for token in range(5):
            full, greedy, best, masked = (
                rows[0]
                for rows in engine.texts.step(
                    [
                        Piece(texts[0], (token,), full=True),
                        Piece(texts[1], (token,), best=1),
                        Piece(texts[2], (token,), best=20, of=(3, 5)),
                        Piece(texts[3], (token,), best=2, mask=mask),
                    ]
                )
            )
            order = np.argsort(-full.full, kind="stable")
            assert greedy.ids[0] == order[0] and best.ids.tolist() == order[:20].tolist()
            assert np.array_equal(best.of, full.full[[3, 5]])
            wide = full.full.astype(np.float64)
            assert best.log_total == pytest.approx(np.log(np.exp(wide - wide.max()).sum()) + wide.max(), abs=1e-4)
            assert sorted(masked.ids.tolist()) == [7, 1999]
            quick = engine.texts.step([Piece(text, (9,), best=1) for text in texts])
            assert len({int(row.ids[0]) for (row,) in quick}) == 1


@pytest.mark.parametrize("k", [1, 20, 200])
def test_the_largest_of_wide_rows_are_those_of_numpy(k: int) -> None:
    table = torch.randn(64, 151_936)
    table[:, 500:520] = table.amax()  # equal ones
    values, columns = find_largest(table.cuda(), k)
    for row, found, at in zip(table.numpy(), values.cpu().numpy(), columns.cpu().tolist()):
        assert at == np.argsort(-row, kind="stable")[:k].tolist() and np.array_equal(found, row[at])


def test_choosing_64_rows_stays_within_what_is_reserved_for_torch() -> None:
    from pshard.runtime.texts.choose_rows import ROOM_BYTES, RowChooser

    table = torch.randn(64, 151_936, device="cuda")
    piece = Piece(None, (0,), best=20, mask=np.full(151_936 // 32, 0xFFFFFFFF, dtype=np.uint32))  # type: ignore[arg-type]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    chooser = RowChooser([(piece, ())] * 64)
    chooser.take(table)
    assert torch.cuda.max_memory_allocated() - before < 2 * ROOM_BYTES
    assert len(chooser.rows) == 64


def test_files_keep_blocks_of_vram_and_of_host_memory(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen3", qtype="Q8_0", n_layers=2)
    rng, found = random.Random(3), []
    with open_model(path) as file:
        spec = file.spec
    for _ in range(3):
        tiers = tuple(make_tier(spec, n, random_places(spec, rng), 2, CONTEXT, 1) for n in (128,))
        with open_engine(path, tiers, "fast", CONTEXT, device="cuda", kv_types=("bf16", "bf16")) as engine:
            engine.texts.keep_in_files(tmp_path / "cache", 1 << 30, 16 << 20)
            ids = some_ids(200, 9)
            text = engine.texts.open(ids)
            found.append((text.cached, feed(engine, text, ids, 128, full=True).full))
    assert [cached for cached, _ in found] == [0, 192, 192]
    for _, logits in found[1:]:
        assert error(logits, found[0][1]) < 2e-3
