"""Engines split by layers (`-sm layer`) give one rank's logits bit for bit: any number of ranks, any placement."""

import random
from pathlib import Path

import pytest
import torch
from engines import open_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from model_files import write_gguf
from thread_ranks import random_tiers, run_ranks

CONTEXT = 96
MODELS = {
    "llama": {"arch": "llama", "qtype": "Q8_0", "tied": True, "n_layers": 3},
    "qwen2": {"arch": "qwen2", "qtype": "F32", "n_heads": 6, "n_kv_heads": 2, "n_layers": 5},
    "qwen3": {"arch": "qwen3", "qtype": "Q4_0", "qtypes": {"attn_output.weight": "Q6_K"}, "n_layers": 4},
    "wide head": {"arch": "llama", "qtype": "Q4_0", "vocab": 9999, "n_layers": 2},  # as large as the layers together
}
SHARES = [
    (1.0,),
    (1.0, 1.0),
    (3.0, 1.0),
    (1.0, 9.0),
    (1.0,) * 3,
    (2.0, 0.0, 5.0),
    (0.0, 1.0),
    (1.0, 0.0),
    (1.0,) * 4,
    (1.0,) * 8,  # more ranks than layers
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: write_gguf(folder / f"{name}.gguf", **args) for name, args in MODELS.items()}


def talk(engine) -> torch.Tensor:
    """A long prompt of which the last logits are wanted (its micro-batches follow each other), a shorter one with all
    logits, single tokens: [n, vocabulary]."""
    rng = random.Random(1)
    ids = [[rng.randrange(320) for _ in range(n)] for n in (53, 19, 1, 1, 4, 1)]
    first = engine.forward(ids[0])
    return torch.cat([first[None], *(engine.forward(part, all_logits=True) for part in ids[1:])])


@pytest.fixture(scope="module")
def wanted(models: dict[str, Path]) -> dict[str, torch.Tensor]:
    found = {}
    for name, path in models.items():
        with open_engine(path, context=CONTEXT, tokens=(4, 16)) as engine:
            found[name] = talk(engine)
    return found


@pytest.mark.parametrize("shares", SHARES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_one_rank(
    models: dict[str, Path], wanted: dict[str, torch.Tensor], name: str, shares: tuple[float, ...]
) -> None:
    for logits in run_ranks(models[name], shares, talk, CONTEXT, mode="layer"):
        assert torch.equal(logits, wanted[name])


@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), shares=st.sampled_from(SHARES), name=st.sampled_from(sorted(MODELS)))
def test_each_rank_may_place_its_layers_as_it_likes(
    models: dict[str, Path], wanted: dict[str, torch.Tensor], seed: int, shares: tuple[float, ...], name: str
) -> None:
    for logits in run_ranks(models[name], shares, talk, CONTEXT, random_tiers(seed, CONTEXT), mode="layer"):
        assert torch.equal(logits, wanted[name])
