"""The scheduler against a machine whose time is simulated."""

from contextlib import nullcontext
from dataclasses import replace
from math import inf, isnan

import numpy as np
import pytest
import torch
from fake_machine import Ear, FakeMachine, answer, next_token
from hypothesis import given, settings
from hypothesis import strategies as st

from pshard.batch import DECODE, Batch, Span
from pshard.errors import UserError
from pshard.runtime.sampling import Sampler, Sampling
from pshard.runtime.sampling.chain import Penalties
from pshard.runtime.speculation.speculator import DraftSettings
from pshard.server.jobs import Ended, Job, Progress
from pshard.server.scheduling.pace import Pace
from pshard.server.scheduling.promises import Promises
from pshard.server.scheduling.request import Request
from pshard.server.scheduling.scheduler import Scheduler, run_step
from pshard.server.scheduling.tally import Tally

GREEDY = Sampling(temperature=0.0)


class Bench:
    """A scheduler with its machine; jobs come at given times."""

    def __init__(self, machine: FakeMachine, **promises) -> None:
        self.machine, self.clock = machine, machine.clock
        self.tally = Tally(self.clock.monotonic())
        self.scheduler = Scheduler(machine, Promises(**promises), self.tally)
        self.ears: dict[str, Ear] = {}

    def add(self, prompt, most=4, **job) -> Ear:
        name = f"j{len(self.ears)}"
        ear = self.ears[name] = Ear(self.clock)
        job = Job(name, tuple(prompt), most, **{"sampling": GREEDY, **job})
        self.scheduler.jobs.line.add(Request(job, ear, self.clock.monotonic()))
        return ear

    def step(self, given_up=lambda ids: False) -> bool:
        return run_step(self.scheduler, self.clock.monotonic, nullcontext(), lambda: None, given_up)

    def run(self, most=100_000) -> None:
        while self.scheduler.busy:
            assert self.step() or not self.scheduler.busy, "there is work, and nothing runs"
            most -= 1
            assert most, "it does not end"

    def run_whatever_comes(self, arrivals, data, meanwhile=lambda: None) -> None:
        """Jobs of (turn, tokens of the prompt, most, more of the job) come, and some are cancelled: no token is lost.
        meanwhile: called at each turn."""
        wanted, left = [], set()
        for turn in range(100_000):
            while arrivals and arrivals[0][0] <= turn:
                _, length, most, more = arrivals.pop(0)
                prompt = prompt_of(length % 3, length)
                self.add(prompt, most, **more)
                wanted.append((prompt, most))
            if data.draw(st.integers(0, 40)) == 0 and self.ears:
                gone = data.draw(st.sampled_from(sorted(self.ears)))
                left.add(gone)
                self.scheduler.jobs.end({gone}, Ended("cancelled"), self.clock.monotonic())
            meanwhile()
            if not self.step() and not arrivals:
                break
        for (name, ear), (prompt, most) in zip(self.ears.items(), wanted):
            expected = answer(prompt, min(most, self.machine.facts.longest - len(prompt)))
            if name in left and ear.ended.reason == "cancelled":
                assert ear.tokens == expected[: len(ear.tokens)]
            else:
                assert ear.ended.reason == "length" and ear.tokens == expected
        self.check_all_back()

    def check_all_back(self) -> None:
        counts = self.machine.pool.counts()
        assert counts.used == 0 and counts.free + counts.cached == counts.total
        assert not self.machine.pool.open_texts


class Odd:
    """Allows odd tokens, and gives up after some."""

    def __init__(self, most=1000) -> None:
        self.came, self.most = [], most

    def words(self):
        if len(self.came) == self.most:
            raise UserError("gave up")
        return np.packbits(np.arange(1024) % 2 == 1, bitorder="little").view(np.uint32)

    def mask(self, logits):
        return np.where(np.arange(len(logits)) % 2, logits, np.float32(-np.inf))

    def accept(self, token) -> None:
        self.came.append(token)

    def copy(self):
        copied = Odd(self.most)
        copied.came = [*self.came]
        return copied


def prompt_of(number: int, length: int) -> list[int]:
    return [(number * 7919 + i * 104729) % 1000 for i in range(length)]


jobs = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 700), st.integers(0, 40), st.sampled_from(("a", "b", "c"))),
    min_size=1, max_size=14,
)  # fmt: skip


