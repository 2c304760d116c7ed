"""Keys of GGUF headers with other values, beside llama.cpp: its log-probabilities, or a line that names the key.

Of the random F32 files of `test_against_llama_cpp.py`. Skipped where xllamacpp is not installed.
"""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engines
import numpy as np
import pytest
import torch
from family_files import RECIPES
from hybrid_files import LIKE
from model_files import OSS
from test_against_llama_cpp import (
    DENSE_AND_EXPERTS,
    FLASH,
    GELU_ROUNDED,
    GEMMA4,
    IDS,
    LATENT,
    OPENED,
    VOCAB,
    open_as_they_do,
    write_model,
)

from pshard.errors import UserError
from pshard.models.gguf_header import read_gguf

ASK = """
import json, os, sys
told = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
import xllamacpp
def ask(path, ids):
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.warmup, params.n_parallel = path, 256, False, 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    answer = xllamacpp.Server(params).handle_completions({
        "prompt": ids, "n_predict": 1, "n_probs": 320, "samplers": ["top_k"], "top_k": 1, "stream": False,
        "post_sampling_probs": False, "logit_bias": [[0, False]],
    })
    rows = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    return {row["id"]: row["logprob"] for row in rows}
ids = json.loads(sys.argv[1])
for line in sys.stdin:
    try:
        found = ask(line.strip(), ids)
    except RuntimeError:  # it does not load such a file
        found = None
    print(json.dumps(found), file=told, flush=True)
"""
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
OTHERS: list[dict[str, Any]] = [
    *({f"rope.scaling.{key}": value} for key, value in (("attn_factor", 1.25), ("factor", 2.0), ("type", "none"))),
    {"rope.scale_linear": 2.0},
    {"rope.scaling.type": "none", "rope.scaling.factor": 2.0},
    {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
    YARN,
    YARN | {"rope.scaling.attn_factor": 1.25},
    YARN | {"rope.freq_base_swa": 500.0},
    *(
        YARN | {f"rope.scaling.yarn_{name}": value}
        for name, value in (
            *(("attn_factor", 1.25), ("ext_factor", 0.5), ("log_multiplier", 0.5), ("log_multiplier", 0.0)),
            *(("beta_fast", 8.0), ("beta_slow", 4.0)),
        )
    ),
    *({f"rope.scaling.yarn_{name}": 0.5} for name in ("attn_factor", "ext_factor", "log_multiplier")),
    *({"rope.dimension_sections": list(found)} for found in ((4, 6, 6, 0), (2, 3, 3, 0), (8, 0, 0, 0), (4, 4, 4, 4))),
    {"rope.freq_base_swa": 500.0},
    {"rope.dimension_count_swa": 8},
    {"attention.key_length_swa": 16, "attention.value_length_swa": 16},
    *({"attention.sliding_window": length} for length in (0, 16)),
    *({"attention.sliding_window_pattern": every} for every in (0, 2, 4)),
    {"attention.sliding_window": 16, "attention.sliding_window_pattern": 2},
    {"attention.temperature_scale": 0.3},
    {"attention.clamp_kqv": 0.4},
    {"attention.causal": False},
    {"attention.max_alibi_bias": 8.0},
    *({key: value} for key in ("attn_logit_softcapping", "final_logit_softcapping") for value in (0.0, 0.7)),
    *({key: value} for key in ("embedding_scale", "residual_scale") for value in (0.0, 3.0)),
    *({key: 0.5} for key in ("logit_scale", "attention.scale", "attention.value_scale")),
]
OF_ROUTERS: list[dict[str, Any]] = [
    *({"expert_gating_func": number} for number in (1, 2, 3)),
    *({"expert_weights_norm": normed} for normed in (True, False)),
    *({"expert_weights_scale": scale} for scale in (0.0, 1.75)),
]
MEANT = {  # what docs/models.md says is not as b11549 has it
    *(("phi3", "attention.sliding_window"), ("smallthinker", "attention.sliding_window")),
    ("llama4", "attention.sliding_window"),
    ("starcoder2", "attention.sliding_window"),
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="llama.cpp is not here: xllamacpp"),
]


class Theirs:
    """llama.cpp's log-probabilities behind the text, of one file after another; it aborts on some."""

    def __init__(self) -> None:
        self._process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        command, pipe = [sys.executable, "-c", ASK, json.dumps(IDS)], subprocess.PIPE
        return subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)

    def ask(self, path: Path) -> np.ndarray | None:
        """None: it does not load the file."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(f"{path}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            self.end()
            self._process = self._start()
            return None
        found = json.loads(line)
        return found and np.array([found.get(str(token), np.nan) for token in range(1, VOCAB)])

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def theirs() -> Iterator[Theirs]:
    one = Theirs()
    yield one
    one.end()


def ours(path: Path) -> np.ndarray:
    with engines.open_engine(path, context=256) as engine:
        return engine.forward(IDS).double().flatten()[1:].numpy()


def apart(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference of log-probabilities, in standard deviations; of those far below all others none."""
    told = np.isfinite(expected) & (expected > -60)
    ours, theirs = (torch.log_softmax(torch.from_numpy(values[told]), -1).numpy() for values in (found, expected))
    return float(np.abs(ours - theirs).max() / found.std())


@pytest.mark.parametrize("arch", [*DENSE_AND_EXPERTS, OSS, LATENT, FLASH, *RECIPES, *LIKE, *GEMMA4])
def test_a_key_counts_as_llama_cpp_reads_it_or_is_named(
    arch: str, theirs: Theirs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "open_model", open_as_they_do)
    plain = write_model(tmp_path, arch)
    metadata = read_gguf(plain).metadata
    if theirs.ask(plain) is None:
        pytest.skip("llama.cpp does not load the tiny file")
    called = metadata["general.architecture"]
    routed = bool(metadata.get(f"{called}.expert_count"))
    rounded, wrong = arch in GELU_ROUNDED or arch in GEMMA4, []
    for keys in (*OTHERS, *(OF_ROUTERS if routed else ())):
        if any((arch, key) in MEANT for key in keys):
            continue
        with monkeypatch.context() as patch:
            for key, value in keys.items():
                patch.setitem(OPENED, f"{called}.{key}", value)
            path = write_model(tmp_path, arch)
        expected = theirs.ask(path)
        try:
            found = ours(path)
        except UserError:
            continue
        if expected is not None and apart(found, expected) > (1e-3 if rounded else 1e-4):
            wrong.append(keys)
    assert not wrong
