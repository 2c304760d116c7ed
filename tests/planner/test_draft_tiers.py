"""Tiers, loads and prices of steps that verify drafts."""

from dataclasses import replace

import numpy as np
import pytest
from planner_cases import DESKTOP, OWN, make_model
from routing_samples import make_drifting_record, make_record

from pshard.batch import VERIFY
from pshard.plan import Variant
from pshard.planner.make_plan import plan_variant
from pshard.planner.price.datasheet import profile_from_datasheet
from pshard.planner.price.profile_tables import Tables
from pshard.planner.price.tier_costs import tier_costs
from pshard.planner.price.tier_loads import tier_loads
from pshard.planner.price.unit_costs import Setting
from pshard.planner.serving.step_times import time_steps
from pshard.predicted_times import decode_rate, first_token_seconds, round_seconds
from pshard.routing.expert_uses import count_apart, used_experts
from pshard.routing.measure_popularity import measure_overlaps, measure_popularity
from pshard.speculation import MOST_DRAFTS, Acceptance, Drafting
from pshard.workload import Workload

WORK = Workload((1000,), context=4096, prompt=1024, generated=256)


def draft(workload: Workload, drafts: int, *rates: float, share: float = 1.0) -> Workload:
    return replace(workload, drafting=Drafting("lookup", drafts), acceptance=Acceptance(rates or (0.5,), share=share))


def test_drafts_add_tiers_of_their_rows_and_without_them_all_is_as_before() -> None:
    assert WORK.tiers() == (1, 16, 128, 512, 1024, 2048, 4096)
    assert draft(WORK, 3).tiers() == (1, 4, 16, 128, 512, 1024, 2048, 4096)
    assert draft(replace(WORK, sequences=3), 5).tiers() == (1, 3, 6, 16, 18, 128, 512, 1024, 2048, 4096)
    assert tier_loads(draft(WORK, 3))[0] == replace(tier_loads(WORK)[0], weight=0)


def test_a_step_with_drafts_wants_logits_of_all_its_rows_behind_the_same_cells() -> None:
    decode, verify, *_ = tier_loads(draft(WORK, 3))
    assert (verify.tokens, verify.sequences, verify.logit_rows, verify.past) == (4, 1, 4, decode.past)
    assert verify.is_answer and verify.verifies and not verify.is_decode and decode.is_decode
    all_of_them = next(load for load in tier_loads(draft(replace(WORK, sequences=3), 5)) if load.tokens == 18)
    assert [(s.kind, s.tokens, s.texts) for s in all_of_them.batch.spans] == [(VERIFY, 6, 3)]


def test_an_answer_takes_as_many_steps_fewer_as_a_step_brings_tokens() -> None:
    work = draft(WORK, 3, 0.8)
    brought = 1 + 0.8 + 0.64 + 0.512
    assert dict(work.answer_steps()) == pytest.approx({4: 256 / brought})
    assert {load.tokens: load.weight for load in tier_loads(work)[:2]} == pytest.approx({1: 0, 4: 256 / brought})
    seldom = draft(WORK, 1, 0.8, share=0.25)
    steps = 256 / (0.75 + 0.25 * 1.8)
    assert dict(seldom.answer_steps()) == pytest.approx({1: 0.75 * steps, 2: 0.25 * steps})


def test_of_a_server_each_number_of_texts_verifies_in_a_tier_that_covers_it() -> None:
    load = draft(replace(WORK, sequences=8, concurrency=4), 3, 0.5)
    plain = replace(load, drafting=Drafting(), acceptance=None)
    assert load.answer_tokens == plain.answer_tokens == pytest.approx(sum(n * s for n, s in plain.answer_steps()))
    assert [4 * n for n, _ in plain.answer_steps()] == [rows for rows, _ in load.answer_steps()]
    assert load.tiers()[-1] >= 32 in load.tiers()
    assert sum(t.weight for t in tier_loads(load)) > 0


def test_rows_of_a_text_cost_no_less_than_one_and_a_gpu_computes_whole_rungs() -> None:
    spec, tables = make_model(layers=2), Tables(profile_from_datasheet(DESKTOP))
    for drafts in (1, 2, 3, 5, 7, 11, 15):
        work = draft(WORK, drafts)
        found = {load.tokens: tier_costs(spec, tables, load, work) for load in tier_loads(work)}
        for name, one in found[1].units.items():
            several = found[drafts + 1].units[name]
            assert several.acc >= one.acc * (1 - 1e-9) and several.link == one.link
    setting = Setting(spec, tables, tier_loads(draft(WORK, 5))[1], draft(WORK, 5))
    assert (setting.side("acc").rows, setting.side("host").rows, setting.apart) == (8, 6, 6)


