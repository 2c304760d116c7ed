"""Speculation tells the tokens that steps of one token tell, whoever drafts and however many a step verifies."""

import json
import random
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from engines import open_engine
from family_files import write_family
from hybrid_files import random_hybrid, write_hybrid_gguf
from latent_files import random_tensors, write_latent_gguf
from model_files import write_gguf
from plan_samples import make_tier, make_variant
from toy_kinds import ToyFile

from pshard.batch import VERIFY
from pshard.errors import StepFailed, UserError
from pshard.models import open_model
from pshard.runtime.build_engine import build_engine
from pshard.runtime.devices.device import CopyThread, open_device
from pshard.runtime.engine import Engine
from pshard.runtime.sampling import Sampler, Sampling
from pshard.runtime.sampling.chain import Penalties
from pshard.runtime.speculation import speculator
from pshard.runtime.speculation.accept import MadeUp, match_drafts
from pshard.runtime.speculation.draft_length import DraftLength
from pshard.runtime.speculation.prompt_lookup import PromptLookup
from pshard.runtime.speculation.speculator import DraftSettings
from pshard.runtime.texts.text import Piece
from pshard.speculation import LOOKUP, Acceptance

VOCAB, CONTEXT, TOKENS = 96, 512, 40
KINDS = ["cells", "windows", "states", "convolutions", "latents"]
Open = Callable[[], Engine]
CASES = [("greedy", 1.0), ("seed 1", 0.6), ("seed 3", 0.0)]
SETTINGS = {
    "greedy": Sampling(temperature=0),
    "seed 1": Sampling(seed=1, temperature=1.5, penalties=Penalties(1.3, 0.4, 0.2, 16)),
    "seed 3": Sampling(seed=3, temperature=1.0, top_k=0, logit_bias=((7, 2.0), (9, float("-inf")))),
}


