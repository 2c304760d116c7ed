"""Discrete-event simulation of the very steps that the executor runs.

Lanes: the link to the device (h2d) and from it (d2h), the accelerator, and the CPU, whose one host thread issues the
steps in order. Copies and accelerator work are asynchronous and start when their lane and what they depend on are
free; CPU work and a hand-off to the CPU hold the host thread. While the CPU computes and a copy runs, both slow down
as the profile's contention says. Of a split unit the accelerator's rows are given to it first, wait for their copy
there, and run while the CPU computes the others. Several micro-batches are run, and the time between the end of the
first and of the last is measured: a steady state in which the next one's first copies run under this one's last units.

Ranks are simulated together: at every sum all wait for the last one.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from pshard.planner.costs import TierCosts
from pshard.steps import (
    AllReduce,
    Compute,
    CopyIn,
    FetchKV,
    Free,
    Gather,
    Handoff,
    Join,
    Receive,
    Send,
    Step,
    StepList,
    WriteBack,
)

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


class _Copy:
    """A copy on its way: when it may start, seconds left, when it started and ended."""

    __slots__ = ("begun", "end", "left", "ready", "step")

    def __init__(self, step: Step, ready: float, left: float) -> None:
        self.step, self.ready, self.left = step, ready, left
        self.begun, self.end = -1.0, -1.0


class _Link:
    """The host-to-device lane: copies in issue order. Settled up to `at`; later copies wait in `queue`."""

    def __init__(self) -> None:
        self.at = 0.0
        self.queue: deque[_Copy] = deque()
        self.done: list[_Copy] = []

    def push(self, step: Step, ready: float, seconds: float) -> _Copy:
        copy = _Copy(step, ready, seconds)
        self.queue.append(copy)
        return copy

    def _advance(self, until: float, speed: float) -> None:
        """Let the first copy run from `at` to `until` at `speed`."""
        copy = self.queue[0]
        if copy.begun < 0:
            copy.begun = self.at
        if self.at + copy.left / speed <= until:
            self.at += copy.left / speed
            copy.end = self.at
            self.done.append(self.queue.popleft())
        else:
            copy.left -= (until - self.at) * speed
            self.at = until

    def settle(self, until: float) -> None:
        """Run copies up to a time, with nothing else reading host memory."""
        while self.queue and self.at < until:
            self.at = max(self.at, self.queue[0].ready)
            if self.at < until:
                self._advance(until, 1.0)

    def wait(self, copy: _Copy) -> float:
        """The time at which a copy is done."""
        while copy.end < 0.0:
            self.at = max(self.at, self.queue[0].ready)
            self._advance(inf, 1.0)
        return copy.end

    def beside(self, start: float, seconds: float, speeds: tuple[float, float]) -> float:
        """Run host work of `seconds` from `start` beside the copies; returns its end."""
        self.settle(start)
        now, left = start, seconds
        link_speed, cpu_speed = speeds
        while left > 1e-12:
            begins = max(self.at, self.queue[0].ready) if self.queue else inf
            if begins > now:
                run = min(left, begins - now)
                now, left = now + run, left - run
                continue
            self.at = now
            run = min(left / cpu_speed, self.queue[0].left / link_speed)
            self._advance(now + run + 1e-15, link_speed)
            now, left = now + run, left - run * cpu_speed
        return now


class _Machine:
    """The lanes' clocks, and what every kind of step does to them."""

    def __init__(self, costs: TierCosts, steps: StepList) -> None:
        self.costs, self.units = costs, costs.units
        self.copies = any(isinstance(step, CopyIn | FetchKV) for step in steps.body)  # they run beside the sums
        self.host = self.acc = self.d2h = 0.0
        self.link = _Link()
        self.loaded: dict[str, _Copy] = {}  # unit -> its last copy into a slot
        self.fetched: dict[str, _Copy] = {}
        self.slot_free: dict[int, float] = {}
        self.begun: tuple[Compute, float] | None = None  # the accelerator's rows of a split unit, and since when
        self.log: list[tuple[Step, str, float, float]] = []

    def copy_in(self, step: CopyIn) -> None:
        self.host += self.costs.copy_issue
        ready = max(self.host, self.slot_free.get(step.slot, 0.0))
        costs = self.costs.split(step.unit, step.cpu_rows) if step.cpu_rows else self.units[step.unit]
        self.loaded[step.unit] = self.link.push(step, ready, costs.link)

    def fetch_kv(self, step: FetchKV) -> None:
        self.host += self.costs.copy_issue
        self.fetched[step.unit] = self.link.push(step, max(self.host, self.d2h), self.units[step.unit].kv_fetch)

    def compute(self, step: Compute) -> None:
        if step.part:
            self.compute_part(step)
            return
        unit, costs = self.units[step.unit], self.costs
        if step.on == "cpu":
            start = self.host
            self.host = self.link.beside(start, unit.cpu, costs.contended[step.unit])
            self.log.append((step, "cpu", start, self.host))
            return
        self.host += unit.issue
        start = max(self.acc, self.host)
        if step.source == "slot":
            start = max(start, self.link.wait(self.loaded[step.unit]))
        if step.unit in self.fetched:
            start = max(start, self.link.wait(self.fetched.pop(step.unit)))
        if costs.acc_contended is None:
            self.acc = start + unit.acc
        else:  # the CPU as accelerator computes on the host's own threads
            self.host = self.acc = self.link.beside(start, unit.acc, costs.acc_contended[step.unit])
        self.log.append((step, "acc", start, self.acc))

    def compute_part(self, step: Compute) -> None:
        cost = self.costs.split(step.unit, step.cpu_rows)
        if step.on == "cpu":
            start = self.host
            self.host = self.link.beside(start, cost.cpu, self.costs.split_speeds(step.unit, step.cpu_rows))
            self.log.append((step, "cpu", start, self.host))
            return
        self.host += cost.issue
        start = max(self.acc, self.host)
        if step.part == "down":
            self.run_part(step, start, cost.down)
        elif self.costs.acc_contended is None:
            self.begun = step, start  # when its copy arrives depends on what the CPU reads meanwhile
        else:
            self.run_part(step, start, cost.acc_rows)

    def run_part(self, step: Compute, start: float, seconds: float) -> None:
        """The accelerator's part, once its weights are there."""
        if step.source == "slot":
            start = max(start, self.link.wait(self.loaded[step.unit]))
        if self.costs.acc_contended is None:
            self.acc = start + seconds
        else:
            speeds = self.costs.acc_contended[step.unit]
            self.host = self.acc = self.link.beside(start, seconds, speeds)
        self.log.append((step, "acc", start, self.acc))

    def join(self, step: Join) -> None:
        if self.begun:
            rows, since = self.begun
            self.run_part(rows, since, self.costs.split(rows.unit, rows.cpu_rows).acc_rows)
            self.begun = None
        start = max(self.host, self.acc)
        self.acc = start + self.costs.handoff("acc", step.nbytes)
        self.log.append((step, "acc", start, self.acc))

    def write_back(self, step: WriteBack) -> None:
        start = max(self.d2h, self.acc)
        self.d2h = start + self.units[step.unit].kv_write
        self.log.append((step, "d2h", start, self.d2h))

    def hand_off(self, step: Handoff) -> None:
        start = max(self.host, self.acc)
        self.acc = start + self.costs.handoff(step.to, step.nbytes)
        self.log.append((step, "acc", start, self.acc))
        if step.to == "cpu":
            self.host = self.acc

    def reduce(self, step: AllReduce | Gather) -> None:
        start = max(self.host, self.acc)
        self.acc = start + self.costs.tables.collective(self.costs.ranks, step.nbytes, self.copies)
        self.log.append((step, "acc", start, self.acc))
        if isinstance(step, Gather):
            self.host = self.acc

    def receive(self, step: Receive) -> None:
        start = max(self.host, self.acc)
        self.acc = start + self.costs.tables.hand_over(step.nbytes, self.copies)
        self.log.append((step, "acc", start, self.acc))

    def send(self, step: Send) -> None:
        """Nothing waits here: the rank that receives pays."""

    def free(self, step: Free) -> None:
        self.slot_free[step.slot] = self.acc