@settings(max_examples=60)
@given(jobs, st.integers(2, 8), st.integers(14, 60), st.data())
def test_no_token_is_lost_whatever_comes_and_few_blocks_there_are(asked, sequences, blocks, data):
    bench = Bench(FakeMachine(sequences=sequences, longest=800, blocks=blocks))
    bench.run_whatever_comes([(turn, n, most, {"key": key}) for turn, n, most, key in sorted(asked)], data)


@settings(max_examples=40)
@given(jobs, st.sampled_from((0.25, 0.6, 1.0)), st.floats(0.7, 1.3))
def test_the_gap_is_kept_where_the_tiers_allow_it(asked, gap, slower):
    switch = {(a, b): 0.03 for a in (1, 4, 16, 128, 512) for b in (1, 4, 16, 128, 512) if a != b}
    bench = Bench(FakeMachine(sequences=8, longest=800, blocks=200, switch=switch, slower=slower), gap=gap)
    bench.add(prompt_of(9, 3), 30)
    arrivals = sorted(asked)
    for turn in range(100_000):
        while arrivals and arrivals[0][0] <= turn:
            _, length, most, key = arrivals.pop(0)
            bench.add(prompt_of(length, length), most, key=key)
        if not bench.step() and not arrivals:
            break
    slack = 1.3 if slower > 1 else 1.0  # a tier is known to be slow once it has run
    for ear in bench.ears.values():
        assert max(ear.gaps, default=0.0) <= gap * slack + 1e-6


def test_a_text_that_has_run_for_long_goes_on_after_a_move():
    bench = Bench(FakeMachine(), patience=1.0)
    ear = bench.add(prompt_of(1, 10), 60)
    for _ in range(40):
        bench.step()
    assert bench.clock.monotonic() > 1.0
    line = bench.scheduler.jobs.suspend()
    bench.scheduler = Scheduler(FakeMachine(clock=bench.clock), bench.scheduler.promises, bench.tally, line)
    bench.run()
    assert ear.ended.reason == "length" and ear.tokens == answer(prompt_of(1, 10), 60)


def test_a_long_prompt_keeps_the_gap_of_others_and_goes_on():
    bench = Bench(FakeMachine(longest=8192, blocks=400), gap=0.25)
    speaker = bench.add(prompt_of(1, 10), 200)
    bench.step()
    long = bench.add(prompt_of(2, 5000), 3)
    while not long.tokens:
        bench.step()
    assert max(speaker.gaps) <= 0.25
    assert long.events[-1][0] < 0.25 * (5000 / 120 + 3)  # each step filled the tier of 128
    bench.run()
    assert speaker.tokens == answer(prompt_of(1, 10), 200)


def test_a_prompt_runs_in_the_largest_tier_where_nobody_waits_for_a_token():
    bench = Bench(FakeMachine(longest=8192, blocks=400), gap=0.25)
    bench.add(prompt_of(2, 1024), 1)
    bench.run()
    assert bench.machine.tiers_run == [512, 512]


def test_a_gap_that_no_tier_keeps_starves_no_prompt():
    bench = Bench(FakeMachine(), gap=0.001)
    for i in range(8):
        bench.add(prompt_of(i, 300), 20)
    bench.run()
    assert all(len(ear.tokens) == 20 for ear in bench.ears.values())


def test_a_short_prompt_need_not_wait_for_a_long_one():
    bench = Bench(FakeMachine(longest=8192, blocks=400))
    long, short = bench.add(prompt_of(1, 4000), 2), bench.add(prompt_of(2, 50), 2)
    bench.run()
    assert short.events[-1][0] < long.events[-1][0] / 2


def test_no_more_than_two_prompts_are_computed_in_part():
    bench = Bench(FakeMachine(longest=8192, blocks=800))
    for i in range(6):
        bench.add(prompt_of(i, 900), 2)
    while bench.scheduler.busy:
        bench.step()
        parts = [run for run in bench.scheduler.jobs.running if run.remaining > 1]
        assert len(parts) <= 2


def test_keys_take_turns():
    bench = Bench(FakeMachine(sequences=1))
    many = [bench.add(prompt_of(i, 20), 2, key="many") for i in range(6)]
    few = bench.add(prompt_of(9, 20), 2, key="few")
    bench.run()
    assert few.events[0][0] < many[2].events[0][0]


