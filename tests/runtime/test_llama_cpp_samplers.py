"""Samplers beside llama.cpp's own, on the logits that llama.cpp itself has: its server says them, and what is left of
them after its chain. xllamacpp, which brings that server, is no dependency: without it these tests are skipped."""

import json
import math
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pshard.models import open_model
from pshard.runtime.sampling import Sampler, Sampling
from pshard.runtime.sampling.chain import Penalties

MODEL = Path(__file__).resolve().parents[2] / "examples" / "demo.gguf"
PROMPT = "ROMEO:\nGood lady, hear the night, the night"
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}

Ask = Callable[..., list[tuple[int, float]]]


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """A function that asks llama.cpp for the next token's chances under some settings: (token, chance or log of it)."""
    xllamacpp = pytest.importorskip("xllamacpp", reason="brings llama.cpp's samplers")
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_gpu_layers = str(MODEL), 512, 0
    params.cpuparams.n_threads = 1
    server = xllamacpp.Server(params)
    address = server.listening_address
    with open_model(MODEL) as file:
        ids = file.tokenizer().encode(PROMPT)

    def ask(after: bool, **settings: Any) -> list[tuple[int, float]]:
        body = {"prompt": ids, "n_predict": 1, "n_probs": 1024, "seed": 1, "cache_prompt": False}
        body |= {"post_sampling_probs": after, **NEUTRAL, **settings}
        request = urllib.request.Request(
            f"{address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            (found,) = json.load(reply)["completion_probabilities"]
        what = ("top_probs", "prob") if after else ("top_logprobs", "logprob")
        return [(token["id"], token[what[1]]) for token in found[what[0]]]

    yield ask


@pytest.fixture(scope="module")
def logits(ask: Ask) -> np.ndarray:
    """llama.cpp's logits of the next token, up to a number that is added to all."""
    found = dict(ask(False, samplers=[]))
    return np.array([found[token] for token in range(1024)], np.float32)


CASES = [
    (Sampling(), {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}),
    (Sampling(1.7, 0, 0.6, 0.0), {"temperature": 1.7, "top_p": 0.6}),
    (Sampling(0.3, 7, 1.0, 0.0), {"temperature": 0.3, "top_k": 7}),
    (Sampling(2.0, 0, 1.0, 0.2), {"temperature": 2.0, "min_p": 0.2}),
    (Sampling(0.0, 40, 0.95, 0.05), {"temperature": 0.0, "top_k": 40, "top_p": 0.95, "min_p": 0.05}),
    (
        Sampling(2.0, 30, 0.9, 0.0, samplers=("temperature", "top_p", "top_k")),
        {"temperature": 2.0, "top_k": 30, "top_p": 0.9, "samplers": ["temperature", "top_p", "top_k"]},
    ),
    (
        Sampling(1.0, 50, 1.0, 0.0, penalties=Penalties(frequency=0.9, presence=1.5)),
        {"top_k": 50, "frequency_penalty": 0.9, "presence_penalty": 1.5, "repeat_last_n": 64},
    ),
    (
        Sampling(1.0, 50, 1.0, 0.0, penalties=Penalties(presence=-2.0, last=3)),
        {"top_k": 50, "presence_penalty": -2.0, "repeat_last_n": 3},
    ),
    (
        Sampling(1.0, 50, 1.0, 0.0, logit_bias=((266, 3.0), (267, -math.inf))),
        {"top_k": 50, "logit_bias": [[266, 3.0], [267, False]]},
    ),
]


@pytest.mark.parametrize(("sampling", "settings"), CASES, ids=lambda value: str(value)[:40])
def test_what_is_left_of_the_same_logits_is_what_llama_cpp_leaves(
    ask: Ask, logits: np.ndarray, sampling: Sampling, settings: dict[str, Any]
) -> None:
    theirs = {token: chance for token, chance in ask(True, **settings) if chance > 0}
    sampler = Sampler(sampling)
    with open_model(MODEL) as file:
        sampler.see(file.tokenizer().encode(PROMPT))
    left = sampler.filter(logits)
    ours = dict(zip(left.ids.tolist(), left.chances().tolist()))
    assert ours.keys() == theirs.keys()
    assert ours == pytest.approx(theirs, abs=2e-4)


def test_a_repeat_penalty_divides_what_llama_cpp_divides(ask: Ask, logits: np.ndarray) -> None:
    """It depends on the number that was added to all logits: there is one with which all chances agree."""
    theirs = dict(ask(True, top_k=0, repeat_penalty=1.4, repeat_last_n=64))
    with open_model(MODEL) as file:
        before = file.tokenizer().encode(PROMPT)

    def far(shift: float) -> float:
        sampler = Sampler(Sampling(1.0, 0, 1.0, 0.0, penalties=Penalties(repeat=1.4)))
        sampler.see(before)
        left = sampler.filter(logits + np.float32(shift))
        return max(abs(chance - theirs.get(token, 0.0)) for token, chance in zip(left.ids.tolist(), left.chances()))

    assert min(map(far, np.arange(-2.0, 30.0, 0.05))) < 1e-3
