"""Steps that verify drafts tell the tokens that steps of one token tell, and have drafts where these pay."""

import random
from dataclasses import replace
from math import inf

import numpy as np
import pytest
from fake_machine import FakeMachine, answer, next_token
from hypothesis import given, settings
from hypothesis import strategies as st
from quick_service import QuickService
from test_scheduler import GREEDY, Bench, Odd, prompt_of

from pshard.runtime.sampling import Sampling
from pshard.runtime.sampling.chain import Penalties
from pshard.runtime.speculation.speculator import DraftSettings
from pshard.server.scheduling import scheduler
from pshard.server.scheduling.step_drafts import READ, LookupDrafter
from pshard.server.shapes.metrics_text import write_metrics
from pshard.speculation import LOOKUP, LOOKUP_MTP, Acceptance

LONGEST = 800


class Guess:
    """Drafts the tokens that come, each with a chance, and asks for no reading."""

    def __init__(self, chance: float) -> None:
        self.chance, self._random = chance, random.Random(1)

    def draft(self, asked):
        return [self.draft_one(*one) for one in asked]

    def draft_one(self, text, tokens, most):
        found = list(tokens)
        for _ in range(most):
            right = next_token(found)
            found.append(right if self._random.random() < self.chance else (right + 7) % 1000)
        return tuple(found[len(tokens) :])


def bench_of(chance=1.0, most=3, fixed=False, gap=inf, made_up=None, **machine) -> Bench:
    drafts = DraftSettings(LOOKUP, most, fixed, made_up)
    bench = Bench(FakeMachine(drafts=drafts, longest=LONGEST, **machine), gap=gap)
    if chance is not None:
        bench.scheduler.drafts._lookup = Guess(chance)
    return bench


jobs = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 400), st.integers(0, 60), st.sampled_from((None, 0, 1, 5))),
    min_size=1, max_size=12,
)  # fmt: skip


@settings(max_examples=30)
@given(jobs, st.integers(2, 8), st.integers(14, 60), st.sampled_from((0.0, 0.6, 1.0)), st.data())
def test_no_token_is_lost_or_doubled_whatever_comes(asked, sequences, blocks, chance, data):
    bench = bench_of(chance, 7, data.draw(st.booleans()), sequences=sequences, blocks=blocks)

    def preempt_one() -> None:
        if data.draw(st.integers(0, 40)) == 0 and len(bench.scheduler.jobs.running) > 1:
            bench.scheduler.jobs.preempt(bench.scheduler.jobs.running[-1])

    arrivals = [(turn, n, most, {"drafts": drafts}) for turn, n, most, drafts in sorted(asked, key=str)]
    bench.run_whatever_comes(arrivals, data, preempt_one)


@pytest.mark.parametrize(
    "sampling", [GREEDY, Sampling(seed=3), Sampling(seed=3, temperature=1.2, top_k=0, penalties=Penalties(1.3, 0.4))]
)
@pytest.mark.parametrize(("likely", "constrained"), [(None, True), (3, False)])
def test_tokens_and_log_probabilities_are_those_without_drafts(sampling, likely, constrained):
    told = []
    for chance, most in ((1.0, 0), (1.0, 3), (0.7, 7), (0.0, 1)):
        bench = bench_of(chance, most, bool(most))
        job = {"constrain": Odd} if constrained else {}
        ears = [bench.add(prompt_of(i, 5 + i), 20, sampling=sampling, likely=likely, **job) for i in range(3)]
        bench.run()
        made = [[e for _, e in ear.events if type(e).__name__ == "Made"] for ear in ears]
        told.append([(ear.tokens, [one for e in of for one in e.likely]) for ear, of in zip(ears, made)])
        bench.check_all_back()
    assert all(one == told[0] for one in told)
    assert all(len(tokens) == 20 and (not likely or len(likelies) == 20) for tokens, likelies in told[0])


def test_masks_go_along_the_drafts_and_end_them_where_a_token_may_not_come():
    bench, asked = bench_of(1.0, 7, True), []
    step = bench.machine.pool.step
    bench.machine.pool.step = lambda pieces, *_: asked.extend(pieces) or step(pieces)
    ear = bench.add(prompt_of(1, 5), 12, constrain=Odd)
    bench.run()
    verified = [piece for piece in asked if piece.drafts]
    assert verified and all(piece.mask.shape == (len(piece.ids), 32) for piece in verified)
    assert all(token % 2 for token in ear.tokens) and len(ear.tokens) == 12
    assert all(token % 2 for piece in verified for token in piece.ids[1:])


