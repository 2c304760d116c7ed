"""Discrete-event simulation of the very steps that the executor runs.

Lanes: the copies (pshard/homes.py), the accelerator, and the CPU, whose one host thread issues the steps in order.
Copies and accelerator work are asynchronous and start when their lane and what they depend on are free; CPU work and a
hand-off to the CPU hold the host thread. While the CPU computes and a copy runs, both slow down as the profile's
contention says; while the disk is read, it lacks the cores that pack what comes from there. The accelerator's part of a
divided unit is issued first, waits for its copy, and runs while the CPU computes the rest. Several micro-batches are
run, and the time between the end of the first and of the last is measured: a steady state in which the next one's first
copies run under this one's last units.

Ranks are simulated together: at every sum all wait for the last one.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import erf, exp, pi, sqrt
from operator import itemgetter
from typing import Any

from pshard.batch_sizes import SMALL_BATCH
from pshard.buffers import BUFFERS, CHUNK
from pshard.homes import ACC, BACK, CPU, LINK, READ, Lane
from pshard.planner.price.packing import packing_share
from pshard.planner.price.tier_costs import TierCosts
from pshard.planner.price.unit_costs import DividedCost, UnitCost
from pshard.steps.move import Activations, Move, NewExperts, Part, UnitState, WaitingRows, Weights
from pshard.steps.step import BEFORE, DEMAND, AllReduce, Compute, Free, Gather, Receive, Send, Step, StepList

ROUNDS = 3
MOST_PACKING = 0.95  # of the cores: whoever computes has some time too
SHARED = (0.5, 0.5)  # of the link's rate, that a copy and activations have while both are on their way


@dataclass(frozen=True)
class Event:
    """A step on its lane (ACC, CPU, or the name of one of copies), in seconds since the micro-batch began."""

    step: Step
    lane: str
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """Steady-state seconds of one micro-batch, and busy seconds by lane. `rows`: (step, lane, start, end) of the last
    one, which began at `origin`."""

    seconds: float
    busy: dict[str, float]
    rows: tuple[tuple[Step, str, float, float], ...]
    origin: float

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """The events of the last micro-batch; most who ask for a simulation do not want them."""
        return tuple(
            Event(step, lane, start - self.origin, stop - self.origin) for step, lane, start, stop in self.rows
        )


# a copy on its way: when it may start, seconds left, when it started and ended (-1: not yet), its step
READY, LEFT, BEGUN, END, STEP = range(5)
_Copy = list


class _Link:
    """The host-to-device lane: copies in issue order. Settled up to `at`; later copies wait in `queue`."""

    def __init__(self) -> None:
        self.at = 0.0
        self.queue: deque[_Copy] = deque()
        self.done: list[_Copy] = []
        # reads from disk in turn: from when to when, and the share of the cores that packs what they bring
        self.packing: deque[tuple[float, float, float]] = deque()

    def pack(self, start: float, end: float, share: float) -> None:
        """Cores are busy with what a read brings."""
        if share:
            self.packing.append((start, end, min(share, MOST_PACKING)))

    def settle(self, until: float) -> None:
        """Run copies up to a time, with nothing else reading host memory."""
        queue, at = self.queue, self.at
        while queue and at < until:
            copy = queue[0]
            at = at if at > copy[READY] else copy[READY]
            if at < until:
                if copy[BEGUN] < 0.0:
                    copy[BEGUN] = at
                ends = at + copy[LEFT]
                if ends <= until:
                    copy[END] = at = ends
                    self.done.append(queue.popleft())
                else:
                    copy[LEFT] -= until - at
                    at = until
        self.at = at

    def wait(self, copy: _Copy) -> float:
        """The time at which a copy is done, all before it done at full speed too."""
        at = self.at
        while copy[END] < 0.0:
            first = self.queue.popleft()
            at = at if at > first[READY] else first[READY]
            if first[BEGUN] < 0:
                first[BEGUN] = at
            first[END] = at = at + first[LEFT]
            self.done.append(first)
        self.at = at
        return copy[END]

    def beside(self, start: float, seconds: float, speeds: tuple[float, float]) -> float:
        """Run host work of `seconds` from `start` beside the copies; returns its end."""
        queue, (link_speed, cpu_speed) = self.queue, speeds
        if self.packing:
            seconds += self._lose(start, seconds)
        if self.at < start:
            self.settle(start)
        now, left, at = start, seconds, self.at
        while left > 1e-12:
            if not queue:
                now += left
                break
            copy = queue[0]
            begins = at if at > copy[READY] else copy[READY]
            if begins > now:
                run = begins - now
                run = run if run < left else left
                now, left = now + run, left - run
                continue
            if copy[BEGUN] < 0.0:
                copy[BEGUN] = now
            run, lasts = left / cpu_speed, copy[LEFT] / link_speed
            run = run if run < lasts else lasts
            until = now + run + 1e-15
            if now + lasts <= until:
                copy[END] = at = now + lasts
                self.done.append(queue.popleft())
            else:
                copy[LEFT] -= (until - now) * link_speed
                at = until
            now, left = now + run, left - run * cpu_speed
        self.at = at
        return now

    def _lose(self, start: float, seconds: float) -> float:
        """Seconds by which host work of `seconds` from `start` takes longer, as cores pack what is read meanwhile."""
        packing, lost, now, left = self.packing, 0.0, start, seconds
        while packing and packing[0][1] <= start:
            packing.popleft()
        for begins, ends, share in packing:
            left -= max(0.0, begins - now)
            if left <= 0.0:
                break
            now = max(now, begins)
            beside = min(left, (ends - now) * (1 - share))
            lost += beside * share / (1 - share)
            left -= beside
            now = ends
        return lost


class _Machine:
    """The lanes' clocks, and what every kind of step does to them. `log`: (step, lane, start, end), if kept."""

    def __init__(self, costs: TierCosts, logs: bool) -> None:
        self.costs, self.units = costs, costs.units
        self.copies = False  # whether they run beside the sums
        self.host = self.acc = self.d2h = 0.0
        self.link = _Link()
        self.beyond: dict[Lane, float] = {}  # when lanes of homes beyond host memory are free
        self.done_beyond: list[tuple[Step, str, float, float]] = []  # their copies, of all rounds, if logged
        self.loaded: dict[int | None, _Copy] = {}  # slot -> the last copy into it
        self.fetched: _Copy | None = None  # of the next state that the accelerator finds in the stage
        self.slot_free: dict[int | None, float] = {}
        # the accelerator's share of a unit, what the unit costs, and since when it runs
        self.begun: tuple[Compute, DividedCost, float] | None = None
        self.reading: tuple[Compute, DividedCost, float, _Copy] | None = None  # the same of one read over the link
        self.refilled: _Copy | None = None  # experts on their way to slots
        # what the host pays for the next unit's run: nothing while one goes on, and a hand-off has paid
        self.to_begin, self.paid = costs.run_issue, False
        self.log: list[tuple[Step, str, float, float]] | None = [] if logs else None

    def run(self, acts: Sequence["_Act"]) -> None:
        """Run steps in order. What most steps are is written out here, for this loop is where searches spend time."""
        host, acc, d2h, log = self.host, self.acc, self.d2h, self.log
        link, loaded, fetched, slot_free = self.link, self.loaded, self.fetched, self.slot_free
        wait = link.wait
        copy_issue, run_issue, queue = self.costs.copy_issue, self.costs.run_issue, link.queue
        to_begin, paid, copies = self.to_begin, self.paid, self.copies
        for kind, step, seconds, more in acts:
            if kind is _COMPUTE or kind is _FROM_SLOT:
                waits = kind is _FROM_SLOT or (fetched is not None and step.state == "host")
                host += more if paid else more + run_issue if waits else more + to_begin
                to_begin, paid = 0.0, False
                start = acc if acc > host else host
                if kind is _FROM_SLOT:
                    copy = loaded[step.slot]
                    done = copy[END] if copy[END] >= 0.0 else wait(copy)
                    start = start if start > done else done
                if fetched is not None and step.state == "host":
                    done, fetched = wait(fetched), None
                    start = start if start > done else done
                acc = start + seconds
                if log is not None:
                    log.append((step, ACC, start, acc))
            elif kind is _COPY:
                host += copy_issue
                to_begin = run_issue
                free = slot_free.get(more, 0.0)
                loaded[more] = copy = [host if host > free else free, seconds, -1.0, -1.0, step]
                queue.append(copy)
            elif kind is _FREE:
                slot_free[more] = acc
                to_begin = run_issue
            elif kind is _FETCH:
                host += more
                to_begin = run_issue
                fetched = copy = [host if host > d2h else d2h, seconds, -1.0, -1.0, step]
                queue.append(copy)
            elif kind is _WRITE:
                host += more
                to_begin = run_issue
                start = d2h if d2h > acc else acc
                d2h = start + seconds
                if log is not None:
                    log.append((step, BACK.name, start, d2h))
            elif kind is _CPU:
                start = host
                host = link.beside(start, seconds, more) if queue or link.packing else start + seconds
                if log is not None:
                    log.append((step, CPU, start, host))
            elif kind is _HAND_OFF:
                start = host if host > acc else acc
                acc = start + seconds
                host = acc if more else host
                to_begin, paid = run_issue, not more
                if log is not None:
                    log.append((step, ACC, start, acc))
            elif kind is _SUM or kind is _GATHER:
                start = host if host > acc else acc
                acc = start + (more if copies else seconds)
                host = acc if kind is _GATHER else host
                if log is not None:
                    log.append((step, ACC, start, acc))
            else:
                self.host, self.acc, self.d2h, self.fetched = host, acc, d2h, fetched
                self.to_begin, self.paid = to_begin, paid
                kind(self, step, more)
                host, acc, d2h, fetched = self.host, self.acc, self.d2h, self.fetched
                to_begin, paid = self.to_begin, self.paid
        self.host, self.acc, self.d2h, self.fetched = host, acc, d2h, fetched
        self.to_begin, self.paid = to_begin, paid

    def note(self, step: Step, lane: str, start: float, end: float) -> None:
        if self.log is not None:
            self.log.append((step, lane, start, end))

    def compute_on_cpu_accelerator(self, step: Compute, unit: UnitCost | DividedCost) -> None:
        """The CPU as accelerator computes on the host's own threads."""
        self.host += unit.issue
        start = max(self.acc, self.host)
        if self.fetched is not None and step.state == "host":
            start, self.fetched = max(start, self.link.wait(self.fetched)), None
        self.run_part(step, start, unit.acc)

    def compute_part(self, step: Compute, cost: DividedCost) -> None:
        if step.on == CPU:
            start = self.host
            self.host = self.link.beside(start, cost.cpu, self.costs.divided_speeds(step.unit, step.share))
            self.note(step, CPU, start, self.host)
            return
        self.host += cost.issue + (0.0 if self.paid else self.costs.run_issue)  # each part is a run of its own
        self.to_begin, self.paid = self.costs.run_issue, False
        start = max(self.acc, self.host)
        if step.source == "link" and step.part == "share":  # while the CPU reads too: when that ends, `join` knows
            self.reading = step, cost, start, self.read_in_place(step, start, cost.read)
        elif step.part == "rest":
            self.run_part(step, start, cost.rest)
        elif self.costs.acc_contended is None:
            self.begun = step, cost, start  # when its copy arrives depends on what the CPU reads meanwhile
        else:
            self.run_part(step, start, cost.acc)

    def refill(self, step: Move, _: None) -> None:
        """NewExperts on their way to slots must be there before the micro-batch begins; then the next leave."""
        if self.refilled is not None:
            self.acc = max(self.acc, self.link.wait(self.refilled))
        seconds, on_host = self.costs.setting.refill
        self.host += on_host
        self.refilled = self.read_in_place(step, max(self.host, self.acc), seconds)

    def read_in_place(self, step: Compute | Move, start: float, seconds: float) -> _Copy:
        """What a kernel reads over the link from its start on."""
        copy = [start, seconds, -1.0, -1.0, step]
        self.link.queue.append(copy)
        return copy

    def compute_in_place(self, step: Compute, unit: UnitCost | DividedCost) -> None:
        """A unit whose kernels read it over the link: done when both are."""
        self.host += unit.issue + (0.0 if self.paid else self.to_begin)
        self.to_begin, self.paid = 0.0, False
        start = max(self.acc, self.host)
        read = self.link.wait(self.read_in_place(step, start, unit.read))
        self.acc = max(start + unit.acc, read)
        self.note(step, ACC, self.acc - unit.acc, self.acc)  # before that it waits for the link

    def compute_on_demand(self, step: Compute, more: tuple[tuple[float, float, float], float]) -> None:
        """Experts of which some are read first, which the slots lack: the others are computed meanwhile, and those as
        they land. more: seconds of computing them, of the reads, and of the last one's computation; the share of the
        cores that packs what is read."""
        (computing, reading, last), share = more
        self.host += self.units[step.unit].issue
        on_acc = step.on == ACC  # the CPU as accelerator
        start = max(self.acc, self.host) if on_acc else self.host
        begun = max(start, self.beyond.get(READ, 0.0))
        self.beyond[READ] = landed = begun + reading
        self.link.pack(begun, landed, share)
        done = start + computing if on_acc else self.link.beside(start, computing, self.costs.contended[step.unit])
        self.host = max(done, landed + last if reading else 0.0)
        if on_acc:
            self.acc = self.host
        if self.log is not None and reading:
            self.done_beyond.append((step, READ.name, begun, landed))
        self.note(step, step.on, self.host - computing, self.host)

    def run_part(self, step: Compute, start: float, seconds: float) -> None:
        """A unit on the accelerator or its part of one, once its weights are there."""
        if step.source == "slot":
            start = max(start, self.link.wait(self.loaded[step.slot]))
        if self.costs.acc_contended is None:
            self.acc = start + seconds
        else:
            speeds = self.costs.acc_contended[step.unit]
            self.host = self.acc = self.link.beside(start, seconds, speeds)
        self.note(step, ACC, start, self.acc)

    def join(self, step: Move, _: None) -> None:
        if self.begun:
            share, cost, since = self.begun
            self.run_part(share, since, cost.acc)
            self.begun = None
        spread = 0.0
        if self.reading:
            share, cost, since, copy = self.reading
            self.acc, self.reading = max(self.acc, since + cost.acc, self.link.wait(copy)), None
            self.note(share, ACC, self.acc - cost.acc, self.acc)
            spread = cost.spread
        start = expect_later(self.host, self.acc, spread)
        seconds = self.costs.handoff(ACC, step.nbytes)
        if self.costs.load.tokens > SMALL_BATCH:  # many bytes: the link has them beside the copies
            self.acc = self.link.beside(start, seconds, SHARED)
        else:
            self.acc = start + seconds
        self.note(step, ACC, start, self.acc)

    def copy_from_beyond(self, step: Move, route: tuple[float, tuple[tuple[Lane, float], ...], float, float]) -> None:
        """Weights that come through further lanes: each takes on what the one before has brought, piece by piece, and
        so ends no sooner than that. route: seconds of the link, and of each lane before it; the share of the cores
        that packs what is read; seconds of reading what the ring holds before the slot is free."""
        last, before, share, ahead = route
        self.host += self.costs.copy_issue
        self.to_begin = self.costs.run_issue
        free = self.slot_free.get(step.slot, 0.0)
        ready = max(self.host, free - ahead)
        following = [seconds for _, seconds in before[1:]] + [last]
        for (lane, seconds), then in zip(before, following):
            start = max(ready, self.beyond.get(lane, 0.0))
            self.beyond[lane] = start + seconds
            if lane is READ:
                self.link.pack(start, start + seconds, share)
            if self.log is not None:
                self.done_beyond.append((step, lane.name, start, start + seconds))
            ready = max(start, start + seconds - then)
        self.loaded[step.slot] = copy = [max(ready, free), last, -1.0, -1.0, step]
        self.link.queue.append(copy)

    def put_aside(self, step: Move, seconds: float) -> None:
        """Rows of a micro-batch that are copied within the accelerator's memory."""
        self.host += self.costs.copy_issue
        self.to_begin, self.paid = self.costs.run_issue, False
        start = max(self.host, self.acc)
        self.acc = start + seconds
        if self.costs.acc_contended is not None:  # the CPU's own threads copy
            self.host = self.acc
        self.note(step, ACC, start, self.acc)

    def receive(self, step: Receive, _: None) -> None:
        start = max(self.host, self.acc)
        self.acc = start + self.costs.hand_over(step.nbytes, self.copies)
        self.note(step, ACC, start, self.acc)

    def send(self, step: Send, _: None) -> None:
        """Nothing waits here: the rank that receives pays."""