def test_a_prompt_that_is_there_already_goes_before_one_without_room_once():
    bench = Bench(FakeMachine(sequences=4, longest=1024, blocks=20))
    shared = prompt_of(1, 300)
    bench.add(shared, 1)
    bench.run()
    runs = bench.add(prompt_of(2, 300), 60)
    bench.step()
    large = bench.add(prompt_of(3, 900), 1)
    cached = [bench.add([*shared[:256], i], 1) for i in range(2)]
    bench.run()
    begun = {id(ear): ear.events[0][0] for ear in (large, *cached)}
    assert begun[id(cached[0])] < begun[id(large)] < begun[id(cached[1])]
    assert len(runs.tokens) == 60


def test_choices_of_one_request_compute_its_long_prompt_once():
    bench = Bench(FakeMachine(longest=4096, blocks=300))
    for _ in range(4):
        bench.add(prompt_of(1, 2000), 3)
    bench.run()
    assert bench.tally.count["prompt_tokens"] < 2000 + 4 * 128
    assert bench.tally.count["cached_tokens"] >= 3 * 1900


def test_blocks_that_run_out_are_taken_from_the_youngest_which_loses_no_token():
    bench = Bench(FakeMachine(sequences=4, longest=640, blocks=12))
    ears = [bench.add(prompt_of(i, 100), 400) for i in range(4)]
    bench.run()
    assert [ear.tokens for ear in ears] == [answer(prompt_of(i, 100), 400) for i in range(4)]
    assert bench.tally.count["preemptions"] > 0
    assert ears[0].ended.reason == "length" and max(ears[0].gaps) < 1  # the oldest never waits
    bench.check_all_back()


def test_a_switch_is_worth_it_before_it_is_made():
    """Going down costs 0.2 s and wins 0.05 s a step: four steps stay in the tier."""
    switch = {(4, 1): 0.2, (1, 4): 0.2}
    bench = Bench(FakeMachine(tiers=(1, 4), seconds=(0.05, 0.1), sequences=4, switch=switch))
    bench.add(prompt_of(1, 4), 40)
    bench.run()
    tiers = bench.machine.tiers_run
    assert tiers == [4] * 5 + [1] * 35


def test_a_tier_whose_prompts_are_deep_gives_way_to_a_smaller_one():
    """The plan says what the cells of a long prompt cost: the first part that would break the gap is smaller."""
    machine = FakeMachine(longest=8192, blocks=400)
    tiers = list(machine.facts.times.tiers)
    tiers[3] = replace(tiers[3], prompt=((0.0, 0.0), (2000.0, 0.2)))
    machine.facts = replace(machine.facts, times=replace(machine.facts.times, tiers=tuple(tiers)))
    pass_time = machine.pass_time

    def pass_more(tokens):
        pass_time(tokens)
        if tokens > 16:
            machine.clock.sleep(1e-4 * (max(len(text.ids) for text in machine.pool.open_texts) - tokens))

    machine.pass_time = pass_more
    bench = Bench(machine, gap=0.25)
    speaker = bench.add(prompt_of(1, 10), 400)
    bench.step()
    machine.tiers_run.clear()
    bench.add(prompt_of(2, 2000), 1)
    for _ in range(60):
        bench.step()
    first = machine.tiers_run.index(16)
    assert set(machine.tiers_run[:first]) == {128} and set(machine.tiers_run[first:]) == {16}
    assert max(speaker.gaps) <= 0.25


