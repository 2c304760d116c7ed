"""Acceptance of drafts, and what a step with drafts brings."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pshard.errors import UserError
from pshard.jsonio import from_json, to_json
from pshard.speculation import (
    Acceptance,
    AcceptanceRecord,
    Drafting,
    PlannedDrafts,
    best_drafts,
    break_even,
    parse_acceptance,
)

CHANCES = st.floats(0, 1, allow_subnormal=False)
RATES = st.lists(CHANCES, min_size=1, max_size=6).map(lambda found: tuple(sorted(found, reverse=True)))
SECONDS = st.floats(1e-3, 1.0)


def test_a_shorter_list_goes_on_by_its_last_ratio() -> None:
    assert [Acceptance((0.8,)).at(i) for i in range(4)] == pytest.approx([1, 0.8, 0.64, 0.512])
    assert [Acceptance((0.9, 0.45)).at(i) for i in (1, 2, 3, 4)] == pytest.approx([0.9, 0.45, 0.225, 0.1125])
    assert Acceptance((0.5, 0.0)).at(3) == Acceptance((0.0, 0.0)).at(5) == 0.0


def test_tokens_of_a_step_are_those_of_the_page() -> None:
    for chance, tokens in {0.5: (1.5, 1.75, 1.875, 1.992), 0.8: (1.8, 2.44, 2.952, 4.161)}.items():
        assert [Acceptance((chance,)).tokens(k) for k in (1, 2, 3, 7)] == pytest.approx(tokens, abs=1e-3)


@given(RATES, st.integers(0, 15))
def test_more_drafts_never_bring_less_and_each_less_than_the_one_before(rates: tuple[float, ...], drafts: int) -> None:
    accepted = Acceptance(rates)
    assert 0 <= accepted.at(drafts + 1) <= accepted.at(drafts) <= 1
    assert accepted.tokens(drafts) <= accepted.tokens(drafts + 1) <= drafts + 2


@given(RATES, st.dictionaries(st.integers(1, 15), SECONDS, min_size=1), SECONDS, st.floats(0, 0.1), CHANCES)
def test_no_number_of_drafts_is_faster_than_the_best(rates, seconds, alone, drafting, share) -> None:
    accepted, seconds = Acceptance(rates, share=share), {**seconds, 0: alone}
    best = best_drafts(accepted, seconds, drafting)
    reached = {k: accepted.rate(k, alone, s, k * drafting) for k, s in seconds.items()}
    assert reached[best] >= max(reached.values()) * (1 - 1e-9)
    assert reached[0] == pytest.approx(1 / alone)


@given(st.integers(1, 15), SECONDS, SECONDS, st.floats(0, 0.1))
def test_drafts_pay_from_the_break_even_on(drafts: int, alone: float, step: float, drafting: float) -> None:
    chance = break_even(drafts, alone, step, drafting)
    if chance is None:
        assert Acceptance((1.0,)).rate(drafts, alone, step, drafting) < 1 / alone
        return
    for tried in (0.9 * chance, min(1.0, 1.1 * chance)):
        rate = Acceptance((tried,)).rate(drafts, alone, step, drafting)
        assert rate * alone >= 1 - 1e-9 if tried >= chance else rate * alone <= 1 + 1e-9


def test_what_takes_seconds_beside_a_step_asks_for_more_drafts_that_hold() -> None:
    planned = PlannedDrafts(3, 1.0, 1.1, 1.0, 0.02, 0.03)
    assert planned.rate(Acceptance((1.0,))) == pytest.approx(4 / 1.15)
    assert planned.rate(Acceptance((0.0,))) == pytest.approx(1 / 1.15)
    cheap, dear = break_even(3, 1.0, 1.1, 0.0), break_even(3, 1.0, 1.1, planned.beside)
    assert cheap is not None and dear is not None and cheap < dear
    assert planned.rate(Acceptance((dear,))) == pytest.approx(1.0)


def test_steps_without_a_draft_cost_a_step_of_one_row() -> None:
    seldom = Acceptance((0.8,), share=0.25)
    assert seldom.mean_tokens(1) == pytest.approx(1.2)
    assert seldom.rate(1, 1.0, 2.0) == pytest.approx(1.2 / 1.25)


@pytest.mark.parametrize("text", [".8,.9", "1.2", "-.1", "nan", "", ".8,,.5", "many", ".8;.7"])
def test_chances_that_rise_or_lie_outside_are_refused_with_the_flag(text: str) -> None:
    with pytest.raises(UserError, match=r"^--spec-rates .*from 0 to 1"):
        parse_acceptance(text, "--spec-rates")
    assert parse_acceptance(".8, .64,.51", "--spec-rates").rates == (0.8, 0.64, 0.51)


@pytest.mark.parametrize("kind, drafts", [("none", 1), ("lookup", 0), ("tea", 1), ("mtp", -1), ("mtp", 16)])
def test_a_drafter_and_its_drafts_agree(kind: str, drafts: int) -> None:
    with pytest.raises(ValueError):
        Drafting(kind, drafts)
    assert Drafting().rows == 1 and Drafting("lookup", 3).rows == 4


def test_a_record_finds_the_chances_that_drafts_were_accepted_with() -> None:
    record, chance, draw = AcceptanceRecord("lookup"), 0.7, random.Random(5)
    for _ in range(20_000):
        drafted = draw.choice((0, 1, 3, 7))  # a step's number of drafts may differ
        accepted = next((i for i in range(drafted) if draw.random() >= chance), drafted)
        record.add(drafted, accepted)
    found = record.acceptance
    assert found is not None and found.source == "recorded"
    assert found.rates[:4] == pytest.approx([chance**i for i in range(1, 5)], abs=0.02)
    assert found.share == pytest.approx(0.75, abs=0.02) and record.steps == 20_000


def test_records_of_two_runs_are_one_of_all_their_steps() -> None:
    one, other, both = (AcceptanceRecord("lookup") for _ in range(3))
    for record, steps in ((one, [(3, 1), (0, 0)]), (other, [(7, 7), (1, 0)])):
        for step in steps:
            record.add(*step)
            both.add(*step)
    one.join(other)
    assert one == both == AcceptanceRecord("lookup", 4, (3, 2, 1, 1, 1, 1, 1), (2, 1, 1, 1, 1, 1, 1))
    assert from_json(AcceptanceRecord, to_json(both)) == both


@pytest.mark.parametrize("counts", [(1, (2,), (0,)), (3, (2,), (3,)), (3, (2, 2), (1, 1)), (3, (1,), ()), (-1, (), ())])
def test_a_record_that_no_steps_have_is_refused(counts) -> None:
    with pytest.raises(ValueError):
        AcceptanceRecord("lookup", *counts)


@given(RATES, st.floats(-0.5, 0.5))
def test_a_shifted_acceptance_is_one_and_moves_each_draft(rates: tuple[float, ...], by: float) -> None:
    moved = Acceptance(rates).shift(by)
    assert (moved.tokens(4) - Acceptance(rates).tokens(4)) * by >= -1e-9


def test_acceptances_are_written_as_flags_take_them() -> None:
    assert str(Acceptance((0.8, 0.64, 0.512))) == ".8,.64,.512" and str(Acceptance((1.0, 0.0))) == "1,0"


def test_a_record_refuses_more_accepted_than_drafted() -> None:
    record = AcceptanceRecord("lookup")
    for drafted, accepted in ((1, 2), (3, -1)):
        with pytest.raises(ValueError):
            record.add(drafted, accepted)
    assert record.acceptance is None