def test_a_step_tells_its_tokens_at_once_and_they_are_counted():
    bench = bench_of(1.0, 3, True)
    ear = bench.add(prompt_of(1, 5), 21)
    bench.run()
    told = [len(e.tokens) for _, e in ear.events if type(e).__name__ == "Made"]
    assert told == [1, 4, 4, 4, 4, 4] and ear.tokens == answer(prompt_of(1, 5), 21)
    counters = bench.tally.counters()
    assert counters.made_tokens == 21 and counters.drafted == counters.accepted == ((1, 5), (2, 5), (3, 5))
    gaps = bench.tally.gap.freeze()
    assert gaps.count == 20 and gaps.total == pytest.approx(sum(ear.gaps))
    assert bench.tally.steps[-1].decodes == 4


def test_a_stop_within_drafts_ends_a_text_and_nothing_behind_it_is_told():
    prompt = prompt_of(1, 5)
    expected = answer(prompt, 20)
    for place in range(3, 9):
        bench = bench_of(1.0, 7, True)
        ear = bench.add(prompt, 20, stops=frozenset(expected[place : place + 1]))
        bench.run()
        end = expected.index(expected[place])
        assert ear.ended.reason == "stop" and ear.tokens == expected[:end]
        bench.check_all_back()


def test_a_row_that_is_no_number_ends_a_text_behind_what_came_before():
    bench = bench_of(1.0, 7, True)
    bench.machine.bad = lambda text: len(text.ids) == 12
    ear = bench.add(prompt_of(1, 5), 20)
    bench.run()
    assert ear.ended.reason == "error" and ear.tokens == answer(prompt_of(1, 5), 7)
    bench.check_all_back()


def test_drafts_that_hold_are_verified_up_to_the_most_and_those_that_never_do_rest():
    good, bad, alone = bench_of(1.0, 7), bench_of(0.0, 7), bench_of(0.0, 0)
    for bench in (good, bad, alone):
        bench.add(prompt_of(1, 5), 700)
        bench.run()
    assert good.tally.count["steps"] < 180  # four tokens a step: the tier of so many rows is nearly as fast as one
    assert bad.clock.now < 1.03 * alone.clock.now
    assert sum(n for _, n in bad.tally.counters().drafted) < 80


def test_texts_whose_drafts_hold_have_them_beside_one_whose_drafts_never_do():
    class Some(Guess):
        def draft_one(self, text, tokens, most):
            self.chance = float(tokens[0] != prompt_of(1, 1)[0])
            return super().draft_one(text, tokens, most)

    bench = bench_of(1.0, 3, seconds=(0.05, 0.06, 0.1, 0.2, 0.5))
    bench.scheduler.drafts._lookup = Some(1.0)
    ears = [bench.add(prompt_of(i, 5), 200) for i in range(3)]
    bench.run()
    told = [sum(type(e).__name__ == "Made" for _, e in ear.events) for ear in ears]
    assert told[1] > 150 and max(told[0], told[2]) < 90
    assert all(ear.tokens == answer(prompt_of(i, 5), 200) for i, ear in enumerate(ears))


def test_drafts_go_where_they_hold_most_likely_and_a_step_keeps_the_gap():
    bench = bench_of(1.0, 3, gap=0.08, tiers=(1, 4, 16), seconds=(0.05, 0.06, 0.1))
    ears = [bench.add(prompt_of(i, 5), 60) for i in range(2)]
    bench.run()
    assert 16 not in bench.machine.tiers_run[4:]  # two texts have two drafts in the tier of four rows
    assert max(gap for ear in ears for gap in ear.gaps) <= 0.08
    assert bench.tally.count["steps"] < 45


def test_a_prompt_goes_on_beside_texts_with_drafts():
    bench = bench_of(1.0, 3, gap=0.3, sequences=2)
    first = bench.add(prompt_of(1, 5), 100)
    for _ in range(5):
        bench.step()
    second = bench.add(prompt_of(2, 500), 4)
    bench.run()
    assert first.tokens == answer(prompt_of(1, 5), 100) and second.tokens == answer(prompt_of(2, 500), 4)
    assert max(first.gaps) <= 0.3 and any(step.prompts and step.decodes > 1 for step in bench.tally.steps)


def test_a_request_may_ask_for_fewer_drafts_or_none():
    bench = bench_of(1.0, 3, True)
    ears = [bench.add(prompt_of(i, 5), 25, drafts=drafts) for i, drafts in enumerate((0, 1, 9, None))]
    bench.run()
    most = [max(len(e.tokens) for _, e in ear.events if type(e).__name__ == "Made") for ear in ears]
    assert most == [1, 2, 4, 4]