def batch(decodes: int = 0, cells: int = 0, prompt: int = 0, past: int = 0) -> Batch:
    """Texts that decode, with so many cells in all, beside a prompt."""
    return Batch((Span(1, cells // max(1, decodes), kind=DECODE, texts=decodes),)).with_prompt(prompt, past)


def test_a_first_step_that_compiles_does_not_close_its_tier():
    """On a GPU the first step of a tier compiles kernels and captures graphs: it may take a hundred times as long."""
    pace = Pace(FakeMachine().facts)
    prompt, beside = batch(prompt=512), batch(4, 400, 1)
    planned = pace.expect(prompt, 512)
    pace.observe(prompt, 512, 100 * planned)
    assert pace.expect(prompt, 512) == pytest.approx(4 * planned)
    assert pace.largest_within(5 * planned, beside, 4) == 512
    for _ in range(12):
        pace.observe(prompt, 512, planned)
    assert pace.expect(prompt, 512) < 1.3 * planned


def test_the_first_steps_of_a_tier_count_alike():
    pace = Pace(FakeMachine().facts)
    for seconds in (0.24, 0.06, 0.06, 0.06):
        pace.observe(batch(4, 0, 0, 0), 4, seconds)
    assert pace.whole(4) == pytest.approx((0.24 + 3 * 0.06) / 4)


def test_what_steps_really_take_corrects_what_the_plan_predicts_of_them():
    machine = FakeMachine()
    times = machine.facts.times
    machine.facts = replace(
        machine.facts,
        times=replace(
            times,
            tiers=(
                *times.tiers[:4],
                replace(
                    times.tiers[4],
                    empty=((129.0, 0.2), (512.0, 0.5)),
                    decoding=((0.0, 0.0), (1000.0, 0.1)),
                    prompt=((0.0, 0.0), (100.0, 0.1)),
                ),
            ),
        ),
    )
    pace = Pace(machine.facts)
    part = batch(4, 500, 300, 50)
    planned = machine.facts.times.seconds(4, 500, 300, 50)
    assert pace.expect(part, 512) == planned > 0.3
    for _ in range(40):
        pace.observe(part, 512, 2 * planned)
    assert pace.expect(part, 512) == pytest.approx(2 * planned)
    assert pace.whole(512) == pytest.approx(2 * 0.5)
    pace.observe(batch(1, 100), 512, 0.07)  # a step that a smaller tier would cover says nothing of full ones
    assert pace.whole(512) == pytest.approx(2 * 0.5)
    assert pace.expect(batch(1, 100), 512) == pytest.approx(0.07)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(seed=3), Sampling(seed=3, top_k=0)])
@pytest.mark.parametrize("likely", [None, 0, 3])
def test_a_constraint_is_kept_to_by_the_best_of_what_it_allows(sampling, likely):
    """Words of bits go to the machine where the best rows are enough; a draw from whole logits has the same tokens."""
    bench, constraint = Bench(FakeMachine()), Odd()
    asked = []
    step = bench.machine.pool.step
    bench.machine.pool.step = lambda pieces, *_: asked.extend(pieces) or step(pieces)
    ear = bench.add(prompt_of(1, 5), 12, sampling=sampling, likely=likely, constrain=lambda: constraint)
    bench.run()
    assert constraint.came == ear.tokens and all(token % 2 for token in ear.tokens)
    whole = Sampler(sampling, Odd(), 1000)
    ids = prompt_of(1, 5)
    for token in ear.tokens:
        logits = np.zeros(1000, np.float32)
        logits[next_token(ids)], logits[(next_token(ids) + 1) % 1000] = 9.0, 5.0
        assert whole.choose(torch.from_numpy(logits)) == token
        ids.append(token)
    masked = likely != 3 and sampling.top_k
    assert {(p.mask is not None, p.full) for p in asked} == {(bool(masked), not masked)}


def test_a_grammar_that_gives_up_ends_its_own_job_only():
    bench = Bench(FakeMachine())
    good = bench.add(prompt_of(1, 20), 30)
    bad = bench.add(prompt_of(2, 20), 30, constrain=lambda: Odd(most=3))
    bench.run()
    assert len(good.tokens) == 30 and bench.scheduler.machine.pool.open_texts == []
    assert bad.ended.reason == "error" and bad.ended.asked and bad.ended.message == "gave up" and len(bad.tokens) == 3


def test_scored_prompts_have_log_probabilities_of_every_token_but_the_first():
    bench = Bench(FakeMachine(longest=4096, blocks=300))
    prompt = prompt_of(4, 700)
    prompt[600] = next_token(prompt[:600])
    bench.add(prompt, 1)
    bench.run()
    for most in (0, 1):
        ear = bench.add(prompt, most, scored=True, likely=2)
        bench.run()
        (scored,) = [e.scored for _, e in ear.events if isinstance(e, Progress) and e.scored]
        assert [s.token for s in scored] == prompt and isnan(scored[0].logprob)
        assert scored[600].logprob > -0.2 > scored[599].logprob
        assert scored[600].best[0][0] == prompt[600] and len(scored[600].best) == 2
        assert ear.tokens == answer(prompt, most)


@pytest.mark.parametrize(
    "sampling", [GREEDY, Sampling(seed=3), Sampling(seed=3, penalties=Penalties(1.3)), Sampling(top_k=0)]
)
def test_tokens_come_with_log_probabilities_of_unmodified_logits(sampling):
    bench = Bench(FakeMachine())
    ear = bench.add(prompt_of(1, 5), 6, sampling=sampling, likely=3)
    bench.run()
    found = [e.likely[0] for _, e in ear.events if type(e).__name__ == "Made"]
    assert [one.token for one in found] == ear.tokens and all(len(one.best) == 3 for one in found)
    ids = prompt_of(1, 5)
    for one in found:
        assert one.best[0][0] == next_token(ids)
        assert (one.logprob == one.best[0][1]) == (one.token == one.best[0][0])
        ids.append(one.token)


def test_a_stop_id_ends_a_text_and_is_no_part_of_it():
    bench = Bench(FakeMachine())
    expected = answer(prompt_of(1, 5), 9)
    ear = bench.add(prompt_of(1, 5), 50, stops=frozenset({expected[6]}))
    bench.run()
    assert ear.tokens == expected[:6] and ear.ended.reason == "stop"


def test_a_row_that_is_no_number_ends_its_own_job_only():
    machine = FakeMachine()
    machine.bad = lambda text: len(text.ids) == 25 and text.ids[0] == prompt_of(2, 1)[0]
    bench = Bench(machine)
    good, bad = bench.add(prompt_of(1, 20), 30), bench.add(prompt_of(2, 20), 30)
    bench.run()
    assert good.tokens == answer(prompt_of(1, 20), 30)
    assert bad.ended.reason == "error" and "not numbers" in bad.ended.message and len(bad.tokens) == 5
    bench.check_all_back()


def test_a_piece_that_the_machine_refuses_ends_its_own_job_only():
    machine = FakeMachine()
    machine.refuse = lambda piece: piece.ids[0] == prompt_of(2, 1)[0]
    bench = Bench(machine)
    good, bad = bench.add(prompt_of(1, 20), 30), bench.add(prompt_of(2, 20), 30)
    bench.run()
    assert good.tokens == answer(prompt_of(1, 20), 30)
    assert bad.ended.reason == "error" and bad.ended.message == "refused"


def test_a_constraint_that_cannot_be_made_ends_its_own_job_only():
    def fail():
        raise ZeroDivisionError("secret")

    bench = Bench(FakeMachine())
    bad, good = bench.add(prompt_of(2, 20), 30, constrain=fail), bench.add(prompt_of(1, 20), 30)
    bench.run()
    assert bad.ended.reason == "error" and "secret" not in bad.ended.message
    assert len(good.tokens) == 30


def test_a_listener_that_fails_ends_its_own_job_only():
    bench = Bench(FakeMachine())
    good, bad = bench.add(prompt_of(1, 20), 30), bench.add(prompt_of(2, 20), 30)
    bad.put = lambda event: (_ for _ in ()).throw(OSError("gone"))
    bench.run()
    assert len(good.tokens) == 30 and bench.tally.ended == {"length": 1, "cancelled": 1, "stop": 0, "error": 0}
    bench.check_all_back()


def test_a_job_that_waits_too_long_is_given_up():
    bench = Bench(FakeMachine(sequences=1), patience=1.0)
    long, late = bench.add(prompt_of(1, 20), 100), bench.add(prompt_of(2, 20), 3)
    bench.run()
    assert len(long.tokens) == 100 and late.ended == Ended("error", late.ended.message, True)


def test_a_tier_that_was_slow_once_is_tried_again():
    machine = FakeMachine(longest=100_000, blocks=4000)
    bench = Bench(machine, gap=0.3)
    bench.add(prompt_of(1, 10), 3000)
    bench.step()
    machine.slower = 3.0
    bench.add(prompt_of(2, 600), 1)
    for _ in range(30):
        bench.step()
    machine.slower = 1.0
    machine.tiers_run.clear()
    bench.add(prompt_of(3, 50_000), 1)
    for _ in range(400):
        bench.step()
    assert 128 in machine.tiers_run


def test_prefixes_are_read_for_a_part_of_the_gap_while_others_wait_for_a_token():
    bench = Bench(FakeMachine(), gap=0.8)
    bench.add(prompt_of(1, 40), 6)
    bench.step()
    bench.add(prompt_of(2, 40), 2)
    bench.run()
    assert bench.machine.pool.reading == [inf, pytest.approx(0.2)]


SWEEP = (0.6, 0.7, 0.8)  # seconds of two micro-batches of 512 tokens, of three and of four


def test_a_long_prompt_goes_in_one_sweep_where_nobody_waits_for_a_token():
    bench = Bench(FakeMachine(longest=8192, blocks=400, sweep=SWEEP))
    first, second = (bench.add(prompt_of(n, length), 1) for n, length in ((1, 1500), (2, 500)))
    bench.run()
    steps = [[count for _, count in step] for step in bench.machine.pool.steps]
    assert steps == [[1500, 500]] and first.events[-1][0] == second.events[-1][0] == pytest.approx(0.8, rel=0.03)
    assert bench.tally.steps[-1].prompts == 2000 and bench.tally.steps[-1].tier == 512


@pytest.mark.parametrize(("gap", "most"), [(0.75, 1536), (0.65, 1024), (0.55, 512), (0.25, 128)])
def test_a_sweep_beside_a_text_that_decodes_keeps_the_gap(gap, most):
    bench = Bench(FakeMachine(longest=8192, blocks=400, sweep=SWEEP), gap=gap)
    speaker = bench.add(prompt_of(1, 10), 200)
    bench.step()
    long = bench.add(prompt_of(2, 5000), 3)
    bench.run()
    assert max(speaker.gaps) <= gap
    assert max(sum(count for _, count in step) for step in bench.machine.pool.steps) == most
    assert speaker.tokens == answer(prompt_of(1, 10), 200) and long.tokens == answer(prompt_of(2, 5000), 3)


def test_sweeps_that_take_longer_than_predicted_become_shorter():
    """By a quarter: four micro-batches would take one second."""
    bench = Bench(FakeMachine(longest=16384, blocks=800, sweep=SWEEP, slower=1.25), gap=0.9)
    speaker = bench.add(prompt_of(1, 10), 400)
    bench.step()
    bench.add(prompt_of(2, 15000), 3)
    bench.run()
    assert max(speaker.gaps[8:]) <= 0.9
    assert max(sum(count for _, count in step) for step in bench.machine.pool.steps[8:]) == 1536


def test_where_decoding_alone_breaks_the_gap_prompts_at_most_double_it():
    tiers, seconds = (1, 4, 16, 128, 512), (1.3, 1.3, 1.3, 1.4, 1.6)
    bench = Bench(FakeMachine(tiers, seconds, longest=8192, blocks=400, sweep=(1.9, 2.5, 3.2)), gap=1.0)
    speaker = bench.add(prompt_of(1, 10), 30)
    bench.step()
    bench.add(prompt_of(2, 5000), 3)
    bench.run()
    assert max(sum(count for _, count in step) for step in bench.machine.pool.steps) == 1536
    assert max(speaker.gaps) == pytest.approx(2.5, abs=0.01)


def test_a_sweep_whose_jobs_are_all_given_up_ends_and_leaves_nothing():
    bench = Bench(FakeMachine(longest=8192, blocks=400, sweep=SWEEP))
    gone, asked = bench.add(prompt_of(1, 3000), 2), list[frozenset[str]]()

    def given_up(ids: frozenset[str]) -> bool:
        asked.append(ids)
        return True

    assert bench.step(given_up) and asked == [{"j0"}] and not bench.machine.pool.steps
    bench.scheduler.jobs.end({"j0"}, Ended("cancelled"), bench.clock.monotonic())
    assert gone.ended.reason == "cancelled"
    bench.check_all_back()
    other = bench.add(prompt_of(1, 3000), 2)
    bench.run()
    assert other.tokens == answer(prompt_of(1, 3000), 2)


def test_drafts_wait_while_a_prompt_goes_in_a_sweep():
    """A sweep has none: the pool refuses such a step."""
    drafts = DraftSettings("lookup", 3)
    bench = Bench(FakeMachine(longest=8192, blocks=400, sweep=SWEEP, drafts=drafts), gap=5.0)
    speaker = bench.add([1, 2, 3] * 5, 60)
    for _ in range(20):
        bench.step()
    bench.add(prompt_of(2, 4000), 3)
    bench.run()
    assert speaker.tokens == answer([1, 2, 3] * 5, 60)
    assert max(sum(count for _, count in step) for step in bench.machine.pool.steps) > 512


@settings(max_examples=40)
@given(jobs, st.integers(2, 8), st.integers(20, 90), st.data())
def test_no_token_is_lost_in_sweeps_whatever_comes(asked, sequences, blocks, data):
    tiers, seconds = (1, 8, 64), (0.05, 0.06, 0.1)
    machine = FakeMachine(tiers, seconds, sequences, longest=800, blocks=blocks, sweep=(0.12, 0.14, 0.2, 0.3))
    bench = Bench(machine, gap=0.15)
    bench.run_whatever_comes([(turn, n, most, {"key": key}) for turn, n, most, key in sorted(asked)], data)
