"""Steps that are more than a micro-batch: prompts go through the model in a sweep, beside texts that decode, with the
bits of one micro-batch after the other."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from engines import open_engine, pinned_everywhere
from hybrid_files import random_hybrid, write_hybrid_gguf
from model_files import write_gguf
from plan_samples import make_tier, make_variant
from toy_kinds import VOCAB, ToyFile, know_decay  # noqa: F401

from pshard.batch import DECODE, VERIFY
from pshard.errors import UserError
from pshard.model import ModelSpec
from pshard.models import open_model
from pshard.plan import TierPlan
from pshard.runtime.build_engine import build_engine
from pshard.runtime.checkpoints import checkpoints
from pshard.runtime.devices.device import open_device
from pshard.runtime.engine import Engine
from pshard.runtime.texts.split_pieces import cut_pieces
from pshard.runtime.texts.text import GivenUp, Piece, Row, Text
from pshard.runtime.texts.text_pool import TextPool
from pshard.units.kv_cells import KV_BLOCK
from pshard.units.unit import places_of

FAST = "fake:rate=20G,jitter=1ms"  # pieces arrive in random order
MOST, SWEEP, CONTEXT, TEXTS = 64, 8, 2048, 3
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def list_tiers(spec: ModelSpec, site: str, state: str = "vram") -> tuple[TierPlan, ...]:
    """With all that may be at a site there, two slots, and sweeps; or with all in VRAM and none."""
    places = {}
    for unit in spec.units:
        far = [place for place in places_of(unit.kind, False) if place[0] == site]
        own = [place for place in far if place[1] == state] or far
        places[unit.name] = own[-1] if own else ("pinned", "vram" if unit.kind.state else None)
    return tuple(
        make_tier(spec, n, places, 2, CONTEXT, TEXTS, batch=MOST, sweep=SWEEP * (n == MOST and site != "pinned"))
        for n in (TEXTS, MOST)
    )


def some_ids(n: int, seed: int, vocab: int = VOCAB) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(vocab) for _ in range(n))


def step_in_turn(pool: TextPool, pieces: Sequence[Piece]) -> list[list[Row]]:
    """The same micro-batches as a sweep has, each as a step."""
    rows = [list[Row]() for _ in pieces]
    for parts in cut_pieces(pieces, MOST, 1 << 20):
        for (place, _), found in zip(parts, pool.step([part for _, part in parts]), strict=True):
            rows[place] += found
    return rows


def speak(pool: TextPool, step: Callable[[TextPool, Sequence[Piece]], list[list[Row]]]) -> list[list[np.ndarray]]:
    """What is wanted of rows: of a text that decodes beside a long prompt and a scored one, and of all three behind."""
    first, long, scored = (pool.open(some_ids(n, n), salt) for n, salt in ((20, "a"), (330, "a"), (150, "b")))
    rows = pool.step([Piece(first, some_ids(20, 20), full=True)])
    prompt = some_ids(150, 150)
    rows += step(
        pool,
        [
            Piece(first, (5,), full=True, kind=DECODE),
            Piece(long, some_ids(330, 330), best=3, full=True),
            Piece(scored, prompt, rows="all", best=2, of=(*prompt[1:], 1)),
        ],
    )
    rows += pool.step([Piece(text, (7,), full=True, kind=DECODE) for text in (first, long, scored)])
    assert [len(text.ids) for text in (first, long, scored)] == [22, 331, 151]
    return [[value for row in each for value in (row.ids, row.logits, row.full, row.of)] for each in rows]


def check_alike(found: list[list[np.ndarray]], expected: list[list[np.ndarray]]) -> None:
    for one, other in zip(found, expected, strict=True):
        for value, wanted in zip(one, other, strict=True):
            assert (value is None) == (wanted is None) and (value is None or np.array_equal(value, wanted))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("arch", "shape", "state"),
    [
        ("llama", {"qtype": "Q4_0"}, "host"),
        ("qwen3moe", {"qtype": "Q8_0"}, "vram"),
        ("gpt-oss", {"qtype": "F32"}, "host"),
    ],
)
def test_a_step_in_a_sweep_has_the_rows_of_its_micro_batches_and_reads_what_is_on_disk_once(
    arch: str, shape: dict, state: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PSHARD_DISK", FAST)
    path = write_gguf(tmp_path / "m.gguf", arch, context=CONTEXT, **shape)
    spec = open_model(path).spec
    tiers, read = list_tiers(spec, "disk", state), list[int]()

    def sweep(pool: TextPool, pieces: Sequence[Piece]) -> list[list[Row]]:
        engine.device.synchronize()
        before = engine.memory().read
        rows = pool.step(pieces)
        engine.device.synchronize()
        read.append(engine.memory().read - before)
        return rows

    with open_engine(path, tiers, context=CONTEXT, sequences=TEXTS, device=device) as engine:
        found = speak(engine.texts, sweep)
    with open_engine(path, list_tiers(spec, "pinned"), context=CONTEXT, sequences=TEXTS, device=device) as engine:
        check_alike(found, speak(engine.texts, step_in_turn))
    far = [spec.unit(p.unit) for p in tiers[-1].placements if p.site.is_beyond_host]
    assert read == [sum(t.file_nbytes for u in far for t in u.tensors if len(t.shape) == 2)]


@contextmanager
def open_toy(layers: str, site: str) -> Iterator[Engine]:
    file = ToyFile(layers, context=CONTEXT)
    places = {
        u.name: (site if site in dict(u.kind.places) else "pinned", "vram" if u.kind.state else None)
        for u in file.spec.units
    }
    swept = SWEEP * (site != "pinned")
    tiers = tuple(
        make_tier(file.spec, n, places, 2, CONTEXT, TEXTS, batch=MOST, sweep=swept * (n == MOST)) for n in (TEXTS, MOST)
    )
    with build_engine(
        file, make_variant(file.spec, tiers, CONTEXT, TEXTS), open_device("cpu"), kernels="plain"
    ) as engine:
        yield engine


@pytest.mark.usefixtures("know_decay")
@pytest.mark.parametrize("layers", ["wawa", "aawwd"])
def test_windows_and_states_of_a_fixed_size_go_through_swept_steps(layers: str) -> None:
    with open_toy(layers, "streamed") as engine:
        found = speak(engine.texts, TextPool.step)
    with open_toy(layers, "pinned") as engine:
        check_alike(found, speak(engine.texts, step_in_turn))


@pytest.mark.parametrize("layers", ["wawa", "aaaa"])
def test_equal_prompts_of_one_sweep_share_their_blocks(layers: str) -> None:
    ids = some_ids(200, 8)

    def speak_twice(site: str, step: Callable[[TextPool, Sequence[Piece]], list[list[Row]]]) -> list[list[np.ndarray]]:
        with open_toy(layers, site) as engine:
            pool = engine.texts
            texts = [pool.open(ids, "a") for _ in range(2)]
            rows = step(pool, [Piece(text, (*ids, n), full=True) for n, text in enumerate(texts)])
            rows += pool.step([Piece(text, (3,), full=True, kind=DECODE) for text in texts])
            assert pool.counts().used == 2 * len(texts[0].blocks) - 200 // KV_BLOCK
            return [[row.full for row in each if row.full is not None] for each in rows]

    check_alike(speak_twice("streamed", TextPool.step), speak_twice("pinned", step_in_turn))


def test_prefixes_of_a_swept_step_are_found_by_other_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a hybrid model at the checkpoints that the same prompt leaves in micro-batches; and they are right."""
    monkeypatch.setattr(checkpoints, "EVERY", 2 * KV_BLOCK)
    path = write_hybrid_gguf(tmp_path / "m.gguf", "dense", random_hybrid("dense"))
    spec, ids = open_model(path).spec, some_ids(310, 1, 320)

    def find(site: str, step: Callable[[TextPool, Sequence[Piece]], list[list[Row]]]) -> list:
        tiers = list_tiers(spec, site, "host")
        with open_engine(path, tiers, context=CONTEXT, sequences=TEXTS, checkpoint_bytes=1 << 20) as engine:
            pool, found = engine.texts, list[object]()
            first = pool.open(ids, "a")
            step(pool, [Piece(first, ids)])
            for n in (310, 200, 100):
                text = pool.open((*ids[:n], 1), "a")
                found.append(text.cached)
                ((row,),) = pool.step([Piece(text, (*ids[text.cached : n], 1)[:MOST], full=True)])
                found.append(row.full)
                pool.close(text)
            return found

    found, expected = find("streamed", TextPool.step), find("pinned", step_in_turn)
    assert found[0] and found[::2] == expected[::2]
    assert all(map(np.array_equal, found[1::2], expected[1::2]))


