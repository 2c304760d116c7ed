"""What is bundled to draft for the bundled model: how many tokens a step it brings, and the text stays the same."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from draft_engines import open_with
from head_engines import open_headed

from pshard.runtime.engine import Engine
from pshard.runtime.sampling import Sampling
from pshard.runtime.speculation.speculator import DraftSettings
from pshard.speculation import DRAFT, MTP, AcceptanceRecord

EXAMPLES = Path(__file__).parents[2] / "examples"
MODEL, SMALL = EXAMPLES / "demo.gguf", EXAMPLES / "demo-draft.gguf"
LEAST = {MTP: (1.55, 2.2), DRAFT: (1.5, 2.0)}  # tokens a step with one and with three drafts


@contextmanager
def open_drafting(kind: str) -> Iterator[Engine]:
    with open_headed(MODEL) if kind == MTP else open_with(MODEL, SMALL) as engine:
        yield engine


@pytest.mark.quick("draft")
@pytest.mark.parametrize("kind", [MTP, DRAFT])
def test_bundled_drafters_bring_what_their_page_says_and_leave_the_text_as_it_is(kind: str) -> None:
    with open_drafting(kind) as engine:
        ids = engine.tokenizer.encode("First Citizen:\n")
        for sampling in (Sampling(temperature=0), Sampling(seed=5, temperature=0.8)):
            told = []
            for most in (0, 1, 3):
                settings = DraftSettings(kind, most, fixed=True, record=AcceptanceRecord(kind))
                engine.reset()
                told.append(list(engine.generate(ids, 80, sampling, False, None, settings if most else None)))
                if most and not sampling.temperature:
                    assert 80 / settings.record.steps > LEAST[kind][most // 2]
            assert told[0] == told[1] == told[2]


def test_bundled_drafters_are_of_the_bundled_model() -> None:
    """As they were trained for it: a model that is trained again needs others."""
    told = json.loads((EXAMPLES / "demo-drafters.json").read_text())
    for part in ("model", "head", "draft_model"):
        data = (EXAMPLES / told[part]["file"]).read_bytes()
        assert hashlib.sha256(data).hexdigest() == told[part]["sha256"]