def simulate(steps: StepList, costs: TierCosts, rounds: int = ROUNDS) -> Simulation:
    """Run `enter`, then `body` `rounds` (2 or more) times; see the module's text for the rules."""
    return simulate_together((steps,), (costs,), rounds)[0]


def simulate_together(
    steps: Sequence[StepList], costs: Sequence[TierCosts], rounds: int = ROUNDS
) -> tuple[Simulation, ...]:
    """The same of every rank of a group, which takes equally long on all of them."""
    machines = [_Machine(cost, each) for cost, each in zip(costs, steps, strict=True)]
    ends = _run(machines, steps, rounds)
    for machine in machines:
        machine.link.settle(ends[-1])
    return tuple(Simulation(_period(ends), *_last_round(machine, ends[-2], ends[-1])) for machine in machines)


def simulate_ranks(mode: str, steps: Sequence[StepList], costs: Sequence[TierCosts]) -> tuple[Simulation, ...]:
    """The ranks of a split model: together, or with mode "layer" each alone (`pshard.pipeline` adds them up)."""
    if mode != "layer":
        return simulate_together(steps, costs)
    return tuple(simulate(each, cost) for each, cost in zip(steps, costs, strict=True))


def simulate_seconds(steps: StepList, costs: TierCosts, rounds: int = ROUNDS) -> float:
    """The seconds of `simulate` alone, for searches that need nothing else of it."""
    return _period(_run([_Machine(costs, steps)], (steps,), rounds))


