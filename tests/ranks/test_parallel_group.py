"""Ranks as real processes: sums repeat bit for bit, and a rank that fails brings the group down with its name."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import psutil
import pytest
import torch
from family_files import write_family
from family_forward import family_logits
from warm_python import WarmProcess, run_warm

from pshard.errors import UserError
from pshard.profile.timed.collective_times import measure_collectives
from pshard.runtime.devices.threads import rank_threads
from pshard.runtime.kernels.cpu import native
from pshard.runtime.ranks import start_ranks
from pshard.runtime.ranks.group import Group, init_group
from pshard.runtime.ranks.start_ranks import EXIT_RANK_LOST, end_ranks, find_failure

needs_native = pytest.mark.skipif(not native.is_available(), reason=f"no native library: {native.why_missing()}")
MAKERS = Path(__file__).resolve().parents[1] / "makers"
START = "import sys; from pshard.runtime.ranks.start_ranks import start_ranks; sys.exit(start_ranks(int(sys.argv[2]), 'rank_program', sys.argv[1:]))"  # noqa: E501


def slow(*case: object) -> object:
    """Parameters of a case that repeats, with other ranks or another way, what a quick one shows."""
    return pytest.param(*case, marks=pytest.mark.slow)


def command(scenario: str, ranks: int, out: Path) -> list[str]:
    return [sys.executable, "-P", "-c", START, scenario, str(ranks), str(out)]


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(MAKERS), os.environ.get("PYTHONPATH"))))
    return {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | {"PYTHONPATH": path}


def run_ranks(scenario: str, ranks: int, out: Path) -> subprocess.CompletedProcess:
    """Forked where that can be: what has CUDA cannot."""
    if not scenario.startswith("gpu") and not scenario.endswith(("@peers", "@nccl")):
        return run_warm(command(scenario, ranks, out), environment(), out)
    return subprocess.run(command(scenario, ranks, out), env=environment(), capture_output=True, text=True, timeout=100)


def expect_wide_norms(backend: str, folder: Path, rounded: float) -> None:
    """Two ranks give the logits of float64 forwards of models whose norms go over all heads, and of one that normalises
    what its ranks have summed, up to so much of the logits' mean square."""
    ids, families = [1 + 7 * i % 300 for i in range(90)], ("olmo2", "olmo3", "minimax-m2", "glm4")
    wanted = {}
    for family in families:
        recipe, weights, _ = write_family(folder / f"{family}.gguf", family, "Q8_0" if rounded > 1e-6 else "F32")
        wanted[family] = family_logits(recipe, weights, ids)
    done = run_ranks(f"wide_norms@{backend}", 2, folder)
    assert done.returncode == 0, done.stderr
    first, other = (torch.load(folder / f"wide_norms-{rank}.pt") for rank in range(2))
    assert len(first) == 2 * len(families)
    for (family, on_cpu), logits in first.items():
        missed = ((logits.double().numpy() - wanted[family]) ** 2).mean() / (wanted[family] ** 2).mean()
        assert missed < rounded, (family, on_cpu, missed)
        assert torch.equal(logits, other[family, on_cpu])


@pytest.mark.slow
def test_norms_over_all_heads_are_of_sums_over_processes(tmp_path: Path) -> None:
    expect_wide_norms("shm", tmp_path, rounded=1e-9)


def wait_for_sums(starter: subprocess.Popen | WarmProcess, out: Path) -> None:
    """Until the ranks of `keep_summing` have met."""
    end = time.monotonic() + 60
    while not (out / "pid").exists():
        assert time.monotonic() < end and starter.poll() is None
        time.sleep(0.05)


def processes_of(folder: Path) -> list[str]:
    """Processes that still run in this test's folder or with it among their arguments."""
    found = psutil.process_iter(["cmdline", "cwd"])
    lines = [" ".join([p.info["cwd"] or "", *(p.info["cmdline"] or ())]) for p in found]
    return [line for line in lines if str(folder) in line]


@pytest.fixture(scope="module")
def talk(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], Path]:
    """The folder in which so many ranks, started once, left what they summed, gathered, handed on and are."""

    @cache
    def start(ranks: int, backend: str) -> Path:
        out = tmp_path_factory.mktemp(f"{ranks}-{backend}")
        done = run_ranks(f"sums+gathers+hands+cores+network@{backend}", ranks, out)
        assert done.returncode == 0, done.stderr
        return out

    return start


@pytest.mark.parametrize(("ranks", "backend"), [(2, "shm"), slow(3, "shm"), slow(2, "gloo")])
def test_sums_are_right_and_the_same_bits_on_every_rank_and_in_every_run(
    talk: Callable[[int, str], Path], ranks: int, backend: str, tmp_path: Path
) -> None:
    done = run_ranks(f"sums@{backend}", ranks, tmp_path)
    assert done.returncode == 0, done.stderr
    runs = [torch.load(out / f"sums-{r}.pt") for out in (talk(ranks, backend), tmp_path) for r in range(ranks)]
    from rank_program import partial

    for i, first in enumerate(runs[0]):
        wanted = sum(partial(r, tuple(first.shape)).double() for r in range(ranks))
        torch.testing.assert_close(first.double(), wanted, rtol=1e-5, atol=1e-4)
        for other in runs[1:]:
            assert torch.equal(first, other[i])


