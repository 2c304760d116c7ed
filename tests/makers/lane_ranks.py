"""Ranks, as threads, whose CPU stands for a GPU more closely: a thread of each computes what it was given while the one
that gives goes on, and what a graph would hold is done as it was written when it was captured."""

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from flag_relay import POLL_SECONDS
from thread_ranks import Meeting, ThreadGroup

from pshard.runtime.devices.device import CpuDevice, CpuEvent
from pshard.runtime.kernels.cpu import native
from pshard.runtime.logits import Logits
from pshard.runtime.tier_in_force import TierInForce

HERE = threading.local()  # device: of this thread's rank; computes: whether the thread is its compute lane


class LaneDevice(CpuDevice):
    """Its compute lane is a thread. Opened by the thread of a rank.

    Attributes:
        replayed: how often work was done as it was captured.
    """

    def __init__(self) -> None:
        super().__init__()
        self._work: queue.SimpleQueue = queue.SimpleQueue()
        self._captured: dict[tuple, Callable[[], Any]] = {}
        self._failed: BaseException | None = None
        self.replayed, self.spans = 0, dict[int, Any]()
        HERE.device = self
        self._lane = threading.Thread(target=self._compute, name="compute", daemon=True)
        self._lane.start()

    def _compute(self) -> None:
        HERE.device, HERE.computes = self, True
        with torch.inference_mode():
            while (act := self._work.get()) is not None:
                try:
                    if self._failed is None:
                        act()
                except BaseException as error:  # nothing is computed any more, as on a GPU
                    self._failed = error

    def queue(self, act: Callable[[], Any]) -> None:
        """Have the lane do it; at once where the lane itself says so."""
        if getattr(HERE, "computes", False):
            act()
        else:
            self._work.put(act)

    def drain(self) -> None:
        """Return when the lane has done all."""
        if getattr(HERE, "computes", False):
            return
        done = threading.Event()
        self._work.put(done.set)
        while not done.wait(0.05):
            self._check()
        self._check()

    def _check(self) -> None:
        if self._failed is not None:
            raise RuntimeError("the lane failed") from self._failed

    def send(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        self.queue(lambda: dst.copy_(src))

    bring = send

    def receive(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        self.send(dst, src)
        self.drain()

    def mark(self) -> CpuEvent:
        event = CpuEvent()
        self.queue(event.finish)
        return event

    def wait(self, event: CpuEvent) -> None:
        self.queue(event.wait)

    def host_wait(self, event: CpuEvent) -> None:
        while not event.happened:
            self._check()
            time.sleep(POLL_SECONDS)
        event.wait()

    def synchronize(self) -> None:
        self.drain()
        super().synchronize()

    def repeat(self, key: tuple, worth_it: bool, work: Callable[[], Any]) -> None:
        if worth_it and key in self._captured:
            self.replayed += 1
            self.queue(lambda: time.sleep(0.001))  # far behind the thread that gives it work
            self.queue(self._captured[key])
            return
        self.queue(work)
        self.drain()
        if worth_it:
            self._captured[key] = work

    def close(self) -> None:
        self._work.put(None)
        self._lane.join()
        super().close()


class LaneGroup(ThreadGroup):
    """A rank whose lane sums, sends, receives and gathers logits in its turn. A tensor that was sent is read when it is
    taken."""

    gathers = False  # whether logits are put together by the lanes

    def __init__(self, rank: int, meeting: Meeting) -> None:
        super().__init__(rank, meeting)
        self._lanes: Meeting = meeting.__dict__.setdefault("lanes", Meeting(len(meeting.parts)))
        self._sent: list[threading.Event] = []

    def _exchange(self, part: torch.Tensor) -> list[torch.Tensor]:
        lane = getattr(HERE, "computes", False)
        return ThreadGroup(self.rank, self._lanes)._exchange(part) if lane else super()._exchange(part)

    def all_reduce(self, tensor: torch.Tensor, exact: bool = False) -> None:
        HERE.device.queue(lambda: super(LaneGroup, self).all_reduce(tensor))

    def add_sum(self, hidden: torch.Tensor, part: torch.Tensor) -> None:
        HERE.device.queue(lambda: super(LaneGroup, self).add_sum(hidden, part))

    def send(self, tensor: torch.Tensor, target: int) -> None:
        taken = threading.Event()
        self._sent.append(taken)
        HERE.device.queue(lambda: self._lanes.sent[target].put((self.rank, tensor, taken)))

    def finish_send(self) -> None:
        for taken in self._sent:
            HERE.device.queue(lambda taken=taken: taken.wait(60))
        self._sent.clear()

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        def take() -> None:
            sender, sent, taken = self._lanes.sent[self.rank].get(timeout=60)
            assert sender == source
            tensor.copy_(sent)
            taken.set()

        HERE.device.queue(take)

    def logit_widths(self, columns: int, on_device: bool) -> tuple[int, ...] | None:
        said = [self.broadcast([columns, on_device], source) for source in range(self.size)]
        return tuple(n for n, _ in said) if self.gathers and all(there for _, there in said) else None

    def gather_logits(self, table: torch.Tensor, widths: tuple[int, ...]) -> None:
        assert not self._sent, "what the others wait for may not start while the gather has the GPU"

        def gather() -> None:
            start = sum(widths[: self.rank])
            own = table[:, start : start + widths[self.rank]]
            table.copy_(torch.cat(self._exchange(own), dim=1))

        HERE.device.queue(gather)


def use_lanes(monkeypatch: Any, gathers: bool) -> list[LaneDevice]:
    """Have `thread_ranks` start such ranks; returns their devices as they are opened. gathers: see LaneGroup."""
    devices, deliver = list[LaneDevice](), Logits.deliver

    def open_lane(_: str) -> LaneDevice:
        devices.append(LaneDevice())
        return devices[-1]

    def deliver_in_turn(logits: Logits, brought: Any = None) -> None:
        if logits._pending is not None and (brought is None or not logits.is_brought):
            HERE.device.drain()  # operators of torch on what a GPU has are done in their turn there
        deliver(logits, brought)

    def keep_spans(_: TierInForce, n: int) -> Any:
        """No GPU's kernel reads them: those of the CPU must find them where they were when captured."""
        return HERE.device.spans.setdefault(n, native.make_spans([(0, 0, 0, 0)] * n))

    monkeypatch.setattr(TierInForce, "spans_of", keep_spans)
    monkeypatch.setattr("thread_ranks.open_device", open_lane)
    monkeypatch.setattr("thread_ranks.ThreadGroup", LaneGroup)
    monkeypatch.setattr(LaneGroup, "gathers", gathers)
    monkeypatch.setattr(Logits, "deliver", deliver_in_turn)
    return devices