_COMPUTE, _FROM_SLOT, _COPY, _FREE, _FETCH, _WRITE, _CPU, _HAND_OFF, _SUM, _GATHER = range(10)
_OTHERS = {Receive: _Machine.receive, Send: _Machine.send}
_Act = tuple[Any, Any, float, Any]  # a kind or a method of `_Machine`, the step, its seconds, and what that kind needs
_COPIES = {_COPY, _FETCH, _Machine.copy_from_beyond}


def _cost_of(step: Compute | Move, costs: TierCosts) -> UnitCost | DividedCost:
    if step.share:
        return costs.divided(step.unit, step.share)
    cost = costs.units[step.unit]
    if step.wave.of > 1:
        return cost.in_waves(step.wave.of)
    return cost.halve(step.part == BEFORE) if isinstance(step, Compute) and step.part else cost


def _price(step: Step, costs: TierCosts) -> _Act:
    """What a step does to the lanes, its costs looked up once for all rounds and simulations."""
    match step:
        case Compute() if step.is_divided:
            return _Machine.compute_part, step, 0.0, costs.divided(step.unit, step.share)
        case Compute(source=source) if source == DEMAND:
            more = costs.on_demand(step), packing_share(costs.tables, step.reads)
            return _Machine.compute_on_demand, step, 0.0, more
        case Compute(on="cpu"):
            return _CPU, step, _cost_of(step, costs).cpu, costs.contended[step.unit]
        case Compute():
            unit = _cost_of(step, costs)
            if costs.acc_contended:
                return _Machine.compute_on_cpu_accelerator, step, 0.0, unit
            if step.source == "link":
                return _Machine.compute_in_place, step, 0.0, unit
            kind = _FROM_SLOT if step.source == "slot" else _COMPUTE
            return kind, step, unit.acc, unit.issue + costs.launch
        case Move():
            return _price_move(step, costs)
        case AllReduce() | Gather():  # alone, and while weights are copied
            kind = _SUM if isinstance(step, AllReduce) else _GATHER
            return kind, step, costs.meeting(step), costs.meeting(step, True)
        case Free():
            return _FREE, step, 0.0, step.slot
    return _OTHERS[type(step)], step, 0.0, None


