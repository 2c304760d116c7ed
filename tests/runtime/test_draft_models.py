"""A draft model beside a model: the text stays what it is, and what cannot draft is named."""

import json
import random
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
from draft_engines import CONTEXT, TOKENS, open_with
from engines import open_engine
from head_engines import record_logits
from model_files import write_gguf

from pshard.errors import UserError
from pshard.models.attach_draft import open_drafted
from pshard.runtime.engine import Engine
from pshard.runtime.kernels.cpu.host import HostKernels
from pshard.runtime.kernels.plain import PlainKernels
from pshard.runtime.sampling import Sampling
from pshard.runtime.sampling.chain import Penalties
from pshard.runtime.speculation.second_program import Ask
from pshard.runtime.speculation.speculator import DraftSettings
from pshard.speculation import DRAFT, LOOKUP_DRAFT, NONE, AcceptanceRecord

VOCAB = 96
GREEDY, DRAWN = Sampling(temperature=0), Sampling(seed=1, temperature=1.5, penalties=Penalties(1.3, 0.4, 0.2, 16))


def some_ids(n: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(n)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("m") / "m.gguf", "qwen3", qtype="Q8_0", n_layers=2, vocab=VOCAB)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of another architecture, whose vocabulary is larger by some."""
    return write_gguf(tmp_path_factory.mktemp("d") / "d.gguf", "llama", qtype="Q8_0", n_layers=1, vocab=VOCAB)


def make(engine: Engine, sampling: Sampling, drafts: int, most: int = 40) -> tuple[list[int], AcceptanceRecord]:
    engine.reset()
    wanted = DraftSettings(DRAFT, drafts, fixed=True, record=AcceptanceRecord(DRAFT))
    told = engine.generate(some_ids(90), most, sampling, text=False, speculation=wanted if drafts else None)
    return list(told), wanted.record


@pytest.mark.quick("sampling1-False")
@pytest.mark.parametrize(("sampling", "on_acc"), [(GREEDY, True), (DRAWN, False)])
def test_the_text_is_that_without_drafts_and_the_model_itself_drafts_what_it_tells(
    model: Path, other: Path, sampling: Sampling, on_acc: bool
) -> None:
    with open_engine(model, context=CONTEXT, tokens=TOKENS, kernels="fast") as engine:
        alone, _ = make(engine, sampling, 0)
    for draft in (model, other):
        with open_with(model, draft, on_acc) as engine:
            for drafts in (1, 3, 7):
                told, record = make(engine, sampling, drafts)
                assert told == alone and record.steps
                if draft == model and sampling is GREEDY:
                    assert record.held == record.tried  # its cells are those of what was told, also behind drafts


def test_drafts_that_are_launched_at_once_are_those_that_come_one_by_one(
    model: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, whose graphs repeat; behind a cut too, where the cells of drafts are known."""
    found, chains = list[list[object]](), list[object]()
    for repeats in (False, True):
        for kernels in (PlainKernels, HostKernels):  # whichever is there
            monkeypatch.setattr(kernels, "repeatable", repeats)
        with open_with(model, other) as engine:
            text, draft = engine.texts.begin(), engine.drafter.draft
            engine.texts.extend([(text, some_ids(40))])
            found.append([draft([Ask(text, (5,), most)]) for most in (7, 2, 7)])
            (whole,) = found[-1][0]
            engine.texts.extend([(text, [5, whole[0], whole[1] ^ 1])])
            found[-1].append(draft([Ask(text, (9,), 7)]))
            chains.append(engine.drafter._program.walks._chain[1])
    assert found[0] == found[1]
    assert chains[0] is None and chains[1] is not None


def test_a_text_that_was_cut_is_drafted_as_if_nothing_else_had_been_there(model: Path) -> None:
    with open_with(model, model) as engine:
        make(engine, DRAWN, 3)
        engine.reset(0, 70)
        engine.forward(some_ids(9, 3))
        wanted = DraftSettings(DRAFT, 3, fixed=True, record=AcceptanceRecord(DRAFT))
        list(engine.generate([5], 30, GREEDY, text=False, speculation=wanted))
        assert sum(wanted.record.held) == sum(wanted.record.tried) > 15


def test_lookup_drafts_first_where_it_finds_a_long_match_and_the_program_elsewhere(model: Path) -> None:
    repeats = Sampling(temperature=0, logit_bias=((7, 50.0),))
    with open_with(model, model) as engine:
        for sampling in (repeats, DRAWN, GREEDY):
            told = []
            for kind in (NONE, DRAFT, LOOKUP_DRAFT):
                engine.reset()
                wanted = DraftSettings(kind, 3, fixed=True, record=AcceptanceRecord(LOOKUP_DRAFT))
                told.append(list(engine.generate(some_ids(60, 3), 30, sampling, text=False, speculation=wanted)))
            assert told[0] == told[1] == told[2]
            assert wanted.spent.drafts > 0 and (wanted.spent.looked_up == 0) == (sampling is DRAWN)


