"""Launches on a device that runs them once, then captures what they do, then repeats what was captured."""

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pshard.runtime.kernels.cpu import native
from pshard.runtime.meanwhile import Meanwhile
from pshard.runtime.walks.program import Program, compile_steps
from pshard.runtime.walks.walk import MicroBatch, PromptGraphs, Walk
from pshard.steps.graph_runs import is_launch_bound
from pshard.steps.move import hand_over
from pshard.steps.step import AllReduce
from pshard.tensor import TensorSpec


class RecordingDevice:
    """Does and records transfers as CudaDevice does kernels in a graph."""

    kind = "cuda"

    def __init__(self) -> None:
        self._graphs: dict[tuple, list[Callable[[], Any]]] = {}
        self._held: list[Callable[[], Any]] | None = None

    def do(self, work: Callable[[], Any]) -> None:
        if self._held is None:
            work()
        else:
            self._held.append(work)

    def send(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        self.do(lambda: dst.copy_(src))

    bring = receive = send

    def repeat(self, key: tuple, worth_it: bool, work: Callable[[], Any]) -> None:
        assert worth_it
        if key in self._graphs:
            for done in self._graphs[key]:
                done()
            return
        work()
        self._held = []
        work()
        self._graphs[key], self._held = self._held, None

    def computing(self) -> Any:
        return contextlib.nullcontext()

    def mark(self) -> object:
        return object()

    def host_wait(self, event: object) -> None:
        pass


def make_space() -> SimpleNamespace:
    tensors = {"hidden": torch.zeros(4, 2), "branch": torch.zeros(4, 2), "logits": torch.zeros(64, 8)}
    return SimpleNamespace(tensors=tensors, rows=lambda name, n: tensors[name][:n])


def make_walk(device: RecordingDevice, host: SimpleNamespace, acc: SimpleNamespace, **group: Any) -> Walk:
    """A walk whose hidden states are the accelerator's."""
    kernels = SimpleNamespace(repeatable=True, fuses_sums=True, forget=lambda: None)
    context: Any = SimpleNamespace(
        device=device, group=SimpleNamespace(**group), transfers=SimpleNamespace(link_bytes=0),
        host=SimpleNamespace(is_locked=True, side=SimpleNamespace(space=host)), sum_rows={}, sums=False,
        spec=SimpleNamespace(config=SimpleNamespace(selection=None)),
        meanwhile=Meanwhile(),
    )  # fmt: skip
    tier: Any = SimpleNamespace(tokens=1, side=SimpleNamespace(space=acc, kernels=kernels), arriving={})
    logits: Any = SimpleNamespace(made=1, kept=[], is_brought=False, fits=lambda: True)
    rows: Any = SimpleNamespace(tokens=1, cells=1024, longest=0)
    ids = torch.zeros(1, dtype=torch.int64)
    batch = MicroBatch(ids, ids, (), rows, rows, ())
    walk = Walk(context, None, tier, batch, logits, PromptGraphs(0))  # type: ignore[arg-type]
    walk._side = "acc"
    return walk


@pytest.mark.parametrize("fused_elsewhere", [True, False])
def test_a_repeated_sum_takes_the_part_that_the_cpu_made_now(fused_elsewhere: bool) -> None:
    device, host, acc = RecordingDevice(), make_space(), make_space()
    group = {
        "size": 2,
        "add_sum": lambda hidden, part: device.do(lambda: hidden.add_(2 * part)),  # the other rank's part is the same
        "row_exchange": lambda *shape: object() if fused_elsewhere else None,
    }
    for hidden, part in ((1.0, 10.0), (2.0, 20.0), (3.0, 30.0)):
        acc.tensors["hidden"].fill_(hidden)
        walk = make_walk(device, host, acc, **group)
        walk.walk(Program((hand_over("cpu", 8),)))
        host.tensors["branch"].fill_(part)  # a CPU unit computes; the next unit is on the CPU, too
        walk.walk(compile_steps((hand_over("acc", 8), AllReduce("f", 8), hand_over("cpu", 8))))
        assert host.tensors["hidden"][0, 0].item() == hidden + 2 * part


@pytest.mark.parametrize("kind, before", [("cuda", ["expect", "wait"] * 2), ("cpu", ["wait"] * 2)])
def test_the_cpus_threads_wake_while_the_gpu_computes_what_they_wait_for(
    kind: str, before: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    device, done = RecordingDevice(), list[str]()
    device.kind = kind
    monkeypatch.setattr(native, "expect_work", lambda: done.append("expect"))
    monkeypatch.setattr(device, "host_wait", lambda event: done.append("wait"))
    monkeypatch.setattr(device, "receive", lambda here, there: done.append("wait"))
    walk = make_walk(device, make_space(), make_space())
    walk.walk(Program((hand_over("cpu", 8),)))  # nothing brought them
    walk._side, walk._left = "acc", object()  # a graph brings them
    walk.walk(Program((hand_over("cpu", 8),)))
    assert done == before


def test_what_prompts_launch_again_is_captured_and_leaves_graphs_to_small_batches() -> None:
    graphs, keys = PromptGraphs(2), (1, 2, 1, 3, 2, 3, 3, 1, 2)
    captured = [graphs.may_repeat((key,)) for key in keys]
    assert captured == [False, False, True, False, True, False, False, True, True]


@pytest.mark.parametrize(("width", "experts", "tokens", "bound"), [
    (2048, 0, 1024, True),  # of any size
    (2048, 0, 4096, True), (8192, 0, 1024, True), (8192, 0, 4096, False), (2048, 0, 4097, False),
    (8192, 8, 4096, True),  # an eighth of the experts is used
])  # fmt: skip
def test_large_prompts_are_captured_where_units_are_small(width: int, experts: int, tokens: int, bound: bool) -> None:
    kind = SimpleNamespace(parts=(lambda config: (1, experts)) if experts else None)
    matrix = TensorSpec("w", "Q4_0", (width, width), experts)
    units: Any = [SimpleNamespace(kind=kind, matrices=(matrix, TensorSpec("s", "F32", (1, 1))))]
    assert is_launch_bound(units, None, tokens) == bound  # type: ignore[arg-type]
