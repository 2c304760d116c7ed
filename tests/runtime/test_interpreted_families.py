"""Whole tiny models by the GPU's kernels, in Triton's interpreter on the CPU: what kernels hand to each other between
layers, which tests of single kernels do not see. Steps of at most 64 rows, as larger ones take a GPU's GEMM."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engines import open_engine
from family_files import write_family
from family_forward import family_logits
from gemma4_files import GEMMAS, make_gemma4, write_gemma4
from interpreted import expect_interpreted_to_pass, mend_interpreter
from qwen4exp_files import RECIPES as STREAMS
from qwen4exp_files import make_weights, qwen4exp_logits, read_tensors, write_qwen4exp

from pshard.units import rewrites

pytest.importorskip("triton", reason="Triton is installed with the CUDA build of torch only")
READY = os.environ.get("TRITON_INTERPRET") == "1"
needs_interpreter = pytest.mark.skipif(not READY, reason="runs inside test_whole_models_in_the_interpreter")
if READY:
    mend_interpreter()

PARTS = (11, 1)  # other numbers of rows are tried kernel by kernel
IDS = [(7 * i * i + 3 * i) % 300 for i in range(18)]
CASES = {  # a family whose units hand something on, in a type, and a rule of it whose lack would show
    ("llama-biased", "BF16"): {"ffn_biases": False},
    ("llama-biased", "Q8_0"): {"ffn_biases": False},
    ("laguna-m", "BF16"): {"gate": ""},
    ("plamo", "BF16"): {"parallel": False},
}


@pytest.mark.slow
@pytest.mark.skipif(READY, reason="the models run here directly")
def test_whole_models_in_the_interpreter() -> None:
    expect_interpreted_to_pass(__file__)


@pytest.fixture
def kernels_of_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The CPU stays the accelerator, with a GPU's kernels."""
    from pshard.runtime.kernels.cpu.host import HostKernels
    from pshard.runtime.kernels.gpu.cuda import CudaKernels

    def choose(_: object, __: str, tokens: int, *more: object) -> tuple[CudaKernels, HostKernels, tuple[str, ...]]:
        return CudaKernels("cpu", tokens), HostKernels(), ()

    monkeypatch.setattr("pshard.runtime.build_engine.choose_kernels", choose)
    yield


def read(path: Path, each: tuple[int, ...] = PARTS) -> np.ndarray:
    """Logits of a prompt, and of what comes behind it."""
    with open_engine(path, context=128, tokens=(1, 64), kernels="fast", kv_types=("bf16", "bf16")) as engine:
        reading = iter(IDS)
        parts = [[next(reading) for _ in range(n)] for n in each]
        return torch.cat([engine.forward(part, all_logits=True) for part in parts]).double().numpy()


def difference(found: np.ndarray, expected: np.ndarray) -> float:
    """Of the middle token the largest difference, in standard deviations of the expected logits: now and then bfloat16
    turns a token to another expert, or a score."""
    return float(np.median(np.abs(found - expected).max(1)) / expected.std())


@needs_interpreter
@pytest.mark.usefixtures("kernels_of_gpus")
@pytest.mark.parametrize(("family", "qtype"), CASES)
def test_logits_are_those_of_a_float64_forward_but_for_bfloat16(family: str, qtype: str, tmp_path: Path) -> None:
    recipe, weights, path = write_family(tmp_path / "m.gguf", family, qtype=qtype)
    found = read(path)
    ids = IDS[: sum(PARTS)]
    right = family_logits(recipe, weights, ids)
    wrong = family_logits(replace(recipe, **CASES[family, qtype]), weights, ids)
    assert difference(found, right) < 0.1 < 0.5 < difference(wrong, right)


@needs_interpreter
@pytest.mark.usefixtures("kernels_of_gpus")
def test_streams_index_and_n_grams_give_those_of_theirs(tmp_path: Path) -> None:
    """An index that leaves cells out of so short a text."""
    recipe, weights = replace(STREAMS["plain"], index=(4, 32, 4, 4)), make_weights(STREAMS["plain"])
    path = write_qwen4exp(tmp_path / "m.gguf", recipe, weights, "BF16")
    found, tensors = read(path, (17, 1)), read_tensors(path)
    right, wrong = (qwen4exp_logits(one, tensors, IDS) for one in (recipe, STREAMS["plain"]))
    assert difference(found, right) < 0.1 < 0.15 < difference(wrong, right)


@needs_interpreter
@pytest.mark.usefixtures("kernels_of_gpus")
def test_norms_that_the_next_unit_makes_are_those_of_launches_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind attention, and behind experts with an FFN beside them, whose results have norms of their own."""
    write_gemma4(tmp_path / "m.gguf", GEMMAS["mixed"], make_gemma4(GEMMAS["mixed"]), "Q8_0")
    together = read(tmp_path / "m.gguf", (2, 1))
    monkeypatch.setattr(rewrites, "FUSED", rewrites.FUSED - {rewrites.END_NORMS})
    assert difference(together, read(tmp_path / "m.gguf", (2, 1))) < 0.02
