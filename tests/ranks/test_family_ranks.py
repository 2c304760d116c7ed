"""Families whose sums over ranks are normalised before they are added: the logits of one rank, whoever has what."""

import random
from pathlib import Path

import pytest
import torch
from engines import open_engine
from family_files import RECIPES, write_family
from thread_ranks import random_tiers, run_ranks

CONTEXT = 128
CLOSE = 1e-4  # of the logits' deviation
SHARES = [(1.0, 1.0), (3.0, 1.0), (2.0, 0.0, 5.0), (0.0, 1.0)]


@pytest.fixture(scope="module", params=["glm4", "gemma3"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("m") / "m.gguf", request.param).path


def talk(engine) -> torch.Tensor:
    """A prompt in several micro-batches, and tokens one by one: the logits of all."""
    rng = random.Random(4)
    text = [rng.randrange(RECIPES["glm4"].vocab) for _ in range(73)]
    return torch.cat([engine.forward(part, all_logits=True) for part in (text[:70], text[70:71], text[71:])])


@pytest.fixture(scope="module")
def of_one_rank(path: Path) -> torch.Tensor:
    with open_engine(path, context=CONTEXT, tokens=(4, 16)) as engine:
        return talk(engine)


@pytest.mark.parametrize("shares", SHARES, ids=str)
def test_what_ranks_have_summed_is_normalised_once(
    path: Path, of_one_rank: torch.Tensor, shares: tuple[float, ...]
) -> None:
    for tiers in (None, random_tiers(len(shares), CONTEXT)):
        for found in run_ranks(path, shares, talk, CONTEXT, tiers):
            assert float((found - of_one_rank).abs().max() / of_one_rank.std()) < CLOSE
