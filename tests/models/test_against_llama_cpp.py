"""The perplexity of a text by llama.cpp, over the same random file in F32. Skipped where xllamacpp is not installed."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from engines import open_engine
from model_files import write_gguf

VOCAB, CONTEXT = 320, 256
TEXT = b"Whoever would know what a program computes compares it with another that was written by somebody else, twice."
OPENED = {
    "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": [f"t{i}" for i in range(VOCAB)],
    "tokenizer.ggml.token_type": [1] * VOCAB, "tokenizer.ggml.merges": ["t1 t2"], "tokenizer.ggml.eos_token_id": 0,
}  # fmt: skip
ASK = """
import json, sys
import xllamacpp
path, ids = sys.argv[1], json.loads(sys.argv[2])
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.warmup, params.n_parallel = path, 256, False, 1
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
server = xllamacpp.Server(params)
found = []
for n in range(1, len(ids)):
    answer = server.handle_completions({
        "prompt": ids[:n], "n_predict": 1, "n_probs": 320, "samplers": ["top_k"], "top_k": 1, "stream": False,
        "cache_prompt": True, "post_sampling_probs": False, "logit_bias": [[0, False]],
    })
    rows = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    found.append({row["id"]: row["logprob"] for row in rows}[ids[n]])
print("found", json.dumps(found))
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="llama.cpp is not here: xllamacpp"),
]


@pytest.mark.parametrize("arch", ["llama", "qwen3", "qwen2moe", "qwen3moe", "mixtral", "glm4moe"])
def test_the_perplexity_is_that_of_llama_cpp(tmp_path: Path, arch: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", arch, vocab=VOCAB, d_ffn=256, metadata=OPENED)
    ids = [1 + byte % (VOCAB - 1) for byte in TEXT]
    asked = subprocess.run([sys.executable, "-c", ASK, str(path), json.dumps(ids)], capture_output=True, text=True)
    lines = [line for line in asked.stdout.splitlines() if line.startswith("found ")]
    assert lines, asked.stderr[-2000:]
    theirs = np.array(json.loads(lines[0].removeprefix("found ")))
    with open_engine(path, context=CONTEXT) as engine:
        logits = engine.forward(ids[:-1], all_logits=True)
    ours = torch.log_softmax(logits.double(), -1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].numpy()
    assert np.abs(ours - theirs).max() < 1e-3
    assert abs(np.exp(theirs.mean() - ours.mean()) - 1) < 1e-3, "of the perplexity"