def test_only_so_many_rows_are_drafts_as_states_can_be_held_back_from():
    bench = bench_of(0.5, 3, True)
    bench.scheduler.drafts._facts = replace(bench.machine.facts, open_rows=5)
    ears = [bench.add(prompt_of(i, 5), 40) for i in range(5)]
    seen = []
    step = bench.machine.pool.step

    def watch(pieces, *_):
        seen.append(sum(len(piece.ids) for piece in pieces if piece.drafts))
        return step(pieces)

    bench.machine.pool.step = watch
    bench.run()
    assert 2 < max(seen) <= 5 and all(ear.tokens == answer(prompt_of(i, 5), 40) for i, ear in enumerate(ears))


def test_made_up_acceptance_holds_as_often_as_it_says_and_is_not_for_log_probabilities():
    bench = bench_of(None, 3, True, made_up=Acceptance((0.8, 0.64, 0.5)), blocks=200)
    ears = [bench.add(prompt_of(i, 5), 600) for i in range(3)]
    likely = bench.add(prompt_of(4, 5), 20, likely=1)
    bench.run()
    counters = bench.tally.counters()
    shares = [held / drafted for (_, held), (_, drafted) in zip(counters.accepted, counters.drafted)]
    assert np.allclose(shares, (0.8, 0.64, 0.5), atol=0.08)
    assert all(len(ear.tokens) == 600 for ear in ears) and likely.tokens == answer(prompt_of(4, 5), 20)


def test_what_settling_takes_counts_as_the_steps_that_verified(monkeypatch):
    clock, seen = [0.0], []
    bench = bench_of(1.0, 3, True)
    commit, observe = bench.machine.pool.commit, bench.scheduler.pace.observe

    def take_long(*asked):
        clock[0] += 5.0
        return commit(*asked)

    def watch(batch, tier, seconds):
        seen.append((batch.tokens > 1 and not batch.others.texts, seconds))
        observe(batch, tier, seconds)

    monkeypatch.setattr(scheduler, "perf_counter", lambda: clock[0])
    bench.machine.pool.commit, bench.scheduler.pace.observe = take_long, watch
    bench.add(prompt_of(0, 5), 40)
    bench.run()
    assert sum(verified for verified, _ in seen) > 5
    assert all((seconds > 5.0) == verified for verified, seconds in seen)


def test_a_program_drafts_for_those_texts_for_which_lookup_finds_nothing():
    class Found(Guess):
        def draft_one(self, text, tokens, most):
            return super().draft_one(text, tokens, most) if tokens[0] == prompt_of(1, 1)[0] else ()

    class Program(Guess):
        asked = ()

        def draft(self, asked):
            self.asked = (*self.asked, *(tokens[0] for _, tokens, _ in asked))
            return super().draft(asked)

    bench = Bench(FakeMachine(drafts=DraftSettings(LOOKUP_MTP, 3), longest=LONGEST), gap=inf)
    drafts = bench.scheduler.drafts
    drafts._lookup, drafts._program = Found(1.0), Program(0.0)
    ears = [bench.add(prompt_of(i, 5), 100) for i in range(3)]
    bench.run()
    told = [sum(type(e).__name__ == "Made" for _, e in ear.events) for ear in ears]
    assert told[1] < 50 and told[0] == told[2] == 100  # what the program drafts never holds, and rests
    assert set(drafts._program.asked) == {prompt_of(i, 1)[0] for i in (0, 2)}
    assert all(ear.tokens == answer(prompt_of(i, 5), 100) for i, ear in enumerate(ears))
    bench.check_all_back()


def test_a_long_text_is_read_over_several_steps():
    text, drafter = type("T", (), {})(), LookupDrafter()
    tokens = [1, 2, 3, 4, *range(10, 10 + 2 * READ), 1, 2, 3]
    assert [drafter.draft([(text, tokens, 2)]) for _ in range(3)] == [[()], [()], [(4, 10)]]
    assert drafter.draft([(text, [*tokens, 4], 2)]) == [(10, 11)]


def test_metrics_have_drafts_by_position():
    now = QuickService().snapshot()
    text = write_metrics(replace(now, counters=replace(now.counters, drafted=((1, 5), (2, 4)), accepted=((1, 3),))))
    assert 'pshard_drafts_verified_total{position="2"} 4' in text
    assert 'pshard_drafts_accepted_total{position="1"} 3' in text
