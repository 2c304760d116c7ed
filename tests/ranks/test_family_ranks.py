"""Families on several ranks: the logits of a float64 forward, whoever has what."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from engines import open_engine
from family_files import RECIPES, write_family
from family_forward import family_logits
from quantised_folders import write_quantised
from test_parallel_group import slow
from thread_ranks import random_tiers, run_ranks

pytestmark = pytest.mark.usefixtures("exact_gelu")
CONTEXT = 128
CLOSE = 1e-4  # of the logits' deviation
RNG = random.Random(4)
TEXT = [RNG.randrange(RECIPES["glm4"].vocab) for _ in range(58)]
# of each way to cut a family's units one: sums that are normalised before they are added, norms over all heads, a
# parallel layer, slopes and gates of heads, biases, convolutions, chunks, values of another width
CUT = ["glm4", "gemma2", "gemma3", "olmo2", "cohere2", "stablelm-12b", "refact", "laguna", "jais2", "lfm2", "grovemoe"]
CUT += ["arctic", "llama4", "deci", "mimo2", "llama-biased"]
# layers that differ, or hand on more than the residual stream
UNLIKE = ["laguna", "lfm2", "grovemoe", "deci", "smallthinker", "llama4", "cohere2", "granitemoe", "gemma2"]
SHARES = [(1.0, 0.0, 3.0), (3.0, 1.0), (1.0, 1.0)]


def talk(engine) -> torch.Tensor:
    """A prompt in several micro-batches, and tokens one by one: the logits of all."""
    return torch.cat([engine.forward(part, all_logits=True) for part in (TEXT[:55], TEXT[55:56], TEXT[56:])])


@pytest.mark.slow
def test_columns_in_an_order_of_their_own_are_put_in_order_on_every_rank(tmp_path: Path) -> None:
    """The output's columns are in an order over all heads: a layer's heads are one rank's."""
    write_quantised(tmp_path, "gptq order", n_layers=3)
    with open_engine(tmp_path, context=CONTEXT, tokens=(4, 16)) as engine:
        alone = talk(engine)
    for found in run_ranks(tmp_path, (2.0, 1.0), talk, CONTEXT, random_tiers(7, CONTEXT)):
        assert float((found - alone).abs().max() / alone.std()) < CLOSE


@pytest.mark.parametrize(
    ("family", "shares", "mode"),
    [
        *((family, SHARES[i % 3], "tensor") for i, family in enumerate(CUT)),
        *(slow(family, SHARES[0], "tensor") for family in RECIPES if family not in CUT),
        *((family, (2.0, 1.0), "layer") for family in UNLIKE),
    ],
    ids=str,
)
def test_every_family_gives_a_float64_forward_s_logits(
    family: str, shares: tuple[float, ...], mode: str, tmp_path: Path
) -> None:
    recipe, weights, path = write_family(tmp_path / "m.gguf", family)
    expected = family_logits(recipe, weights, TEXT)
    tiers = random_tiers(5, 512)  # a context beyond what phi3 and mistral3 were trained with
    for found in run_ranks(path, shares, talk, 512, tiers, mode=mode):
        assert float(np.abs(found.numpy() - expected).max() / expected.std()) < 1e-5
