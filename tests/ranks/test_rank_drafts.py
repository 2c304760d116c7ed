"""Several ranks verify drafts in step: the text is that without drafts, whoever holds what."""

import itertools
import random
from pathlib import Path

import pytest
from engines import open_engine
from hybrid_files import VOCAB, random_hybrid, write_hybrid_gguf
from model_files import write_gguf
from thread_ranks import run_ranks

from pshard.runtime.engine import Engine
from pshard.runtime.sampling import Sampling
from pshard.runtime.sampling.chain import Penalties
from pshard.runtime.speculation.draft_length import DraftLength
from pshard.runtime.speculation.speculator import DraftSettings
from pshard.speculation import LOOKUP, Acceptance, AcceptanceRecord

CONTEXT, TOKENS = 128, 24
RNG = random.Random(3)
IDS = [RNG.randrange(90) for _ in range(30)] * 2
REPEATS = Sampling(temperature=0, logit_bias=((7, 50.0),))
DRAWN = Sampling(seed=5, temperature=0.4, penalties=Penalties(1.1))


def tell(engine: Engine, drafts: int = 0, **more: object) -> tuple[list[list[int]], int]:
    """Texts, and how many drafts held."""
    told, held = list[list[int]](), 0
    for sampling in (REPEATS, DRAWN):
        wanted = DraftSettings(LOOKUP, drafts, record=AcceptanceRecord(LOOKUP), **more) if drafts else None
        engine.reset()
        told.append(list(engine.generate(IDS, TOKENS, sampling, False, None, wanted)))
        assert list(engine.generate([9], 3, sampling, False)), "behind what was told"
        held += sum(wanted.record.held) if wanted else 0
    return told, held


@pytest.fixture(scope="module", params=["dense", "states"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("m") / "m.gguf"
    if request.param == "states":
        return write_hybrid_gguf(place, "dense", random_hybrid("dense"))
    return write_gguf(place, "qwen3", qtype="Q8_0", n_layers=3, vocab=VOCAB)


@pytest.mark.parametrize(("path", "mode"), [("dense", "layer"), ("states", "tensor")], indirect=["path"])
def test_ranks_with_drafts_tell_what_they_tell_without(path: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank's clock says something else of how many drafts pay."""
    turns = itertools.cycle(range(4))
    monkeypatch.setattr(DraftLength, "choose", lambda length: next(turns))

    def talk(engine: Engine) -> list[object]:
        return [tell(engine), tell(engine, 3), tell(engine, 3, fixed=True, made_up=Acceptance((0.6,)))[1]]

    first, *others = run_ranks(path, (1.0, 2.0), talk, CONTEXT, mode=mode, kernels="fast")
    (alone, _), (drafted, held), made_up = first
    assert drafted == alone and held > 5 and made_up > 5
    assert all(other[:2] == first[:2] for other in others)
    if mode == "layer":  # whose ranks compute as one does
        with open_engine(path, context=CONTEXT, tokens=(4, 16), kernels="fast") as engine:
            assert tell(engine)[0] == alone
