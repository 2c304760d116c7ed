"""Helpers that the system puts aside in a call: nobody waits for them, bits are the same, nothing comes later."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from delta_inputs import copy_case, run_case
from delta_inputs import make_case as make_delta_case
from test_native_experts import make_case, make_routes
from test_native_kernels import matrix
from test_native_rows import make_cache, make_rows

from pshard.model_config import Experts
from pshard.runtime.kernels.api import Packed, RopeTable, Routes, Segment
from pshard.runtime.kernels.cpu import native
from pshard.runtime.kernels.cpu.host import HostKernels

pytestmark = [
    pytest.mark.skipif(not native.is_available(), reason=f"CPU kernels: {native.why_missing()}"),
    pytest.mark.skipif(sys.platform != "linux", reason="threads are recalled on Linux only"),
]

POINTS = {"woken": 1, "has taken a chunk": 2, "has written": 3, "has said so": 4}  # Point in csrc/threads/pool.h
SENTINEL = 1234.5
TASKS = Path("/proc/self/task")

Call = Callable[[], torch.Tensor]  # computes from memory that stays as it is; a fresh result each time


def make_linear() -> Call:
    packed, _ = matrix("Q4_0", 2048, 1024)
    x, before = torch.randn(3, 1024), torch.randn(3, 2048)

    def call() -> torch.Tensor:
        out = before.clone()
        native.linear(x, packed, out, 3, accumulate=True)
        return out

    return call


def make_ffn() -> Call:
    gate, up, down = (matrix("Q8_0", *shape)[0] for shape in ((1024, 512), (1024, 512), (512, 1024)))
    x, before = torch.randn(70, 512), torch.randn(70, 512)

    def call() -> torch.Tensor:
        out = before.clone()
        native.ffn(x, gate, up, down, out, 70, accumulate=True)
        return out

    return call


def make_tiled() -> Call:
    if not suits_emulation():
        pytest.skip("emulated tiles need AVX-512 with bf16, which this machine lacks")
    packed, _ = matrix("Q8_0", 384, 256)
    x, before = torch.randn(40, 256), torch.randn(40, 384)

    def call() -> torch.Tensor:
        out, best = before.clone(), native.tiles()
        native.set_tiles("emulated")
        native.linear_tiled(x, packed, out, 40, accumulate=True)
        native.set_tiles(best)
        return out

    return call


def make_attention() -> Call:
    cells = torch.randn(2, 2000, 2, 64)
    q = torch.randn(3, 8 * 64)

    def call() -> torch.Tensor:
        out = torch.empty(3, 8 * 64)
        native.attention(q, cells[0], cells[1], ("f32", "f32"), [(0, 3, 1997, 0)], (8, 2, 64), 0.125, out)
        return out

    return call


def make_rope() -> Call:
    heads, segment = (8, 2, 128), Segment(0, 0, 60, 0, (0,))
    qkv, angles, cache = torch.randn(60, 12 * 128), torch.randn(64, 64), make_cache(("f32", "f32"), 2, 128, 1)
    rope, rows, norm = RopeTable(angles.cos(), angles.sin(), "halves"), make_rows([segment]), torch.randn(128)

    def call() -> torch.Tensor:
        out = qkv.clone()
        HostKernels().rope_store(out, heads, norm, norm, 1e-6, rope, rows, cache)
        return out

    return call


def make_norm() -> Call:
    x, before, weight = torch.randn(60, 2048), torch.randn(60, 2048), torch.randn(2048)

    def call() -> torch.Tensor:
        out = before.clone()
        HostKernels().rms_norm(x, weight, 1e-6, out, accumulate=True)
        return out

    return call


def make_experts() -> Call:
    """Some experts have enough tokens for tiles."""
    tokens, case = 200, make_case(("Q8_0",) * 3, 200, biases=True)
    x, before, routes = torch.randn(tokens, 256), torch.randn(tokens, 256), make_routes(tokens, True)

    def call() -> torch.Tensor:
        best = native.tiles()
        native.set_tiles("emulated" if suits_emulation() else "")
        out = case.run(x, routes, before, True).clone()
        native.set_tiles(best)
        return out

    return call


def make_routing() -> Call:
    rule = Experts(160, 6, 0)
    x, router = torch.randn(150, 256), torch.randn(160, 256)
    packed = Packed(router.view(torch.uint8).flatten(), "F32", 160, 256)

    def call() -> torch.Tensor:
        routes = Routes(torch.empty(150, 6, dtype=torch.int32), torch.empty(150, 6))
        HostKernels().route(x, packed, rule, routes)
        return torch.cat((routes.ids.float(), routes.weights), 1)

    return call


def make_delta(lengths: tuple[int, ...]) -> Call:
    """States and tails that change in place."""
    before = make_delta_case(lengths, key_heads=8, value_heads=16, head=128)

    def call() -> torch.Tensor:
        case = copy_case(before)
        run_case(HostKernels(), case)
        return torch.cat([part.flatten() for part in (case.out, case.states, case.tails)])

    return call


def suits_emulation() -> bool:
    best = native.tiles()
    try:
        native.set_tiles("emulated")
    except ValueError:
        return False
    native.set_tiles(best)
    return True


CALLS = {
    "linear": make_linear,
    "ffn": make_ffn,
    "tiles": make_tiled,
    "attention": make_attention,
    "rope": make_rope,
    "norm": make_norm,
    "experts": make_experts,
    "route": make_routing,
    "delta steps": lambda: make_delta((3, 1)),
    "delta chunks": lambda: make_delta((70, 9)),
}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = native.threads()
    native.set_threads(2)
    yield
    let_go()
    native.set_threads(before)


def helpers(call: Call) -> list[int]:
    """Thread ids of the pool's helpers."""
    native.set_threads(1)
    others = set(os.listdir(TASKS))
    native.set_threads(2)
    call()
    return [int(name) for name in set(os.listdir(TASKS)) - others]


