"""Tensor-parallel engines of models with routed experts: logits of one rank, and the same choice on every rank."""

import random
from dataclasses import replace
from pathlib import Path
from threading import get_ident
from typing import Any

import pytest
import torch
from engines import converse, open_engine, pinned_everywhere
from experts_file import RULES, ExpertsFile
from hypothesis import given, settings
from hypothesis import strategies as st
from model_files import write_gguf
from plan_samples import keep_rows, make_tier, make_variant, mix_parts, random_places, shrink_places
from test_parallel_group import slow
from test_pipeline_ranks import process_logits
from thread_ranks import Tiers, mixed_tiers, random_tiers, run_ranks

from pshard.model import ModelSpec
from pshard.plan import TierPlan
from pshard.runtime.blocks.routed_rows import view_routed
from pshard.runtime.blocks.router_block import RouterBlock
from pshard.runtime.build_engine import build_engine
from pshard.runtime.devices.device import open_device
from pshard.runtime.executor import Executor
from pshard.runtime.kernels.cpu import native
from pshard.runtime.kernels.plain import PlainKernels
from pshard.units.moe.router import ROUTER
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


@pytest.mark.quick("glm4moe-(2.0, 0.0, 5.0)")
@pytest.mark.parametrize(
    ("name", "shares"),
    [(name, shares) for i, name in enumerate(MODELS) for n, shares in enumerate(SHARES) if (i + n) % 2 and n in (1, 3)],
    ids=str,
)
def test_logits_are_those_of_one_rank(
    models: dict[str, Path], of_one_rank: dict[str, torch.Tensor], name: str, shares: tuple[float, ...]
) -> None:
    check_all(run_ranks(models[name], shares, talk, CONTEXT), of_one_rank[name])


@settings(max_examples=10)
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
            real = Executor.shape_of
            patch.setattr(Executor, "shape_of", lambda *given: replace(real(*given), sums_on_host=False))
            patch.setattr(PlainKernels, "repeatable", True)
        tiers = (mixed_tiers if mixed else random_tiers)(seed, CONTEXT)
        check_all(run_ranks(models[name], shares, talk, CONTEXT, tiers), of_one_rank[name])


@pytest.mark.quick("(1.0, 1.0)-(('attention', 1), ('experts', 1))")
@pytest.mark.parametrize(
    ("shares", "limits"),
    [
        ((1.0, 1.0, 1.0), (("experts", 2),)),
        ((1.0, 2.0, 1.0), (("experts", 2), ("shared", 1))),
        ((1.0, 1.0), (("attention", 1), ("experts", 1))),
    ],
    ids=str,
)
def test_fewer_ranks_may_share_experts(
    models: dict[str, Path],
    of_one_rank: dict[str, torch.Tensor],
    shares: tuple[float, ...],
    limits: Limits,
) -> None:
    ranks = run_ranks(models["glm4moe"], shares, talk, CONTEXT, random_tiers(5, CONTEXT), limits=limits)
    check_all(ranks, of_one_rank["glm4moe"])


@pytest.mark.quick("(1.0, 1.0)")
@pytest.mark.parametrize("shares", [(1.0, 1.0), (1.0, 0.0, 1.0)], ids=str)
def test_biases_of_experts_are_added_once(shares: tuple[float, ...]) -> None:
    file = ExpertsFile(RULES["of the chosen"])
    plan = make_variant(file.spec, pinned_everywhere(file.spec, (4, 16), CONTEXT), CONTEXT, 1)
    with build_engine(file, plan, open_device("cpu"), kernels="plain") as engine:
        wanted = talk(engine)
    for tiers in (None, mixed_tiers(1, CONTEXT)):
        check_all(run_ranks(file, shares, talk, CONTEXT, tiers), wanted)


