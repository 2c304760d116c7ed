"""Tensor-parallel engines of models with routed experts: logits of one rank, and the same choice on every rank."""

import random
from dataclasses import replace
from pathlib import Path
from threading import get_ident
from typing import Any

import pytest
import torch
from engines import open_engine, pinned_everywhere
from experts_file import RULES, ExpertsFile
from hypothesis import given, settings
from hypothesis import strategies as st
from model_files import write_gguf
from plan_samples import make_variant
from thread_ranks import mixed_tiers, random_tiers, run_ranks

from pshard.runtime.blocks.routed_rows import view_routed
from pshard.runtime.blocks.router_block import RouterBlock
from pshard.runtime.build_engine import build_engine
from pshard.runtime.devices.device import open_device
from pshard.runtime.executor import Executor
from pshard.runtime.kernels.cpu import native
from pshard.runtime.kernels.plain import PlainKernels
from pshard.workload import Limits

needs_native = pytest.mark.skipif(not native.is_available(), reason=f"no native library: {native.why_missing()}")
CONTEXT = 96
# of 256-column blocks a layer's experts are whole on one rank, of 32-column ones all ranks have some of each
MODELS = {
    "qwen3moe": {"arch": "qwen3moe", "qtype": "Q4_0", "d_expert": 96},
    "qwen2moe": {"arch": "qwen2moe", "qtype": "Q8_0", "d_expert": 160, "d_shared": 96},
    "glm4moe": {"arch": "glm4moe", "qtype": "F32", "d_expert": 80, "d_shared": 80, "n_layers": 3},
    "mixtral": {"arch": "mixtral", "qtype": "Q4_K", "d_expert": 512, "n_used": 3},
}
SHARES = [(1.0, 1.0), (1.0, 1.0, 1.0), (3.0, 1.0), (2.0, 0.0, 5.0), (0.0, 1.0)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: write_gguf(folder / f"{name}.gguf", **args) for name, args in MODELS.items()}


@pytest.fixture(scope="module")
def of_one_rank(models: dict[str, Path]) -> dict[str, torch.Tensor]:
    found = {}
    for name, path in models.items():
        with open_engine(path, context=CONTEXT, tokens=(4, 16)) as engine:
            found[name] = talk(engine)
    return found


def talk(engine: Any) -> torch.Tensor:
    """A prompt in two parts and single tokens: logits of every position, [n, vocabulary]."""
    rng = random.Random(1)
    prompts = [[rng.randrange(320) for _ in range(n)] for n in (23, 9, 1, 1, 4, 1)]
    return torch.cat([engine.forward(p, all_logits=True) for p in prompts])


def nmse(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float(((got - wanted).double() ** 2).sum() / (wanted.double() ** 2).sum())


def check_all(results: list[torch.Tensor], wanted: torch.Tensor) -> None:
    assert nmse(results[0], wanted) < 1e-10
    for other in results[1:]:
        assert torch.equal(other, results[0])


@pytest.mark.parametrize(
    "shares", [s if s in SHARES[1::2] else pytest.param(s, marks=pytest.mark.slow) for s in SHARES], ids=str
)
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_one_rank(
    models: dict[str, Path], of_one_rank: dict[str, torch.Tensor], name: str, shares: tuple[float, ...]
) -> None:
    check_all(run_ranks(models[name], shares, talk, CONTEXT), of_one_rank[name])


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    shares=st.sampled_from(SHARES),
    name=st.sampled_from(sorted(MODELS)),
    mixed=st.booleans(),
    as_on_gpus=st.booleans(),
)
def test_each_rank_may_have_its_slices_in_any_place(
    models: dict[str, Path],
    of_one_rank: dict[str, torch.Tensor],
    seed: int,
    shares: tuple[float, ...],
    name: str,
    mixed: bool,
    as_on_gpus: bool,
) -> None:
    """Pinned, streamed, read in place, on the CPU, or all at once, each rank otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        if as_on_gpus:  # the residual stream stays on the accelerator, transfers go with the units' graphs
            real = Executor._shape
            patch.setattr(Executor, "_shape", lambda *given: replace(real(*given), sums_on_host=False))
            patch.setattr(PlainKernels, "repeatable", True)
        tiers = (mixed_tiers if mixed else random_tiers)(seed, CONTEXT)
        check_all(run_ranks(models[name], shares, talk, CONTEXT, tiers), of_one_rank[name])


@pytest.mark.parametrize(
    ("shares", "limits"),
    [
        ((1.0, 1.0, 1.0), (("experts", 2),)),
        ((1.0, 2.0, 1.0), (("experts", 2), ("shared", 1))),
        ((1.0, 1.0), (("attention", 1), ("experts", 1))),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["qwen2moe", "glm4moe"])
def test_fewer_ranks_may_share_experts(
    models: dict[str, Path],
    of_one_rank: dict[str, torch.Tensor],
    name: str,
    shares: tuple[float, ...],
    limits: Limits,
) -> None:
    check_all(
        run_ranks(models[name], shares, talk, CONTEXT, random_tiers(5, CONTEXT), limits=limits), of_one_rank[name]
    )


@pytest.mark.parametrize("shares", [(1.0, 1.0), (1.0, 0.0, 1.0)], ids=str)
def test_biases_of_experts_are_added_once(shares: tuple[float, ...]) -> None:
    file = ExpertsFile(RULES["of the chosen"])
    plan = make_variant(file.spec, pinned_everywhere(file.spec, (4, 16), CONTEXT), CONTEXT, 1)
    with build_engine(file, plan, open_device("cpu"), kernels="plain") as engine:
        wanted = talk(engine)
    for tiers in (None, mixed_tiers(1, CONTEXT)):
        check_all(run_ranks(file, shares, talk, CONTEXT, tiers), wanted)


@pytest.mark.parametrize("kernels", ["plain", pytest.param("fast", marks=needs_native)])
@pytest.mark.parametrize("name", MODELS)
def test_all_ranks_see_the_same_hidden_states_and_choose_the_same_experts(
    models: dict[str, Path], name: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit, wherever a rank has its router: with another choice it would add its slice of another expert."""
    seen: dict[int, list[torch.Tensor]] = {}
    real = RouterBlock.run

    def run(self: Any, work: Any, weights: Any, state: None, residual: Any) -> None:
        real(self, work, weights, state, residual)
        hidden, (x, routes) = work.side.space.rows("hidden", work.rows.tokens), view_routed(work.side, work.rows.tokens)
        seen.setdefault(get_ident(), []).extend(t.clone() for t in (hidden, x, routes.ids, routes.weights))

    monkeypatch.setattr(RouterBlock, "run", run)
    run_ranks(models[name], (3.0, 1.0, 2.0), talk, CONTEXT, random_tiers(2, CONTEXT), kernels=kernels)
    first, *others = seen.values()
    assert len(others) == 2 and first
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
