"""Multi-token heads: their logits are those of an independent forward, and texts are those without them."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flag_relay import open_on_flags
from head_engines import HeadedEngines, open_headed, record_logits
from head_files import HEADED
from head_forward import LATER, MISTAKES, OF_OWN, head_logits

from pshard.batch import VERIFY
from pshard.runtime.devices.relay import Relay
from pshard.runtime.engine import Engine
from pshard.runtime.executor import Executor
from pshard.runtime.kernels.cpu import native
from pshard.runtime.kernels.cpu.host import HostKernels
from pshard.runtime.kernels.plain import PlainKernels
from pshard.runtime.sampling import Sampling
from pshard.runtime.sampling.chain import Penalties
from pshard.runtime.speculation.second_program import Ask
from pshard.runtime.speculation.speculator import DraftSettings
from pshard.runtime.texts.open_rows import OpenRows
from pshard.runtime.texts.text import Piece, Text
from pshard.runtime.walks.chain import Chain
from pshard.runtime.walks.ready_walk import WalkMaker
from pshard.speculation import MTP, Acceptance

DRAFTS = 4


@pytest.fixture(scope="module", params=HEADED)
def headed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HeadedEngines:
    """A model with a head; the one like GLM's has a table and an output of its own."""
    return HeadedEngines(tmp_path_factory.mktemp("m") / "m.gguf", request.param, own=request.param == "glm")


def some_ids(n: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(90) for _ in range(n)]


@pytest.mark.quick("dense")
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


@pytest.mark.slow
def test_each_mistake_would_show(headed: HeadedEngines) -> None:
    ids = some_ids(21)
    right = head_logits(headed.config, headed.tensors, ids, DRAFTS)
    deviation = right.std()
    for mistake in MISTAKES:
        if mistake in OF_OWN and not headed.own:
            continue
        wrong = head_logits(headed.config, headed.tensors, ids, DRAFTS, [mistake])
        at = 1 if mistake in LATER else 0
        assert np.abs(wrong - right)[at:].max() > 0.05 * deviation, mistake


@pytest.mark.quick("glm")
@pytest.mark.parametrize("headed", ["moe", "glm", "latent", "llama"], indirect=True)
def test_texts_with_a_heads_drafts_are_those_without(headed: HeadedEngines) -> None:
    penalised = Sampling(seed=3, temperature=1.0, penalties=Penalties(1.2, 0.3, 0.1, 16))
    for on_acc, sampling, tried in ((True, Sampling(temperature=0), (1, 7)), (False, penalised, (3,))):
        with headed.open(on_acc=on_acc) as engine:
            base = tell(engine, sampling, 0)
            for drafts in tried:
                assert tell(engine, sampling, drafts) == base, (on_acc, drafts)


