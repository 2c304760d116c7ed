"""Steps that verify drafts: their logits are those of the tokens computed one by one.

An exact engine promises that no bit of a text depends on the others in its step. So drafts have the bits that they have
alone, whatever decodes or is verified beside them, and one draft has those of a token that is decoded. Several drafts
of one text are computed by other kernels of attention and of delta nets than single tokens: their logits are equal
within rounding.
"""

import random
from pathlib import Path

import numpy as np
import pytest
from engines import open_engine
from hybrid_files import random_hybrid, write_hybrid_gguf
from model_files import write_gguf

from pshard.batch import DECODE, VERIFY
from pshard.runtime.engine import Engine
from pshard.runtime.texts.text import Piece, Text

VOCAB, ROUNDING = 96, 1e-5  # of the logits' deviation
PROMPTS, DRAFTS = (30, 61, 70, 5), (4, 8, 1, 1)  # the drafts of the second go over a block's end


def some_ids(n: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(n)]


def begin(engine: Engine, number: int) -> Text:
    """A text with its prompt, that shares with no other."""
    ids = some_ids(PROMPTS[number], number)
    text = engine.texts.open(ids, str(random.random()))
    for start in range(0, len(ids), 64):
        engine.texts.step([Piece(text, tuple(ids[start : start + 64]))])
    return text


def verify(engine: Engine, texts: dict[int, Text]) -> dict[int, np.ndarray]:
    """Logits of all drafts of some texts, by one step; the last one decodes a token."""
    kinds = {number: DECODE if number == len(DRAFTS) - 1 else VERIFY for number in texts}
    pieces = [
        Piece(text, tuple(some_ids(DRAFTS[n], 50 + n)), "all", full=True, kind=kinds[n]) for n, text in texts.items()
    ]
    return {n: np.stack([row.full for row in rows]) for n, rows in zip(texts, engine.texts.step(pieces))}


def compute_one_by_one(engine: Engine, number: int) -> np.ndarray:
    text = begin(engine, number)
    found = [engine.texts.step([Piece(text, (token,), full=True)]) for token in some_ids(DRAFTS[number], 50 + number)]
    engine.texts.close(text, keep=False)
    return np.stack([rows[0].full for (rows,) in found])


@pytest.fixture(scope="module", params=["dense", "mixture", "hybrid"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("m") / "m.gguf"
    if request.param == "hybrid":
        return write_hybrid_gguf(path, "dense", random_hybrid("dense"))
    return write_gguf(path, "qwen3" if request.param == "dense" else "qwen3moe", qtype="Q8_0", n_layers=2)


@pytest.mark.quick("hybrid-fast")
@pytest.mark.parametrize(
    ("path", "kernels"),
    [("hybrid", "plain"), ("dense", "fast"), ("mixture", "fast"), ("hybrid", "fast")],
    indirect=["path"],
)
def test_logits_of_a_verify_batch_are_those_of_its_tokens_one_by_one(path: Path, kernels: str) -> None:
    exact = kernels == "fast"
    with open_engine(path, context=1024, sequences=4, tokens=(64,), kernels=kernels, exact=exact) as engine:
        together = verify(engine, {n: begin(engine, n) for n in range(len(DRAFTS))})
        engine_is_free(engine)
        for number, rows in together.items():
            alone = verify(engine, {number: begin(engine, number)})[number]
            engine_is_free(engine)
            single = compute_one_by_one(engine, number)
            if exact:
                assert np.array_equal(rows, alone)
            if exact and DRAFTS[number] == 1:
                assert np.array_equal(rows, single)
            assert rows.shape == single.shape == (DRAFTS[number], single.shape[1])
            assert np.abs(rows - single).max() < ROUNDING * single.std()


def engine_is_free(engine: Engine) -> None:
    """Close whatever is open."""
    for text in engine.texts._blocks._open:
        if text:
            engine.texts.close(text, keep=False)
