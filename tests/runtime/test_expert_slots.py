"""Experts that follow use into slots of VRAM: the same logits, the right bytes, decisions that repeat."""

import random
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from cache_plans import cache_of, with_cache
from experts_file import RULES, ExpertsFile, skew_routers
from routing_samples import make_drifting_record
from test_experts import check_talk, make_toy_tier
from test_routing import draw_text, record_text

from pshard.model_config import Experts
from pshard.plan import Variant
from pshard.planner.check_plan import check_runnable
from pshard.routing.followed import follow_plan, keep_slots
from pshard.routing.measure_popularity import measure_popularity
from pshard.routing.order_experts import order_experts
from pshard.routing.record import RoutingRecord
from pshard.routing.replay_slots import replay_run, replay_tokens
from pshard.runtime.build_engine import build_engine
from pshard.runtime.devices import device
from pshard.runtime.devices.device import open_device
from pshard.runtime.engine import Engine
from pshard.runtime.sampling import Sampling
from pshard.units.moe.expert_cache import FOLLOW_TOKENS, ExpertCache

IN_PLACE, KEPT = ("streamed", None), ("streamed", None, 0, 2)
SHARED, PINNED = ("streamed", None, 3, 2), ("pinned", None, 5)  # with the CPU
TEXT = 73  # tokens of `walk_text`


def make_cached(
    file: ExpertsFile, way: tuple, caches: tuple[ExpertCache, ...], sequences: int = 1, slots: int = 1
) -> Variant:
    """Tiers for a token or a few, and for prompts, all experts placed that way."""
    layers = sum(bool(unit.kind.parts) for unit in file.spec.units)
    tiers = tuple(make_toy_tier(file, n, [way] * layers, slots, sequences) for n in (sequences, 5, 16))
    return with_cache(file, tiers, caches, sequences)


def open_cached(
    file: ExpertsFile,
    variant: Variant,
    kernels: str = "plain",
    records: bool = False,
    plays: RoutingRecord | None = None,
) -> Engine:
    check_runnable((order_experts(file.spec, variant.popularity),), variant, "cpu")
    return build_engine(file, variant, open_device("cpu"), kernels=kernels, records=records, plays=plays)


@pytest.mark.quick("('streamed', None)-1-lru")
@pytest.mark.parametrize(
    ("way", "sequences", "policy"),
    [(IN_PLACE, 1, "lru"), (SHARED, 3, "frequency"), (KEPT, 3, "lru"), (PINNED, 1, "frequency")],
    ids=str,
)
def test_slots_give_the_logits_of_a_plain_forward(way: tuple, sequences: int, policy: str) -> None:
    file = ExpertsFile()
    variant = make_cached(file, way, (cache_of(file, 5, policy),), sequences)
    with open_cached(file, variant) as engine:
        check_talk(engine, file, sequences, 0)
        assert engine.expert_hits.hits > 0 and engine.expert_hits.admitted > 0


@pytest.mark.quick("('streamed', None, 3, 2)-fast")
@pytest.mark.parametrize(("way", "kernels"), [(IN_PLACE, "plain"), (SHARED, "fast")], ids=str)
def test_slots_give_the_logits_of_a_plain_forward_where_16_sequences_decode(way: tuple, kernels: str) -> None:
    file = ExpertsFile()
    layers = sum(bool(unit.kind.parts) for unit in file.spec.units)
    tiers = tuple(replace(make_toy_tier(file, n, [way] * layers, 1, 16), in_place=n <= 16) for n in (1, 16, 32))
    cache = replace(cache_of(file, 8), tokens=16)
    with open_cached(file, with_cache(file, tiers, (cache,), 16), kernels) as engine:
        engine.forward([draw_text(4, s) for s in range(16)])  # leaves slots as they are: 64 tokens
        before = engine.expert_hits
        for turn in range(6):
            logits = engine.forward([[turn + s] for s in range(16)])
            _check_bytes(engine)
        hits = engine.expert_hits
        texts = [[*draw_text(4, s), *(turn + s for turn in range(6))] for s in range(16)]
    assert before.chosen == 0 and hits.chosen == 6 * 16 * 3 * 2 and hits.hits > 0 < hits.admitted
    for row, text in zip(logits, texts):
        right = file.logits(text)[-1]
        assert (row.double() - right).abs().max() < 1e-4 * right.std()


def walk_text(engine: Engine, text: list[int]) -> torch.Tensor:
    """Prompts between stretches of single tokens and a few at once: logits of all."""
    rows, at = [], 0
    for size in [20, *[1] * 12, 4, *[1] * 6, 16, 3, *[1] * 12]:
        rows.append(engine.forward(text[at : at + size], all_logits=True))
        at += size
    return torch.cat(rows)


