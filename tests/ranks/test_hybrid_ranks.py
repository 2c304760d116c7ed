"""Hybrids on several ranks: the logits, cuts and files of one rank, whoever has which heads or layers."""

import random
from pathlib import Path

import pytest
import torch
from engines import open_engine
from family_files import write_family
from hybrid_files import VOCAB, random_hybrid, write_hybrid_gguf
from thread_ranks import random_tiers, run_ranks

CONTEXT = 128
CLOSE = 1e-4  # of the logits' deviation
RNG = random.Random(4)
TEXT = [RNG.randrange(VOCAB) for _ in range(41)]
SHARES = [  # (0, 1) everywhere in VRAM, else placed by chance
    *(("next", (1.0, 1.0)), ("next", (2.0, 0.0, 5.0)), ("dense", (3.0, 1.0)), ("dense", (0.0, 1.0))),
    *(("lfm2", (1.0, 1.0, 1.0)), ("lfm2", (2.0, 0.0, 5.0))),
]
ROOM = 1 << 20


@pytest.fixture(scope="module", params=["next", "dense", "lfm2"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Value heads by key head (next), and one of each key head in turn; channels of short convolutions."""
    folder = tmp_path_factory.mktemp("m")
    if request.param == "lfm2":
        return write_family(folder / "m.gguf", "lfm2").path
    return write_hybrid_gguf(folder / "m.gguf", request.param, random_hybrid(request.param))


def talk(engine) -> torch.Tensor:
    """A prompt, tokens, a cut, more tokens, a reset and a text of its own: the logits of all."""
    parts = [engine.forward(TEXT, all_logits=True), engine.forward([1], all_logits=True)]
    engine.reset(0, 35)
    parts += [engine.forward([2, 3, 4], all_logits=True), engine.forward([5], all_logits=True)]
    engine.reset()
    return torch.cat([*parts, engine.forward([6, 7], all_logits=True)])


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.std())


@pytest.fixture(scope="module")
def of_one_rank(path: Path) -> torch.Tensor:
    with open_engine(path, context=CONTEXT, tokens=(4, 16)) as engine:
        return talk(engine)


@pytest.mark.quick("dense-(0.0, 1.0)")
@pytest.mark.parametrize(("path", "shares"), SHARES, indirect=["path"], ids=str)
def test_ranks_with_key_heads_of_their_own_give_one_rank_s_logits(
    path: Path, of_one_rank: torch.Tensor, shares: tuple[float, ...]
) -> None:
    tiers = None if shares == (0.0, 1.0) else random_tiers(len(shares), CONTEXT)
    for found in run_ranks(path, shares, talk, CONTEXT, tiers, checkpoint_bytes=ROOM):
        assert difference(found, of_one_rank) < CLOSE


@pytest.mark.quick("lfm2-(1.0, 1.0)")
@pytest.mark.parametrize(
    ("path", "shares"),
    [("next", (1.0, 1.0)), ("dense", (1.0, 3.0, 1.0)), ("lfm2", (1.0, 1.0))],
    indirect=["path"],
    ids=str,
)
def test_ranks_with_layers_of_their_own_give_them_too(
    path: Path, of_one_rank: torch.Tensor, shares: tuple[float, ...]
) -> None:
    tiers = random_tiers(7, CONTEXT)
    for found in run_ranks(path, shares, talk, CONTEXT, tiers, mode="layer", checkpoint_bytes=ROOM):
        assert difference(found, of_one_rank) < CLOSE


def test_a_file_is_one_rank_s_whoever_saves_it(path: Path, tmp_path: Path) -> None:
    def load_and_save(before: Path, after: Path):
        def talk(engine) -> torch.Tensor:
            assert engine.load(before) == tuple(TEXT)
            engine.save(after)
            engine.reset(0, 36)
            return engine.forward(TEXT[36:], all_logits=True)

        return talk

    first = tmp_path / "0"
    with open_engine(path, context=CONTEXT, tokens=(4, 16), checkpoint_bytes=ROOM) as engine:
        wanted = engine.forward(TEXT, all_logits=True)[36:]
        engine.save(first)
    before = first
    runs = [((1.0, 1.0), "tensor"), ((1.0, 1.0), "layer"), ((0.0, 1.0), "tensor"), ((1.0, 1.0, 1.0), "tensor")]
    for number, (shares, mode) in enumerate(runs):
        after = tmp_path / str(number + 1)
        turn = load_and_save(before, after)
        for found in run_ranks(path, shares, turn, CONTEXT, None, mode=mode, checkpoint_bytes=ROOM):
            assert difference(found, wanted) < CLOSE
        assert after.read_bytes() == first.read_bytes()
        before = after
