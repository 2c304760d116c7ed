"""A saved KV cache continues the text bit for bit, on another number of ranks too; damaged files are refused."""

import os
import random
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines import open_engine
from model_files import write_gguf
from thread_ranks import random_tiers, run_ranks

from pshard.commands.cli_run import _take_cached
from pshard.errors import StepFailed, UserError
from pshard.models import open_model
from pshard.runtime.memory.kv_store import fingerprint_model
from pshard.runtime.texts.block_record import BlockRecord, encode_record
from pshard.session.lead_ranks import follow

CONTEXT = 96
PROMPT = [(7 * i) % 320 for i in range(30)]
AFTER = [[5], [6], [7, 8, 9]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write_gguf(folder / "m.gguf", "qwen3", qtype="Q8_0", n_heads=8, n_kv_heads=4)


def test_ranks_that_find_different_files_say_so(model: Path, tmp_path: Path) -> None:
    files = [tmp_path / "one", tmp_path / "other"]
    for file, ids in zip(files, (PROMPT, PROMPT[:7])):
        with open_engine(model, context=CONTEXT, tokens=(4, 16)) as engine:
            engine.forward(ids)
            engine.save(file)
    with pytest.raises(UserError, match="ranks find different KV caches in"):
        run_ranks(model, (1.0, 1.0), lambda engine: engine.load(files[engine.rank_plan.rank]), CONTEXT)


def test_rank_0_says_whether_there_is_a_prompt_cache(model: Path, tmp_path: Path) -> None:
    file, missing = tmp_path / "cache", tmp_path / "missing"
    with open_engine(model, context=CONTEXT, tokens=(4, 16)) as engine:
        engine.forward(PROMPT)
        engine.save(file)

    def cached(seen: Path) -> list[int]:
        def talk(engine) -> int:
            if engine.rank_plan.rank:
                follow(engine, lambda: engine.agree(None))
            else:
                left = _take_cached(engine, PROMPT, Namespace(prompt_cache=seen))
                assert left == PROMPT[engine.lengths[0] :]
                engine.agree(None)
            return engine.lengths[0]

        return run_ranks(model, (1.0, 1.0), talk, CONTEXT)

    assert cached(missing) == [0, 0] and cached(file) == [len(PROMPT) - 1] * 2
    file.write_bytes(b"none")
    with pytest.raises(UserError, match=r"the KV cache .* is no KV cache of pshard"):
        cached(file)


def go_on(engine) -> torch.Tensor:
    return torch.cat([engine.forward(ids, all_logits=True) for ids in AFTER])


def start_and_save(path: Path):
    def talk(engine) -> torch.Tensor:
        engine.forward(PROMPT)
        engine.save(path)
        return go_on(engine)

    return talk


def load_and_save(path: Path, again: Path | None = None):
    def talk(engine) -> torch.Tensor:
        assert engine.load(path) == tuple(PROMPT) and engine.lengths == (len(PROMPT),)
        if again:
            engine.save(again)
        return go_on(engine)

    return talk


def test_the_file_is_the_same_whoever_saves_it(model: Path, tmp_path: Path) -> None:
    with open_engine(model, context=CONTEXT, tokens=(4, 16)) as engine:
        wanted = start_and_save(tmp_path / "1")(engine)
    before = tmp_path / "1"
    for ranks in ((1.0, 1.0), (1.0, 2.0, 1.0), (0.0, 1.0), (1.0,) * 6):  # six ranks share four KV heads
        after = tmp_path / str(len(ranks))
        results = run_ranks(model, ranks, load_and_save(before, after), CONTEXT)
        assert after.read_bytes() == before.read_bytes()
        assert float(((results[0] - wanted) ** 2).sum() / (wanted**2).sum()) < 1e-10
        before = after
    with open_engine(model, context=CONTEXT, tokens=(4, 16)) as engine:
        assert torch.equal(load_and_save(before)(engine), wanted)


def test_ranks_that_hold_whole_layers_write_and_take_the_same_file(model: Path, tmp_path: Path) -> None:
    first, tensor, layers = tmp_path / "one", tmp_path / "tensor", tmp_path / "layers"
    with open_engine(model, context=CONTEXT, tokens=(4, 16)) as engine:
        wanted = start_and_save(first)(engine)
    run_ranks(model, (1.0, 2.0), load_and_save(first, tensor), CONTEXT)
    for logits in run_ranks(model, (1.0, 1.0, 1.0), load_and_save(tensor, layers), CONTEXT, mode="layer"):
        assert torch.equal(logits, wanted)
    assert layers.read_bytes() == tensor.read_bytes() == first.read_bytes()
    run_ranks(model, (2.0, 1.0), load_and_save(layers), CONTEXT)
    run_ranks(model, (1.0, 3.0), start_and_save(layers), CONTEXT, mode="layer")
    assert layers.read_bytes() == first.read_bytes()


@pytest.mark.quick("1")
@pytest.mark.parametrize("seed", range(2))
def test_it_does_not_matter_where_the_cache_lies(model: Path, tmp_path: Path, seed: int) -> None:
    file = tmp_path / "cache"
    kept = run_ranks(model, (1.0, 1.0), start_and_save(file), CONTEXT, random_tiers(seed, CONTEXT))
    loaded = run_ranks(model, (1.0, 1.0), load_and_save(file), CONTEXT, random_tiers(seed + 100, CONTEXT))
    assert torch.equal(kept[0], loaded[0])


def test_files_that_are_damaged_or_of_another_run_are_refused(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "cache"
    with open_engine(model, context=CONTEXT) as engine:
        start_and_save(file)(engine)
    raw, rng = file.read_bytes(), random.Random(1)
    other = write_gguf(tmp_path / "other.gguf", "qwen3", qtype="Q8_0", n_heads=8, n_kv_heads=4, seed=1)
    with open_engine(other, context=CONTEXT) as engine, pytest.raises(UserError, match="another model"):
        engine.load(file)
    with (
        open_engine(model, context=16) as engine,
        pytest.raises(UserError, match="30 cells, the context 16: give a larger -c"),
    ):
        engine.load(file)
    with open_engine(model, context=CONTEXT) as engine:
        for version, told in (
            (2, "is of an older version, 2; this pshard reads 3: remove it"),
            (4, "a newer version, 4"),
        ):
            file.write_bytes(raw[:8] + bytes([version]) + raw[9:])
            with pytest.raises(UserError, match=told):
                engine.load(file)
        block = BlockRecord(bytes(32), bytes(32), tuple(PROMPT), {"cells": b"1234"})
        for foreign, told in (
            (encode_record(block), "holds no text, as it should"),
            (b"pshardpc" + raw[8:], "is no KV"),
        ):
            file.write_bytes(foreign)
            with pytest.raises(UserError, match=told):
                engine.load(file)
    with open_engine(model, context=CONTEXT) as engine:
        for at in [0, 8, 12, 16, 40, len(raw) - 1, *(rng.randrange(len(raw)) for _ in range(40))]:
            file.write_bytes(raw[:at] + bytes([raw[at] ^ 64]) + raw[at + 1 :])
            with pytest.raises(UserError):
                engine.load(file)
            assert engine.lengths == (0,)
        for length in (0, 10, 100, len(raw) // 2, len(raw) - 1):
            file.write_bytes(raw[:length])
            with pytest.raises(UserError):
                engine.load(file)
        file.write_bytes(raw)
        engine.load(file)


class Tuned:
    """A model file that differs in one tensor."""

    def __init__(self, file: Any, tensor: str) -> None:
        self.spec, self.forget_tensor, self._file, self._tensor = file.spec, file.forget_tensor, file, tensor

    def tensor_bytes(self, name: str) -> np.ndarray:
        raw = self._file.tensor_bytes(name)
        return raw ^ 1 if name == self._tensor else raw


def test_models_that_differ_in_one_tensor_are_told_apart(model: Path) -> None:
    with open_model(model) as file:
        names = [tensor.name for unit in file.spec.units for tensor in unit.tensors]
        found = {fingerprint_model(Tuned(file, name)) for name in ("", *names)}
    assert len(found) == len(names) + 1


def test_a_file_that_cannot_be_written_leaves_the_old_one(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "folder" / "cache"
    with open_engine(model, context=CONTEXT) as engine:
        engine.forward(PROMPT)
        with pytest.raises(UserError, match="cannot write the KV cache"):
            engine.save(file)
        file.mkdir(parents=True)
        with pytest.raises(UserError, match="cannot write the KV cache"):
            engine.save(file)
    assert [p.name for p in file.parent.iterdir()] == ["cache"]


def test_a_file_may_be_named_by_a_text(model: Path, tmp_path: Path) -> None:
    with open_engine(model, context=CONTEXT, tokens=(4, 16)) as engine:
        engine.forward(PROMPT)
        engine.save(str(tmp_path / "cache"))
        assert engine.load(str(tmp_path / "cache")) == tuple(PROMPT)
        with pytest.raises(UserError, match="cannot read the KV cache missing: No such file"):
            engine.load("missing")


def test_a_pipe_and_a_circle_of_links_are_no_kv_files(model: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("link")
    with open_engine(model, context=CONTEXT, tokens=(4, 16)) as engine:
        engine.forward(PROMPT)
        for name, why in (("pipe", "It is no regular file"), ("link", "Too many levels of symbolic links")):
            with pytest.raises(UserError, match=f"cannot read the KV cache .*{name}: {why}"):
                engine.load(tmp_path / name)
            with pytest.raises(UserError, match=f"cannot write the KV cache to .*{name}: {why}"):
                engine.save(tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe"]


def test_numbers_that_f16_cells_cannot_hold_are_told_with_the_remedy(tmp_path: Path) -> None:
    keys = np.random.default_rng(3).standard_normal((128, 256)).astype(np.float32) * 1e5
    path = write_gguf(tmp_path / "large.gguf", extra={"blk.0.attn_k.weight": keys, "blk.0.attn_v.weight": keys})
    with (
        open_engine(path, kv_types=("f16", "f16")) as engine,
        pytest.raises(StepFailed, match="65504, the most that f16 cells hold: plan with -ctk bf16 -ctv bf16"),
    ):
        list(engine.generate([5, 77], 2, text=False))
    with open_engine(path, kv_types=("bf16", "bf16")) as engine:
        assert len(list(engine.generate([5, 77], 2, text=False))) == 2
