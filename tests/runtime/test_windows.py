"""Layers that see the last cells only keep these and no more, wherever they lie and whatever is cut back."""

import random
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import thread_ranks
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_samples import make_tier, make_variant, random_places, shrink_places, with_workload
from thread_ranks import random_tiers, run_ranks
from toy_kinds import VOCAB, WINDOW, ToyFile

from pshard.commands import cli_run
from pshard.planner.check_plan import check_runnable
from pshard.runtime.build_engine import build_engine
from pshard.runtime.devices.device import open_device
from pshard.runtime.engine import Engine
from pshard.runtime.memory.kv_blocks import RecentBlocks, blocks_of
from pshard.session.bench_engine import BenchSetting, BenchTest, run_test
from pshard.units.kv_cells import KV_BLOCK, window_blocks, window_start
from pshard.units.state import StateShape

CONTEXT, BATCH = 768, 24
CLOSE = dict(rtol=1e-4, atol=1e-4)
PLACES = [("pinned", "vram"), ("streamed", "host"), ("cpu", "host")]


def make_file(layers: str = "wawa") -> ToyFile:
    return ToyFile(layers, context=CONTEXT)


def open_toy(file: ToyFile, tiers, sequences: int = 1, kernels: str = "plain", kv_types=("f32", "f32")) -> Engine:
    variant = make_variant(file.spec, tiers, CONTEXT * sequences, sequences)
    check_runnable((file.spec,), variant, "cpu")
    variant = with_workload(variant, type_k=kv_types[0], type_v=kv_types[1])
    return build_engine(file, variant, open_device("cpu"), kernels=kernels)


def make_tiers(file: ToyFile, place: tuple[str, str], sequences: int = 1, tokens: tuple[int, ...] = ()):
    places: dict[str, tuple] = {u.name: place if u.kind.state else ("pinned", None) for u in file.spec.units}
    shape = CONTEXT * sequences, sequences
    tokens = tokens or (sequences, BATCH)
    return tuple(make_tier(file.spec, n, places, 1, *shape, batch=tokens[-1]) for n in tokens)


def text(n: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(n)]


def check_talk(engine: Engine, file: ToyFile, sequences: int, seed: int = 0) -> None:
    """Turns of unequal length, in all several times the window: all logits are those of every text alone."""
    rng, texts = random.Random(seed), [list[int]() for _ in range(sequences)]
    found = [list[torch.Tensor]() for _ in range(sequences)]
    for sizes in [(150, 3, 70), (1, 1, 1), (1, 0, 1), (2, 200, 1), (1, 1, 1), (130, 1, 90), (1, 1, 1), (1, 65, 1)]:
        new = [[rng.randrange(VOCAB) for _ in range(n)] for n in sizes[:sequences]]
        for s, logits in enumerate(engine.forward(new, all_logits=True)):
            texts[s] += new[s]
            found[s].append(logits)
    for whole, rows in zip(texts, found, strict=True):
        torch.testing.assert_close(torch.cat(rows).double(), file.logits(whole), **CLOSE)


@pytest.mark.quick("('streamed', 'host')-3-fast")
@pytest.mark.parametrize(
    ("place", "sequences", "kernels"),
    [(PLACES[0], 3, "plain"), (PLACES[0], 1, "fast"), (PLACES[1], 3, "fast"), (PLACES[2], 3, "fast")],
    ids=str,
)
def test_every_placement_gives_the_logits_of_a_plain_forward(place, sequences: int, kernels: str) -> None:
    file = make_file()
    with open_toy(file, make_tiers(file, place, sequences), sequences, kernels) as engine:
        check_talk(engine, file, sequences)


@pytest.mark.parametrize("tokens", [(1, 7), (1, 64), (1, 16, 130), (1, 300)], ids=str)
def test_micro_batches_of_any_size_see_their_windows(tokens: tuple[int, ...]) -> None:
    file = make_file()
    with open_toy(file, make_tiers(file, ("pinned", "vram"), tokens=tokens), kernels="fast") as engine:
        check_talk(engine, file, 1)


@pytest.mark.quick("1")
@pytest.mark.parametrize("seed", range(2))
def test_windows_stay_whole_when_tiers_are_switched(seed: int) -> None:
    file, rng = make_file(), random.Random(seed)
    decode = random_places(file.spec, rng)
    tiers = tuple(
        make_tier(file.spec, n, places, 2, CONTEXT * 3, 3, batch=BATCH)
        for n, places in ((3, decode), (BATCH, shrink_places(file.spec, decode, rng)))
    )
    with open_toy(file, tiers, 3) as engine:
        check_talk(engine, file, 3, seed)
        assert engine.switches > 2


