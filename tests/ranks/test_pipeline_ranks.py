"""Real processes that hold whole layers (`-sm layer`) give one rank's logits bit for bit, on CPUs and on GPUs."""

import json
from pathlib import Path

import pytest
import torch
from engines import converse, open_engine, pinned_everywhere
from model_files import write_gguf
from plan_samples import with_workload
from rounded_kernels import RoundedKernels
from test_parallel_group import processes_of, run_ranks, slow
from thread_ranks import Tiers, random_tiers, split_variant

from pshard.jsonio import to_json
from pshard.model import ModelSpec
from pshard.plan import TierPlan
from pshard.reserve import TORCH_RESERVE_MIB
from pshard.runtime import build_executor as loading
from pshard.workload import Limits, Split

CONTEXT = 256
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Normalised mean square error."""
    return float(((got - wanted).double() ** 2).sum() / (wanted.double() ** 2).sum())


def process_logits(
    folder: Path,
    shares: tuple[float, ...],
    backend: str,
    tiers: Tiers | None = None,
    mode: str = "layer",
    limits: Limits = (),
    reduce_dtype: str = "auto",
    scenario: str = "engine",
) -> list[torch.Tensor]:
    """Logits of `converse` on every rank, for the model that lies in the folder."""
    reserve = TORCH_RESERVE_MIB if backend in ("peers", "nccl") else 0
    variant = split_variant(folder / "m.gguf", Split(mode, shares, limits), CONTEXT, tiers, reserve)
    variant = with_workload(variant, reduce_dtype=reduce_dtype)
    (folder / "plan.json").write_text(json.dumps(to_json(variant)))
    done = run_ranks(f"{scenario}@{backend}", len(shares), folder)
    assert done.returncode == 0, done.stderr
    assert not processes_of(folder)
    return [torch.load(folder / f"engine-{rank}.pt") for rank in range(len(shares))]


@pytest.mark.parametrize(
    ("shares", "backend", "seed"),
    [((1.0, 1.0), "shm", 1), slow((2.0, 0.0, 1.0), "shm", 2), slow((1.0,) * 3, "gloo", None)],
)
def test_processes_on_cpus(tmp_path: Path, shares: tuple[float, ...], backend: str, seed: int | None) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen3", qtype="Q8_0", n_layers=5)
    with open_engine(path, context=CONTEXT, tokens=(4, 16)) as one:
        wanted = converse(one)
    tiers = None if seed is None else random_tiers(seed, CONTEXT)
    for logits in process_logits(tmp_path, shares, backend, tiers):
        assert torch.equal(logits, wanted)


@pytest.mark.slow
def test_processes_of_which_two_hold_the_attention(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen3", qtype="Q8_0", n_layers=3)
    with open_engine(path, context=CONTEXT, tokens=(4, 16)) as one:
        wanted = converse(one)
    limits = (("attention", 2), ("output", 1))
    first, *others = process_logits(tmp_path, (1.0,) * 3, "shm", random_tiers(3, CONTEXT), "tensor", limits)
    assert error(first, wanted) < 1e-10
    assert all(torch.equal(other, first) for other in others)


@pytest.mark.slow
def test_sums_of_cpus_are_rounded_when_that_is_asked_for(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen3", qtype="BF16", n_layers=2)
    with open_engine(path, context=CONTEXT, tokens=(4, 80)) as one:
        wanted = converse(one)

    def tiers(spec: ModelSpec) -> tuple[TierPlan, ...]:
        return pinned_everywhere(spec, (4, 80), CONTEXT)

    kept, other = process_logits(tmp_path, (1.0, 1.0), "shm", tiers, "tensor")
    assert torch.equal(kept, other) and error(kept, wanted) < 1e-10
    rounded, other = process_logits(tmp_path, (1.0, 1.0), "shm", tiers, "tensor", reduce_dtype="bf16")
    assert torch.equal(rounded, other) and 1e-9 < error(rounded, wanted) < 1e-4  # here of single tokens too


@pytest.mark.gpu
@needs_two_gpus
@pytest.mark.parametrize("backend", ["peers", "nccl"])
def test_prompts_between_gpus_are_summed_in_bfloat16(
    tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What that costs is a hundredth of what activations in bfloat16 do."""

    def tiers(spec: ModelSpec) -> tuple[TierPlan, ...]:
        return pinned_everywhere(spec, (1, 4, 80), CONTEXT)

    path = write_gguf(tmp_path / "m.gguf", "qwen3", qtype="BF16", n_layers=2)
    with open_engine(path, context=CONTEXT, tokens=(1, 4, 80)) as one:
        wanted = converse(one)
    monkeypatch.setattr(loading, "PlainKernels", RoundedKernels)
    with open_engine(path, context=CONTEXT, tokens=(1, 4, 80)) as one:
        bound = 1.05 * error(converse(one), wanted)  # 1.06e-4
    found, other = process_logits(tmp_path, (1.0, 1.0), backend, tiers, "tensor")
    assert torch.equal(found, other) and error(found, wanted) < bound
    in_float32, _ = process_logits(tmp_path, (1.0, 1.0), backend, tiers, "tensor", reduce_dtype="f32")
    assert not torch.equal(found, in_float32) and error(in_float32, wanted) < bound


