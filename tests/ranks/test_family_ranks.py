"""Families on several ranks: the logits of a float64 forward, and of one rank where sums are normalised before they are
added, whoever has what."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from engines import open_engine
from family_files import COMPOSED, RECIPES, write_family
from family_forward import family_logits
from quantised_folders import write_quantised
from test_parallel_group import slow
from thread_ranks import random_tiers, run_ranks

pytestmark = pytest.mark.usefixtures("exact_gelu")
CONTEXT = 128
CLOSE = 1e-4  # of the logits' deviation
RNG = random.Random(4)
TEXT = [RNG.randrange(RECIPES["glm4"].vocab) for _ in range(58)]
SHARES = [(1.0, 1.0), (3.0, 1.0), (2.0, 0.0, 5.0), (0.0, 1.0)]


LIKE = ["glm4", "gemma3", "olmo2", "cohere2"]


@pytest.fixture(scope="module", params=LIKE)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("m") / f"{request.param}.gguf", request.param).path


def talk(engine) -> torch.Tensor:
    """A prompt in several micro-batches, and tokens one by one: the logits of all."""
    return torch.cat([engine.forward(part, all_logits=True) for part in (TEXT[:55], TEXT[55:56], TEXT[56:])])


@pytest.fixture(scope="module")
def of_one_rank(path: Path) -> torch.Tensor:
    with open_engine(path, context=CONTEXT, tokens=(4, 16)) as engine:
        return talk(engine)


@pytest.mark.parametrize("turn", range(2))
def test_what_ranks_have_summed_is_normalised_once(path: Path, of_one_rank: torch.Tensor, turn: int) -> None:
    shares = SHARES[(LIKE.index(path.stem) + turn) % len(SHARES)]
    for tiers in (None, random_tiers(len(shares), CONTEXT))[turn:]:
        for found in run_ranks(path, shares, talk, CONTEXT, tiers):
            assert float((found - of_one_rank).abs().max() / of_one_rank.std()) < CLOSE


def test_columns_in_an_order_of_their_own_are_put_in_order_on_every_rank(tmp_path: Path) -> None:
    """The output's columns are in an order over all heads: a layer's heads are one rank's."""
    write_quantised(tmp_path, "gptq order", n_layers=3)
    with open_engine(tmp_path, context=CONTEXT, tokens=(4, 16)) as engine:
        alone = talk(engine)
    for found in run_ranks(tmp_path, (2.0, 1.0), talk, CONTEXT, random_tiers(7, CONTEXT)):
        assert float((found - alone).abs().max() / alone.std()) < CLOSE


def layers_differ(family: str) -> bool:
    """Or hand on more than the residual stream."""
    own = RECIPES[family]
    return bool(own.windows or own.still or own.layer_heads or own.convs or own.limits or own.parallel or own.experts)


@pytest.mark.parametrize(
    ("family", "shares", "mode"),
    [
        *((f, (1.0, 0.0, 3.0), "tensor") if f not in COMPOSED else slow(f, (1.0, 0.0, 3.0), "tensor") for f in RECIPES),
        *(
            (f, (2.0, 1.0), "layer") if f not in COMPOSED and layers_differ(f) else slow(f, (2.0, 1.0), "layer")
            for f in RECIPES
        ),
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