@pytest.fixture(scope="module", params=KINDS)
def start(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Open:
    """Opens an engine of a model whose units keep such states, whose rows have equal bits whatever their number."""
    path = tmp_path_factory.mktemp("m") / "m.gguf"
    sizes = dict(context=CONTEXT, tokens=(1, 16, 64), kernels="fast")
    if request.param == "windows":
        file = ToyFile("wawa", context=CONTEXT)
        places = {u.name: ("pinned", "vram" if u.kind.state else None) for u in file.spec.units}
        tiers = tuple(make_tier(file.spec, n, places, 1, CONTEXT, 1, batch=64) for n in (1, 16, 64))
        return lambda: build_engine(file, make_variant(file.spec, tiers, CONTEXT, 1), open_device("cpu"))
    if request.param == "cells":
        write_gguf(path, "qwen3", qtype="Q8_0", n_layers=2)
        return lambda: open_engine(path, **sizes)
    if request.param == "latents":
        write_latent_gguf(path, "v3", random_tensors("v3"))
        return lambda: open_engine(path, **sizes)
    if request.param == "convolutions":
        write_family(path, "lfm2")
    else:
        write_hybrid_gguf(path, "dense", random_hybrid("dense"))
    return lambda: open_engine(path, **sizes, drafts=15, checkpoint_bytes=1 << 22)


@pytest.fixture(scope="module")
def engine(start: Open) -> Iterator[Engine]:
    """One for the tests that begin their texts anew."""
    with start() as engine:
        yield engine


class Drafts(PromptLookup):
    """Drafts what a test says: of the right tokens, of others, or of both by chance."""

    right: tuple[int, ...] = ()
    chance = 1.0

    def __init__(self) -> None:
        super().__init__()
        self._random = random.Random(5)

    def draft(self, most: int) -> tuple[int, ...]:
        at = len(self._text)
        coming = self.right[at : at + most]
        return tuple(t if self._random.random() < self.chance else (t + 1) % VOCAB for t in coming)


def some_ids(n: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(n)]


def make(engine: Engine, sampling: Sampling, drafts: int, most: int = TOKENS, prompt: int = 30) -> list[int]:
    engine.reset()
    wanted = DraftSettings(LOOKUP, drafts, fixed=True) if drafts else None
    return list(engine.generate(some_ids(prompt), most, sampling, text=False, speculation=wanted))


def test_rows_go_into_states_on_the_host_once_the_step_has_brought_these_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long a copy takes; no state behind them waits for it."""
    path = write_hybrid_gguf(tmp_path / "m.gguf", "dense", random_hybrid("dense"))
    spec, do = open_model(path).spec, CopyThread.do
    places = {u.name: ("pinned", "vram" if u.kind.state else None) for u in spec.units}
    places |= {name: ("pinned", "host") for name in places if name.endswith("delta")}
    tiers = tuple(make_tier(spec, n, places, 0, CONTEXT, 1, batch=16) for n in (4, 16))
    monkeypatch.setattr(CopyThread, "do", lambda own, work, after: do(own, lambda: (time.sleep(0.002), work()), after))
    monkeypatch.setattr(speculator, "PromptLookup", Drafts)
    with open_engine(path, tiers, "fast", CONTEXT) as engine:
        alone = make(engine, SETTINGS["greedy"], 0)
        monkeypatch.setattr(Drafts, "right", (*some_ids(30), *alone))
        for chance in (1.0, 0.6):
            monkeypatch.setattr(Drafts, "chance", chance)
            assert make(engine, SETTINGS["greedy"], 3) == alone


@pytest.mark.quick(
    "convolutions-seed 3-0.0", "windows-seed 3-0.0", "states-seed 3-0.0", "latents-seed 3-0.0", "cells-seed 3-0.0"
)
@pytest.mark.parametrize("setting, chance", CASES)
def test_tokens_are_those_without_drafts(
    engine: Engine, setting: str, chance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculator, "PromptLookup", Drafts)
    alone = make(engine, SETTINGS[setting], 0)
    left = engine.tokens()
    monkeypatch.setattr(Drafts, "right", (*some_ids(30), *alone))
    monkeypatch.setattr(Drafts, "chance", chance)
    for drafts in (1, 15) if setting == "greedy" else (3, 7):
        assert make(engine, SETTINGS[setting], drafts) == alone
        assert engine.tokens() == left


def test_right_drafts_take_fewer_steps_and_are_counted_by_position(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculator, "PromptLookup", Drafts)
    alone = make(engine, SETTINGS["greedy"], 0)
    monkeypatch.setattr(Drafts, "right", (*some_ids(30), *alone))
    wanted = DraftSettings(LOOKUP, 3, fixed=True)
    engine.reset()
    list(engine.generate(some_ids(30), TOKENS, SETTINGS["greedy"], text=False, speculation=wanted))
    assert wanted.record.steps == 10  # 39 tokens after the prompt's, 4 a step
    assert wanted.record.tried == wanted.record.held == (10, 10, 9)


def test_what_leaves_early_finds_the_text_as_without_drafts(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculator, "PromptLookup", Drafts)
    alone = make(engine, SETTINGS["seed 1"], 0)
    monkeypatch.setattr(Drafts, "right", (*some_ids(30), *alone))
    for stop in range(1, 8):
        engine.reset()
        wanted = DraftSettings(LOOKUP, 3, fixed=True)
        made = engine.generate(some_ids(30), TOKENS, SETTINGS["seed 1"], text=False, speculation=wanted)
        assert [next(made) for _ in range(stop)] == alone[:stop]
        made.close()
        assert list(engine.tokens()) == [*some_ids(30), *alone[: stop - 1]]
    assert list(engine.generate([alone[6]], 1, Sampling(temperature=0), text=False))


@pytest.mark.quick("windows")
def test_texts_end_where_the_context_does(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculator, "PromptLookup", Drafts)
    alone = make(engine, SETTINGS["greedy"], 0, most=CONTEXT, prompt=CONTEXT - 9)
    assert len(alone) == 10
    monkeypatch.setattr(Drafts, "right", (*some_ids(CONTEXT - 9), *alone, 1, 2, 3, 4, 5, 6, 7))
    for drafts in (3, 7):
        assert make(engine, SETTINGS["greedy"], drafts, most=CONTEXT, prompt=CONTEXT - 9) == alone


@pytest.mark.quick("convolutions")
def test_a_text_goes_on_after_it_was_saved_and_loaded(
    start: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculator, "PromptLookup", Drafts)
    monkeypatch.setattr(Drafts, "chance", 0.6)
    with start() as engine:
        alone = make(engine, SETTINGS["greedy"], 0)
        monkeypatch.setattr(Drafts, "right", (*some_ids(30), *alone))
        half = make(engine, SETTINGS["greedy"], 7, most=20)
        engine.save(tmp_path / "text")
    with start() as engine:
        assert list(engine.load(tmp_path / "text")) == [*some_ids(30), *half[:-1]]
        wanted = DraftSettings(LOOKUP, 7, fixed=True)
        rest = list(engine.generate([half[-1]], 20, SETTINGS["greedy"], text=False, speculation=wanted))
        assert [*half, *rest] == alone


def test_one_random_number_is_spent_on_a_told_token(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on those after drafts that do not hold: the state of the generator says so at the end."""
    ends = []
    first = Sampler.__init__

    def remember(self: Sampler, *args: object) -> None:
        first(self, *args)
        ends.append(self)

    monkeypatch.setattr(Sampler, "__init__", remember)
    monkeypatch.setattr(speculator, "PromptLookup", Drafts)
    monkeypatch.setattr(Drafts, "chance", 0.5)
    monkeypatch.setattr(Drafts, "right", (*some_ids(30), *make(engine, SETTINGS["seed 1"], 0)))
    make(engine, SETTINGS["seed 1"], 3)
    assert ends[0]._random.bit_generator.state == ends[1]._random.bit_generator.state


def test_nothing_is_drawn_behind_a_stop() -> None:
    drawn = list[int]()

    def draw(row: int) -> int:
        drawn.append(row)
        return (5, 7, 9, 4)[row]

    assert match_drafts(draw, (5, 7, 9), stops={7}) == [5, 7] and drawn == [0, 1]
    assert match_drafts(draw, (5, 7, 9), stops={4}) == [5, 7, 9, 4]


def test_a_stop_among_drafts_that_hold_ends_a_text_as_one_that_is_drawn_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tokens, the same text behind them, and the same number comes next."""
    alone, samplers, begin = make(engine, SETTINGS["seed 1"], 0), list[Sampler](), Sampler.__init__

    def remember(sampler: Sampler, *given: object) -> None:
        begin(sampler, *given)
        samplers.append(sampler)

    monkeypatch.setattr(Sampler, "__init__", remember)
    monkeypatch.setattr(speculator, "PromptLookup", Drafts)
    monkeypatch.setattr(Drafts, "right", (*some_ids(30), *alone))
    monkeypatch.setattr(Drafts, "chance", 1.0)
    stop = next(token for at, token in enumerate(alone) if at > 2 and token not in alone[:at])
    monkeypatch.setattr(engine, "tokenizer", SimpleNamespace(eos_ids=frozenset({stop})))
    found = [(make(engine, SETTINGS["seed 1"], drafts), list(engine.tokens())) for drafts in (0, 7)]
    assert found[0] == found[1] and found[0][0] == alone[: alone.index(stop)]
    assert samplers[0]._random.bit_generator.state == samplers[1]._random.bit_generator.state


def test_states_are_held_back_so_that_nothing_is_copied_or_computed_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No host memory is there for checkpoints."""
    write_hybrid_gguf(tmp_path / "m.gguf", "dense", random_hybrid("dense"))
    monkeypatch.setattr(speculator, "PromptLookup", Drafts)
    monkeypatch.setattr(Drafts, "chance", 0.5)
    with open_engine(tmp_path / "m.gguf", context=CONTEXT, tokens=(1, 16, 64), kernels="fast") as engine:
        alone = make(engine, SETTINGS["greedy"], 0)
        monkeypatch.setattr(Drafts, "right", (*some_ids(30), *alone))
        steps, run = list[int](), engine._executor.run

        def count(ids, *more, **named):
            steps.append(len(ids))
            return run(ids, *more, **named)

        monkeypatch.setattr(engine._executor, "run", count)
        assert make(engine, SETTINGS["greedy"], 9) == alone
        assert max(steps[1:]) == 4 and len(steps) < TOKENS * 0.7  # a plan without drafts has room for 4 rows


def test_drafts_of_a_draw_that_fails_are_cut_off(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise StepFailed("no numbers")

    monkeypatch.setattr(speculator, "PromptLookup", Drafts)
    alone = make(engine, SETTINGS["greedy"], 0)
    monkeypatch.setattr(Drafts, "right", (*some_ids(30), *alone))
    with monkeypatch.context() as patched, pytest.raises(StepFailed, match="no numbers"):
        patched.setattr(speculator, "match_drafts", fail)
        make(engine, SETTINGS["greedy"], 3)
    assert list(engine.tokens()) == some_ids(30)
    engine.forward([alone[0]])
    assert make(engine, SETTINGS["greedy"], 3) == alone


def test_more_rows_than_a_plan_has_room_for_are_refused_before_anything_changes(tmp_path: Path) -> None:
    write_hybrid_gguf(tmp_path / "m.gguf", "dense", random_hybrid("dense"))
    with open_engine(tmp_path / "m.gguf", context=CONTEXT, tokens=(1, 16, 64), kernels="fast") as engine:
        pool = engine.texts
        text = pool.open(some_ids(8))
        pool.step([Piece(text, tuple(some_ids(8)))])
        with pytest.raises(UserError, match="5 rows of drafts in a step: the plan has room for 4"):
            pool.step([Piece(text, (1, 2, 3, 4, 5), "all", kind=VERIFY)])
        pool.step([Piece(text, (1, 2, 3, 4), "all", kind=VERIFY)])
        with pytest.raises(UserError, match="a text has drafts that its states"):
            pool.step([Piece(text, (5, 6), "all", kind=VERIFY)])
        assert not pool.commit(text, 10) and text.ids == [*some_ids(8), 1, 2]


def test_rows_of_a_step_have_the_bits_that_they_have_alone(engine: Engine) -> None:
    ids = some_ids(16, 9)
    engine.reset()
    engine.forward(some_ids(40))
    alone = torch.stack([engine.forward([token]) for token in ids])
    for rows in (2, 4, 8, 16):
        engine.reset()
        engine.forward(some_ids(40))
        assert torch.equal(engine.forward(ids[:rows], all_logits=True), alone[:rows])


def demo() -> Iterator[Engine]:
    with open_engine(
        Path(__file__).parents[2] / "examples" / "demo.gguf", context=1024, tokens=(1, 16, 64), kernels="fast"
    ) as engine:
        yield engine


demo_engine = pytest.fixture(demo, scope="module")
COPIED = "ROMEO:\nO, she doth teach the torches to burn bright!\nROMEO:\nO, she doth"


def test_made_up_acceptance_holds_as_often_as_it_says(demo_engine: Engine) -> None:
    wanted = DraftSettings(LOOKUP, 3, fixed=True, made_up=Acceptance((0.8, 0.64, 0.5)))
    demo_engine.reset()
    made = list(demo_engine.generate(some_ids(30), 400, Sampling(seed=1), text=False, speculation=wanted))
    assert len(made) == 400
    record = wanted.record
    assert record.tried[0] >= record.steps - 1
    found = record.acceptance
    assert found is not None
    assert found.at(1) == pytest.approx(0.8, abs=0.08)
    assert found.at(3) == pytest.approx(0.5, abs=0.08)


@pytest.mark.parametrize("drafts", [1, 3, 5, 7])
def test_a_short_text_has_the_tokens_a_step_that_made_up_chances_say(drafts: int) -> None:
    """A bench of 128 tokens has some 35 steps, which chance alone would leave 10% off."""
    chances = Acceptance((0.8, 0.64, 0.51))
    made = MadeUp(chances)
    told = sum(1 + made.count(drafts) for _ in range(35))
    assert told / 35 == pytest.approx(chances.tokens(drafts), rel=0.02)


def test_what_settling_takes_counts_as_the_steps_that_verified(
    demo_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The share of it that waits for the next step's drafts takes as long as the last time."""
    clock, seen, commit = [0.0], list[tuple[int, float]](), demo_engine.texts.commit
    drafted = list[float]()

    def take_long(*asked: object) -> list[int]:
        clock[0] += 5.0
        return commit(*asked)

    def settle_long() -> None:
        clock[0] += 2.0

    def note(self: DraftLength, count: int, held: int, seconds: float, drafting: float = 0.0) -> None:
        drafted.append(drafting)

    monkeypatch.setattr(speculator, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(demo_engine.texts, "commit", take_long)
    monkeypatch.setattr(demo_engine._seconds, "observe", lambda rows, tier, seconds: seen.append((rows, seconds)))
    monkeypatch.setattr(DraftLength, "note", note)

    def tell() -> None:
        demo_engine.reset()
        wanted = DraftSettings(LOOKUP, 3, fixed=True, made_up=Acceptance((0.5,)))
        assert len(list(demo_engine.generate(some_ids(30), 40, Sampling(seed=1), False, None, wanted))) == 40
        assert len(seen) == wanted.steps

    tell()
    assert all(seconds == 5.0 * (rows > 1) for rows, seconds in seen)
    seen.clear()
    monkeypatch.setattr(demo_engine.texts, "settle", settle_long)
    tell()
    first, *others, last = [seconds for rows, seconds in seen if rows > 1]
    assert first == 5.0 and len(others) > 5 and set(others) == {7.0}
    assert last == 5.0, "it settles as it is committed"
    assert set(drafted) == {0.0}, "none of it counts as drafting"


def test_steps_in_which_drafts_rest_are_not_recorded_as_steps_that_found_none(
    demo_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They rest where they do not pay, which another plan may change, and that is made by what the record says."""
    turns = cycle((0, 0, 3))
    monkeypatch.setattr(DraftLength, "choose", lambda length: next(turns))
    wanted = DraftSettings(LOOKUP, 3, made_up=Acceptance((0.5,)))
    demo_engine.reset()
    list(demo_engine.generate(some_ids(30), 90, Sampling(seed=1), text=False, speculation=wanted))
    record = wanted.record
    assert record.acceptance is not None and record.acceptance.share == 1.0
    assert 1.7 < wanted.spent.rested / record.steps < 2.3
    assert 1 + record.steps + wanted.spent.rested + sum(record.held) == 90


@pytest.mark.quick("greedy-7")
@pytest.mark.parametrize("setting, drafts", [("greedy", 7), ("seed 1", 3)])
def test_lookup_tells_the_tokens_of_a_real_model(demo_engine: Engine, setting: str, drafts: int) -> None:
    ids, wanted = demo_engine.tokenizer.encode(COPIED), DraftSettings(LOOKUP, drafts, fixed=True)
    demo_engine.reset()
    alone = list(demo_engine.generate(ids, 120, SETTINGS[setting], text=False))
    demo_engine.reset()
    assert list(demo_engine.generate(ids, 120, SETTINGS[setting], text=False, speculation=wanted)) == alone
    if setting == "greedy":
        assert wanted.record.steps < 100


def test_a_grammar_sees_told_tokens_only(demo_engine: Engine) -> None:
    pytest.importorskip("llguidance")
    from pshard.runtime.sampling.grammar import follow_grammar

    kind = json.dumps({"type": "array", "items": {"enum": ["to be", "not to be"]}, "minItems": 6, "maxItems": 6})
    texts = []
    for drafts in (0, 1, 3, 7):
        demo_engine.reset()
        follow = follow_grammar("schema", kind, demo_engine.tokenizer, demo_engine.vocab)
        wanted = DraftSettings(LOOKUP, drafts, fixed=True) if drafts else None
        ids = demo_engine.tokenizer.encode("To be:")
        made = demo_engine.generate(ids, 200, Sampling(seed=4), constraint=follow, speculation=wanted)
        texts.append("".join(made))
        assert not wanted or sum(wanted.record.held) > 5
    assert len(set(texts)) == 1
    assert len(json.loads(texts[0])) == 6
