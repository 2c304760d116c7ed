"""Baseline: transformers with accelerate's device_map, under the same budget and tests as our own runs."""

import contextlib
import io
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pshard.errors import UserError
from pshard.plan import Variant
from pshard.times.measurement import Measurement, summarise_samples
from pshard.times.stolen_time import lost_since, read_core_time

if TYPE_CHECKING:
    from pshard.session.bench_engine import BenchSetting, BenchTest

WORKING_BYTES = 1 << 30  # of the budget, for the KV cache and activations that accelerate's map does not count


def run_accelerate(
    path: Path, variant: Variant, kind: str, tests: "Sequence[BenchTest]", repetitions: int, setting: "BenchSetting"
) -> list[Measurement]:
    """Measure the tests with transformers in bfloat16, layers placed by accelerate within the budget.

    `kind`: "cuda", or "cpu", where nothing is placed. GGUF weights are dequantised by transformers, as it cannot
    compute from them. Returns nothing, and says so on stderr, when the packages are missing or cannot load the model.
    """
    try:
        import accelerate
        import transformers

        model = _load(transformers, path, variant, kind)
    except (ImportError, OSError, ValueError, KeyError, NotImplementedError, UserError) as error:
        print(f"note: baseline accelerate is left out: {' '.join(str(error).split())[:200]}", file=sys.stderr)
        return []
    versions = (("transformers", transformers.__version__), ("accelerate", accelerate.__version__))
    setting = replace(setting, strategy="accelerate", environment=(*setting.environment, *versions))
    return [_measure(model, variant, kind, test, repetitions, setting) for test in tests]


def _load(transformers: Any, path: Path, variant: Variant, kind: str) -> Any:
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device_map": "cpu"}
    if kind == "cuda":
        weights = [(m << 20) - WORKING_BYTES for m in variant.workload.vram_mib]
        most: dict[int | str, int | str] = {**dict(enumerate(weights)), "cpu": "1000GiB"}
        options |= {"device_map": "auto", "max_memory": most}
    folder = path if path.is_dir() else path.parent
    if path.is_file():
        options["gguf_file"] = path.name
    with contextlib.redirect_stderr(io.StringIO()):  # the bar over GGUF tensors listens to no setting
        return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def _measure(
    model: Any, variant: Variant, kind: str, test: "BenchTest", repetitions: int, setting: "BenchSetting"
) -> Measurement:
    device = model.get_input_embeddings().weight.device
    if device.type == "meta":
        device = torch.device(kind)
    if kind == "cuda":
        torch.cuda.reset_peak_memory_stats()
    samples, began = [], read_core_time()
    for nth in range(repetitions + 1):
        began = read_core_time() if nth == 1 else began  # the first is the warm-up
        cache = _prefill(model, None, test.n_depth, test, device)
        _synchronise(kind)
        start = time.perf_counter_ns()
        cache = _prefill(model, cache, test.n_prompt, test, device)
        for _ in range(test.n_gen):
            cache = _prefill(model, cache, 1, test, device)
        _synchronise(kind)
        samples.append(time.perf_counter_ns() - start)
    lost = lost_since(began)
    peak = torch.cuda.max_memory_reserved() / (1 << 20) if kind == "cuda" else None
    return Measurement(
        test=test.name,
        n_prompt=test.n_prompt,
        n_gen=test.n_gen,
        n_depth=test.n_depth,
        n_sequences=test.n_sequences,
        **summarise_samples(tuple(samples[1:]), (test.n_prompt + test.n_gen) * test.n_sequences),
        test_time=datetime.now(UTC).isoformat(timespec="seconds"),
        model=setting.model,
        model_bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
        strategy=setting.strategy,
        budget_mib=variant.workload.vram_mib,
        tier=0,
        predicted_ts=None,
        peak_vram_mib=peak,
        link_bytes=None,
        ranks=1,
        type_k="bf16",
        type_v="bf16",
        n_ubatch=test.n_prompt,
        kernels="transformers, bfloat16",
        environment=setting.environment,
        command=setting.command,
        stolen=lost.stolen,
        disturbed=lost.disturbed,
    )


@torch.inference_mode()
def _prefill(model: Any, cache: Any, tokens: int, test: "BenchTest", device: torch.device) -> Any:
    if tokens == 0:
        return cache
    ids = torch.randint(0, model.config.vocab_size, (test.n_sequences, tokens), device=device)
    return model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values


def _synchronise(kind: str) -> None:
    if kind == "cuda":
        torch.cuda.synchronize()
