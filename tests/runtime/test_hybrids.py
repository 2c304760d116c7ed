"""Hybrids: the logits of a float64 forward and of transformers, wherever units and states are."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from engines import open_engine, pinned_everywhere
from hybrid_files import (
    LIKE,
    VOCAB,
    fuse_inputs,
    random_hybrid,
    read_hybrid_gguf,
    take_hybrid_tensors,
    write_hybrid_folder,
    write_hybrid_gguf,
)
from hybrid_forward import MISTAKES, hybrid_logits
from plan_samples import make_tier, random_places, shrink_places
from thread_ranks import run_ranks

from pshard.models import ModelFile, open_model
from pshard.units.delta_net import DELTA_NET

CONTEXT = 256
CLOSE = 1e-5  # of the logits' deviation
OFTEN = 1e-4  # likewise, of many texts: where a head gives nearly nothing, its norm makes rounding larger
IDS = [int(i) for i in np.random.default_rng(0).integers(0, VOCAB, 24)]


class Written:
    """A model file, and what it was made from."""

    def __init__(self, folder: Path, like: str) -> None:
        self.like, self.tensors = like, random_hybrid(like)
        self.path = write_hybrid_gguf(folder / f"{like}.gguf", like, self.tensors)

    def logits(self, file: ModelFile, ids: list[int]) -> np.ndarray:
        return hybrid_logits(file.spec.config, self.tensors, ids)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Written]:
    folder = tmp_path_factory.mktemp("m")
    return {like: Written(folder, like) for like in LIKE}


def difference(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference, in standard deviations of the expected logits."""
    return float(np.abs(found - expected).max() / expected.std())


def check_talk(engine, model: Written, sequences: int, seed: int, close: float = OFTEN) -> None:
    """Turns of unequal length, pauses, resets and single tokens: all logits are those of every text alone."""
    rng, texts = random.Random(seed), [list[int]() for _ in range(sequences)]
    turns = [(21, 3, 9), (1, 1, 1), (1, 0, 1), (0, 30, 1), (1, 1, 0), (1, 1, 1), (20, 1, 2), (1, 1, 1)]
    with open_model(model.path) as file:
        for turn, sizes in enumerate(turns):
            if turn in (3, 6):
                engine.reset(sequences - 1)
                texts[-1] = []
            new = [[rng.randrange(VOCAB) for _ in range(n)] for n in sizes[:sequences]]
            if not any(new):
                continue
            for s, logits in enumerate(engine.forward(new, all_logits=True)):
                texts[s] += new[s]
                if new[s]:
                    assert difference(logits.numpy(), model.logits(file, texts[s])[-len(new[s]) :]) < close


@pytest.mark.quick("fast-moe")
@pytest.mark.parametrize("like", LIKE)
@pytest.mark.parametrize("kernels", ["plain", "fast"])
def test_logits_are_those_of_a_float64_forward(models: dict[str, Written], like: str, kernels: str) -> None:
    with open_model(models[like].path) as file:
        expected = models[like].logits(file, IDS)
    with open_engine(models[like].path, None, kernels) as engine:
        assert difference(engine.forward(IDS, all_logits=True).numpy(), expected) < CLOSE


@pytest.mark.slow
@pytest.mark.parametrize("like", LIKE)
def test_every_mistake_gives_other_logits(models: dict[str, Written], like: str) -> None:
    with open_model(models[like].path) as file:
        config, tensors = file.spec.config, models[like].tensors
    right = hybrid_logits(config, tensors, IDS[:12])
    for mistake in MISTAKES:
        assert difference(hybrid_logits(config, tensors, IDS[:12], [mistake]), right) > 1e-3, mistake


@pytest.mark.quick("('streamed', 'host')-1")
@pytest.mark.parametrize(
    ("place", "sequences"), [(place, 3 - i % 2 * 2) for i, place in enumerate(DELTA_NET.places)], ids=str
)
def test_every_placement_gives_them_too(models: dict[str, Written], place: tuple, sequences: int) -> None:
    model = models["dense"]
    with open_model(model.path) as file:
        places = {u.name: ("pinned", "vram" if u.kind.state else None) for u in file.spec.units}
        places |= {u.name: place for u in file.spec.units if u.kind is DELTA_NET}
        tiers = tuple(make_tier(file.spec, n, places, 2, CONTEXT * sequences, sequences) for n in (sequences, 16))
    with open_engine(model.path, tiers, "plain", CONTEXT * sequences, sequences) as engine:
        check_talk(engine, model, sequences, 1)


@pytest.mark.quick("next-0")
@pytest.mark.parametrize(("like", "seed"), [(like, i) for i, like in enumerate(LIKE)])
def test_random_placements_of_all_units_give_the_same_in_every_tier(
    models: dict[str, Written], like: str, seed: int
) -> None:
    rng, model = random.Random(seed), models[like]
    with open_model(model.path) as file:
        large = random_places(file.spec, rng)
        small = shrink_places(file.spec, large, rng)
        tiers = tuple(make_tier(file.spec, n, p, 2, 3 * CONTEXT, 3) for n, p in ((3, small), (16, large)))
    with open_engine(model.path, tiers, "plain", 3 * CONTEXT, 3) as engine:
        check_talk(engine, model, 3, seed)
        assert engine.switches > 1