@pytest.mark.quick("qwen2moe-fast")
@pytest.mark.parametrize(
    ("name", "kernels"), [("glm4moe", "plain"), pytest.param("qwen2moe", "fast", marks=needs_native)]
)
def test_all_ranks_see_the_same_hidden_states_and_choose_the_same_experts(
    models: dict[str, Path],
    of_one_rank: dict[str, torch.Tensor],
    name: str,
    kernels: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To the last bit, wherever a rank has its router: with another choice it would add its slice of another expert."""
    seen: dict[int, list[torch.Tensor]] = {}
    real = RouterBlock.run

    def run(self: Any, work: Any, weights: Any, state: None, residual: Any) -> None:
        real(self, work, weights, state, residual)
        hidden, (x, routes) = work.side.space.rows("hidden", work.rows.tokens), view_routed(work.side, work.rows)
        seen.setdefault(get_ident(), []).extend(t.clone() for t in (hidden, x, routes.ids, routes.weights))

    monkeypatch.setattr(RouterBlock, "run", run)
    found = run_ranks(models[name], (3.0, 1.0, 2.0), talk, CONTEXT, random_tiers(2, CONTEXT), kernels=kernels)
    assert nmse(found[0], of_one_rank[name]) < 1e-3  # fast kernels cut activations to int8
    first, *others = seen.values()
    assert len(others) == 2 and first
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@needs_native
@pytest.mark.parametrize(
    ("shares", "backend"), [slow((1.0, 1.0), "shm"), slow((2.0, 0.0, 1.0), "shm"), slow((1.0,) * 3, "gloo")]
)
def test_processes_on_cpus(tmp_path: Path, shares: tuple[float, ...], backend: str) -> None:
    """The C++ kernels, sums in shared memory: what a run on a host without a GPU does."""
    path = write_gguf(tmp_path / "m.gguf", "qwen2moe", qtype="Q8_0", d_expert=160, d_shared=96)
    with open_engine(path, context=256, tokens=(4, 16), kernels="fast") as one:
        wanted = converse(one)
    tiers = mixed_tiers(4, 256)
    first, *others = process_logits(tmp_path, shares, backend, tiers, "tensor", scenario="fast_engine")
    assert nmse(first, wanted) < 1e-5  # activations are cut to int8, so last bits move some of them
    assert all(torch.equal(other, first) for other in others)


def tiers_on_gpus(seed: int) -> Tiers:
    """As `random_tiers`, with all routers on the GPUs."""

    def make(spec: ModelSpec) -> tuple[TierPlan, ...]:
        rng = random.Random(f"{seed} {spec.packed_nbytes}")
        routers = {u.name: ("pinned", None) for u in spec.units if u.kind is ROUTER}
        places = random_places(spec, rng) | routers
        decode = mix_parts(spec, places, rng)
        tiers = ((4, decode), (16, keep_rows(spec, shrink_places(spec, places, rng) | routers, decode)))
        return tuple(make_tier(spec, n, p, 2, 256, 1) for n, p in tiers)

    return make


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize("backend", ["peers", "nccl"])
@pytest.mark.parametrize("arch", ["qwen3moe", "qwen2moe"])
def test_processes_on_gpus(
    tmp_path: Path, arch: str, backend: str, seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against plain kernels in float32, as far from these as one GPU is."""
    path = write_gguf(tmp_path / "m.gguf", arch, qtype="Q8_0", d_expert=160, d_shared=96)
    with open_engine(path, context=256, tokens=(4, 16)) as one:
        wanted = converse(one)
    with open_engine(path, context=256, tokens=(4, 16), kernels="fast", device="cuda") as one:
        bound = 1.5 * nmse(converse(one), wanted)
    tiers = None if seed is None else tiers_on_gpus(seed)
    first, second = process_logits(tmp_path, (3.0, 2.0), backend, tiers, "tensor")
    assert torch.equal(first, second) and nmse(first, wanted) < bound
    again, _ = process_logits(tmp_path, (3.0, 2.0), backend, tiers, "tensor")
    assert torch.equal(first, again)
