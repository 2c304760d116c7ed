"""Multi-token heads on a CUDA GPU: logits, and texts by graphs. Skipped without one."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from head_engines import HeadedEngines, record_logits
from head_files import HEADED
from head_forward import head_logits

from pshard.runtime.sampling import Sampling
from pshard.runtime.speculation.second_program import Ask
from pshard.runtime.speculation.speculator import DraftSettings
from pshard.runtime.walks import ready_walk
from pshard.runtime.walks.chain import Chain
from pshard.speculation import MTP, Acceptance

pytestmark = pytest.mark.gpu
ROUNDED = 2e-2  # of the logits' mean square


@pytest.mark.parametrize("like", HEADED)
@pytest.mark.parametrize("on_acc", [True, False])
def test_a_head_drafts_as_the_reference_does(tmp_path: Path, like: str, on_acc: bool) -> None:
    engines = HeadedEngines(tmp_path / "m.gguf", like, own=like == "glm")
    rng = random.Random(1)
    ids = [rng.randrange(90) for _ in range(31)]
    with engines.open(on_acc=on_acc, device="cuda") as engine:
        found, text = record_logits(engine), engine.texts.begin()
        engine.texts.extend([(text, ids[:21])])
        for at in range(21, 30):
            engine.texts.extend([(text, ids[at : at + 1])])
        engine.drafter.draft([Ask(text, (ids[30],), 1)])
        right = torch.from_numpy(head_logits(engines.config, engines.tensors, ids, 1))
        got = torch.stack(found).double()
        assert ((got - right) ** 2).mean() < ROUNDED * (right**2).mean()
        prompt = ids[:20]
        for drafts in (1, 3, 7):  # as graphs that are captured for other texts
            engine.texts.close(text)
            engine.reset()
            settings = DraftSettings(MTP, drafts, True, Acceptance((0.8, 0.64)))
            told = list(engine.generate(prompt, 40, Sampling(temperature=0), False, None, settings))
            assert len(told) == 40 and sum(settings.record.held) > 0


@pytest.mark.parametrize(
    ("like", "experts_on_acc"),
    [*((like, True) for like in HEADED), *((like, False) for like in ("moe", "next", "glm"))],
)
def test_drafts_that_are_launched_at_once_are_those_that_come_one_by_one(
    tmp_path: Path, like: str, experts_on_acc: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a graph a token that counts on by itself, also where more cells take larger launches, and where it asks the
    CPU for a head's experts."""
    monkeypatch.setattr(ready_walk, "LEAST_CELLS", 64)
    engines = HeadedEngines(tmp_path / "m.gguf", like, own=like == "glm")
    rng = random.Random(1)
    ids = [rng.randrange(90) for _ in range(501)]
    asks = [(length, most) for length in (5, 61, 70, 253, 500) for most in (2, 7, 2, 7)]
    runs, run = list[int](), Chain.run
    monkeypatch.setattr(Chain, "run", lambda *asked: runs.append(1) or run(*asked))
    with engines.open(device="cuda", experts_on_acc=experts_on_acc) as engine:
        walks, found = engine.drafter._program.walks, list[list[tuple[int, ...]]]()
        for at_once in (True, False):
            if not at_once:
                monkeypatch.setattr(walks, "follow_on", lambda *_: None)
            engine.reset()
            text, told = engine.texts.begin(), list[tuple[int, ...]]()
            for length, most in asks:
                if new := ids[len(text.ids) : length]:
                    engine.texts.extend([(text, new)])
                told += engine.drafter.draft([Ask(text, (ids[length],), most)])
            found.append(told)
            engine.texts.close(text)
            assert walks._chain is not None and walks._chain[1] is not None, "the CPU has at most its experts"
            assert bool(walks._chain[1]._parts.runs) is not experts_on_acc
        assert len(runs) >= len(asks) - 2, "of the first drafts the CPU's calls are written down"
        assert [len(drafts) for drafts in found[0]] == [most for _, most in asks]
        assert found[0] == found[1]


def test_drafts_that_are_interrupted_while_the_gpu_asks_the_cpu_leave_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU was given some of the tokens, and waits for the CPU several times; the CPU waits for those that it was
    not given."""
    engines, ids, launched = HeadedEngines(tmp_path / "m.gguf", "moe"), list(range(3, 24)), list[tuple]()
    with engines.open(device="cuda", experts_on_acc=False) as engine:
        text, device = engine.texts.begin(), engine.device
        repeat, ask = device.repeat, Ask(text, (ids[20],), 7)

        def interrupt(key: tuple, *more: Any) -> None:
            if key[0] == "chain":
                launched.append(key)
                if len(launched) == 4:
                    raise KeyboardInterrupt
            repeat(key, *more)

        engine.texts.extend([(text, ids[:20])])
        found = [engine.drafter.draft([ask]) for _ in range(3)]
        for _ in range(20):
            launched.clear()
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(device, "repeat", interrupt)
                engine.drafter.draft([ask])
            assert engine.drafter.draft([ask]) == found[0] == found[2]
