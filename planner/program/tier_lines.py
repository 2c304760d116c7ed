"""What the time of a tier is at least: every formula of time once, for columns of the program and for numbers.

A line says that the tier's time T is at least `base` and so much more for every second in which host work of a group of
classes and copies overlap. docs/planning.md derives the lines; `tier_rows.py` adds them to the program, and `fluid.py`
finds the least time that they leave for given counts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pshard.planner.program.counts import AnyCounts, copied_units, place_units
from pshard.planner.program.tier_problems import (
    ClassCost,
    Contending,
    TierProblem,
    contending_groups,
    copies_beside_a_run,
)
from pshard.planner.solver.linear import Amount


@dataclass
class TierSums:
    """Work of all units of a tier, each in the seconds of who does it (or milliseconds, by `scale`), and units.

    acc, host, link: by accelerator, CPU and copies; issue: the host thread's for the accelerator; one_slot: units
    in slots, copied and computed in turn; staged: layers with KV on the host, fetched, computed and written back in
    turn; works: host work by class. busy: the accelerator's, beside the CPU's too. divided: units that both sides
    compute. on_cpu: units by `ClassCost.place`; feeders: those in layers that are never divided.
    """

    problem: TierProblem
    scale: float
    stalls: bool  # every fetch of KV holds up the accelerator
    acc: Amount = 0.0
    host: Amount = 0.0
    link: Amount = 0.0
    issue: Amount = 0.0
    one_slot: Amount = 0.0
    staged: Amount = 0.0
    busy: Amount = 0.0
    cpu_units: Amount = 0
    feeders: Amount = 0
    divided: Amount = 0
    streamed: Amount = 0
    works: list[Amount] = field(default_factory=list)
    on_cpu: dict[str, Amount] = field(default_factory=lambda: dict.fromkeys(("leads", "follows", "first", "last"), 0))

    def add_class(self, cost: ClassCost, n: AnyCounts) -> None:
        scale, units = self.scale, place_units(cost, n)
        self.works.append(scale * (cost.cpu * n.cpu + self._add_divided(cost, n)))
        self.host += self.works[-1]
        self.acc += scale * cost.acc * units.on_acc
        self.busy += scale * cost.acc * units.on_acc
        self.issue += scale * cost.issue * units.on_acc
        self.cpu_units += n.cpu
        self.on_cpu[cost.place] += n.cpu
        if cost.kind.position == "layer" and not cost.divided:
            self.feeders += n.cpu
        if cost.kind.is_looked_up:
            return
        self.link += scale * cost.link * units.streamed
        self.acc += scale * cost.read * units.streamed
        if not cost.in_place:
            self.issue += scale * self.problem.copy_issue * units.streamed
            self.one_slot += scale * (cost.link + cost.acc) * units.streamed
        self.streamed += units.streamed
        if cost.kv_nbytes:
            self._add_kv(cost, units.kv_on_host)

    def _add_divided(self, cost: ClassCost, n: AnyCounts) -> Amount:
        """Work on divided units; returns that of the CPU, in seconds."""
        host: Amount = 0.0
        scale = self.scale
        for part, (in_arena, elsewhere) in zip(cost.divided, n.divided):
            both, in_slot = in_arena + elsewhere, copied_units(part, in_arena, elsewhere)
            host += part.cpu * both
            self.acc += scale * (part.acc * both + part.read * in_slot)
            self.busy += scale * part.alone * both
            self.issue += scale * part.issue * both
            self.link += scale * part.link * in_slot
            if not cost.in_place:
                self.issue += scale * self.problem.copy_issue * in_slot
                self.one_slot += scale * (part.link + part.alone) * in_slot
            self.streamed += in_slot
            if part.share.cpu:
                self.divided += both
        return host

    def _add_kv(self, cost: ClassCost, on_host: Amount) -> None:
        self.link += self.scale * cost.kv_fetch * on_host
        self.issue += self.scale * self.problem.kv_issue * on_host
        if self.stalls:
            self.acc += self.scale * cost.kv_stall * on_host
        if cost.kv_cycle:
            self.staged += self.scale * (cost.acc + cost.kv_cycle) * on_host


class Handoffs(NamedTuple):
    """Where the chain of units changes sides: columns, or the least that `handoff_floors` allows.

    reached: 1 if the accelerator computes at all; handed_in: 1 if it gets its input from an embedding on the CPU;
    trips: runs of CPU units beside the one that the embedding begins; lone_divided: divided units that do not follow
    one on the CPU.
    """

    reached: Amount
    handed_in: Amount
    trips: Amount
    lone_divided: Amount


class Floor(NamedTuple):
    """One of the hand-offs' numbers (`of`) is `least` or more."""

    name: str
    of: str
    least: Amount


class TimeLine(NamedTuple):
    """T >= base + slopes x overlaps, by group."""

    name: str
    base: Amount
    slopes: tuple[float, ...]


class OverlapLimit(NamedTuple):
    """shares x overlaps <= most, by group."""

    name: str
    shares: tuple[float, ...]
    most: Amount