def test_a_draft_ends_before_the_first_token_that_is_less_likely_than_asked_for(model: Path) -> None:
    """By the softmax of all logits of the program that drafts."""
    with open_with(model, model, sequences=2) as engine:
        ids = some_ids(50, 7)
        text = engine.texts.open(ids)
        engine.texts.extend([(text, ids)])
        found = record_logits(engine)
        (whole,) = engine.drafter.draft([Ask(text, (5,), 12)])
        chances = [float(row.softmax(0).max()) for row in found[-12:]]
        assert len(whole) == 12 and min(chances) < sorted(chances)[6]
        for p_min in (0.0, 1.0, *(chance * by for chance in chances for by in (0.999, 1.001))):
            (drafts,) = engine.drafter.draft([Ask(text, (5,), 12, p_min)])
            likely = [chance >= p_min for chance in chances] + [False]
            assert drafts == whole[: likely.index(False)]
        both = engine.drafter.draft([Ask(text, (5,), 3), Ask(engine.texts.begin(), (9,), 3, 1.0)])
        assert both == [whole[:3], ()]


def test_a_saved_text_is_drafted_behind_as_before_or_read_by_the_draft_model_first(model: Path, tmp_path: Path) -> None:
    ids, file, wanted = some_ids(150, 4), tmp_path / "text", DraftSettings(DRAFT, 3, fixed=True)
    with open_with(model, model, sequences=2) as engine:
        engine.forward(ids)
        engine.save(file)
    with open_engine(model, context=CONTEXT, tokens=TOKENS, kernels="fast") as engine:
        engine.load(file)
        told = list(engine.generate([5], 30, GREEDY, text=False))
        engine.load(file)
        engine.save(tmp_path / "alone")
    for name in ("text", "alone"):
        with open_with(model, model) as engine:
            engine.load(tmp_path / name)
            counted, read = replace(wanted, record=AcceptanceRecord(DRAFT)), list[int]()
            program = engine.drafter._program

            def run(ids, *more, call=program.run, read=read, **kept):
                read.append(len(ids))
                return call(ids, *more, **kept)

            program.run = run
            assert list(engine.generate([5], 30, GREEDY, text=False, speculation=counted)) == told
            assert counted.record.held == counted.record.tried and sum(counted.record.tried) > 15
            assert (sum(read) > 150) == (name == "alone")


@pytest.mark.parametrize(("field", "value"), [("drafter", 3), ("drafter_cells", 0), ("drafter_cells", 151)])
def test_a_saved_text_that_cannot_say_who_drafted_is_refused(
    model: Path, tmp_path: Path, field: str, value: int
) -> None:
    ids, file = some_ids(150, 4), tmp_path / "text"
    with open_with(model, model) as engine:
        engine.forward(ids)
        engine.save(file)
        raw = file.read_bytes()
        (length,) = struct.unpack_from("<I", raw, 12)
        header = json.dumps(json.loads(raw[20 : 20 + length]) | {field: value}).encode()
        told = struct.pack("<II", len(header), zlib.crc32(header))
        file.write_bytes(raw[:12] + told + header + raw[20 + length :])
        with pytest.raises(UserError, match="says nothing of who drafts"):
            engine.load(file)


def test_plans_of_a_model_with_a_draft_model_are_others_than_of_it_alone(model: Path, other: Path) -> None:
    inputs = [open_drafted(model, draft).fingerprint_inputs() for draft in (None, model, other)]
    assert inputs[0] == inputs[1][:-1] == inputs[2][:-1] and inputs[1] != inputs[2]


def test_a_model_of_another_vocabulary_or_with_windows_is_refused_in_one_line(model: Path, tmp_path: Path) -> None:
    larger = write_gguf(tmp_path / "larger.gguf", "llama", n_layers=1, vocab=VOCAB + 8)
    with pytest.raises(UserError, match="its vocabulary is not the model's: 104 tokens for 96; give a model"):
        open_drafted(model, larger)
    windows = write_gguf(tmp_path / "windows.gguf", "gpt-oss", n_layers=2, vocab=VOCAB)
    with pytest.raises(UserError, match="layers with a window"):
        open_drafted(model, windows)
    with pytest.raises(UserError, match=r"gone\.gguf"):
        open_drafted(model, tmp_path / "gone.gguf")
