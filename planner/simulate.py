"""Discrete-event simulation of the very steps that the executor runs.

Lanes: the link to the device (h2d) and from it (d2h), the accelerator, and the CPU, whose one host thread issues the
steps in order. Copies and accelerator work are asynchronous and start when their lane and what they depend on are
free; CPU work and a hand-off to the CPU hold the host thread. While the CPU computes and a copy runs, both slow down
as the profile's contention says. Three micro-batches are run and the last two measured: a steady state in which the
next micro-batch's first copies run under this one's last units.
"""

from collections import deque
from dataclasses import dataclass
from math import inf

from pshard.planner.costs import TierCosts
from pshard.steps import AllReduce, Compute, CopyIn, FetchKV, Free, Gather, Handoff, Step, StepList, WriteBack

ROUNDS = 3


@dataclass(frozen=True)
class Event:
    """A step on its lane ("link", "d2h", "acc", "cpu"), in seconds since the micro-batch began."""

    step: Step
    lane: str
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """Steady-state seconds of one micro-batch, busy seconds by lane, and the events of the last one."""

    seconds: float
    busy: dict[str, float]
    events: tuple[Event, ...]


class _Link:
    """The host-to-device lane: copies in issue order. Settled up to `at`; later copies wait in `queue`."""

    def __init__(self, log: list) -> None:
        self.at, self.queue, self.done, self.log = 0.0, deque(), {}, log

    def push(self, key: int, step: Step, ready: float, seconds: float) -> None:
        self.queue.append([key, step, ready, seconds, None])

    def _advance(self, until: float, speed: float) -> None:
        """Let the first copy run from `at` to `until` at `speed`."""
        task = self.queue[0]
        task[4] = self.at if task[4] is None else task[4]
        if self.at + task[3] / speed <= until:
            self.at += task[3] / speed
            self.queue.popleft()
            self.done[task[0]] = self.at
            self.log.append(Event(task[1], "link", task[4], self.at))
        else:
            task[3] -= (until - self.at) * speed
            self.at = until

    def settle(self, until: float) -> None:
        """Run copies up to a time, with nothing else reading host memory."""
        while self.queue and self.at < until:
            self.at = max(self.at, self.queue[0][2])
            if self.at < until:
                self._advance(until, 1.0)

    def wait(self, key: int) -> float:
        """The time at which a copy is done."""
        while key not in self.done:
            self.at = max(self.at, self.queue[0][2])
            self._advance(inf, 1.0)
        return self.done[key]

    def beside(self, start: float, seconds: float, speeds: tuple[float, float]) -> float:
        """Run CPU work of `seconds` from `start` beside the copies; returns its end."""
        self.settle(start)
        now, left = start, seconds
        link_speed, cpu_speed = speeds
        while left > 1e-12:
            begins = max(self.at, self.queue[0][2]) if self.queue else inf
            if begins > now:
                run = min(left, begins - now)
                now, left = now + run, left - run
                continue
            self.at = now
            run = min(left / cpu_speed, self.queue[0][3] / link_speed)
            self._advance(now + run + 1e-15, link_speed)
            now, left = now + run, left - run * cpu_speed
        return now


def simulate(steps: StepList, costs: TierCosts, rounds: int = ROUNDS) -> Simulation:
    """Run `enter`, then `body` `rounds` times; see the module's text for the rules."""
    log: list[Event] = []
    link = _Link(log)
    host = acc = d2h = 0.0
    keys: dict[str, int] = {}
    fetched: dict[str, int] = {}
    slot_free: dict[int, float] = {}
    n_keys = 0
    own_lane = costs.acc_contended is None
    ends, first = [], 0
    for step in steps.enter:
        keys[step.unit], n_keys = n_keys, n_keys + 1
        link.push(keys[step.unit], step, 0.0, costs.units[step.unit].link)
    for turn in range(rounds):
        if turn == rounds - 1:
            first = len(log)
        for step in steps.body:
            if isinstance(step, CopyIn):
                keys[step.unit], n_keys = n_keys, n_keys + 1
                link.push(keys[step.unit], step, max(host, slot_free.get(step.slot, 0.0)), costs.units[step.unit].link)
            elif isinstance(step, FetchKV):
                fetched[step.unit], n_keys = n_keys, n_keys + 1
                link.push(fetched[step.unit], step, max(host, d2h), costs.units[step.unit].kv_fetch)
            elif isinstance(step, Compute) and step.on == "cpu":
                end = link.beside(host, costs.units[step.unit].cpu, costs.contended[step.unit])
                log.append(Event(step, "cpu", host, end))
                host = end
            elif isinstance(step, Compute):
                start = max(acc, host)
                if step.source == "slot":
                    start = max(start, link.wait(keys[step.unit]))
                if step.unit in fetched:
                    start = max(start, link.wait(fetched.pop(step.unit)))
                if own_lane:
                    acc = start + costs.units[step.unit].acc
                else:  # the CPU as accelerator computes on the host's own threads
                    host = acc = link.beside(start, costs.units[step.unit].acc, costs.acc_contended[step.unit])
                log.append(Event(step, "acc", start, acc))
            elif isinstance(step, WriteBack):
                start = max(d2h, acc)
                d2h = start + costs.units[step.unit].kv_write
                log.append(Event(step, "d2h", start, d2h))
            elif isinstance(step, Handoff):
                start = max(host, acc)
                end = start + costs.handoff(step.to, step.nbytes)
                log.append(Event(step, "acc", start, end))
                acc = end
                host = end if step.to == "cpu" else host
            elif isinstance(step, AllReduce | Gather):
                start = max(host, acc)
                end = start + costs.tables.collective(costs.ranks, step.nbytes)
                log.append(Event(step, "acc", start, end))
                acc = end
                host = end if isinstance(step, Gather) else host
            elif isinstance(step, Free):
                slot_free[step.slot] = acc
        host = max(host, acc)
        ends.append(host)
    link.settle(ends[-1])
    origin = ends[-2] if rounds > 1 else 0.0
    events = tuple(Event(e.step, e.lane, e.start - origin, e.end - origin) for e in log[first:] if e.end > origin)
    busy = {
        lane: sum(e.end - max(e.start, 0.0) for e in events if e.lane == lane) for lane in ("acc", "cpu", "link", "d2h")
    }
    period = (ends[-1] - ends[0]) / (rounds - 1) if rounds > 1 else ends[0]
    return Simulation(period, busy, tuple(sorted(events, key=lambda e: e.start)))
