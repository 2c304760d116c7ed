"""The timing loop, the rule for threads, and tasks that run at once."""

import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from manual_clock import ManualClock

from pshard.machine import MatmulTiming
from pshard.profile import timing_loop as timing
from pshard.profile.timed import time_kernels as kernels
from pshard.profile.timed.host_threads import pick_threads, thread_counts
from pshard.profile.timed.operands import OperandPool
from pshard.profile.timed.time_kernels import KernelBench, time_series
from pshard.profile.timed.time_links import LinkBench, copy_in_turn, link_from, run_together, time_copies
from pshard.profile.timing_loop import Pace, calls_in_graph, mean_seconds, median_seconds, replay_seconds
from pshard.runtime.devices.device import CpuDevice
from pshard.runtime.kernels.plain import PlainKernels
from pshard.steps.graph_runs import LAUNCH_BOUND


def test_repetitions_fill_the_budget_within_bounds():
    pace = Pace(1.0, least=3, most=10)
    assert pace.repetitions(0.2) == 5
    assert pace.repetitions(0.9) == 3
    assert pace.repetitions(1e-6) == 10
    assert pace.repetitions(2.0) == 1


def test_a_warm_up_is_left_out(monkeypatch):
    clock = ManualClock()
    monkeypatch.setattr(timing, "time", clock)
    assert median_seconds(lambda i: clock.sleep(0.05 if i == 0 else 0.002), Pace(0.02)) == pytest.approx(0.002)


def test_calls_on_the_host_count_as_they_add_up_but_for_stalls(monkeypatch):
    samples = [1.0, 1.0, 1.0, 1.5, 9.0]
    monkeypatch.setattr(timing, "_sample_cpu", lambda run, first, count: samples if count > 1 else [1e-3])
    assert mean_seconds(len, Pace(0.1)) == pytest.approx(4.5 / 4)
    assert median_seconds(len, Pace(0.1)) == 1.0