def let_go() -> None:
    wait_until(lambda: native.stop_helpers(0) == 0)


def wait_until(come: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not come():
        assert time.monotonic() < end, "the helper never came there"


def stop_helper(point: int, call: Call, want: torch.Tensor) -> torch.Tensor:
    """Call until a helper stands still at `point`; the result of the call in which that came about."""
    wait_until(lambda: native.stop_helpers(0) == 0)
    found = [torch.empty(0)]

    def stands() -> bool:
        found[0] = call()
        assert torch.equal(found[0], want)
        return native.stop_helpers(point) == 1

    native.stop_helpers(point)
    wait_until(stands)
    return found[0]


@pytest.mark.parametrize(  # the points are the pool's, whatever is computed
    ("kind", "point"), [*(("experts", point) for point in POINTS), *((kind, "has taken a chunk") for kind in CALLS)]
)
def test_a_helper_that_is_put_aside_is_not_waited_for_and_writes_nothing_later(kind: str, point: str) -> None:
    torch.manual_seed(1)
    call = CALLS[kind]()
    native.set_threads(1)
    want = call()
    native.set_threads(2)
    out = stop_helper(POINTS[point], call, want)  # it stands in that call, which is over
    assert torch.equal(call(), want)  # and the next ones are done without it
    out.fill_(SENTINEL)
    let_go()  # it comes back late
    stop_helper(POINTS["woken"], call, want)  # and has gone on to other work
    assert (out == SENTINEL).all()


@pytest.mark.parametrize("kind", [k if k == "experts" else pytest.param(k, marks=pytest.mark.slow) for k in CALLS])
def test_a_helper_put_aside_by_the_system_at_any_instruction_changes_no_bit(kind: str) -> None:
    """Again and again it is moved, as it runs, to a processor that another program keeps busy."""
    torch.manual_seed(2)
    call = CALLS[kind]()
    native.set_threads(1)
    want = call()
    (helper,), usable = helpers(call), os.sched_getaffinity(0)
    busy = subprocess.Popen(["taskset", "-c", str(min(usable)), sys.executable, "-c", "while True: pass"])
    over = threading.Event()

    def move() -> None:
        while not over.wait(0.0005):
            os.sched_setaffinity(helper, usable - {min(usable)} or usable)
            time.sleep(0.0005)
            os.sched_setaffinity(helper, {min(usable)})

    mover, end = threading.Thread(target=move), time.monotonic() + 0.7
    mover.start()
    try:
        while time.monotonic() < end:
            assert torch.equal(call(), want)
    finally:
        over.set()
        mover.join()
        busy.kill()
        busy.wait()


def test_recalls_work_after_another_handler_took_their_signal() -> None:
    torch.manual_seed(3)
    call, seen = make_linear(), list[int]()
    want = call()
    before = signal.signal(signal.SIGURG, lambda number, _: seen.append(number))
    try:
        out = stop_helper(POINTS["has taken a chunk"], call, want)
        out.fill_(SENTINEL)
        let_go()
        stop_helper(POINTS["woken"], call, want)
        assert (out == SENTINEL).all() and not seen
        os.kill(os.getpid(), signal.SIGURG)  # and theirs still comes
        assert seen == [signal.SIGURG]
    finally:
        let_go()
        signal.signal(signal.SIGURG, before)


def test_helpers_sleep_soon_after_their_work() -> None:
    call = make_linear()
    (helper,) = helpers(call)

    def ran() -> float:
        return int((TASKS / str(helper) / "schedstat").read_text().split()[0]) / 1e9

    started = ran()
    for _ in range(50):
        call()
        time.sleep(0.003)
    assert ran() - started < 50 * 0.0006  # of which some is work


def fall_asleep(call: Call) -> None:
    call()
    wait_until(lambda: native.sleeping() == 1)


def test_a_helper_that_expects_work_is_awake_when_it_comes() -> None:
    call = make_linear()

    def is_awake() -> bool:
        fall_asleep(call)
        native.expect_work()
        return any(native.sleeping() == 0 for _ in range(300))

    wait_until(is_awake)  # on a busy machine not always


def test_a_helper_that_expected_work_in_vain_sleeps_until_some_came() -> None:
    call = make_linear()
    fall_asleep(call)
    native.expect_work()
    for _ in range(2):
        time.sleep(0.005)
        wait_until(lambda: native.sleeping() == 1)  # it gave up
    for _ in range(10):
        native.expect_work()
        assert all(native.sleeping() == 1 for _ in range(1000))


def test_nothing_is_expected_after_work_that_came_late() -> None:
    call = make_linear()
    fall_asleep(call)

    def stays_asleep() -> bool:
        native.expect_work()
        time.sleep(0.005)
        fall_asleep(call)
        native.expect_work()
        asleep = all(native.sleeping() == 1 for _ in range(1000))
        time.sleep(0.005)
        fall_asleep(call)
        return asleep

    for _ in range(10):
        wait_until(stays_asleep)  # an expectation is lost where a helper has the lock


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor only")
def test_helpers_keep_to_their_processors_and_the_caller_goes_where_it_may() -> None:
    usable = sorted(os.sched_getaffinity(0))
    call = make_linear()
    (helper,) = helpers(call)
    assert sorted(os.sched_getaffinity(helper)) == usable
    native.set_threads(1)
    others = set(os.listdir(TASKS))
    native.set_threads(2, usable[:2])
    call()
    (name,) = set(os.listdir(TASKS)) - others
    assert sorted(os.sched_getaffinity(int(name))) == usable[:2] and sorted(os.sched_getaffinity(0)) == usable