@pytest.mark.quick("('streamed', None, 0, 2)-fast")
@pytest.mark.parametrize(("way", "kernels"), [(IN_PLACE, "plain"), (KEPT, "fast")], ids=str)
def test_slots_change_no_bit_where_one_side_computes_all_experts(way: tuple, kernels: str) -> None:
    file, text, found = skew_routers(ExpertsFile(RULES["of the chosen"]), 1.0), draw_text(TEXT), []
    for caches in ((), (cache_of(file, 6),)):
        with open_cached(file, make_cached(file, way, caches), kernels) as engine:
            found.append(walk_text(engine, text))
            assert bool(caches) == (engine.expert_hits.hits > 0)
    assert torch.equal(*found)


@pytest.mark.parametrize("way", [SHARED, PINNED], ids=str)
def test_slots_move_logits_by_no_more_than_rounding_where_the_cpu_has_experts(way: tuple) -> None:
    file, text, found = skew_routers(ExpertsFile(RULES["of the chosen"]), 1.0), draw_text(TEXT), []
    for caches in ((), (cache_of(file, 6),)):
        with open_cached(file, make_cached(file, way, caches), "fast") as engine:
            found.append(walk_text(engine, text).double())
    assert (found[0] - found[1]).abs().max() < 1e-5 * found[0].std()


