"""Multi-token heads: their logits are those of an independent forward, and texts are those without them."""

import random

import numpy as np
import pytest
import torch
from head_engines import HeadedEngines, record_logits
from head_files import HEADED
from head_forward import LATER, MISTAKES, OF_OWN, head_logits

from pshard.runtime.engine import Engine
from pshard.runtime.sampling import Sampling
from pshard.runtime.sampling.chain import Penalties
from pshard.runtime.speculation.head_program import Ask
from pshard.runtime.speculation.speculator import DraftSettings
from pshard.speculation import MTP

DRAFTS = 4


@pytest.fixture(scope="module", params=HEADED)
def headed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HeadedEngines:
    """A model with a head; the one like GLM's has a table and an output of its own."""
    return HeadedEngines(tmp_path_factory.mktemp("m") / "m.gguf", request.param, own=request.param == "glm")


def some_ids(n: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(90) for _ in range(n)]


def test_a_heads_logits_are_those_of_an_independent_forward_chained(headed: HeadedEngines) -> None:
    ids = some_ids(21)
    with headed.open(kernels="plain") as engine:
        texts, found = engine.texts, record_logits(engine)
        text = texts.begin()
        texts.extend([(text, ids[:13])])
        texts.extend([(text, ids[13:17])], all_logits=True)
        texts.extend([(text, ids[17:20])])
        (drafts,) = engine.drafter.draft([Ask(text, (ids[20],), DRAFTS)])
    right = head_logits(headed.config, headed.tensors, ids, DRAFTS)
    assert list(drafts) == right.argmax(1).tolist()
    deviation = right.std()
    assert np.abs(torch.stack(found).double().numpy() - right).max() < 1e-5 * deviation
    for mistake in MISTAKES:
        if mistake in OF_OWN and not headed.own:
            continue
        wrong = head_logits(headed.config, headed.tensors, ids, DRAFTS, [mistake])
        at = 1 if mistake in LATER else 0
        assert np.abs(wrong - right)[at:].max() > 0.05 * deviation, mistake


def test_texts_with_a_heads_drafts_are_those_without(headed: HeadedEngines) -> None:
    penalised = Sampling(seed=3, temperature=1.0, penalties=Penalties(1.2, 0.3, 0.1, 16))
    for on_acc in (True, False):
        with headed.open(on_acc=on_acc) as engine:
            for sampling in (Sampling(temperature=0), penalised):
                base = tell(engine, sampling, 0)
                for drafts in (1, 3, 7):
                    assert tell(engine, sampling, drafts) == base, (on_acc, drafts)


def tell(engine: Engine, sampling: Sampling, drafts: int, most: int = 24) -> list[int]:
    """A text of a prompt, with so many drafts of the head in every step."""
    settings = DraftSettings(MTP, drafts, True) if drafts else None
    engine.reset()
    return list(engine.generate(some_ids(30), most, sampling, False, None, settings))
