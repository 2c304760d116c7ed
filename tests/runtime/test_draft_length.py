"""How many drafts a step verifies: it follows what holds and what steps take, and steps aside where drafts lose."""

import random

import pytest

from pshard.runtime.speculation.draft_length import DraftLength, StepSeconds
from pshard.runtime.speculation.prompt_lookup import PromptLookup


def play(holds: float, cost: float, tokens: int, share: float = 1.0, most: int = 7) -> tuple[float, DraftLength]:
    """Rate over that without drafts, of a text whose drafts hold with a chance; cost: of a row beside the first."""
    rng, seconds = random.Random(1), StepSeconds({1: 1.0, 16: 1.0})
    length, told, taken = DraftLength(most, seconds), 0, 0.0
    while told < tokens:
        wanted = length.choose()
        drafted = wanted if rng.random() < share else 0
        accepted = next((i for i in range(drafted) if rng.random() >= holds), drafted)
        step = 1 + cost * drafted
        seconds.observe(drafted + 1, 16 if drafted else 1, step)
        if wanted:
            length.note(drafted, accepted, step)
        told += accepted + 1
        taken += step
    return told / taken, length


@pytest.mark.parametrize("cost", [0.3, 0.6, 1.0])
@pytest.mark.parametrize("share", [1.0, 0.2])
def test_a_text_whose_drafts_never_hold_loses_little(cost: float, share: float) -> None:
    assert play(0.0, cost, 2000, share)[0] > 0.97


@pytest.mark.quick("0.9-0.02")
@pytest.mark.parametrize(("holds", "cost"), [(0.9, 0.02), (0.9, 0.2), (0.7, 0.1), (0.5, 0.1)])
def test_it_is_near_the_best_fixed_number(holds: float, cost: float) -> None:
    rates = []
    for k in range(1, 8):
        tokens = sum(holds**i for i in range(k + 1))
        rates.append(tokens / (1 + k * cost))
    assert play(holds, cost, 4000)[0] > 0.9 * max(1.0, *rates)


def test_drafts_are_tried_again_and_taken_up_where_they_hold_by_then() -> None:
    _, length = play(0.0, 0.3, 300)
    found = []
    for _ in range(400):
        if wanted := length.choose():
            length.note(wanted, wanted, 1.0)
        found.append(wanted)
    assert 0 in found and found[-1] > 3


def test_one_slow_step_changes_nothing() -> None:
    seconds = StepSeconds({1: 1.0, 16: 1.0})
    for _ in range(4):
        seconds.observe(1, 1, 1.0)
        seconds.observe(4, 16, 1.1)
    before = seconds.of(4, 16)
    seconds.observe(4, 16, 50.0)
    assert seconds.of(4, 16) == before


def test_what_a_plan_says_of_so_many_rows_goes_before_its_tier() -> None:
    """Of a step that never ran: twice as long with four rows, where the tier would take as long with two."""
    seconds = StepSeconds({1: 1.0, 4: 2.0, 16: 4.0}, (1.0, 1.2, 1.9, 2.0))
    assert [seconds.of(rows, seconds.tier(rows)) for rows in (1, 2, 4, 5)] == [1.0, 1.2, 2.0, 4.0]
    for _ in range(4):
        seconds.observe(1, 1, 3.0)
    assert [seconds.of(rows, seconds.tier(rows)) for rows in (2, 5)] == [pytest.approx(3.6), 12.0]
    assert seconds.of(2, 16) == 12.0  # under another tier than the one that covers them


def test_lookup_takes_the_longest_match_and_the_newest_of_equals() -> None:
    drafter = PromptLookup()
    drafter.see([1, 2, 3, 4, 50, 9, 2, 3, 4, 60, 8, 3, 4, 70, 1, 2, 3, 4])
    assert drafter.draft(3) == (50, 9, 2)
    drafter = PromptLookup()
    drafter.see([3, 4, 50, 9, 3, 4, 60, 9, 3, 4])
    assert drafter.draft(2) == (60, 9)


def test_lookup_goes_on_with_itself_where_a_text_repeats_and_drafts_nothing_new() -> None:
    drafter = PromptLookup()
    drafter.see([5, 6, 7, 5, 6, 7, 5])
    assert drafter.draft(8) == (6, 7, 5, 6, 7, 5, 6, 7)
    drafter = PromptLookup()
    drafter.see([1, 2, 3, 4])
    assert drafter.draft(4) == ()
    assert PromptLookup().draft(4) == ()