class TierLines(NamedTuple):
    """All that bounds a tier's time and its overlaps.

    runs: of copies beside runs of CPU units; None where copies may run beside all work. one_slot: None with more slots.
    busy: None where no parts are divided: what the accelerator computes is in the serial line then.
    """

    groups: tuple[Contending, ...]
    serial: TimeLine
    link: TimeLine
    issue: TimeLine
    kv_stage: TimeLine
    host_memory: TimeLine
    works: tuple[OverlapLimit, ...]
    copies: OverlapLimit
    runs: OverlapLimit | None
    one_slot: TimeLine | None
    busy: TimeLine | None

    def in_order(self) -> Iterator[TimeLine | OverlapLimit]:
        """As the program has them."""
        yield from (self.serial, self.link, self.issue, self.kv_stage, self.host_memory)
        yield from self.works
        yield self.copies
        if self.runs:
            yield self.runs
        if self.one_slot:
            yield self.one_slot
        if self.busy:
            yield self.busy


def sum_work(problem: TierProblem, counts: Sequence[AnyCounts], scale: float, stalls: bool) -> TierSums:
    """`scale`: 1 for seconds."""
    sums = TierSums(problem, scale, stalls)
    for cost, n in zip(problem.classes, counts):
        sums.add_class(cost, n)
    return sums


def handoff_floors(problem: TierProblem, sums: TierSums, reached: Amount) -> list[Floor]:
    """What the hand-offs are at least.

    Leaders and the others take turns in the order of execution (`ClassCost.place`), so a run of neighbours has at most
    one leader, or the followers of one, more than of the other kind; the run that ends with the output does not go
    back. A divided unit after a CPU unit hides the hand-off to the accelerator, after others it needs one to the CPU.
    Before a layer's experts that unit may be the router.
    """
    leads, follows = sums.on_cpu["leads"], 1 / problem.followers * sums.on_cpu["follows"]
    floors = [Floor("handed_in_least", "handed_in", reached + 1 / problem.firsts * sums.on_cpu["first"] - 1)]
    if problem.may_divide:
        before = sums.feeders if problem.divides_parts else sums.on_cpu["leads"]
        floors.append(Floor("lone_divided_least", "lone_divided", sums.divided - before))
    floors.append(Floor("trips_of_followers", "trips", follows - leads - sums.on_cpu["last"]))
    floors.append(Floor("trips_of_leaders", "trips", leads - follows - 1))
    return floors


def draw_lines(
    problem: TierProblem, counts: Sequence[AnyCounts], sums: TierSums, hands: Handoffs, scale: float
) -> TierLines:
    """The lines of a tier; `sums` and `hands` of the same counts."""
    groups = contending_groups(problem)
    together = problem.all_contend
    acc, host, works = _chain(problem, sums, hands, scale), sums.host, sums.works
    stage = sums.staged + host - scale * max(c.kv_cycle for c in problem.classes) * (sums.cpu_units + sums.divided)
    if together:  # what the accelerator does is host work too
        acc, host = 0.0, acc + host
        costs = zip(works, problem.classes, counts)
        works = [work + scale * cost.acc * (cost.size - n.cpu) for work, cost, n in costs]
    slower = tuple(1 - g.cpu_speed for g in groups)
    apart: Amount = 0.0
    for group in groups:
        for c in group.classes:
            apart = apart + works[c]
    shares = tuple(g.link_speed for g in groups)
    gains = tuple(-(g.link_speed + g.cpu_speed - 1) for g in groups)
    most = scale * copies_beside_a_run(problem)
    runs = hands.trips + 1 + sums.on_cpu["last"] + sums.divided
    return TierLines(
        groups=groups,
        serial=TimeLine("serial", acc + host, slower),
        link=TimeLine("link", sums.link, tuple(1 - g.link_speed for g in groups)),
        issue=TimeLine("issue", sums.issue + host, slower),
        kv_stage=TimeLine("kv_stage", stage, (0.0,) * len(groups) if together else slower),
        host_memory=TimeLine("host_memory", apart + sums.link, gains),
        works=tuple(_limit_work(i, groups, works) for i in range(len(groups))),
        copies=OverlapLimit("copies", shares, sums.link),
        runs=None if together else OverlapLimit("runs", shares, most * runs),
        one_slot=TimeLine("one_slot", sums.one_slot, (0.0,) * len(groups)) if problem.lookahead == 1 else None,
        busy=TimeLine("busy", sums.busy, (0.0,) * len(groups)) if problem.divides_parts and not together else None,
    )


def _chain(problem: TierProblem, sums: TierSums, hands: Handoffs, scale: float) -> Amount:
    """The accelerator's work and all hand-offs."""
    ends = problem.fixed + problem.enter * hands.handed_in + problem.leave * hands.reached
    acc = sums.acc + scale * ends + scale * problem.round_trip * hands.trips
    if problem.may_divide:
        acc = acc + scale * (problem.round_trip * hands.lone_divided - problem.enter * sums.divided)
    return acc


def _limit_work(i: int, groups: tuple[Contending, ...], works: list[Amount]) -> OverlapLimit:
    """The overlap of group number i is at most its host work, slowed down."""
    most: Amount = 0.0
    for c in groups[i].classes:
        most = most + works[c]
    return OverlapLimit(f"work_{groups[i].name}", tuple(g.cpu_speed if g is groups[i] else 0.0 for g in groups), most)
