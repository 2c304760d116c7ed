"""Walks that are made ready while the one before is on its way, and logits that leave with whoever asked for them."""

from pathlib import Path

import pytest
import torch
from engines import open_engine
from model_files import write_gguf

from pshard.runtime.kernels.cpu import native
from pshard.runtime.kernels.cpu.host import HostKernels
from pshard.runtime.lent_rows import LentRows
from pshard.runtime.texts.text_blocks import TextBlocks
from pshard.runtime.walks.ready_walk import WalkMaker
from pshard.units.kv_cells import KV_BLOCK

fast_only = pytest.mark.skipif(not native.is_available(), reason="needs the C++ library")


def talk(path: Path, sequences: int = 2) -> list[torch.Tensor]:
    """Logits of prompts, single tokens over a block's border, cuts, and other sets of sequences."""
    with open_engine(path, context=256, sequences=sequences, tokens=(1, 4, 64)) as engine:
        found: list[torch.Tensor] = [*engine.forward([[3, 4, 5], [6, 7]])]
        for i in range(KV_BLOCK + 3):
            found += engine.forward([[i], [i + 1]])
        engine.reset(0, length=5)
        found += engine.forward([[9], [10]])
        found += engine.forward([[11], []])
        found += engine.forward([[12], []])
        found += engine.forward([[], [13]])
        engine.reset(1)
        found += engine.forward([[14], [15]])
        found += engine.forward([[14, 1], [15, 2]])
        found += engine.forward([[16], [17]])
        return found


def test_what_was_made_ready_gives_the_bits_of_what_was_not(tmp_path: Path, monkeypatch) -> None:
    """Of a model with windows and experts."""
    path = write_gguf(tmp_path / "m.gguf", "gpt-oss")
    got = talk(path)
    monkeypatch.setattr(TextBlocks, "foresee", lambda self, segments: None)
    for one, other in zip(got, talk(path), strict=True):
        assert torch.equal(one, other)


def test_the_next_token_finds_its_walk_ready(tmp_path: Path, monkeypatch) -> None:
    order: list[str] = []

    def noted(name: str):
        method = getattr(WalkMaker, name)

        def call(self, *what):
            order.append(name)
            return method(self, *what)

        return call

    path = write_gguf(tmp_path / "m.gguf")
    with open_engine(path, context=128) as engine:
        engine.forward([1, 2, 3])
        engine.forward([4])  # makes the next one ready
        for name in ("make", "make_next", "prepare"):
            monkeypatch.setattr(WalkMaker, name, noted(name))
        for token in range(5):
            engine.forward([token])
    assert order == ["make", "make_next", "prepare"] * 5, "none is prepared when it is wanted"


def test_the_best_logit_is_on_its_way_before_the_next_walk_is_made(tmp_path: Path, monkeypatch) -> None:
    """Whatever the host launches meanwhile comes behind it."""
    order: list[str] = []
    with open_engine(write_gguf(tmp_path / "m.gguf"), context=128) as engine:
        best = [engine.forward([token], best_only=True) for token in (1, 2, 3)]
        engine.reset()
        bring, make_next = engine.device.bring, WalkMaker.make_next
        monkeypatch.setattr(
            engine.device, "bring", lambda *what: order.append(f"bring {[*what[1].shape]}") or bring(*what)
        )
        monkeypatch.setattr(WalkMaker, "make_next", lambda *what: order.append("make next") or make_next(*what))
        again = [engine.forward([token], best_only=True) for token in (1, 2, 3)]
    assert order == ["bring [1, 3]", "make next"] * 3
    assert all(torch.equal(one, other) for one, other in zip(best, again)), "each stays as it was"


@fast_only
@pytest.mark.parametrize("keeps", [1, 5])
def test_logits_that_are_kept_stay_as_they_are(tmp_path: Path, monkeypatch, keeps: int) -> None:
    monkeypatch.setattr(HostKernels, "repeatable", True)  # as a GPU's: logits come to the host by themselves
    path = write_gguf(tmp_path / "m.gguf", "qwen3", qtype="Q4_0")
    with open_engine(path, kernels="fast", context=128) as engine:
        engine.forward([1, 2, 3])
        kept, copies = [], []
        for token in range(12):
            row = engine.forward([token])
            assert isinstance(row, torch.Tensor)
            kept, copies = [*kept, row][-keeps:], [*copies, row.clone()][-keeps:]
            for one, other in zip(kept, copies):
                assert torch.equal(one, other)
    assert all(torch.equal(one, other) for one, other in zip(kept, copies)), "also after the engine is closed"


def test_a_place_is_free_when_no_tensor_of_it_is_left() -> None:
    lent = LentRows(8, 4, lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8))
    first = lent.take(2)
    assert first is not None and first.shape == (2, 8)
    part = first[1]
    second = lent.take(4)
    assert second is not None and second.data_ptr() != first.data_ptr()
    assert lent.take(1) is None, "both are taken"
    at = first.data_ptr()
    del first
    assert lent.take(1) is None, "a part of it is left"
    del part
    again = lent.take(3)
    assert again is not None and again.data_ptr() == at
    assert lent.take(5) is None, "more rows than there is room for"