def test_a_delta_net_takes_drafts_one_after_the_other() -> None:
    drafts, prompt = (next(t for t in tier_loads(work) if t.tokens == 16) for work in (draft(WORK, 15), WORK))
    assert prompt.takes_chunks and not drafts.takes_chunks


@pytest.fixture(scope="module")
def drafted() -> Variant:
    """A plan of steps with three drafts for a model of which most lies outside VRAM."""
    work = draft(replace(WORK, vram_mib=(OWN + 30,)), 3, 0.8)
    return plan_variant(make_model(layers=2), profile_from_datasheet(DESKTOP), work)


def test_the_rate_is_of_tokens_and_not_of_steps(drafted: Variant) -> None:
    seconds = {t.tokens: t.prediction.seconds for t in drafted.ranks[0].tiers}
    assert list(seconds)[:2] == [1, 4]
    assert decode_rate(drafted) == pytest.approx(2.952 / seconds[4])
    assert round_seconds(drafted) - first_token_seconds(drafted) == pytest.approx(256 / 2.952 * seconds[4])


def test_steps_with_drafts_are_timed_as_the_plan_says(drafted: Variant) -> None:
    tier, load = drafted.ranks[0].tiers[1], tier_loads(drafted.workload)[1]
    times = time_steps(make_model(layers=2), profile_from_datasheet(DESKTOP), drafted)
    assert times.seconds(0, 0, 4, load.past) == pytest.approx(tier.prediction.seconds, rel=1e-9)
    assert times.seconds(0, 0, 2, load.past) <= times.seconds(0, 0, 4, load.past)


@pytest.mark.parametrize("overlap", [0.0, 0.3, 0.9])
def test_neighbours_use_the_experts_that_their_overlap_says(overlap: float) -> None:
    for tokens in (2, 4, 8, 16):
        apart = count_apart(tokens, 8, 128, (), (overlap,))
        wanted = min(8 * (1 + (1 - overlap) * (tokens - 1)), used_experts(range(128), 8, 128, tokens, ()))
        assert used_experts(range(128), 8, 128, apart, ()) == pytest.approx(wanted, rel=1e-6)
    assert count_apart(4, 8, 128, (), ()) == 4 and count_apart(1, 8, 128, (), (overlap,)) == 1


def test_a_token_shares_experts_with_all_rows_before_it() -> None:
    """A text that turns between two topics shares nothing with its neighbour, and all with the one before that."""
    topics = np.stack([np.arange(4), 4 + np.arange(4)] * 50).astype(np.uint8)[:, None]
    record = replace(make_record(100, layers=1), ids=topics, batches=(1,) * 100)
    overlaps = measure_overlaps(record)
    assert overlaps == (0.0, *[1.0] * (MOST_DRAFTS - 1)) and measure_popularity(record).overlaps == overlaps
    for tokens, found in ((2, 8), (3, 8), (16, 8)):
        apart = count_apart(tokens, 4, record.experts, (), overlaps)
        assert used_experts(range(record.experts), 4, record.experts, apart, ()) == pytest.approx(
            min(found, used_experts(range(record.experts), 4, record.experts, tokens, ())), rel=1e-6
        )


@pytest.mark.parametrize("tokens", [2, 4, 8, 12])
def test_rows_of_a_record_use_as_many_experts_as_are_expected(tokens: int) -> None:
    """Of texts in which words come again: other stretches of the same record, counted by hand."""
    record = make_drifting_record(2000, 2)
    popularity = measure_popularity(record)
    apart = count_apart(tokens, record.used, record.experts, popularity.uses, popularity.overlaps)
    expected = used_experts(range(record.experts), record.used, record.experts, apart, popularity.uses)
    steps = record.ids[: record.tokens // tokens * tokens].reshape(-1, tokens, 2, record.used)
    counted = np.mean([len(np.unique(step[:, layer])) for step in steps for layer in range(2)])
    assert expected == pytest.approx(counted, rel=0.03)


def test_a_record_says_how_much_neighbours_share() -> None:
    record = make_record(200, layers=2)
    ids = record.ids
    by_hand = [
        len({*ids[t, layer]} & {*ids[t - 1, layer]}) / record.used
        for t in range(1, record.tokens)
        for layer in range(2)
    ]
    assert measure_overlaps(record)[0] == pytest.approx(sum(by_hand) / len(by_hand))
    assert measure_popularity(record).overlaps == measure_overlaps(record)
    assert measure_overlaps(replace(record, ids=ids[:3], batches=(3,)))[1:2] and not measure_overlaps(
        replace(record, ids=ids[:1], batches=(1,))
    )
