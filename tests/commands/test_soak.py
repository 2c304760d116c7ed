"""A long random conversation: sequences join, grow, are cut back and leave, under plans that switch all the time."""

import random
from pathlib import Path

import pytest
import torch
from engines import open_engine, pinned_everywhere
from model_files import write_gguf
from plan_samples import make_tier, random_places, shrink_places

from pshard.errors import UserError
from pshard.models import open_model

CONTEXT, SEQUENCES, VOCAB = 96, 3, 320


@pytest.mark.parametrize(
    ("arch", "seed"),
    [
        pytest.param("qwen3", 1, marks=pytest.mark.slow),
        pytest.param("qwen3moe", 1, marks=pytest.mark.slow),
    ],
)
def test_logits_stay_right_through_joins_cuts_switches_and_refused_requests(
    tmp_path: Path, arch: str, seed: int
) -> None:
    rng = random.Random(seed)
    path = write_gguf(tmp_path / "m.gguf", arch, qtype="Q5_0", n_layers=3)
    spec = open_model(path).spec
    places = random_places(spec, rng)
    tiers = []
    for tokens in (3, 12, 40):
        tiers.append(make_tier(spec, tokens, places, rng.randint(1, 3), SEQUENCES * CONTEXT, SEQUENCES))
        places = shrink_places(spec, places, rng)
    history: list[list[int]] = [[] for _ in range(SEQUENCES)]
    with (
        open_engine(path, tuple(tiers), context=SEQUENCES * CONTEXT, sequences=SEQUENCES) as engine,
        open_engine(path, pinned_everywhere(spec, (128,), CONTEXT), context=CONTEXT) as reference,
    ):
        for _ in range(120):
            if rng.random() < 0.2:  # a sequence leaves, or an answer is cut back
                s = rng.randrange(SEQUENCES)
                history[s] = history[s][: rng.randint(0, len(history[s]))] if rng.random() < 0.5 else []
                engine.reset(s, len(history[s]))
            if rng.random() < 0.1:  # a request that is refused must change nothing
                with pytest.raises(UserError):
                    engine.forward([[VOCAB + 1], [], []])
            longest = rng.choice((1, 1, 1, 5, 30))
            new = [[rng.randrange(VOCAB) for _ in range(rng.randint(0, longest))] for _ in range(SEQUENCES)]
            new = [ids[: CONTEXT - len(h)] for ids, h in zip(new, history)]
            if not any(new):
                continue
            logits = engine.forward(new)
            history = [h + ids for h, ids in zip(history, new)]
            assert engine.lengths == tuple(len(h) for h in history)
            if rng.random() < 0.25:
                s = rng.choice([i for i, ids in enumerate(new) if ids])
                reference.reset()
                torch.testing.assert_close(logits[s], reference.forward(history[s]), rtol=1e-4, atol=1e-4)
        assert engine.switches > 20


def test_a_failed_step_makes_the_engine_refuse_further_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", qtype="Q8_0")
    with open_engine(path) as engine:
        engine.forward([1, 2, 3])
        monkeypatch.setattr(
            engine._executor, "run", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("copy failed"))
        )
        with pytest.raises(RuntimeError, match="copy failed"):
            engine.forward([4])
        monkeypatch.undo()
        with pytest.raises(RuntimeError, match="load the model again"):
            engine.forward([4])