@pytest.mark.parametrize(("ranks", "backend"), [(2, "shm"), slow(3, "shm"), slow(3, "gloo")])
def test_columns_are_gathered_in_rank_order_and_values_broadcast(
    talk: Callable[[int, str], Path], ranks: int, backend: str
) -> None:
    for rank in range(ranks):
        gathered, said = json.loads((talk(ranks, backend) / f"gathers-{rank}.json").read_text())
        assert gathered == [[0.0] * 3 + [ranks - 1.0] * 5] * 2  # of three the second has no columns
        assert said == {"tokens": [1, 2, 3], "by": 0}


@pytest.mark.parametrize(("ranks", "backend"), [(2, "shm"), slow(3, "shm"), slow(3, "gloo")])
def test_hidden_states_are_handed_on_in_order_whatever_their_size(
    talk: Callable[[int, str], Path], ranks: int, backend: str
) -> None:
    out = talk(ranks, backend)
    assert [(out / f"hands-{rank}").read_text() for rank in range(ranks)] == ["0"] + ["21"] * (ranks - 1)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no core affinity")
@pytest.mark.parametrize(
    ("host", "ranks", "cores", "in_turns", "expected"),
    [(32, 2, 32, False, 16), (32, 2, 32, True, 32), (15, 2, 8, False, 7), (2, 4, 1, False, 1), (64, 2, 16, False, 16)],
)
def test_ranks_divide_the_threads_that_serve_the_host_best(
    host: int, ranks: int, cores: int, in_turns: bool, expected: int
) -> None:
    assert rank_threads(host, ranks, cores, in_turns) == expected


def test_ranks_have_their_own_cores_and_threads(talk: Callable[[int, str], Path]) -> None:
    cores = sorted(os.sched_getaffinity(0))
    (first, threads), (second, _) = (json.loads((talk(2, "shm") / f"cores-{r}.json").read_text()) for r in range(2))
    assert threads == len(first)
    if len(cores) > 1:
        assert not set(first) & set(second)
    assert set(first) | set(second) <= set(cores)


@pytest.mark.parametrize("scenario", ["crash", slow("crash_in_line@shm"), slow("crash_in_line@gloo")])
def test_a_rank_that_dies_is_named_and_ends_the_others(scenario: str, tmp_path: Path) -> None:
    start = time.monotonic()
    done = run_ranks(scenario, 3, tmp_path)
    assert done.returncode == 9
    assert "rank 1 of 3 ended with code 9" in done.stderr
    assert time.monotonic() - start < 60
    assert not processes_of(tmp_path)


def test_of_several_ranks_that_fail_the_one_with_a_reason_counts() -> None:
    def end(*codes: int) -> int | None:
        processes = [subprocess.Popen([sys.executable, "-Sc", f"raise SystemExit({code})"]) for code in codes]
        for process in processes:
            process.wait()
        return find_failure(processes)

    assert end(0, 0) is None
    assert end(EXIT_RANK_LOST, 0, EXIT_RANK_LOST) == 0
    assert end(EXIT_RANK_LOST, 2, 0) == 1
    assert end(2, EXIT_RANK_LOST, 9) == 2


@needs_native
def test_a_rank_that_never_comes_to_a_sum_is_named(tmp_path: Path) -> None:
    done = run_ranks("late", 2, tmp_path)
    assert done.returncode == 2
    assert "rank 1 did not come to a sum within 1 s" in done.stderr
    assert not processes_of(tmp_path)


@needs_native
def test_ranks_of_one_host_sum_in_shared_memory(talk: Callable[[int, str], Path]) -> None:
    assert [(talk(2, "shm") / f"network-{rank}").read_text().split()[0] for rank in range(2)] == ["shm", "shm"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "named"),
    [("stop", "rank 1 died or hangs"), ("stop_first", "rank 0 or the process that started it died or hangs")],
)
def test_a_rank_that_hangs_is_named_and_ended(scenario: str, named: str, tmp_path: Path) -> None:
    done = run_ranks(scenario, 2, tmp_path)
    assert done.returncode == 75
    assert named in done.stderr
    assert not processes_of(tmp_path)


