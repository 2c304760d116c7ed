"""The thread that owns the engine, over machines that compute nothing."""

import threading
import time
from dataclasses import replace

import pytest
from fake_machine import Ear, FakeMachine, answer
from manual_clock import ManualClock

from pshard.errors import KernelRefused, NotPlanned, StepFailed, UserError
from pshard.runtime.sampling import Sampling
from pshard.server.jobs import Ended, Job, Refused
from pshard.server.scheduling.promises import Promises
from pshard.server.thread.engine_thread import EngineThread

GREEDY = Sampling(temperature=0.0)
PATIENCE = 60.0


class Waiter(Ear):
    """An ear for which a test can wait."""

    def __init__(self) -> None:
        super().__init__(time)
        self.over, self.began = threading.Event(), threading.Event()

    def put(self, event) -> None:
        super().put(event)
        self.began.set()
        if isinstance(event, Ended):
            self.over.set()

    def wait(self) -> Ended:
        assert self.over.wait(PATIENCE), "no end came"
        return self.ended


class Garage:
    """Loads fake machines; `prepare` makes trouble in the next one, `errors` are raised instead of loading."""

    budgets = (50, 100)

    def look_again(self, budget, plan, stopped):
        if plan:
            self.budgets = (50, 75, 100)
        if budget not in self.budgets:
            raise NotPlanned(f"no plan has a budget of {budget} MiB; run: pshard-plan")

    def __init__(self, **machine) -> None:
        self.given, self.machines, self.asked = machine, [], []
        self.prepare, self.errors, self.gate = (lambda m: None), [], threading.Event()
        self.gate.set()

    def load(self, budget):
        assert self.gate.wait(PATIENCE)
        self.asked.append(budget)
        if self.errors:
            raise self.errors.pop(0)
        machine = FakeMachine(**self.given)
        self.prepare(machine)
        self.machines.append(machine)
        return machine


@pytest.fixture
def started():
    threads = []

    def start(garage, **how):
        promises = Promises(**how.pop("promises", {}))
        states = []
        thread = EngineThread(garage, promises, tell=lambda s: states.append(s.state), **how)
        thread.states = states
        thread.start()
        threads.append(thread)
        return thread

    yield start
    for thread in threads:
        thread.drain(0)
        assert thread.join(PATIENCE)


def wait_for(what, patience=PATIENCE) -> None:
    end = time.monotonic() + patience
    while not what():
        assert time.monotonic() < end
        time.sleep(0.002)


def ready(thread, patience=PATIENCE) -> None:
    wait_for(lambda: thread.snapshot().state == "ready", patience)


def ask(thread, name="j", prompt=(1, 2, 3), most=5, **job) -> Waiter:
    ear = Waiter()
    thread.submit(Job(name, tuple(prompt), most, **{"sampling": GREEDY, **job}), ear)
    return ear


def test_jobs_are_refused_while_the_model_is_loaded_and_run_then(started):
    garage = Garage()
    garage.gate.clear()
    thread = started(garage)
    with pytest.raises(Refused) as refused:
        ask(thread)
    assert refused.value.status == 503 and refused.value.retry_after and not thread.snapshot().ready
    garage.gate.set()
    ready(thread)
    ear = ask(thread)
    assert ear.wait().reason == "length" and ear.tokens == answer((1, 2, 3), 5)