@pytest.mark.parametrize("can", [True, False])
def test_calls_that_a_step_makes_again_are_timed_as_it_makes_them(can: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, made = ManualClock(), list[str]()
    monkeypatch.setattr(timing, "time", clock)

    def run(i: int) -> None:
        made.append(f"made {i}")
        clock.sleep(0.003)

    def record(work: Callable[[], object]) -> Callable[[], None] | None:
        work()
        again = made[-1].replace("made", "again")
        return (lambda: (made.append(again), clock.sleep(0.001))[0]) if can or again != "again 4" else None

    seconds = replay_seconds(run, Pace(0.024), record)
    assert seconds == pytest.approx(0.001 if can else 0.003)
    if can:  # all others are made between the two times
        assert made[2:] == [f"{what} {i}" for what in ("made", "again") for i in range(2, 6)]
    assert replay_seconds(run, Pace(0.001), record) == pytest.approx(0.003)  # too slow to be made again


def test_every_call_gets_its_own_number():
    seen: list[int] = []
    median_seconds(seen.append, Pace(0.001, least=4, most=4))
    assert seen == list(range(6))


def test_a_slow_call_is_timed_once(monkeypatch):
    clock, seen = ManualClock(), []
    monkeypatch.setattr(timing, "time", clock)

    def run(i: int) -> None:
        seen.append(i)
        clock.sleep(0.01)

    assert median_seconds(run, Pace(0.001)) == pytest.approx(0.01)
    assert seen == [0, 1]


def test_what_heats_is_timed_when_it_has_heated(monkeypatch):
    """A GPU that keeps its clock for 0.1 s of work, and takes an eighth longer from then on."""
    clock, began = ManualClock(), []
    monkeypatch.setattr(timing, "time", clock)

    def run(i: int) -> None:
        began.append(clock.perf_counter())
        clock.sleep(0.0008 if began[-1] - began[0] < 0.1 else 0.0009)

    assert median_seconds(run, Pace(0.03)) == pytest.approx(0.0008)
    began.clear()
    assert median_seconds(run, Pace(0.03).under_load()) == pytest.approx(0.0009)
    long: list[int] = []

    def run_long(i: int) -> None:
        long.append(i)
        clock.sleep(1.0)

    assert median_seconds(run_long, Pace(0.03).under_load()) == pytest.approx(1.0)
    assert long == [0, 1], "what takes so long has heated by itself"


def test_no_token_of_a_timed_product_is_like_its_neighbour():
    cpu = torch.device("cpu")
    bench = KernelBench("host", PlainKernels(), cpu, OperandPool(1 << 20, cpu), Pace(0.1), 1.0)
    assert len(bench.activations(60, 32).unique(dim=0)) == 60
    assert bench.activations(300, 32).shape == (300, 32)


def test_a_copy_that_stood_still_is_timed_again(monkeypatch):
    stalls = iter([3e-3])

    def time_copy(link, host, direction, copy, pace, nbytes):
        return next(stalls, nbytes / 50e9) if nbytes == 64 << 20 else nbytes / 50e9

    monkeypatch.setattr("pshard.profile.timed.time_links._time_copy", time_copy)
    device = CpuDevice()
    try:
        rows = time_copies(LinkBench(device, *[torch.empty(0)] * 3), (16 << 20, 64 << 20, 256 << 20), Pace(0.1))
    finally:
        device.close()
    assert not list(stalls) and all(row.seconds == row.nbytes / 50e9 for row in rows)


def test_threads_are_the_fewest_within_three_percent():
    assert pick_threads({1: 10.0, 2: 19.0, 4: 30.0, 8: 30.5, 16: 29.0}) == 4
    assert pick_threads({1: 10.0, 2: 10.5}) == 2
    assert pick_threads({1: 10.0, 2: 10.2}) == 1


def test_one_of_many_cores_is_left_to_the_system_unless_it_is_needed():
    rates = {1: 10.0, 8: 80.0, 15: 113.0}
    assert pick_threads({**rates, 16: 121.0}) == 15
    assert pick_threads({**rates, 16: 127.0}) == 16
    assert pick_threads({1: 10.0, 3: 28.0, 4: 30.0}) == 4


@pytest.mark.parametrize("cores", [1, 2, 3, 6, 16, 100])
def test_thread_counts_reach_from_one_to_all_cores(cores):
    for quick in (True, False):
        counts = thread_counts(cores, quick)
        assert counts[0] == 1 and counts[-1] == cores
        assert list(counts) == sorted(set(counts))


def test_a_series_ends_after_a_slow_call_and_before_a_much_slower_one():
    sizes = (1, 64, 128, 512, 4096)
    assert time_series(sizes, 1.0, lambda n: n / 1e6) == [(n, n / 1e6) for n in sizes]
    assert [n for n, _ in time_series(sizes, 1.0, lambda n: n / 100)] == [1, 64, 128]
    assert [n for n, _ in time_series(sizes, 1.0, lambda n: n / 1000)] == [1, 64, 128, 512]
    assert [n for n, _ in time_series((4096, 1), 1.0, lambda n: 9.0)] == [1]


@pytest.mark.parametrize("stalled", [1, 16, 512])
def test_a_timing_that_its_neighbours_rule_out_is_measured_again(stalled):
    true, calls = {1: 1e-3, 16: 2e-3, 512: 20e-3}, []

    def seconds_of(size: int) -> float:
        calls.append(size)
        return true[size] * (20 if size == stalled and calls.count(size) <= 2 else 1)

    assert time_series(true, 1.0, seconds_of) == list(true.items())
    assert calls.count(stalled) == 3


def test_a_kernel_that_really_is_slower_for_fewer_tokens_stays_so():
    true = {1: 1e-3, 64: 9e-3, 128: 6e-3}
    assert time_series(true, 1.0, lambda size: true[size]) == list(true.items())


def test_a_matrix_that_was_timed_in_a_bad_moment_is_measured_again(monkeypatch: pytest.MonkeyPatch):
    def row(rows: int, cols: int, tokens: int, seconds: float, qtype: str = "Q4_0") -> MatmulTiming:
        return MatmulTiming("host", qtype, rows, cols, tokens, seconds)

    timed = [
        row(4096, 8192, 16, 1e-3),
        row(8192, 4096, 16, 2e-3),  # a bad moment
        row(8192, 8192, 16, 3e-3),  # is slower
        row(8192, 4096, 64, 9e-3),  # nothing to compare it with
        row(8192, 4096, 16, 9e-3, "Q6_K"),
        row(512, 512, 16, 1e-3),  # small ones take what a call takes
    ]
    asked = []

    def time_again(bench: KernelBench, qtype: str, rows: int, cols: int, tokens: list[int]) -> list[MatmulTiming]:
        asked.append((rows, cols))
        return [row(rows, cols, tokens[0], {4096: 1.1e-3, 8192: 3.1e-3}[cols])]

    monkeypatch.setattr(kernels, "time_matmul", time_again)
    again = kernels.repeat_unlike(SimpleNamespace(slow=1.0), timed)
    assert asked == [(8192, 4096), (8192, 8192)]
    assert [again.get(r, r) for r in timed] == [timed[0], replace(timed[1], seconds=1.1e-3), *timed[2:]]
    asked.clear()
    kernels.repeat_unlike(SimpleNamespace(slow=-1.0), timed)
    assert not asked


def test_a_link_from_memory_that_is_there_copies_it_and_unlocks_it_when_closed():
    device, memory, locks = CpuDevice(), torch.randint(0, 255, (1 << 20,), dtype=torch.uint8), []
    device.page_lock = lambda m: locks.append(m.data_ptr()) or True
    device.page_unlock = lambda m: locks.remove(m.data_ptr())
    link = link_from(device, memory, 1 << 19)
    run = copy_in_turn(link, "h2d", 1 << 19)
    run()
    assert torch.equal(link.remote, memory[: 1 << 19]) and locks == [memory.data_ptr()]
    run()
    assert torch.equal(link.remote, memory[1 << 19 :])
    link.close()
    device.close()
    assert not locks


def test_tasks_run_at_once_and_report_their_own_rates():
    def task(units: int, seconds: float):
        def run() -> int:
            time.sleep(seconds)
            return units

        return run

    rates = run_together({"a": task(1000, 0.005), "b": task(1, 0.005)}, 0.1)
    assert 0 < rates["b"] < rates["a"]
    assert rates["b"] <= 200 and rates["a"] <= 200_000


def test_a_failing_task_is_reported_and_ends_the_others():
    def fail() -> int:
        raise ValueError("broken lane")

    with pytest.raises(ValueError, match="broken lane"):
        run_together({"good": lambda: 1, "bad": fail}, 0.05)


@pytest.mark.parametrize(("device", "repeatable"), [("cuda", True), ("cuda", False), ("cpu", True), ("cpu", False)])
def test_kernels_are_timed_in_a_graph_for_as_many_tokens_as_the_runtime_captures(
    device: str, repeatable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "graph_seconds", lambda run, pace: 1.0)
    monkeypatch.setattr(kernels, "median_seconds", lambda run, pace, cuda: 2.0 if cuda else 3.0)
    monkeypatch.setattr(kernels, "mean_seconds", lambda run, pace: 3.0)
    plain = PlainKernels()
    plain.repeatable = repeatable
    pool = OperandPool(4096, torch.device("cpu"))
    bench = KernelBench("acc", plain, torch.device(device), pool, Pace(0.1), 1.0)
    bound = LAUNCH_BOUND
    got = [bench.seconds(lambda i: None, tokens) for tokens in (1, 64, 65, bound, bound + 1)]
    each = 1.0 if device == "cuda" and repeatable else 3.0 if device == "cpu" else 2.0
    assert got == [each] * 4 + [3.0 if device == "cpu" else 2.0]


def test_a_graph_holds_calls_for_a_quarter_of_the_pace_and_no_more_than_it_allows():
    pace = Pace(0.04)
    assert [calls_in_graph(pace, s) for s in (1e-6, 100e-6, 2e-3, 10e-3, 0.1)] == [256, 100, 8, 4, 1]


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [128, 1024])
def test_prompts_of_few_tokens_are_timed_without_their_launches(tokens: int) -> None:
    from pshard.runtime.build_executor import choose_kernels
    from pshard.runtime.devices.device import open_device

    device = open_device("cuda")
    try:
        fast, _, _ = choose_kernels(device, "fast", 1024)
        bench = KernelBench("acc", fast, device.torch_device, OperandPool(64 << 20, device.torch_device), Pace(0.05), 1)
        weights = bench.pool.rotate_weights("Q4_0", 512, 512)
        run = bench.linear_calls(weights, tokens)
        captured, launched = bench.seconds(run, tokens), median_seconds(run, bench.pace, cuda=True)
        assert 2e-6 < captured < 0.8 * launched  # 512 x 512: two kernels of a few us each
        shape = kernels.Attend(8, 2, 128)
        attention = kernels.time_attention(bench, shape, "bf16", tokens, (tokens, 4096))
        assert 2e-6 < attention[0].seconds < attention[1].seconds
        rows = kernels.time_elementwise(bench, 1024, 2048, shape, (tokens,))
        assert {r.what for r in rows} == {"norm", "two norms", "residual", "rope", "silu_mul"}
        (few,) = [r for r in kernels.time_elementwise(bench, 1024, 2048, shape, (1,)) if r.what == "quantise"]
        assert 2e-7 < few.seconds < 1e-5
        assert all(0 <= r.seconds < 1e-3 for r in rows)
    finally:
        device.close()
