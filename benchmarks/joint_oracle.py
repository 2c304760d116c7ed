"""The fastest plan of a small model by enumeration: all tiers at once, every placement of every unit.

It shares no code with the planner. What a unit takes and weighs comes as plain numbers (`Tier`, `Item`); the order of
steps, the lanes, the memory of a tier and which tiers go with each other are written here from docs/runtime.md and
docs/planning.md.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

SLOTS = (1, 2, 3, 4)


class Way(NamedTuple):
    """One way to place a unit: who computes it ("acc", "cpu" or "both"), and what that takes. Seconds, bytes.

    pins: a bit for each thing of which the arena could have bytes, so that those of nested tiers are nested bits. slot:
    bytes in a staging slot; 0: not streamed. both: (accelerator, CPU, join, rest) of a divided unit.
    """

    label: str
    on: str
    seconds: float
    pins: int = 0
    held: int = 0
    slot: int = 0
    link: float = 0.0
    issue: float = 0.0
    speeds: tuple[float, float] = (1.0, 1.0)
    state: str = ""  # "vram", "host", or "" where the accelerator needs none
    fetch: float = 0.0
    write: float = 0.0
    rows: int = 0
    both: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    looked_up: bool = False

    @property
    def busy(self) -> float:
        """What its unit keeps the chain of units busy for at least."""
        acc, cpu, join, rest = self.both
        return max(acc, cpu) + join + rest if self.on == "both" else self.seconds


@dataclass(frozen=True)
class Tier:
    """What one tier is made of. ways: by unit, in order of execution. room: bytes beside the scratch."""

    tokens: int
    weight: float
    entered: bool
    ways: tuple[tuple[Way, ...], ...]
    room: int
    stage: int
    to_acc: float
    to_cpu: float
    deliver: float
    copy_issue: float
    run_issue: float


class Copy:
    """A copy in its lane: when it may start, seconds left, when it was done."""

    __slots__ = ("done", "left", "ready")

    def __init__(self, ready: float, left: float) -> None:
        self.ready, self.left, self.done = ready, left, -1.0


class Lane:
    """Copies to the device, one after the other."""

    def __init__(self) -> None:
        self.now, self.waiting = 0.0, deque[Copy]()

    def finish(self, copy: Copy) -> float:
        """Run copies at full rate until that one is done."""
        while copy.done < 0:
            first = self.waiting.popleft()
            first.done = self.now = max(self.now, first.ready) + first.left
        return copy.done

    def run_until(self, time: float) -> None:
        while self.waiting and self.now < time:
            first = self.waiting[0]
            begins = max(self.now, first.ready)
            if begins >= time:
                self.now = begins
                return
            if begins + first.left <= time:
                self.finish(first)
            else:
                first.left -= time - begins
                self.now = time

    def beside(self, start: float, work: float, speeds: tuple[float, float]) -> float:
        """CPU work from `start` on while copies run, both slower than alone; its end."""
        self.run_until(start)
        of_link, of_cpu = speeds
        while work > 1e-12 and self.waiting:
            first = self.waiting[0]
            begins = max(self.now, first.ready)
            if begins > start:
                alone = min(work, begins - start)
                start, work = start + alone, work - alone
                continue
            lasts = min(work / of_cpu, first.left / of_link)
            first.left, work, start = first.left - lasts * of_link, work - lasts * of_cpu, start + lasts
            self.now = start
            if first.left <= 1e-15:
                first.done = start
                self.waiting.popleft()
        return start + work


def time_tier(tier: Tier, placed: Sequence[Way], slots: int) -> float:
    """Seconds between micro-batches in the steady state, by running three."""
    return _Clock(tier, placed, slots).run()


class _Clock:
    """The lanes of a machine that runs one tier."""

    def __init__(self, tier: Tier, placed: Sequence[Way], slots: int) -> None:
        self.tier, self.placed, self.slots, self.lane = tier, placed, slots, Lane()
        self.host = self.acc = self.back = 0.0
        self.begins, self.paid = tier.run_issue, False
        self.streamed = [i for i, way in enumerate(placed) if way.slot]
        self.staged = [i for i, way in enumerate(placed) if way.state == "host"]
        self.loaded: dict[int, Copy] = {}
        self.brought: dict[int, Copy] = {}
        self.free = [0.0] * max(slots, 1)

    def run(self) -> float:
        for number in range(self.slots):
            self.copy(number)
        ends = [self.round() for _ in range(3)]
        return (ends[2] - ends[0]) / 2

    def copy(self, number: int) -> None:
        """Start the copy of the streamed unit of that number into its slot."""
        at = self.streamed[number]
        self.host += self.tier.copy_issue
        self.begins = self.tier.run_issue
        copy = Copy(max(self.host, self.free[number % self.slots]), self.placed[at].link)
        self.loaded[at] = copy
        self.lane.waiting.append(copy)

    def fetch(self, at: int) -> None:
        """Start to bring a state to the stage, once the last one has been written back."""
        if not self.placed[at].fetch:
            return
        self.host += 2 * self.tier.copy_issue
        self.begins = self.tier.run_issue
        self.brought[at] = copy = Copy(max(self.host, self.back), self.placed[at].fetch)
        self.lane.waiting.append(copy)

    def hand(self, to: str, seconds: float) -> None:
        self.acc = max(self.host, self.acc) + seconds
        self.begins, self.paid = self.tier.run_issue, to == "acc"
        if to == "cpu":
            self.host = self.acc

    def round(self) -> float:
        side, fetched, copied = "cpu", 0, 0
        if self.staged:
            self.fetch(self.staged[0])
        for at, way in enumerate(self.placed):
            if way.on == "both":
                other = "cpu" if side == "acc" else "acc"
                self.hand(other, self.tier.to_cpu if other == "cpu" else self.tier.to_acc)
                self.on_both(at, way)
                side = "acc"
            else:
                if way.on != side and not way.looked_up:
                    self.hand(way.on, self.tier.to_cpu if way.on == "cpu" else self.tier.to_acc)
                side = way.on
                if way.on == "cpu":
                    self.host = self.lane.beside(self.host, way.seconds, way.speeds)
                else:
                    self.on_acc(at, way)
            if way.state == "host":
                self.host += 2 * self.tier.copy_issue
                self.begins = self.tier.run_issue
                self.back = max(self.back, self.acc) + way.write
                fetched += 1
                if fetched < len(self.staged):
                    self.fetch(self.staged[fetched])
            if way.slot:
                self.free[copied % self.slots] = self.acc
                self.begins = self.tier.run_issue
                following = copied + self.slots
                if following >= len(self.streamed):
                    following = copied % self.slots
                if following != copied:
                    self.copy(following)
                copied += 1
        if side == "acc":
            self.hand("cpu", self.tier.deliver)
        self.host = max(self.host, self.acc)
        return self.host

    def on_acc(self, at: int, way: Way) -> None:
        waits = bool(way.slot) or at in self.brought
        self.host += way.issue
        if not self.paid:
            self.host += self.tier.run_issue if waits else self.begins
        self.begins, self.paid = 0.0, False
        start = max(self.acc, self.host)
        if way.slot:
            start = max(start, self.lane.finish(self.loaded[at]))
        if at in self.brought:
            start = max(start, self.lane.finish(self.brought.pop(at)))
        self.acc = start + way.seconds

    def on_both(self, at: int, way: Way) -> None:
        acc, cpu, join, rest = way.both
        self.host += way.issue + (0.0 if self.paid else self.tier.run_issue)
        self.begins, self.paid = self.tier.run_issue, False
        start = max(self.acc, self.host)
        self.host = self.lane.beside(self.host, cpu, way.speeds)
        if way.slot:
            start = max(start, self.lane.finish(self.loaded[at]))
        self.acc = max(self.host, start + acc) + join
        self.host += way.issue + self.tier.run_issue
        self.acc = max(self.acc, self.host) + rest


class Residency(NamedTuple):
    """What a tier has in VRAM, as bits."""

    pins: int
    states: int

    def goes_with(self, other: "Residency") -> bool:
        """Whether the pins of one lie within those of the other, and likewise the states."""
        return all(not a & ~b or not b & ~a for a, b in zip(self, other))


@dataclass
class Enumeration:
    """Every placement of one tier that takes less than `limit` seconds: the fastest by what it has in VRAM.

    What is cut off cannot be faster: units of the accelerator and the CPU take turns, copies share one link, and each
    slot serves two units at least (with one it would count as pinned). ended: whether `most` timings were enough.
    """

    tier: Tier
    limit: float
    most: int
    shrinks: bool = False
    fastest: dict[Residency, float] = field(default_factory=dict)
    best: tuple[Sequence[Way], int] | None = None
    timed: int = 0
    rest: list[float] = field(init=False)
    choices: list[list[tuple[Way, float, float]]] = field(init=False)  # each way, its time in the chain, on the link

    @property
    def ended(self) -> bool:
        return self.timed < self.most

    def run(self) -> "Enumeration":
        ways = self.tier.ways
        self.rest = [sum(min(way.busy for way in of) for of in ways[at:]) for at in range(len(ways) + 1)]
        self.choices = [[(w, w.busy, w.fetch + (w.link if w.slot else 0.0)) for w in of] for of in ways]
        self._descend([], 0.0, 0.0, 0, 0)
        return self

    def _descend(self, placed: list[Way], busy: float, link: float, held: int, slot: int) -> None:
        """Place the next unit each way; `slot`: bytes of the largest one that is streamed, which a slot must have."""
        at = len(placed)
        if at == len(self.choices):
            self._time(placed, held, slot)
            return
        rest, room = self.rest[at + 1], self.tier.room
        for way, more, brought in self.choices[at]:
            largest = slot if slot > way.slot else way.slot
            if held + way.held + largest > room or link + brought >= self.limit:
                continue
            if busy + more + rest < self.limit and self.ended:
                self._descend([*placed, way], busy + more, link + brought, held + way.held, largest)

    def _time(self, placed: list[Way], held: int, slot: int) -> None:
        streamed = sum(way.slot > 0 for way in placed)
        held += max((way.rows for way in placed), default=0)
        held += self.tier.stage if any(way.state == "host" for way in placed) else 0
        fitting = [n for n in SLOTS if 2 * n <= streamed] if streamed else [0]
        fitting = [n for n in fitting if held + n * slot <= self.tier.room]
        if not fitting:
            return
        states = sum(1 << i for i, way in enumerate(placed) if way.state == "vram")
        where = Residency(sum(way.pins for way in placed), states)
        for n in fitting:
            self.timed += 1
            seconds = time_tier(self.tier, placed, n)
            if seconds < min(self.limit, self.fastest.get(where, inf)):
                self.fastest[where] = seconds
                if self.shrinks:
                    self.limit, self.best = seconds, (tuple(placed), n)


def joint_optimum(tiers: Sequence[Tier], planned: float, switch: "Switch", most: int) -> float | None:
    """Seconds of the fastest round below `planned`, which is returned where there is none; None where there are too
    many placements."""
    floors = []
    for tier in tiers:
        alone = Enumeration(tier, planned / tier.weight, most, shrinks=True).run()
        if not alone.ended:
            return None
        floors.append(tier.weight * min(alone.fastest.values(), default=inf))
    lists: list[list[tuple[float, Residency]]] = []
    for tier, floor in zip(tiers, floors):
        limit = (planned - sum(floors) + floor) / tier.weight
        every = Enumeration(tier, limit, most).run()
        if not every.ended:
            return None
        lists.append(sorted((tier.weight * s, where) for where, s in every.fastest.items()))
    ends = [i for i, tier in enumerate(tiers) if tier.entered]
    return min([planned, *_mixes(lists, floors, planned, switch, (ends[0], ends[-1]))])


@dataclass(frozen=True)
class Switch:
    """Seconds of bringing in what the bits of pins stand for, and the state of each unit."""

    pins: tuple[float, ...]
    states: tuple[float, ...]

    def seconds(self, one: Residency, other: Residency) -> float:
        """Of what one tier has in VRAM and the other has not."""
        return sum(
            seconds
            for of, a, b in zip((self.pins, self.states), one, other)
            for i, seconds in enumerate(of)
            if (a ^ b) >> i & 1
        )


def _mixes(
    lists: list[list[tuple[float, Residency]]],
    floors: list[float],
    best: float,
    switch: Switch,
    ends: tuple[int, int],
) -> Iterator[float]:
    """Rounds, each shorter than those before."""
    order = sorted(range(len(lists)), key=lambda i: len(lists[i]))
    rest = [sum(floors[i] for i in order[at:]) for at in range(len(order) + 1)]

    def descend(taken: tuple[Residency, ...], seconds: float) -> Iterator[float]:
        nonlocal best
        at = len(taken)
        if at == len(order):
            small, large = (taken[order.index(end)] for end in ends)
            total = seconds + switch.seconds(small, large)
            if total < best:
                best = total
                yield total
            return
        for more, where in lists[order[at]]:
            if seconds + more + rest[at + 1] >= best:
                return
            if all(where.goes_with(other) for other in taken):
                yield from descend((*taken, where), seconds + more)

    yield from descend((), 0.0)