@pytest.mark.quick("3")
@pytest.mark.parametrize("sequences", [1, 3])
def test_the_host_s_fast_kernels_give_them_too(models: dict[str, Written], sequences: int) -> None:
    with open_engine(models["moe"].path, None, "fast", CONTEXT * sequences, sequences, (4, 32)) as engine:
        check_talk(engine, models["moe"], sequences, 2, 2e-4)


@pytest.mark.quick("fast")
@pytest.mark.parametrize("kernels", ["plain", "fast"])
def test_micro_batches_of_any_size_leave_the_same_state(models: dict[str, Written], kernels: str) -> None:
    ids = [int(i) for i in np.random.default_rng(5).integers(0, VOCAB, 256)]
    found = []
    for sizes in ((256,), (1, 255), (64,) * 4, (3, 100, 153)):
        with open_engine(models["next"].path, None, kernels, 384, tokens=(1, 256)) as engine:
            done = 0
            for n in sizes:
                engine.forward(ids[done : done + n])
                done += n
            found.append(engine.forward([7, 8, 9], all_logits=True).numpy())
    assert all(difference(other, found[0]) < 1e-4 for other in found[1:])


def test_a_file_with_one_input_matrix_of_each_layer_gives_them_too(models: dict[str, Written], tmp_path: Path) -> None:
    fused = fuse_inputs(models["next"].tensors)
    path = write_hybrid_gguf(tmp_path / "old.gguf", "next", fused)
    with open_model(path) as file:
        expected = hybrid_logits(file.spec.config, fused, IDS)
    assert difference(expected, hybrid_logits(file.spec.config, models["next"].tensors, IDS)) < 1e-12
    with open_engine(path) as engine:
        assert difference(engine.forward(IDS, all_logits=True).numpy(), expected) < CLOSE


MIXED = {  # as published Q4_K_M, UD-Q4_K_XL, IQ4_XS and MXFP4_MOE files mix them
    "attn_qkv": "Q5_K", "attn_gate": "IQ4_XS", "ssm_in": "Q4_K", "ssm_ba": "IQ4_XS", "ssm_beta": "Q8_0",
    "ssm_alpha": "F16", "ssm_out": "IQ4_NL", "attn_q": "Q4_K", "attn_k": "Q6_K", "attn_v": "Q8_0",
    "attn_output": "IQ4_XS", "ffn_gate": "IQ4_XS", "ffn_up": "Q4_K", "ffn_down": "Q6_K", "ffn_gate_exps": "MXFP4",
    "ffn_up_exps": "MXFP4", "ffn_down_exps": "IQ4_NL", "ffn_down_shexp": "Q8_0", "token_embd": "Q4_K",
    "output": "Q6_K",
}  # fmt: skip


@pytest.mark.quick("fused")
@pytest.mark.parametrize("like", ["moe", "fused"])
def test_a_file_of_many_types_gives_the_logits_of_its_weights(like: str, tmp_path: Path) -> None:
    tensors = fuse_inputs(random_hybrid("next")) if like == "fused" else random_hybrid(like)
    path = write_hybrid_gguf(tmp_path / "m.gguf", "next" if like == "fused" else like, tensors, qtypes=MIXED)
    with open_model(path) as file:
        expected = hybrid_logits(file.spec.config, read_hybrid_gguf(path), IDS)
        assert {"Q4_K", "Q6_K", "IQ4_NL", "IQ4_XS"} <= {t.qtype for u in file.spec.units for t in u.matrices}
    for found in run_ranks(path, (3.0, 1.0), lambda engine: engine.forward(IDS, all_logits=True), 128):
        assert difference(found.numpy(), expected) < OFTEN
    with open_engine(path) as engine:
        assert difference(engine.forward(IDS, all_logits=True).numpy(), expected) < OFTEN


# --- transformers ---------------------------------------------------------------------------------------------------


@pytest.mark.slow  # most of it for the import of transformers
@pytest.mark.parametrize("like", LIKE)
def test_logits_of_hybrids_equal_transformers(like: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = write_hybrid_folder(tmp_path / "hf", like)
    tensors = take_hybrid_tensors(like, model)
    paths = [tmp_path / "hf", write_hybrid_gguf(tmp_path / "m.gguf", like, tensors)]
    ids = [random.Random(0).randrange(VOCAB) for _ in range(150)]
    with torch.no_grad():
        exact = model.double()(torch.tensor([ids])).logits[0].numpy()
    with open_model(paths[1]) as file:
        tiers = pinned_everywhere(file.spec, (1, 64), 256)
        assert difference(hybrid_logits(file.spec.config, tensors, ids), exact) < 1e-5
    for path in paths:
        with open_engine(path, tiers, context=256) as engine:
            assert difference(engine.forward(ids, all_logits=True).numpy(), exact) < 1e-4, path