def _period(ends: list[float]) -> float:
    return (ends[-1] - ends[0]) / (len(ends) - 1)


def _run(machines: Sequence[_Machine], steps: Sequence[StepList], rounds: int) -> list[float]:
    """Let the machines run all rounds; returns when each ended."""
    for machine, each in zip(machines, steps):
        for copy in each.enter:
            machine.copy_in(copy)
    stretches = [_stretches(machine, each.body, len(machines) > 1) for machine, each in zip(machines, steps)]
    ends: list[float] = []
    for _ in range(rounds):
        for machine in machines:
            machine.log.clear()
        for i, together in enumerate(zip(*stretches, strict=True)):
            if i:
                _meet(machines)
            for stretch in together:
                for act, step in stretch:
                    act(step)
        for machine in machines:
            machine.host = max(machine.host, machine.acc)
        ends.append(max(machine.host for machine in machines))
    return ends


_Action = tuple[Callable[[Step], None], Step]


def _stretches(machine: _Machine, body: Sequence[Step], meets: bool) -> list[list[_Action]]:
    """What a machine does; a new stretch begins with each sum when it `meets` others there."""
    actions: dict[type, Callable] = {
        CopyIn: machine.copy_in,
        FetchKV: machine.fetch_kv,
        Compute: machine.compute,
        WriteBack: machine.write_back,
        Handoff: machine.hand_off,
        Join: machine.join,
        AllReduce: machine.reduce,
        Gather: machine.reduce,
        Receive: machine.receive,
        Send: machine.send,
        Free: machine.free,
    }
    stretches: list[list[_Action]] = [[]]
    for step in body:
        if meets and isinstance(step, AllReduce | Gather):
            stretches.append([])
        stretches[-1].append((actions[type(step)], step))
    return stretches


def _meet(machines: Sequence[_Machine]) -> None:
    """A sum begins when the last rank has come to it."""
    last = max(max(machine.host, machine.acc) for machine in machines)
    for machine in machines:
        machine.acc = last


def _last_round(machine: _Machine, origin: float, end: float) -> tuple[dict[str, float], tuple[Event, ...]]:
    """Busy seconds and events between `origin` and `end`; copies that cross a bound count with their part inside."""
    rows = list(machine.log)
    rows += [(c.step, "link", c.begun, c.end) for c in machine.link.done if c.end > origin]
    rows += [(c.step, "link", c.begun, end) for c in machine.link.queue if 0 <= c.begun < end]
    rows.sort(key=lambda row: row[2])
    busy = dict.fromkeys(("acc", "cpu", "link", "d2h"), 0.0)
    for _, lane, start, stop in rows:
        busy[lane] += min(stop, end) - max(start, origin)
    return busy, tuple(Event(step, lane, start - origin, stop - origin) for step, lane, start, stop in rows)