@pytest.mark.parametrize("device", DEVICES)
def test_a_sweep_that_nobody_waits_for_ends_between_layers_and_leaves_nothing_behind(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another text had is there still; of the swept prompt nothing is found; the next step's weights are right."""
    monkeypatch.setenv("PSHARD_DISK", FAST)
    path = write_gguf(tmp_path / "m.gguf", qtype="Q4_0", n_layers=4, context=CONTEXT)
    spec, ids = open_model(path).spec, some_ids(400, 3, 320)
    whole = sum(t.file_nbytes for u in spec.units for t in u.tensors if len(t.shape) == 2)
    rows, texts = list[np.ndarray](), list[Text]()
    with open_engine(path, list_tiers(spec, "disk", "host"), context=CONTEXT, sequences=TEXTS, device=device) as engine:
        pool = engine.texts
        head = pool.open(ids[:130], "a")
        pool.step([Piece(head, ids[:64])])
        pool.step([Piece(head, ids[64:128])])
        pool.close(head)
        for asked in (1, 4, 7):
            text, calls = pool.open(ids, "a"), list[int]()
            assert text.cached == 128
            texts.append(text)
            engine.device.synchronize()
            before = engine.memory().read

            def give_up(calls: list[int] = calls, asked: int = asked) -> bool:
                calls.append(1)
                return len(calls) == asked

            with pytest.raises(GivenUp):
                pool.step([Piece(text, ids[128:], full=True)], given_up=give_up)
            assert len(calls) == asked and not text.is_open
            engine.device.synchronize()
            assert engine.memory().read - before < whole * (asked + 4) / 9
            assert pool.counts().used == 0
        text = pool.open(ids, "a")
        assert text.cached == 128
        rows.append(pool.step([Piece(text, ids[128:], full=True)])[0][0].full)
        rows.append(pool.step([Piece(text, (9,), full=True, kind=DECODE)])[0][0].full)
    with open_engine(path, list_tiers(spec, "pinned"), context=CONTEXT, sequences=TEXTS, device=device) as engine:
        text = engine.texts.open(ids, "a")
        expected = [
            step_in_turn(engine.texts, [Piece(text, part, full=True)])[0][-1].full for part in (ids[:128], ids[128:])
        ]
        expected.append(engine.texts.step([Piece(text, (9,), full=True, kind=DECODE)])[0][0].full)
    assert all(map(np.array_equal, rows, expected[1:]))


def test_steps_that_are_no_sweep_are_refused_as_before(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", qtype="Q4_0", context=CONTEXT)
    spec = open_model(path).spec
    ids = some_ids(SWEEP * MOST + 1, 1, 320)
    with open_engine(path, list_tiers(spec, "streamed"), context=CONTEXT, sequences=TEXTS) as engine:
        text, other = (engine.texts.open(ids, name) for name in "ab")
        with pytest.raises(UserError, match=f"1 to {SWEEP * MOST} tokens"):
            engine.texts.step([Piece(text, ids)])
        with pytest.raises(UserError, match=f"1 to {MOST} tokens"):
            engine.texts.step([Piece(text, ids[:70]), Piece(other, ids[:2], "all", kind=VERIFY)])
        engine.texts.step([Piece(text, ids[1:])])
    with open_engine(path, pinned_everywhere(spec, (1, MOST), CONTEXT), context=CONTEXT) as engine:
        text = engine.texts.open(ids, "a")
        with pytest.raises(UserError, match=f"1 to {MOST} tokens"):
            engine.texts.step([Piece(text, ids[:70])])