@pytest.mark.slow
def test_a_thousand_jobs_with_cancels_end_once_each_and_leave_nothing(started):
    garage = Garage(sequences=64, longest=1024, blocks=200)
    thread = started(garage, promises={"queue": 2000})
    ready(thread)
    ears = {}

    def submit(part: int) -> None:
        for i in range(part, 1000, 4):
            prompt = [(i * 31 + k) % 1000 for k in range(1 + i % 90)]
            ears[i] = prompt, ask(thread, f"j{i}", prompt, i % 37, key=str(i % 5))
            if i % 7 == 0:
                thread.cancel(f"j{i}")

    askers = [threading.Thread(target=submit, args=(part,)) for part in range(4)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    for i, (prompt, ear) in ears.items():
        ended = ear.wait()
        expected = answer(prompt, i % 37)
        assert ear.tokens == expected if ended.reason == "length" else ear.tokens == expected[: len(ear.tokens)]
        assert ended.reason == "length" or (ended.reason == "cancelled" and i % 7 == 0)
    wait_for(lambda: not thread.snapshot().running)
    counts = garage.machines[0].pool.counts()
    assert counts.used == 0 and counts.free + counts.cached == counts.total
    assert sum(n for _, n in thread.snapshot().counters.ended) == 1000


def test_what_does_not_fit_the_queue_is_refused_with_a_time_to_try_again(started):
    garage = Garage(sequences=1, longest=4096)
    hold = threading.Event()
    garage.prepare = lambda m: setattr(m, "fail", lambda pieces: not hold.wait(PATIENCE))
    thread = started(garage, promises={"queue": 2})
    ready(thread)
    ears = [ask(thread, f"j{i}") for i in range(3)]
    with pytest.raises(Refused) as refused:
        ask(thread, "late")
    assert refused.value.status == 429 and 1 <= refused.value.retry_after <= 120
    hold.set()
    assert [ear.wait().reason for ear in ears] == ["length"] * 3
    assert dict(thread.snapshot().counters.refused) == {429: 1}


@pytest.mark.parametrize(
    ("prompt", "words"),
    [((), "at least one"), ((1, 1000), "0 to 999"), ((-1,), "0 to 999"), ((1,) * 2048, "2048 tokens; the context is")],
)
def test_what_can_never_run_is_refused_at_once(started, prompt, words):
    thread = started(Garage())
    ready(thread)
    with pytest.raises(Refused, match=words) as refused:
        ask(thread, prompt=prompt)
    assert refused.value.status == 400


def test_a_step_that_fails_ends_all_jobs_and_the_model_is_loaded_again(started):
    garage = Garage()
    garage.prepare = lambda m: setattr(m, "fail", lambda pieces: len(garage.machines) == 1 and len(pieces) > 1)
    thread = started(garage)
    ready(thread)
    ears = [ask(thread, f"j{i}", (i, 1), 10_000) for i in range(3)]
    for ear in ears:
        ended = ear.wait()
        assert ended.reason == "error" and ended.retry and "CUDA" not in ended.message
    wait_for(lambda: thread.snapshot().counters.restarts == 1)
    ready(thread)
    assert garage.machines[0].closed and "restarting" in thread.states
    assert ask(thread).wait().reason == "length"


def test_an_engine_that_fails_again_and_again_is_given_up(started):
    garage = Garage()
    garage.prepare = lambda m: setattr(m, "fail", lambda pieces: True)
    thread = started(garage)
    for i in range(4):
        ready(thread)
        assert ask(thread, f"j{i}").wait().reason == "error"
        wait_for(lambda times=i + 1: times == 4 or thread.snapshot().counters.restarts == times)
    assert thread.join(PATIENCE)
    assert "made up" in str(thread.error) and thread.snapshot().state == "failed"
    with pytest.raises(Refused) as refused:
        ask(thread)
    assert refused.value.status == 503


@pytest.mark.parametrize("while_loading", [False, True])
def test_what_the_gpu_cannot_run_is_given_up_at_once(started, while_loading):
    garage = Garage()
    refused = KernelRefused("decode_kernel needs 141312 of shared memory: A card (sm_86) cannot run this")

    def fail(pieces):
        if while_loading:
            garage.errors.append(refused)
            return True
        raise refused

    garage.prepare = lambda m: setattr(m, "fail", fail)
    thread = started(garage)
    ready(thread)
    assert ask(thread).wait().reason == "error"
    assert thread.join(PATIENCE)
    assert thread.error is refused and len(garage.asked) == 1 + while_loading
    assert thread.snapshot().state == "failed"


def test_a_model_that_cannot_be_loaded_ends_the_thread_with_the_reason(started):
    garage = Garage()
    garage.errors = [UserError("no plan; run: pshard plan")]
    thread = started(garage)
    assert thread.join(PATIENCE)
    assert isinstance(thread.error, UserError) and thread.snapshot().state == "failed"


def test_a_drain_lets_jobs_end_and_takes_no_more(started):
    garage = Garage(longest=10_000)
    thread = started(garage)
    ready(thread)
    ear = ask(thread, most=3000)
    assert ear.began.wait(PATIENCE)
    thread.drain(60)
    with pytest.raises(Refused) as refused:
        ask(thread, "late")
    assert refused.value.status == 503
    assert ear.wait().reason == "length" and thread.join(PATIENCE) and garage.machines[0].closed
    assert thread.error is None


def test_a_drain_ends_what_is_late_with_an_error_event(started):
    garage = Garage(longest=1_000_000)
    thread = started(garage)
    ready(thread)
    ear = ask(thread, most=900_000)
    assert ear.began.wait(PATIENCE)
    thread.drain(0.05)
    ended = ear.wait()
    assert ended.reason == "error" and ended.retry and "stopping" in ended.message
    assert thread.join(PATIENCE)


def sweep_until_given_up(machine) -> None:
    """A sweep ends when nobody waits for it, and not before."""
    pool, step = machine.pool, machine.pool.step

    def waiting(pieces, meanwhile, given_up):
        if sum(len(piece.ids) for piece in pieces) > machine.facts.tiers[-1]:
            meanwhile()
            pool.sweeping = True
            wait_for(given_up)
        return step(pieces, meanwhile, given_up)

    pool.sweeping, pool.step = False, waiting


def test_a_job_that_is_cancelled_in_a_sweep_ends_it_and_others_go_on(started):
    garage = Garage(longest=8192, blocks=400, sweep=(0.6, 0.7, 0.8))
    garage.prepare = sweep_until_given_up
    thread = started(garage)
    ready(thread)
    gone = ask(thread, "gone", [1] * 2000)
    wait_for(lambda: garage.machines[0].pool.sweeping)
    after = ask(thread, "after", [2] * 300)
    time.sleep(0.05)
    assert not gone.events
    thread.cancel("gone")
    assert gone.wait().reason == "cancelled" and after.wait().reason == "length"
    assert after.tokens == answer([2] * 300, 5)
    wait_for(lambda: not thread.snapshot().running)
    assert garage.machines[0].pool.counts().used == 0 and len(garage.machines) == 1


def test_a_drain_does_not_wait_for_the_end_of_a_sweep(started):
    garage = Garage(longest=8192, blocks=400, sweep=(0.6, 0.7, 0.8))
    garage.prepare = sweep_until_given_up
    thread = started(garage)
    ready(thread)
    ear = ask(thread, prompt=[1] * 2000)
    wait_for(lambda: garage.machines[0].pool.sweeping)
    thread.drain(0.05)
    ended = ear.wait()
    assert ended.reason == "error" and ended.retry and "stopping" in ended.message
    assert thread.join(PATIENCE) and garage.machines[0].closed


def test_prompts_in_sweeps_go_on_under_another_budget(started):
    """One plan has sweeps, the other has none."""
    garage = Garage(longest=8192, blocks=600)
    garage.prepare = lambda machine: garage.given.update(sweep=() if garage.given.get("sweep") else (0.6, 0.7))
    thread = started(garage)
    ready(thread)
    prompts = [[(7 * i + k) % 1000 for k in range(1500)] for i in range(6)]
    for _ in range(2):
        ears = [ask(thread, f"j{len(garage.asked)}-{i}", prompt, 40) for i, prompt in enumerate(prompts)]
        assert ears[0].began.wait(PATIENCE)
        assert thread.move_budget(50).result(PATIENCE)
        for prompt, ear in zip(prompts, ears):
            assert ear.wait().reason == "length" and ear.tokens == answer(prompt, 40)
    assert [machine.facts.swept for machine in garage.machines] == [1, 3, 1]
    largest = [max(sum(count for _, count in step) for step in machine.pool.steps) for machine in garage.machines]
    assert largest[1] > 512 >= max(largest[0], largest[2])


def test_an_idle_server_gives_its_machine_back_and_a_job_wakes_it(started):
    garage = Garage()
    thread = started(garage, sleep_idle=0.05)
    ready(thread)
    wait_for(lambda: thread.snapshot().state == "sleeping")
    assert garage.machines[0].closed and thread.snapshot().blocks.total == 0
    ear = ask(thread)
    assert ear.wait().reason == "length" and ear.tokens == answer((1, 2, 3), 5)
    assert len(garage.machines) == 2


def test_a_server_that_cannot_wake_says_so_and_sleeps_on(started):
    garage = Garage()
    thread = started(garage, sleep_idle=0.02)
    wait_for(lambda: thread.snapshot().state == "sleeping")
    garage.errors = [UserError("the plan takes 100 MiB of VRAM and 9 MiB are free")]
    ended = ask(thread).wait()
    assert ended.reason == "error" and ended.retry and "9 MiB are free" in ended.message
    assert thread.snapshot().state == "sleeping" and thread.snapshot().counters.restarts == 0
    assert ask(thread).wait().reason == "length"


def test_a_job_that_is_cancelled_while_the_server_wakes_ends_once(started):
    garage = Garage()
    thread = started(garage, sleep_idle=0.02)
    wait_for(lambda: thread.snapshot().state == "sleeping")
    garage.gate.clear()
    ear = ask(thread, most=100_000)
    thread.cancel("j")
    garage.gate.set()
    assert ear.wait().reason == "cancelled"


def test_texts_go_on_under_another_budget(started):
    garage = Garage(longest=10_000)
    thread = started(garage)
    ready(thread)
    ears = [ask(thread, f"j{i}", (i, 2, 3), 400) for i in range(3)]
    assert ears[2].began.wait(PATIENCE)
    said = thread.move_budget(50).result(PATIENCE)
    assert said == "made up" and garage.asked == [None, 50]
    for i, ear in enumerate(ears):
        assert ear.wait().reason == "length" and ear.tokens == answer((i, 2, 3), 400)
    assert thread.snapshot().counters.budget_moves == 1


def test_a_budget_that_is_not_planned_is_refused(started):
    thread = started(Garage())
    ready(thread)
    for refused in (lambda: thread.move_budget(75), lambda: thread.find_budget(75, False)):
        with pytest.raises(Refused, match="no plan has a budget of 75 MiB") as told:
            refused()
        assert told.value.status == 400 and told.value.code == "no_such_budget"


def test_a_budget_that_is_planned_meanwhile_is_shown_and_moved_to(started):
    thread = started(Garage())
    ready(thread)
    assert thread.snapshot().plan.budgets == (50, 100)
    thread.find_budget(75, True)
    assert thread.snapshot().plan.budgets == (50, 75, 100)
    assert thread.move_budget(75).result(PATIENCE) == "made up"


def test_a_budget_that_cannot_be_taken_leaves_the_plan_before(started):
    garage = Garage(longest=10_000)
    thread = started(garage)
    ready(thread)
    ear = ask(thread, most=400)
    garage.errors = [StepFailed("out of memory")]
    with pytest.raises(UserError, match="out of memory"):
        thread.move_budget(50).result(PATIENCE)
    assert ear.wait().reason == "length" and ear.tokens == answer((1, 2, 3), 400)
    assert garage.asked == [None, 50, None]


def test_a_snapshot_says_what_runs_and_what_waits(started):
    garage = Garage(sequences=1, longest=10_000)
    hold = threading.Event()
    garage.prepare = lambda m: setattr(m, "fail", lambda pieces: len(m.pool.steps) > 9 and not hold.wait(PATIENCE))
    thread = started(garage)
    ready(thread)
    first, second = ask(thread, "a", most=100), ask(thread, "b", (4, 5))
    wait_for(lambda: thread.snapshot().counters.steps == 10 and thread.snapshot().waiting)
    shot = thread.snapshot()
    (running,), (waiting,) = shot.running, shot.waiting
    assert (running.job, running.state, running.prompt, running.made, running.most) == ("a", "decode", 3, 10, 100)
    assert (waiting.job, waiting.prompt) == ("b", 2)
    assert shot.blocks.used == 1 and shot.counters.steps == 10 and len(shot.steps) == 10
    assert shot.plan.tiers[0].steps == 8 and shot.distributions.gap.count == 9
    hold.set()
    assert first.wait() == second.wait() == Ended("length")


def test_readers_are_woken_once_a_step_while_the_machine_computes(started):
    """A reader that wakes wants Python's lock: it gets it where the engine's thread does not need it."""
    garage, seen = Garage(), []

    class Reader(Waiter):
        def wake(self) -> None:
            seen.append((garage.machines[0].pool.computing, threading.current_thread().name))

    garage.prepare = watch_steps
    thread = started(garage)
    ready(thread)
    ears = [Reader() for _ in range(4)]
    for i, ear in enumerate(ears):
        thread.submit(Job(f"j{i}", (i,), 30, GREEDY), ear)
    for ear in ears:
        ear.wait()
    wait_for(lambda: len(seen) == sum(len(ear.events) for ear in ears))
    assert {name for _, name in seen} == {"engine"}
    assert sum(computing for computing, _ in seen) >= 0.9 * len(seen)  # the last step's readers wait for no other


def watch_steps(machine) -> None:
    """Note in the pool while it computes."""
    pool, step = machine.pool, machine.pool.step
    pool.computing = False

    def watched(pieces, meanwhile, given_up):
        def told():
            pool.computing = True
            meanwhile()

        try:
            return step(pieces, told, given_up)
        finally:
            pool.computing = False

    pool.step = watched


def test_what_loading_takes_is_no_idle_time(started):
    clock, garage = ManualClock(), Garage()
    garage.prepare = lambda machine: clock.sleep(100)
    thread = started(garage, sleep_idle=50, clock=clock.monotonic)
    assert ask_when_ready(thread).wait().reason == "length"
    assert thread.states == ["ready"] and len(garage.machines) == 1


def ask_when_ready(thread) -> Waiter:
    wait_for(lambda: thread.states)
    return ask(thread)


def test_a_move_behind_one_that_ended_the_server_is_answered(started):
    garage = Garage()
    thread = started(garage)
    ready(thread)
    garage.errors += [UserError("no room")] * 20
    with thread._posts.changed:  # both are taken together
        moves = [thread.move_budget(mib) for mib in (50, 100)]
    for future in moves:
        with pytest.raises(UserError):
            future.result(PATIENCE)


def test_a_server_is_not_ready_before_all_else_is_prepared():
    gate, states = threading.Event(), []
    thread = EngineThread(Garage(), Promises(), tell=lambda now: states.append(now.state))
    thread.start(gate.wait)
    try:
        wait_for(lambda: thread.snapshot().plan is not None)  # it is loaded
        with pytest.raises(Refused):
            ask(thread)
        assert "ready" not in states
        gate.set()
        ready(thread)
    finally:
        gate.set()
        thread.drain(0)
        assert thread.join(PATIENCE)


def test_a_cache_that_cannot_be_written_is_told_once(started, monkeypatch, caplog):
    problems = ["", "cannot write it: No space", "cannot write it: No space", "", "cannot write it: read-only"]
    garage = Garage()
    thread = started(garage)
    ready(thread)
    pool = garage.machines[0].pool
    counts = pool.counts
    keeper = thread._keeper
    for problem in problems:
        monkeypatch.setattr(pool, "counts", lambda told=problem: replace(counts(), files_problem=told))
        keeper.count_blocks()
        assert thread.snapshot().blocks.files_problem == problem
    told = [record.getMessage() for record in caplog.records if "not kept in files" in record.getMessage()]
    assert [line.rpartition(": ")[2] for line in told] == ["No space", "read-only"]
