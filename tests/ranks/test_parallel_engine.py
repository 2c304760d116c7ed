"""Tensor-parallel engines give the logits of one rank: any number of ranks, any ratios, any placement on each."""

import random
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from engines import open_engine
from hypothesis import example, given, settings
from hypothesis import strategies as st
from model_files import write_gguf
from test_parallel_group import slow
from thread_ranks import random_tiers, run_ranks, split_tiers

from pshard.runtime.executor import Executor
from pshard.runtime.kernels.plain import PlainKernels
from pshard.workload import Limits

CONTEXT = 96
MODELS = {
    "llama": {"arch": "llama", "qtype": "Q8_0", "tied": True},
    "qwen2": {"arch": "qwen2", "qtype": "F32", "n_heads": 6, "n_kv_heads": 2},
    "qwen3": {"arch": "qwen3", "qtype": "Q4_0", "qtypes": {"attn_output.weight": "Q6_K", "ffn_down.weight": "Q4_K"}},
    "one kv head": {"arch": "llama", "qtype": "Q4_0", "n_kv_heads": 1, "vocab": 333},
}
SHARES = [(1.0, 1.0), (1.0, 1.0, 1.0), (1.0,) * 4, (3.0, 1.0), (2.0, 0.0, 5.0), (1.0,) * 5, (0.0, 1.0)]
UNLIKE, WITHOUT, MANY = (3.0, 1.0), (2.0, 0.0, 5.0), (1.0,) * 5  # one has none; more ranks than layers or heads


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: write_gguf(folder / f"{name}.gguf", **args) for name, args in MODELS.items()}


def talk(engine) -> torch.Tensor:
    """A prompt in two parts and single tokens: logits of every position, [n, vocabulary]."""
    rng = random.Random(1)
    prompts = [[rng.randrange(320) for _ in range(n)] for n in (23, 9, 1, 1, 4, 1)]
    return torch.cat([engine.forward(p, all_logits=True) for p in prompts])


@cache
def one_rank(path: Path) -> torch.Tensor:
    with open_engine(path, context=CONTEXT, tokens=(4, 16)) as engine:
        return talk(engine)


def nmse(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float(((got - wanted).double() ** 2).sum() / (wanted.double() ** 2).sum())


@pytest.mark.quick("qwen2-(3.0, 1.0)")
@pytest.mark.parametrize(
    ("name", "shares"),
    [
        ("llama", UNLIKE),
        ("qwen2", UNLIKE),
        ("qwen3", WITHOUT),
        ("one kv head", MANY),
        slow("qwen2", (1.0,) * 4),
        slow("qwen3", (0.0, 1.0)),
    ],
    ids=str,
)
def test_logits_are_those_of_one_rank(models: dict[str, Path], name: str, shares: tuple[float, ...]) -> None:
    results = run_ranks(models[name], shares, talk, CONTEXT)
    assert nmse(results[0], one_rank(models[name])) < 1e-10
    for other in results[1:]:
        assert torch.equal(other, results[0])


@pytest.mark.quick("llama-(1.0, 1.0)-(('ffn', 1), ('output', 1))")
@pytest.mark.parametrize(
    ("name", "shares", "limits"),
    [
        ("qwen2", (1.0, 1.0, 1.0), (("attention", 2),)),
        ("qwen3", (1.0, 2.0, 1.0), (("attention", 1), ("ffn", 2))),
        ("llama", (1.0, 1.0), (("ffn", 1), ("output", 1))),
    ],
    ids=str,
)
def test_fewer_ranks_may_share_a_kind_of_unit(
    models: dict[str, Path], name: str, shares: tuple[float, ...], limits: Limits
) -> None:
    results = run_ranks(models[name], shares, talk, CONTEXT, random_tiers(5, CONTEXT), limits=limits)
    assert nmse(results[0], one_rank(models[name])) < 1e-10
    for other in results[1:]:
        assert torch.equal(other, results[0])


@cache
def run_pinned(path: Path, shares: tuple[float, ...]) -> list[torch.Tensor]:
    return run_ranks(path, shares, talk, CONTEXT)


# qwen2 over 3:1 gives layers of one rank unequal numbers of KV heads, some of them staged from host memory
@example(seed=131071, shares=(3.0, 1.0), name="qwen2", as_on_gpus=False)
@example(seed=2, shares=(3.0, 1.0), name="qwen2", as_on_gpus=False)
@settings(max_examples=14)
@given(
    seed=st.integers(0, 10**6),
    shares=st.sampled_from(SHARES),
    name=st.sampled_from(sorted(MODELS)),
    as_on_gpus=st.booleans(),
)
def test_each_rank_may_place_its_slice_as_it_likes(
    models: dict[str, Path], seed: int, shares: tuple[float, ...], name: str, as_on_gpus: bool
) -> None:
    pinned = run_pinned(models[name], shares)
    with pytest.MonkeyPatch.context() as patch:
        if as_on_gpus:  # the residual stream stays on the accelerator, transfers go with the units' graphs
            real = Executor.shape_of
            patch.setattr(Executor, "shape_of", lambda *given: replace(real(*given), sums_on_host=False))
            patch.setattr(PlainKernels, "repeatable", True)
            patch.setattr(PlainKernels, "fills", False)  # products of more rows may round otherwise
        mixed = run_ranks(models[name], shares, talk, CONTEXT, random_tiers(seed, CONTEXT))
    for a, b in zip(pinned, mixed):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("shares", "seed"), [((1.0, 1.0), 0), ((3.0, 1.0), 1)], ids=str)
def test_ranks_may_split_their_slices_of_ffns(models: dict[str, Path], shares: tuple[float, ...], seed: int) -> None:
    results = run_ranks(models["llama"], shares, talk, CONTEXT, split_tiers(seed, CONTEXT))
    assert nmse(results[0], one_rank(models["llama"])) < 1e-10
    assert torch.equal(results[1], results[0])


def test_a_group_of_one_is_bit_identical(models: dict[str, Path]) -> None:
    assert torch.equal(run_ranks(models["qwen3"], (1.0,), talk, CONTEXT)[0], one_rank(models["qwen3"]))