def test_a_layer_with_a_window_holds_the_window_and_a_micro_batch() -> None:
    file, shape = make_file(), StateShape(1 << 17, 4, "f32", "f32", 512)
    sizes = [n for n in file.spec.state_sizes(shape).values() if n]
    cell = 2 * 4 * 32
    assert sizes[1] == sizes[3] == (1 << 17) * cell
    assert sizes[0] == sizes[2] == KV_BLOCK * cell * window_blocks(WINDOW, 1 << 17, 4, 512)
    assert 4 * WINDOW + 512 < sizes[0] // cell < 4 * (WINDOW + 3 * KV_BLOCK) + 512
    law = file.spec.states(shape)["blk.0.attention"]
    assert law.fetched(4 * 10000, 4) <= 4 * (WINDOW + KV_BLOCK) * law.cell
    assert law.fetched(4 * 50, 4) == 4 * 50 * law.cell


# kept: what the pool has room for behind the window; else the text is computed again
FEW = [485, 100]
CUTS = [499, 440, 320, 129, 128, 127, 64, 1]


@pytest.mark.quick("place1-tokens1-cuts1")
@pytest.mark.parametrize(
    ("place", "tokens", "cuts"),
    [
        *(((place, (1, 150), FEW)) for place in PLACES),
        pytest.param(PLACES[1], (1, 260), CUTS, marks=pytest.mark.slow),
    ],
)
def test_a_sequence_that_is_cut_back_goes_on_as_in_a_fresh_engine(
    place: tuple[str, str], tokens: tuple[int, ...], cuts: list[int]
) -> None:
    file, whole, more = make_file(), text(500), text(30, 1)
    with open_toy(file, make_tiers(file, place, tokens=tokens)) as engine:
        for cut in cuts:
            engine.reset()
            engine.forward(whole[:470])
            for token in whole[470:]:
                engine.forward([token])
            engine.reset(0, cut)
            assert engine.lengths == (cut,)
            found = [engine.forward(more[:1], all_logits=True), engine.forward(more[1:], all_logits=True)]
            expected = file.logits(whole[:cut] + more)[cut:]
            torch.testing.assert_close(torch.cat(found).double(), expected, **CLOSE)


def test_cells_that_nobody_needs_the_room_of_are_still_there(monkeypatch: pytest.MonkeyPatch) -> None:
    file = make_file()
    with open_toy(file, make_tiers(file, ("pinned", "vram"), tokens=(1, 256))) as engine:
        engine.forward(text(600))
        for token in text(100, 1):
            engine.forward([token])
        monkeypatch.setattr(engine, "forward", lambda *_, **__: pytest.fail("computed again"))
        engine.reset(0, 600)
        assert engine.lengths == (600,)


def test_sequences_are_cut_back_together_and_one_by_one() -> None:
    file, texts = make_file(), [text(n, n) for n in (400, 90, 260)]
    with open_toy(file, make_tiers(file, ("pinned", "vram"), 3), 3) as engine:
        engine.forward(texts)
        engine.reset(2, 150)
        texts[2] = texts[2][:150]
        engine.reset(length=80)
        texts = [t[:80] for t in texts]
        assert engine.lengths == (80, 80, 80)
        new = [text(40, 5), [7], text(3, 6)]
        for t, n, found in zip(texts, new, engine.forward(new), strict=True):
            torch.testing.assert_close(found.double(), file.logits(t + n)[-1], **CLOSE)


@pytest.mark.quick("400")
@pytest.mark.parametrize("n", [40, 128, 129, 400])
def test_a_saved_sequence_has_its_windows(tmp_path: Path, n: int) -> None:
    file, whole = make_file(), text(n)
    with open_toy(file, make_tiers(file, ("pinned", "vram"), 2), 2) as engine:
        engine.forward([[], whole])
        engine.save(tmp_path / "cache", 1)
        engine.reset()
        engine.forward([text(300, 3)])
        assert list(engine.load(tmp_path / "cache", 1)) == whole
        found = engine.forward([[], [5]])[1]
        torch.testing.assert_close(found.double(), file.logits([*whole, 5])[-1], **CLOSE)
        engine.reset(1, 30)
        found = engine.forward([[], [5]])[1]
        torch.testing.assert_close(found.double(), file.logits([*whole[:30], 5])[-1], **CLOSE)


@pytest.mark.parametrize(("n", "taken"), [(163, 0), (164, 163)])
def test_a_run_says_how_much_of_a_prompt_it_takes_from_its_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture, n: int, taken: int
) -> None:
    """Of 163 tokens the file lacks the block that the last one sees the first cell of: all are computed again."""
    file, whole = make_file(), text(n)
    with open_toy(file, make_tiers(file, ("pinned", "vram"))) as engine:
        engine.forward(whole)
        engine.save(tmp_path / "cache")
        left = cli_run._take_cached(engine, whole, Namespace(prompt_cache=tmp_path / "cache"))
        assert left == whole[-1:] and engine.lengths == (n - 1,)
        said = capsys.readouterr().err
        assert f"{taken} of {n} tokens are taken from it" in said
        assert (f"{n - 1} are computed again" in said) == (not taken)


