"""Text is cut before BPE as llama.cpp cuts it, for every kind that GGUF files name. Skipped without xllamacpp."""

import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from model_files import write_gguf
from tokenizers import models, pre_tokenizers, trainers

from pshard.models.text.gguf_tokenizer import PRE_TOKENIZERS, gguf_tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="llama.cpp is not here: xllamacpp"),
]
WORDS = [
    "The", "it's", "WE'LL", "don'T", "camelCase", "HTTPServer", "x", "über", "Ωmega", "русский", "中文字符", "日本語の",
    "テキスト", "한국어", "12", "1984", "12345", "3.14159", "...", "!?", "(a)", "{x", "};", "#", "//", "/usr/bin", "\n",
    "\r\n", "\n\n", " ", "  ", "   ", "     ", "\t", "-", "e.g.", "$5", "50%", "a_b", "<b>", "\u3002", "'", '"',
]  # fmt: skip
OWN = ("kimi-k2", "tiny_aya")  # b11549 cuts no capitals there; the models' tokenizer.json do, and so do we
ASK = """
import json, sys, urllib.request
import xllamacpp
texts, found = json.load(open(sys.argv[1])), {}
for name, path in json.loads(sys.argv[2]).items():
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.warmup, params.n_parallel = path, 64, False, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    try:
        server = xllamacpp.Server(params)
    except RuntimeError:  # it does not know the name
        continue
    found[name] = []
    for text in texts:
        body = json.dumps({"content": text, "add_special": True}).encode()
        request = urllib.request.Request(server.listening_address + "/tokenize", body)
        found[name].append(json.load(urllib.request.urlopen(request))["tokens"])
    del server
print("found", json.dumps(found))
"""


def draw_texts(count: int) -> list[str]:
    """Words with and without spaces between them."""
    rng = random.Random(3)
    return [
        "".join(rng.choice(WORDS) + rng.choice(["", " "]) for _ in range(rng.randrange(1, 24))) for _ in range(count)
    ]


def train_across_words(texts: list[str]) -> tuple[list[str], list[str]]:
    """Tokens and merges of byte-level BPE that no cut holds up: wherever a text is cut, other tokens come of it."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=3000, initial_alphabet=alphabet, min_frequency=2, show_progress=False)
    )
    model = json.loads(backend.to_str())["model"]
    return sorted(model["vocab"], key=model["vocab"].__getitem__), [" ".join(pair) for pair in model["merges"]]


def test_text_becomes_the_tokens_that_llama_cpp_makes_of_it(tmp_path: Path) -> None:
    texts = draw_texts(120)
    tokens, merges = train_across_words(texts)
    tokens += ["<s>", *(f"<pad{i}>" for i in range(-(len(tokens) + 1) % 64))]
    ours: dict[str, list[list[int]]] = {}
    paths = {}
    for name in (n for n in PRE_TOKENIZERS if n not in OWN):
        metadata: dict[str, Any] = {
            "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": name, "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [3 if t.startswith(("<s>", "<pad")) else 1 for t in tokens],
            "tokenizer.ggml.merges": merges, "tokenizer.ggml.bos_token_id": tokens.index("<s>"),
            "tokenizer.ggml.eos_token_id": tokens.index("<s>"),
        }  # fmt: skip
        paths[name] = str(write_gguf(tmp_path / f"{name}.gguf", "llama", vocab=len(tokens), metadata=metadata))
        tokenizer = gguf_tokenizer(metadata, "x.gguf")
        ours[name] = [tokenizer.encode(text) for text in texts]
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    command = [sys.executable, "-c", ASK, str(tmp_path / "texts.json"), json.dumps(paths)]
    asked = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in asked.stdout.splitlines() if line.startswith("found ")]
    assert lines, asked.stderr[-2000:]
    theirs = json.loads(lines[0].removeprefix("found "))
    assert theirs.keys() == ours.keys()
    unlike = {name: [t for t, a, b in zip(texts, ours[name], theirs[name]) if a != b][:3] for name in theirs}
    assert not {name: found for name, found in unlike.items() if found}