def test_how_long_copies_take_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decisions hang on tokens, never on clocks: over a link that dawdles, now more, now less."""
    file, text, found, rng = skew_routers(ExpertsFile(), 1.0), draw_text(TEXT), [], random.Random(0)

    class Slow(device.CopyThread):
        def __init__(self, name: str, copy: Callable = device.move) -> None:
            super().__init__(name, lambda dst, src: (time.sleep(0.004 * rng.random()), copy(dst, src)))

    for dawdles in (False, True):
        if dawdles:
            monkeypatch.setattr(device, "CopyThread", Slow)
        with open_cached(file, make_cached(file, SHARED, (cache_of(file, 4),)), "fast") as engine:
            found.append((walk_text(engine, text), engine.expert_hits))
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]
    assert found[0][1].admitted > 10


def test_a_slot_has_the_bytes_of_its_expert_after_any_talk() -> None:
    """Over resets, tiers and sequences: what the table says lies in a slot is what lies there."""
    file = skew_routers(ExpertsFile(), 1.0)
    with open_cached(file, make_cached(file, SHARED, (cache_of(file, 5),), 3)) as engine:
        rng = random.Random(0)
        for _ in range(60):
            if rng.random() < 0.1:
                engine.reset(rng.randrange(3))
            engine.forward([draw_text(rng.choice((1, 1, 1, 2, 9)), rng.randrange(99)) for _ in range(3)])
            _check_bytes(engine)
        assert engine.expert_hits.admitted > 10


def _check_bytes(engine: Engine) -> None:
    executor = engine._executor
    executor.device.synchronize()
    (pool,) = executor.slots._pools
    for row, expert in np.argwhere(pool.follower.slot_of >= 0).tolist():
        unit, slot = pool._units[row], int(pool.follower.slot_of[row, expert])
        held, blob = executor.weights.held[unit.name], executor.weights.blob(unit.name)
        for matrix, (at, tensor) in zip(pool._view(slot), held.unit.offsets().values()):
            part = tensor.packed_nbytes // tensor.parts
            assert torch.equal(matrix.data, blob[at + (expert - held.first) * part :][:part])


@pytest.mark.quick("lru")
@pytest.mark.parametrize("policy", ["lru", "frequency"])
def test_the_hits_of_a_run_are_those_of_a_replay_of_its_record(policy: str) -> None:
    file, text = skew_routers(ExpertsFile(Experts(16, 2, 16)), 1.0), draw_text(TEXT)
    variant = make_cached(file, SHARED, (cache_of(file, 10, policy),))
    with open_cached(file, variant, records=True) as engine:
        walk_text(engine, text)
        record, measured = engine.record_routing("ab"), engine.expert_hits
    (rank,) = variant.ranks
    follower = follow_plan(file.spec, rank, rank.caches[0])
    assert replay_run(record, record.layers, follower, FOLLOW_TOKENS) == measured
    assert measured.chosen == 3 * 2 * (len(text) - 16 - 16)  # without those of prompts and 0.1 < measured.share < 0.9


def test_prompts_leave_slots_as_they_are() -> None:
    file = skew_routers(ExpertsFile(), 1.0)
    with open_cached(file, make_cached(file, IN_PLACE, (cache_of(file, 5),))) as engine:
        for token in draw_text(20):
            engine.forward([token])
        before, (pool,) = engine.expert_hits, engine._executor.slots._pools
        inside = pool.follower.slot_of.copy()
        engine.forward(draw_text(32))
        assert engine.expert_hits == before and np.array_equal(pool.follower.slot_of, inside) and (inside >= 0).any()
        _check_bytes(engine)


def test_slots_begin_with_the_experts_that_a_record_says_are_used_most() -> None:
    file, text = skew_routers(ExpertsFile(Experts(16, 2, 16)), 1.5), draw_text(100)
    popularity = measure_popularity(record_text(file, text))
    tiers = tuple(make_toy_tier(file, n, [KEPT] * 3, 1, 1) for n in (1, 16))
    variant = with_cache(file, tiers, (cache_of(file, 6),), popularity=popularity)
    with open_cached(file, variant) as engine:
        (pool,) = engine._executor.slots._pools
        inside = {(row, expert) for row, expert in np.argwhere(pool.follower.slot_of >= 0).tolist()}
    ranked = sorted((-popularity.uses_of(layer)[at], at, layer) for layer in range(3) for at in range(2, 16))
    assert inside == {(layer, popularity.order_of(layer)[at]) for _, at, layer in ranked[:6]}


def test_with_slots_that_are_kept_earlier_text_moves_no_bit() -> None:
    file, text, found = skew_routers(ExpertsFile(), 1.0), draw_text(30), []
    variant = make_cached(file, SHARED, (cache_of(file, 5),))
    for before in ([], draw_text(25, seed=5)):
        with open_cached(file, keep_slots(variant), "fast") as engine:
            for token in before:
                engine.forward([token])
            engine.reset()
            found.append(torch.cat([engine.forward([token], all_logits=True) for token in text]))
            assert engine.expert_hits.admitted == 0 < engine.expert_hits.hits
    assert torch.equal(*found)


@pytest.mark.quick("('streamed', None, 3, 2)")
@pytest.mark.parametrize("way", [KEPT, SHARED], ids=str)
def test_with_slots_that_are_kept_greedy_text_is_the_same_after_any_requests(way: tuple) -> None:
    """Though the cache would have other experts then: who computes each one stays the same."""
    file, found = skew_routers(ExpertsFile(), 1.0), []
    variant, prompt, greedy = make_cached(file, way, (cache_of(file, 5),)), draw_text(18), Sampling(temperature=0.0)
    for kept in (True, False):
        for earlier in ((), (3, 16, 1)):
            with open_cached(file, keep_slots(variant) if kept else variant, "fast") as engine:
                for seed, size in enumerate(earlier):
                    list(engine.generate(draw_text(size, seed=seed + 7), 12, greedy, text=False))
                    engine.reset()
                tokens = list(engine.generate(prompt, 15, greedy, text=False))
                engine.reset()
                rows = [engine.forward(prompt), *(engine.forward([token]) for token in tokens)]
                found.append((tokens, torch.stack(rows)))
                assert (engine.expert_hits.admitted == 0) == kept and engine.expert_hits.hits > 0
    assert found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])
    if way == SHARED:  # without it the cache decides
        assert not torch.equal(found[2][1], found[3][1])


@pytest.mark.quick("('pinned', None, 5)-fast")
@pytest.mark.parametrize(("way", "kernels"), [(SHARED, "plain"), (PINNED, "fast")], ids=str)
def test_tokens_of_a_trial_use_the_experts_that_a_record_says(way: tuple, kernels: str) -> None:
    """Whatever they are: so slots find what a replay of the record finds."""
    file, record = ExpertsFile(Experts(16, 2, 16)), make_drifting_record(200)
    variant = make_cached(file, way, (cache_of(file, 10),))
    with open_cached(file, variant, kernels, True, record) as engine:
        _check_bytes(engine)  # of slots that are warm from the start
        engine.forward(draw_text(20))
        for _ in range(80):
            engine.forward([7])
        played, hits = engine.record_routing("ab"), engine.expert_hits
        _check_bytes(engine)
    assert np.array_equal(played.ids, record.ids[100:])
    (rank,) = variant.ranks
    replay = replay_tokens(record, record.layers, follow_plan(file.spec, rank, rank.caches[0]))
    assert hits.share == pytest.approx(replay.share, abs=0.05) and 0.2 < hits.share < 0.95


@pytest.mark.parametrize(("way", "kernels"), [(IN_PLACE, "plain"), (SHARED, "fast")], ids=str)
def test_a_router_that_finds_no_numbers_spoils_its_own_text_and_no_other(way: tuple, kernels: str) -> None:
    """Beside it in prompts and in single tokens, with experts in slots."""
    file, spoilt = ExpertsFile(), 7
    file.values["token_embd.weight"][spoilt] = np.nan
    texts = [[3, 4, 5, 6, 8, 9, 10, 2], [3, spoilt, 5, 6, 8, 9, 10, 2], [11, 12, 13, 14, 15, 3, 2, 1]]
    with open_cached(file, make_cached(file, way, (cache_of(file, 6),), 3), kernels) as engine:
        engine.forward([text[:5] for text in texts])
        for at in range(5, 8):
            logits = engine.forward([text[at : at + 1] for text in texts])
        assert engine.expert_hits.chosen == 3 * 3 * 3 * 2
        _check_bytes(engine)
    assert logits[1].isnan().all()
    for row in (0, 2):
        right = file.logits(texts[row])[-1]
        assert (logits[row].double() - right).abs().max() < 1e-4 * right.std()