@pytest.mark.quick("moe")
@pytest.mark.parametrize("headed", ["moe", "glm", "latent"], indirect=True)
def test_drafts_that_are_launched_at_once_are_those_that_come_one_by_one(
    headed: HeadedEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, whose graphs repeat: the host waits twice for all drafts of a text."""
    ids, found = some_ids(31), list[list[object]]()
    for repeats in (False, True):
        monkeypatch.setattr(PlainKernels, "repeatable", repeats)
        with headed.open(kernels="plain") as engine:
            text, head = engine.texts.begin(), engine.drafter
            engine.texts.extend([(text, ids[:20])])
            engine.texts.extend([(text, ids[20:22])], all_logits=True)
            runs, run = list[int](), head._program.run
            monkeypatch.setattr(
                head._program,
                "run",
                lambda ids, *more, _run=run, _runs=runs, **kept: _runs.append(1) or _run(ids, *more, **kept),
            )
            found.append([head.draft([Ask(text, (ids[22],), most)]) for most in (1, 2, 7)])
            assert len(runs) == (3 if repeats else 10)
            assert head.draft([Ask(text, (ids[22],), 7, 1e-9)]) == found[-1][2]  # chances are told one by one
            engine.texts.close(text)
            found[-1].append(tell(engine, Sampling(temperature=0), 3, most=9))
    assert found[0] == found[1]


def test_texts_that_draft_together_in_several_micro_batches_draft_as_each_alone(tmp_path: Path) -> None:
    engines, found = HeadedEngines(tmp_path / "m.gguf", "latent"), list[list[tuple[int, ...]]]()
    for together in (False, True):
        with engines.open(kernels="plain", sequences=3) as engine:
            asks = list[Ask]()
            for number in range(3):
                text, ids = engine.texts.begin(), some_ids(40, number)
                engine.texts.extend([(text, ids[:30])])
                for token in ids[30:39]:  # whose cells are made with the first draft
                    engine.texts.extend([(text, [token])])
                asks.append(Ask(text, (ids[39],), 4))
            assert sum(len(engine.drafter._begin(ask).ids) for ask in asks) > engine.drafter._most
            draft = engine.drafter.draft
            found.append(draft(asks) if together else [own for ask in asks for own in draft([ask])])
    assert found[0] == found[1] and len(set(found[0])) == 3


@pytest.mark.skipif(not native.is_available(), reason="needs the C++ library")
@pytest.mark.parametrize("headed", ["moe", "next", "glm"], indirect=True)
def test_drafts_are_launched_at_once_where_the_cpu_has_a_heads_experts(
    headed: HeadedEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The accelerator asks the CPU for them as a walk that runs ahead does; states of "next" settle meanwhile."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    ids, found, turns, start = some_ids(31), list[list[object]](), list[int](), Relay.start
    monkeypatch.setattr(Relay, "start", lambda self, lists, times=1: turns.append(times) or start(self, lists, times))
    monkeypatch.setattr("pshard.runtime.executor.open_relay", open_on_flags)
    monkeypatch.setattr(HostKernels, "repeatable", True)
    for at_once in (False, True):
        with headed.open(experts_on_acc=False) as engine, monkeypatch.context() as patch:
            if not at_once:
                patch.setattr(WalkMaker, "follow_on", lambda *_: None)
            text, head = engine.texts.begin(), engine.drafter
            engine.texts.extend([(text, ids[:20])])
            engine.texts.extend([(text, ids[20:22])], all_logits=True)
            found.append([head.draft([Ask(text, (ids[22],), most)]) for most in (3, 2, 7)])
            if at_once:
                patch.setattr(Chain, "_launch", interrupt)
                with pytest.raises(KeyboardInterrupt):
                    head.draft([Ask(text, (ids[22],), 7)])
                patch.undo()
                assert head.draft([Ask(text, (ids[22],), 7)]) == found[-1][2], "the CPU waits for nobody any more"
            engine.texts.close(text)
            turns.clear()
            found[-1].append(tell(engine, Sampling(temperature=0), 5, most=9))
            assert any(times > 1 for times in turns) is at_once, "the other drafts of a step are one turn"
    assert found[0] == found[1]


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_drafts_that_are_launched_at_once_end_where_the_model_has_no_such_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: float
) -> None:
    """inf: the fourth is beyond the model's vocabulary."""
    monkeypatch.setattr(PlainKernels, "repeatable", True)
    engines, ids = HeadedEngines(tmp_path / "m.gguf", "llama"), some_ids(31)
    with engines.open(kernels="plain") as engine:
        text, run = engine.texts.begin(), Chain.run
        engine.texts.extend([(text, ids[:20])])
        (whole,) = engine.drafter.draft([Ask(text, (ids[20],), 7)])

        def spoil(*asked: object) -> np.ndarray:
            found = run(*asked)
            found[2] = (wrong, 5) if wrong != wrong else (1.0, 1000)
            return found

        monkeypatch.setattr(Chain, "run", spoil)
        assert engine.drafter.draft([Ask(text, (ids[20],), 7)]) == [whole[:3]]
        monkeypatch.undo()
        assert engine.drafter.draft([Ask(text, (ids[20],), 7)]) == [whole]


def tell(engine: Engine, sampling: Sampling, drafts: int, most: int = 15) -> list[int]:
    """A text of a prompt, with so many drafts of the head in every step."""
    settings = DraftSettings(MTP, drafts, True) if drafts else None
    engine.reset()
    return list(engine.generate(some_ids(30), most, sampling, False, None, settings))


def drafts_behind(engine: Engine, text: Text, token: int) -> tuple[list[int], torch.Tensor]:
    """Three drafts behind a token that a text does not have, and the logits that they are from."""
    found = record_logits(engine)
    (drafts,) = engine.drafter.draft([Ask(text, (token,), 3)])
    return list(drafts), torch.stack(found[-3:])


@pytest.mark.parametrize("headed", ["moe"], indirect=True)
def test_while_the_first_draft_is_computed_states_are_settled_and_the_next_step_is_made_ready(
    headed: HeadedEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = list[str]()

    def note(kind: type, name: str, said: Callable[[Any], str]) -> None:
        method = getattr(kind, name)

        def call(self: Any, *what: Any) -> Any:
            order.append(said(self))
            return method(self, *what)

        monkeypatch.setattr(kind, name, call)

    with headed.open(tokens=(4, 64)) as engine:
        tell(engine, Sampling(temperature=0), 3)
        head = engine.drafter._program
        whose = {id(head): "head", id(head.walks): "head"}
        note(Executor, "_walk", lambda self: f"run {whose.get(id(self), 'model')}")
        note(WalkMaker, "prepare", lambda self: f"prepare {whose.get(id(self), 'model')}")
        note(OpenRows, "settle", lambda self: "settle")
        settings = DraftSettings(MTP, 1, True, Acceptance((1.0,)))
        engine.reset()
        list(engine.generate(some_ids(30), 9, Sampling(temperature=0), False, None, settings))
    each = ["prepare head", "run head", "settle", "prepare model", "run model"]
    assert " ".join(order).count(" ".join(each)) == 3, order
    assert order.count("run model") == 1 + 1 + 3, "the prompt, and four steps, of which the first settles nothing"


def test_a_draft_that_is_interrupted_holds_up_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = HeadedEngines(tmp_path / "m.gguf", "moe")
    with engines.open() as engine:
        run, runs = engine.drafter._program.run, list[int]()

        def interrupt(*asked: Any, **more: Any) -> torch.Tensor:
            runs.append(1)
            if len(runs) == 4:
                raise KeyboardInterrupt
            return run(*asked, **more)

        base = tell(engine, Sampling(temperature=0), 0)
        monkeypatch.setattr(engine.drafter._program, "run", interrupt)
        with pytest.raises(KeyboardInterrupt):
            tell(engine, Sampling(temperature=0), 1)
        text = engine.tokens()
        engine.forward([text[-1]])
        assert tell(engine, Sampling(temperature=0), 1) == base


def test_drafts_do_not_depend_on_how_a_text_came(tmp_path: Path) -> None:
    """In one micro-batch or several; after drafts that did not hold, a cut, and in blocks that another text made."""
    engines, ids = HeadedEngines(tmp_path / "m.gguf", "latent"), some_ids(150, 4)
    with engines.open(kernels="plain", sequences=3) as engine:
        texts = engine.texts
        first = texts.open(ids[:140])
        texts.extend([(first, ids[:140])])
        right = drafts_behind(engine, first, ids[140])

        def check(text: Text) -> None:
            drafts, logits = drafts_behind(engine, text, ids[140])
            assert drafts == right[0] and torch.allclose(logits, right[1], atol=1e-4)

        adopted = texts.open(ids[:140])
        assert adopted.cached == 128
        texts.extend([(adopted, ids[128:140])])
        check(adopted)
        guessed = texts.begin()
        texts.extend([(guessed, ids[:137])])
        engine.drafter.draft([Ask(guessed, (ids[137],), 7)])
        texts.step([Piece(guessed, (ids[137], 5, 6, 7), "all", best=1, kind=VERIFY)])
        assert texts.commit(guessed, 138) == []
        texts.extend([(guessed, ids[138:139])])
        texts.extend([(guessed, ids[139:140])])
        check(guessed)
        texts.extend([(guessed, [1, 2, 3])])
        assert texts.cut(guessed, 140) == [] or texts.extend([(guessed, ids[139:140])])
        check(guessed)
        again = texts.cut(adopted, 100)
        texts.extend([(adopted, [*again, *ids[100:140]])])
        check(adopted)


@pytest.mark.quick("140")
@pytest.mark.parametrize("length", [140, 128])
def test_a_saved_text_is_drafted_behind_as_it_was_and_by_a_head_alone(tmp_path: Path, length: int) -> None:
    """Also after drafts that did not hold, in blocks that another text adopts, and after it is saved again."""
    engines, ids, file = HeadedEngines(tmp_path / "m.gguf", "latent"), some_ids(150, 4), tmp_path / "text"
    with engines.open(kernels="plain", sequences=2) as engine:
        text = engine.texts.begin()
        engine.texts.extend([(text, ids[: length - 2])])
        engine.drafter.draft([Ask(text, (ids[length - 2],), 7)])
        engine.texts.step([Piece(text, (*ids[length - 2 : length], 5, 6), "all", best=1, kind=VERIFY)])
        engine.texts.commit(text, length)
        engine.texts.save(text, file)
        right = drafts_behind(engine, text, ids[length])
    for _ in range(2):
        with engines.open(kernels="plain", sequences=2, on_acc=False) as engine:
            loaded = engine.texts.load(file, salt="")
            engine.texts.save(loaded, file)
            adopted = engine.texts.open(ids[:length])
            engine.texts.extend([(adopted, ids[adopted.cached : length])])
            for text in (loaded, adopted):
                drafts, logits = drafts_behind(engine, text, ids[length])
                assert drafts == right[0] and torch.allclose(logits, right[1], atol=1e-4)
    with open_headed(engines.path, head=False) as engine:  # who has no head needs none, and saves none
        assert engine.load(file) == tuple(ids[:length])
        engine.save(file)
    with engines.open() as engine:
        assert engine.load(file) == tuple(ids[:length])
        told = [
            list(engine.generate([5], 9, Sampling(temperature=0), False, None, s)) for s in (DraftSettings(MTP, 3),)
        ]
        assert len(told[0]) == 9


def test_a_head_drafts_behind_many_steps_whose_drafts_were_somebody_elses(tmp_path: Path) -> None:
    """Lookup goes first: its rows are more than a micro-batch of the head before that is asked again."""
    engines, ids = HeadedEngines(tmp_path / "m.gguf", "latent"), some_ids(150, 4)
    with engines.open(kernels="plain", sequences=2) as engine:
        text, alone = engine.texts.begin(), engine.texts.begin()
        engine.texts.extend([(text, ids[:60])])
        for start in range(60, 100, 4):
            engine.texts.step([Piece(text, (*ids[start : start + 4], 5, 6), "all", best=1, kind=VERIFY)])
            assert engine.texts.commit(text, start + 4) == []
        engine.texts.extend([(alone, ids[:100])])
        right, found = (drafts_behind(engine, each, ids[100]) for each in (alone, text))
        assert found[0] == right[0] and torch.allclose(found[1], right[1], atol=1e-4)