@pytest.mark.slow
def test_a_group_that_was_stopped_as_a_whole_goes_on(tmp_path: Path) -> None:
    python, *flags, code, scenario, ranks, out = command("keep_summing_watched", 2, tmp_path)
    alone = f"import os; os.setsid(); {code}"  # in a group of its own, which a shell stops
    starter = WarmProcess([python, *flags, alone, scenario, ranks, out], environment(), cwd=tmp_path)
    try:
        wait_for_sums(starter, tmp_path)
        os.killpg(starter.pid, signal.SIGSTOP)
        time.sleep(6)  # longer than ranks wait for a sign of life
        os.killpg(starter.pid, signal.SIGCONT)
        time.sleep(3)
        assert starter.poll() is None and len(processes_of(tmp_path)) == 3
        os.killpg(starter.pid, signal.SIGINT)
        assert starter.wait(timeout=30) == 130
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(starter.pid, signal.SIGKILL)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks Linux who is stopped")
def test_a_rank_that_is_stopped_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_ranks, "GRACE_SECONDS", 30.0)
    ranks = [subprocess.Popen([sys.executable, "-Sc", "import time; time.sleep(600)"]) for _ in range(2)]
    os.kill(ranks[1].pid, signal.SIGSTOP)
    while psutil.Process(ranks[1].pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    start = time.monotonic()
    end_ranks(ranks)
    assert time.monotonic() - start < 15 and [rank.poll() for rank in ranks] == [-signal.SIGTERM, -signal.SIGKILL]


@pytest.mark.parametrize("together", [True, False])
def test_a_line_is_begun_where_answers_and_errors_go_to_one_place(tmp_path: Path, together: bool) -> None:
    say = "print('half', end='', flush=True); start_ranks.end_line(); print('error', file=sys.stderr)"
    code = f"import sys; from pshard.runtime.ranks import start_ranks; {say}"
    with open(tmp_path / "out", "w") as out, open(tmp_path / "other", "w") as other:
        subprocess.run([sys.executable, "-c", code], stdout=out, stderr=out if together else other, check=True)
    assert (tmp_path / "out").read_text() == ("half\nerror\n" if together else "half")


def test_an_error_of_the_user_is_said_once(tmp_path: Path) -> None:
    done = run_ranks("user_error", 2, tmp_path)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines() == ["error: the budget is too small"]


def test_a_rank_that_fails_while_its_watch_is_in_the_store_ends_with_its_own_error(tmp_path: Path) -> None:
    done = run_ranks("careless", 2, tmp_path)
    assert done.returncode == 2 and "error: enough" in done.stderr.splitlines(), done.stderr
    assert "terminate called" not in done.stderr  # nor does rank 1 abort


@pytest.mark.slow
def test_ranks_that_end_after_the_store_is_gone_have_not_failed(tmp_path: Path) -> None:
    done = run_ranks("leaves_early", 2, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("number", [signal.SIGINT, slow(signal.SIGTERM), slow(signal.SIGKILL)])
def test_ending_the_starter_ends_the_ranks(number: signal.Signals, tmp_path: Path) -> None:
    starter = WarmProcess(command("keep_summing", 2, tmp_path), environment(), stderr=subprocess.PIPE, cwd=tmp_path)
    wait_for_sums(starter, tmp_path)
    assert len(processes_of(tmp_path)) == 3
    starter.send_signal(number)
    code = starter.wait(timeout=30)
    assert code == (-9 if number == signal.SIGKILL else 130)
    end = time.monotonic() + 10
    while processes_of(tmp_path):
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.slow
def test_the_same_program_runs_under_torchrun(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = [str(MAKERS / "rank_program.py"), "gathers", "2", str(tmp_path)]
    done = subprocess.run([*torchrun, *program], env=environment(), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "gathers-1.json").exists()


@pytest.mark.slow
def test_a_command_that_torchrun_started_alone_starts_its_ranks_itself(tmp_path: Path) -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    alone |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    done = run_warm(command("gathers", 2, tmp_path), environment() | alone, tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "gathers-1.json").exists()


def test_one_rank_needs_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    group, tensor = init_group(1, "cpu"), torch.ones(3)
    group.all_reduce(tensor)
    assert type(group) is Group and torch.equal(tensor, torch.ones(3))
    assert group.gather_columns(tensor) is tensor and group.broadcast((1, 2)) == (1, 2)


def test_another_number_of_ranks_than_started_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="2 ranks were started, but the model is to run on 3; start 3 with torchrun"):
        init_group(3, "cpu")


@pytest.mark.parametrize(
    ("named", "variables"),
    [
        ("WORLD_SIZE is ''", {"WORLD_SIZE": ""}),
        ("RANK is 'x'", {"RANK": "x"}),
        ("RANK is '2'", {"RANK": "2"}),
        ("LOCAL_WORLD_SIZE is '3'", {"LOCAL_WORLD_SIZE": "3"}),
        ("LOCAL_RANK is '1'", {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "1"}),
        ("not MASTER_ADDR", {"MASTER_ADDR": ""}),
        ("MASTER_PORT is ''", {"MASTER_PORT": ""}),
    ],
)
def test_variables_that_describe_no_group_are_named(
    named: str, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    usual = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in (usual | variables).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=named):
        init_group(2, "cpu")


def test_all_reduces_are_timed_for_the_profile() -> None:
    timings = measure_collectives("cpu", (2,), (16 << 10, 1 << 20))
    assert [(t.ranks, t.nbytes) for t in timings] == [(2, 16 << 10), (2, 1 << 20)]
    assert all(t.seconds > 0 and t.backend in ("shm", "gloo") for t in timings)


@pytest.mark.slow
def test_gloo_is_timed_beside_shared_memory() -> None:
    (timing,) = measure_collectives("cpu", (2,), (16 << 10,), shared_memory=False)
    assert timing.backend == "gloo" and timing.seconds > 0