@pytest.mark.gpu
@needs_two_gpus
@pytest.mark.parametrize("kind", ["attention", "ffn", "output"])
def test_gpus_of_which_one_holds_a_kind_of_unit(tmp_path: Path, kind: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen3", qtype="Q4_0", n_layers=4)
    with open_engine(path, context=CONTEXT, tokens=(4, 16)) as one:
        wanted = converse(one)
    first, second = process_logits(tmp_path, (1.0, 2.0), "peers", random_tiers(1, CONTEXT), "tensor", ((kind, 1),))
    assert torch.equal(first, second)
    assert error(first, wanted) < 2e-3  # int8 activations, bfloat16 on the GPU


@pytest.mark.gpu
@needs_two_gpus
@pytest.mark.parametrize("backend", ["peers", "nccl"])
@pytest.mark.parametrize("shares", [(1.0, 1.0), (3.0, 1.0), (0.0, 1.0)], ids=str)
def test_gpus_that_hold_everything(tmp_path: Path, shares: tuple[float, ...], backend: str) -> None:
    """Decode in graphs, a prompt in micro-batches of 80 that follow each other through the GPUs."""

    def tiers(spec):
        return pinned_everywhere(spec, (1, 4, 80), CONTEXT)

    path = write_gguf(tmp_path / "m.gguf", "qwen3", qtype="Q4_0", n_layers=5)
    with open_engine(path, None, "fast", CONTEXT, device="cuda", tokens=(1, 4, 80)) as one:
        wanted = converse(one)
    for logits in process_logits(tmp_path, shares, backend, tiers):
        assert torch.isfinite(logits).all() and torch.equal(logits, wanted)


@pytest.mark.gpu
@needs_two_gpus
@pytest.mark.parametrize("mode", ["layer", "tensor"])
@pytest.mark.parametrize("seed", range(3))
def test_gpus_that_stream_and_share_with_the_cpu(tmp_path: Path, mode: str, seed: int) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen3", qtype="Q4_0", n_layers=4)
    with open_engine(path, context=CONTEXT, tokens=(4, 16)) as one:
        wanted = converse(one)
    first, second = process_logits(tmp_path, (1.0, 1.0), "peers", random_tiers(seed, CONTEXT), mode)
    assert torch.equal(first, second)
    assert error(first, wanted) < 2e-3  # int8 activations, bfloat16 on the GPU
    again, _ = process_logits(tmp_path, (1.0, 1.0), "peers", random_tiers(seed, CONTEXT), mode)
    assert torch.equal(again, first)