def _price_move(step: Move, costs: TierCosts) -> _Act:
    """The same of a copy."""
    match step.portion:
        case Weights():
            seconds, before = _cost_of(step, costs).link, step.origin.way_in[:-1]
            if not before:
                return _COPY, step, seconds, step.slot
            route = tuple((lane, costs.over_lane(lane, step.unit, step.share) / step.wave.of) for lane in before)
            share = packing_share(costs.tables, step.nbytes - step.held)
            if costs.tables.kind == "cpu":  # the last of these brings it to its place
                return _Machine.copy_from_beyond, step, 0.0, (0.0, route, share, 0.0)
            ahead = min(1.0, BUFFERS * CHUNK / step.nbytes) * route[0][1]
            return _Machine.copy_from_beyond, step, 0.0, (seconds, route, share, ahead)
        case UnitState(unit):  # keys and values
            fetches, unit_cost = step.is_to_acc, costs.units[unit]
            seconds = unit_cost.kv_fetch if fetches else unit_cost.kv_write
            return _FETCH if fetches else _WRITE, step, seconds, 2 * costs.copy_issue
        case Activations(names):
            side = ACC if step.is_to_acc else CPU
            return _HAND_OFF, step, costs.handoff(side, step.nbytes, len(names)), not step.is_to_acc
        case NewExperts():
            return _Machine.refill, step, 0.0, None
        case WaitingRows():
            tokens = costs.load.tokens
            seconds = costs.tables.elementwise("acc", "norm", tokens, step.nbytes // (4 * tokens))
            return _Machine.put_aside, step, 0.0, seconds
        case Part():
            return _Machine.join, step, 0.0, None


def expect_later(one: float, other: float, spread: float) -> float:
    """When the later of two is expected, whose difference is spread normally (Clark 1961); without it the maximum."""
    if spread <= 0.0:
        return max(one, other)
    apart = (one - other) / spread
    return other + spread * (apart * 0.5 * (1.0 + erf(apart / sqrt(2.0))) + exp(-0.5 * apart * apart) / sqrt(2.0 * pi))


def simulate(steps: StepList, costs: TierCosts, rounds: int = ROUNDS) -> Simulation:
    """Run `enter`, then `body` `rounds` (2 or more) times; see the module's text for the rules."""
    return simulate_together((steps,), (costs,), rounds)[0]


def simulate_together(
    steps: Sequence[StepList], costs: Sequence[TierCosts], rounds: int = ROUNDS
) -> tuple[Simulation, ...]:
    """The same of every rank of a group, which takes equally long on all of them."""
    machines = [_Machine(cost, True) for cost, _ in zip(costs, steps, strict=True)]
    ends = _run(machines, steps, rounds)
    for machine in machines:
        machine.link.settle(ends[-1])
    return tuple(Simulation(_period(ends), *_last_round(machine, ends[-2], ends[-1])) for machine in machines)


def simulate_ranks(mode: str, steps: Sequence[StepList], costs: Sequence[TierCosts]) -> tuple[Simulation, ...]:
    """The ranks of a split model: together, or with mode "layer" each alone (`pshard.cuts.layer_cuts` adds them up)."""
    if mode != "layer":
        return simulate_together(steps, costs)
    return tuple(simulate(each, cost) for each, cost in zip(steps, costs, strict=True))


def simulate_seconds(steps: StepList, costs: TierCosts, rounds: int = ROUNDS) -> float:
    """The seconds of `simulate` alone, for searches that need nothing else of it."""
    return _period(_run([_Machine(costs, False)], (steps,), rounds))


def ranks_seconds(mode: str, steps: Sequence[StepList], costs: Sequence[TierCosts]) -> tuple[float, ...]:
    """The seconds of `simulate_ranks` alone."""
    if mode == "layer":
        return tuple(map(simulate_seconds, steps, costs))
    machines = [_Machine(cost, False) for cost, _ in zip(costs, steps, strict=True)]
    return (_period(_run(machines, steps, ROUNDS)),) * len(machines)


def _period(ends: list[float]) -> float:
    return (ends[-1] - ends[0]) / (len(ends) - 1)


def _run(machines: Sequence[_Machine], steps: Sequence[StepList], rounds: int) -> list[float]:
    """Let the machines run all rounds; returns when each ended."""
    for machine, each in zip(machines, steps):
        machine.run(_act(each.enter, machine.costs))
    stretches = []
    for machine, each in zip(machines, steps):
        acts = _act(each.flat, machine.costs)
        machine.copies = not _COPIES.isdisjoint(map(itemgetter(0), acts))
        stretches.append(_stretches(each.flat, acts, len(machines) > 1))
    ends: list[float] = []
    for _ in range(rounds):
        for machine in machines:
            if machine.log:
                machine.log.clear()
        for i, together in enumerate(zip(*stretches, strict=True)):
            if i:
                _meet(machines)
            for machine, stretch in zip(machines, together):
                machine.run(stretch)
        for machine in machines:
            machine.host = max(machine.host, machine.acc)
        ends.append(max(machine.host for machine in machines))
        for machine in machines:
            machine.host += machine.costs.turn
    return ends


def _act(steps: Sequence[Step], costs: TierCosts) -> list[_Act]:
    """What steps do. `costs.acts` remembers it by the step's identity, which is no other's: the step is in it."""
    known = costs.acts
    try:
        return list(map(known.__getitem__, map(id, steps)))
    except KeyError:
        for step in steps:
            if id(step) not in known:
                known[id(step)] = _price(step, costs)
        return [known[id(step)] for step in steps]


def _stretches(body: Sequence[Step], acts: list[_Act], meets: bool) -> list[list[_Act]]:
    """What a machine does; a new stretch begins with each sum when it `meets` others there."""
    if not meets:
        return [acts]
    stretches: list[list[_Act]] = [[]]
    for step, act in zip(body, acts):
        if isinstance(step, AllReduce | Gather):
            stretches.append([])
        stretches[-1].append(act)
    return stretches


def _meet(machines: Sequence[_Machine]) -> None:
    """A sum begins when the last rank has come to it."""
    last = 0.0
    for machine in machines:
        here = machine.host if machine.host > machine.acc else machine.acc
        last = last if last > here else here
    for machine in machines:
        machine.acc = last


def _last_round(machine: _Machine, origin: float, end: float) -> tuple[dict[str, float], tuple, float]:
    """Busy seconds and rows between `origin` and `end`; copies that cross a bound count with their part inside."""
    rows = list(machine.log or ())
    rows += [(c[STEP], LINK.name, c[BEGUN], c[END]) for c in machine.link.done if c[END] > origin]
    rows += [(c[STEP], LINK.name, c[BEGUN], end) for c in machine.link.queue if 0 <= c[BEGUN] < end]
    rows += [row for row in machine.done_beyond if row[3] > origin and row[2] < end]
    rows.sort(key=lambda row: row[2])
    busy = dict.fromkeys((ACC, CPU, LINK.name, BACK.name), 0.0)
    for _, lane, start, stop in rows:
        busy[lane] = busy.get(lane, 0.0) + min(stop, end) - max(start, origin)
    return busy, tuple(rows), origin
