"""Large micro-batches of prompts on a CUDA GPU: captured and repeated they give the bits of kernels started one by one.
Skipped without one."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import open_engine, read_twice
from family_files import write_family
from hybrid_files import random_hybrid, write_hybrid_gguf
from latent_files import random_tensors, write_latent_gguf
from model_files import write_gguf

from pshard.runtime.walks import walk as micro_batch
from pshard.steps.graph_runs import LAUNCH_BOUND

pytestmark = pytest.mark.gpu
CONTEXT = 3 * LAUNCH_BOUND + 64
WRITERS: dict[str, Callable[[Path], Path]] = {
    "dense": lambda path: write_gguf(path, "qwen3", qtype="Q4_0", context=CONTEXT),
    "experts": lambda path: write_gguf(path, "qwen3moe", qtype="Q4_0", context=CONTEXT),
    "sinks": lambda path: write_gguf(path, "gpt-oss", qtype="Q8_0", context=CONTEXT),
    "delta net": lambda path: write_hybrid_gguf(
        path, "dense", random_hybrid("dense"), qtype="Q8_0", metadata={"qwen35.context_length": CONTEXT}
    ),
    "latent": lambda path: write_latent_gguf(
        path, "lite", random_tensors("lite"), qtype="Q8_0", metadata={"deepseek2.context_length": CONTEXT}
    ),
    "windows": lambda path: write_family(path, "gemma3", qtype="Q8_0", **{"gemma3.context_length": CONTEXT}).path,
}


@pytest.mark.parametrize("tokens", [2048, LAUNCH_BOUND])
@pytest.mark.parametrize("what", WRITERS)
def test_large_micro_batches_are_captured_and_give_the_same_bits(
    what: str, tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, rng = WRITERS[what](tmp_path / "m.gguf"), random.Random(3)
    prompts = [[rng.randrange(300) for _ in range(tokens)] for _ in range(3)]

    options: Any = {"kernels": "fast", "device": "cuda", "context": CONTEXT, "tokens": (1, tokens)}
    captured, got = read_twice(open_engine(path, **options), prompts)
    monkeypatch.setattr(micro_batch, "is_launch_bound", lambda *_: False)
    launched, expected = read_twice(open_engine(path, **options), prompts)
    assert captured and not launched and torch.isfinite(got).all()
    assert torch.equal(got, expected)