def test_bytes_of_a_bench_are_those_of_its_tests_and_not_of_windows_computed_again() -> None:
    file, test = make_file(), BenchTest(200, 0, n_depth=300)
    with open_toy(file, make_tiers(file, ("streamed", "host"))) as engine:
        engine.forward(text(300))
        before = engine.link_bytes
        engine.forward(text(200))
        wanted = engine.link_bytes - before
        assert engine.reset(length=300) == 300
        found = run_test(engine, None, test, 2, BenchSetting("toy", 1, "hand", (), ""))
    assert found.link_bytes == pytest.approx(wanted, rel=0.05)


@pytest.mark.parametrize(("kind", "bound"), [("bf16", 0.02), ("f16", 0.003), ("q8_0", 0.05)])
def test_windows_of_every_type_of_cells(kind: str, bound: float) -> None:
    file, whole = make_file(), text(400)
    expected = file.logits(whole)
    place = PLACES[("bf16", "f16", "q8_0").index(kind)]
    with open_toy(file, make_tiers(file, place), kernels="fast", kv_types=(kind, kind)) as engine:
        found = torch.cat([engine.forward(part, all_logits=True) for part in (whole[:390], *zip(whole[390:]))])
    assert (found - expected).abs().max() < bound * expected.abs().max()


@pytest.mark.parametrize(("mode", "shares"), [("tensor", (1.0, 0.0)), ("layer", (1.0, 0.0, 1.0))])
def test_ranks_have_their_windows_and_sinks(monkeypatch: pytest.MonkeyPatch, mode: str, shares: Any) -> None:
    """A rank without attention cuts back with the others."""
    file, whole = make_file(), text(300)
    monkeypatch.setattr(thread_ranks, "open_model", lambda path: file)

    def talk(engine: Engine) -> torch.Tensor:
        engine.forward(whole)
        engine.reset(0, 90)
        return engine.forward(whole[90:140], all_logits=True)

    for found in run_ranks(Path("toy"), shares, talk, CONTEXT, random_tiers(1, CONTEXT), mode=mode):
        torch.testing.assert_close(found.double(), file.logits(whole[:140])[90:], **CLOSE)


@pytest.mark.quick("('cpu', 'host')")
@pytest.mark.parametrize("place", [PLACES[0], PLACES[2]], ids=str)
def test_cells_behind_the_window_stay_whole_while_others_are_written(place: tuple[str, str]) -> None:
    """The stage has windows that were fetched apart; new cells of unequal number go back with those between them."""
    file, texts = make_file(), [text(n, n) for n in (200, 328)]
    with open_toy(file, make_tiers(file, place, 2, (4, 300)), 2) as engine:
        engine.forward(texts)
        for token in text(40, 1):
            engine.forward([[token], [token]])
        engine.forward([[5], [6, 7]])
        for number, length in enumerate((180, 310)):
            engine.reset(number, length)
            found = engine.forward([[]] * number + [[5]])[number]
            expected = file.logits([*texts[number][:length], 5])[-1]
            torch.testing.assert_close(found.double(), expected, **CLOSE)


@pytest.mark.parametrize("window", [1, 2, 3, 64, 65, 66, 67, 100, 128, 130])
@pytest.mark.parametrize("sequences", [1, 3])
def test_windows_that_begin_at_a_blocks_last_cell_find_room(window: int, sequences: int) -> None:
    length = window + 2 * KV_BLOCK - 2  # the next token's window begins there
    assert sequences == 1 or (length + 1 - window) % KV_BLOCK == KV_BLOCK - 1
    for batch in (sequences, 63, 64, 65, 130):
        blocks = RecentBlocks(window_blocks(window, 1 << 20, sequences, batch), sequences, window)
        lengths = [0] * sequences
        while lengths[0] < length:
            for i in range(sequences):
                blocks.extend(i, lengths[i] + 1, lengths)
            lengths = [n + 1 for n in lengths]
        new = [batch - sequences + 1] + [1] * (sequences - 1)
        for i, n in enumerate(new):
            blocks.extend(i, lengths[i] + n, lengths)


@settings(max_examples=60)
@given(
    st.integers(1, 200),
    st.integers(1, 130),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 130), st.integers(0, 900)), max_size=40),
)
def test_windows_always_find_room_and_share_no_block(
    window: int, batch: int, steps: list[tuple[int, int, int]]
) -> None:
    pool = window_blocks(window, 3000, 3, batch)
    blocks, lengths = RecentBlocks(pool, 3, window), [0, 0, 0]
    for number, new, cut in steps:
        new = min(new, batch)
        blocks.extend(number, lengths[number] + new, lengths)
        tables = [blocks.table(i)[blocks.first(i) // KV_BLOCK :] for i in range(3)]
        everything = [b for table in tables for b in table]
        assert len(set(everything)) == len(everything) and set(everything) <= set(range(pool))
        for i, length in enumerate(lengths):
            assert blocks.first(i) <= window_start(length, window)
            assert len(blocks.table(i)) == blocks_of(length + (new if i == number else 0))
        lengths[number] += new
        if cut < lengths[number]:
            lengths[number] = cut if blocks.cut_back(number, cut) else 0
