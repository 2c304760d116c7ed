"""Before a server is ready it runs a step of every size that it will have, and nothing is left of them."""

from pathlib import Path

import pytest
import torch
from cli_world import make_world
from engines import open_engine, pinned_everywhere
from hybrid_files import random_hybrid, write_hybrid_gguf
from model_files import write_gguf
from served import DEMO

from pshard.errors import StepFailed
from pshard.models import open_model
from pshard.runtime.engine import Engine
from pshard.runtime.texts.text import Piece
from pshard.server.life import load_model
from pshard.server.life.how_to_run import HowToRun
from pshard.server.life.rehearse_steps import rehearse_steps
from pshard.session.open_plan import open_plan
from pshard.session.run_request import RunRequest

TIERS = (1, 4, 16, 64, 128, 256)


def write_model(folder: Path, what: str) -> Path:
    path = folder / "m.gguf"
    return write_hybrid_gguf(path, "moe", random_hybrid("moe")) if what == "hybrid" else write_gguf(path, what)


def open_served(path: Path, context: int = 2048, sequences: int = 6, exact: bool = False):
    with open_model(path) as file:
        tiers = pinned_everywhere(file.spec, TIERS, context, sequences)
    return open_engine(path, tiers, context=context, sequences=sequences, tokens=TIERS, exact=exact)


def watch_steps(engine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Of every micro-batch: its tier, its texts that decode, its tokens."""
    seen, run = [], engine._executor.run

    def watched(ids, segments, *rest, **named):
        tier = engine._executor.plan.covering(max(len(ids), engine._executor.least)).tokens
        seen.append((tier, sum(s.tokens == 1 and s.past > 0 for s in segments), len(ids)))
        return run(ids, segments, *rest, **named)

    monkeypatch.setattr(engine._executor, "run", watched)
    return seen


def test_every_tier_and_every_number_of_texts_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_served(DEMO) as engine:
        seen = watch_steps(engine, monkeypatch)
        rehearse_steps(engine, deterministic=False)
    assert {(128, 0, 128), (256, 0, 256), (128, 5, 128), (256, 5, 256)} <= set(seen)
    assert {width for _, width, tokens in seen if width == tokens} == {1, 2, 4, 6}
    assert seen[-1] == (1, 1, 1)  # what the first token of an answer needs is in VRAM then


def test_every_number_of_rows_with_drafts_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_served(DEMO) as engine:
        seen = watch_steps(engine, monkeypatch)
        rehearse_steps(engine, deterministic=False, drafts=3)
        counts = engine.texts.counts()
    assert {2, 4, 8, 12, 16, 24} <= {tokens for _, width, tokens in seen if width < tokens} and seen[-1] == (1, 1, 1)
    assert counts.used == counts.cached == 0


def test_deterministic_steps_are_of_one_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_served(DEMO, exact=True) as engine:
        seen = watch_steps(engine, monkeypatch)
        rehearse_steps(engine, deterministic=True)
    assert {tier for tier, *_ in seen} == {64}


@pytest.mark.parametrize("what", ["gpt-oss", "hybrid"])
def test_nothing_is_left(tmp_path: Path, what: str) -> None:
    path, ids = write_model(tmp_path, what), tuple(range(5, 90))
    logits = []
    for rehearses in (False, True):
        with open_served(path) as engine:
            if rehearses:
                rehearse_steps(engine, deterministic=False)
                counts = engine.texts.counts()
                assert counts.used == counts.cached == 0 and counts.free == counts.total
            text = engine.texts.open(ids)
            assert not text.cached
            rows = engine.texts.step([Piece(text, ids, "all", full=True)])[0]
            logits.append(torch.tensor([row.full.tolist() for row in rows]))
    assert torch.equal(*logits)


def test_a_small_cache_leaves_out_what_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_served(DEMO, context=128, sequences=6) as engine:
        seen = watch_steps(engine, monkeypatch)
        rehearse_steps(engine, deterministic=False)
        counts = engine.texts.counts()
    assert {(width, tokens) for _, width, tokens in seen} == {(0, 128), (0, 5), (0, 1), (6, 6), (4, 4), (2, 2), (1, 1)}
    assert counts.free == counts.total


def test_a_server_starts_without_it_where_it_fails_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(tmp_path)
    request = RunRequest(world.model, profile=world.profile, registry=tmp_path / "plans.json", plans=True)
    monkeypatch.setattr(load_model, "compiles_kernels", lambda profile: True)
    tried: list[Engine] = []

    def fail(engine: Engine, deterministic: bool, drafts: int) -> None:
        tried.append(engine)
        raise StepFailed("the device does not answer")

    monkeypatch.setattr(load_model, "rehearse_steps", fail)
    loader = load_model.ModelLoader(open_plan(request), request, HowToRun(), 1.0)
    for notes in (1, 0):  # a second engine of a process is not tried
        machine = loader.load(None)
        told = [note for note in machine.facts.shown.notes if "the device does not answer" in note]
        assert len(told) == notes and len(tried) == 1
        machine.close()
    with pytest.raises(RuntimeError, match="closed"):
        tried[0].forward([1])
