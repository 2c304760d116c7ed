"""Columns of a bound: between them lies every division of a unit with parts over VRAM, link and CPU.

All amounts of such a unit are above straight lines in how much its parts are used (`_Measure`): the CPU's seconds, the
link's, the accelerator's. So what is kept in VRAM decides what the others have together, and that is divided between
link and CPU in a straight line, which ends where nothing is the CPU's and where nothing is streamed. The first parts
are used most: what is kept is followed by straight lines that no number of parts is above.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from pshard.planner.price.tier_costs import TierCosts
from pshard.planner.price.unit_costs import DividedCost
from pshard.planner.program.tier_problems import DividedClassCost
from pshard.routing.expert_uses import used_experts
from pshard.units.divide_unit import count_shares, divided_sizes
from pshard.units.share import Share
from pshard.units.unit import Unit

SAMPLES = 128  # numbers of parts that a bound looks at: all of them, of most models
MOST_BENDS = 6  # of what is kept: edges of its outline that are followed


@dataclass(frozen=True)
class _Rise:
    """A straight line that never falls and is never below 0: `begin` at 0, more by `slope`."""

    begin: float
    slope: float

    def at(self, x: float) -> float:
        return self.begin + self.slope * x


def divide_anywhere(unit: Unit, costs: TierCosts) -> tuple[DividedClassCost, ...]:
    """A unit of a class of which parts of units count: no division of it is better than a mix of these and of whole
    ones in VRAM, streamed or on the CPU.

    A unit that is read in place takes at least as long as that takes, and as the CPU's part of it beside that. With the
    CPU's part c alone, d all the while beside a copy, and the reading r: r where that is longer than d, else
    c + (d - c) r / d, as the CPU is held up no longer than the reading lasts. With more on the CPU this is first
    straight, then above the straight line to where nothing is read.
    """
    counts = sample_counts(count_shares(unit))
    lines = _Lines.draw(unit, costs, counts, [costs.divided(unit.name, Share(n)) for n in counts])
    columns: list[DividedClassCost] = []
    for kept, used in lines.bends():
        columns += lines.list_columns(kept, lines.measure[-1] - used)
    return tuple(columns)


def sample_counts(parts: int) -> list[int]:
    """Numbers of parts from one to all but one."""
    return sorted({*range(1, parts, max(1, parts // SAMPLES)), parts - 1})


def _measure_parts(unit: Unit, costs: TierCosts) -> tuple[float, ...]:
    """How much the first n parts are used, for all n from 0 to all: by what tokens choose where just that is read over
    the link, by their number where all are copied."""
    parts = count_shares(unit)
    if not costs.reads_in_place(unit.kind) or unit.kind.parts is None:
        return tuple(map(float, range(parts + 1)))
    chosen, of = unit.kind.parts(costs.spec.config)
    each = (used_experts(range(i, i + 1), chosen, of, costs.load.tokens, costs.setting.uses) for i in range(parts))
    return tuple(accumulate(each, initial=0.0))


@dataclass(frozen=True)
class _Lines:
    """Straight lines below the amounts of every division of a unit. Seconds, by how much the parts are used that the
    CPU has (`cpu`; `held_up`: beside a copy), that are streamed (`link`), that the accelerator has (`alone`); bytes by
    how many are in VRAM.

    measure: of the first n parts. chain: what a divided unit adds to the work of both sides, issue: to the host's;
    whole, issue_whole: the same of one that the accelerator computes alone. in_place: whether it reads over the link
    what is streamed. part_nbytes: bytes of a part, without space to where the next tensor begins.
    """

    measure: tuple[float, ...]
    cpu: _Rise
    held_up: _Rise
    link: _Rise
    alone: _Rise
    nbytes: _Rise
    chain: float
    issue: float
    whole: float
    issue_whole: float
    in_place: bool
    part_nbytes: int

    @staticmethod
    def draw(unit: Unit, costs: TierCosts, counts: Sequence[int], found: Sequence[DividedCost]) -> "_Lines":
        measure = _measure_parts(unit, costs)
        used, kept = measure[-1], [costs.divided(unit.name, Share(kept=n)) for n in counts]
        by_cpu, by_acc = [used - measure[-1 - n] for n in counts], [measure[-1 - n] for n in counts]
        streamed = by_acc + [used - measure[n] for n in counts]
        of_link = [costs.over_link(unit.kind, cost) for cost in (*found, *kept)]
        cpu = _line_below(by_cpu, [c.cpu for c in found])
        beside = [c.cpu / costs.divided_speeds(unit.name, Share(n))[1] for n, c in zip(counts, found)]
        steepest = min((seconds - cpu.begin) / used for used, seconds in zip(by_cpu, beside))
        return _Lines(
            measure,
            cpu=cpu,
            held_up=_Rise(cpu.begin, max(cpu.slope, steepest)),
            link=_line_below(streamed, of_link),
            alone=_line_below(by_acc, [c.acc + c.rest for c in found]),
            nbytes=_line_below([float(n) for n in counts], [divided_sizes(unit, Share(kept=n)).kept for n in counts]),
            chain=min(c.issue + c.join + c.rest for c in found),
            issue=min(2 * c.issue for c in found),
            whole=min(c.acc for c in kept),
            issue_whole=min(c.issue for c in kept),
            in_place=costs.reads_in_place(unit.kind),
            part_nbytes=sum(t.packed_nbytes // t.parts for t in unit.tensors if t.parts),
        )

    def bends(self) -> list[tuple[float, float]]:
        """Numbers of parts in VRAM, and how much these are used at most: straight lines between them are never below
        `measure`. Where reading the others takes as long as to compute all there is a bend too."""
        found = _outline(self.measure)
        if not self.in_place or self.whole <= self.link.begin or not self.link.slope:
            return found
        used = self.measure[-1] - (self.whole - self.link.begin) / self.link.slope
        for (k, u), (next_k, next_u) in pairwise(found):
            if u < used < next_u:
                found.append((k + (next_k - k) * (used - u) / (next_u - u), used))
        return sorted(found)

    def list_columns(self, kept: float, rest: float) -> list[DividedClassCost]:
        """With so many parts in VRAM, and all others used so much: these streamed, without the CPU or next to that; on
        the CPU; and in between where both take as long."""
        in_vram, all_parts = round(self.nbytes.at(kept)) if kept else 0, len(self.measure) - 1
        least = min((used / n for n, used in enumerate(self.measure) if n), default=0.0)
        columns = []
        if kept < all_parts:
            if kept:
                columns.append(self._column(in_vram, self.link.at(rest), self.whole))
            columns.append(self._column(in_vram, self.link.at(rest), self.alone.at(self.measure[-1]), 0.0))
            even = self._even_part(rest)
            if self.in_place and 0 < even < rest:
                alone = self.alone.at(self.measure[-1] - even)
                columns.append(self._column(in_vram, self.link.at(rest - even), alone, even))
        columns.append(self._column(in_vram, 0.0, self.alone.at(least * kept), rest, pinned=True))
        on_host = int((all_parts - kept) * self.part_nbytes)
        return [replace(column, on_host=on_host) for column in columns]

    def _even_part(self, rest: float) -> float:
        """How much of the rest the CPU computes, held up, while the link brings the others."""
        return (self.link.at(rest) - self.held_up.begin) / max(self.held_up.slope + self.link.slope, 1e-300)

    def _column(
        self, in_vram: int, link: float, alone: float, on_cpu: float | None = None, pinned: bool = False
    ) -> DividedClassCost:
        """on_cpu: how much what the CPU has is used; None: it has nothing. pinned: nothing is streamed."""
        cpu = 0.0 if on_cpu is None else self.cpu.at(on_cpu)
        beside = self.whole if on_cpu is None else cpu
        return DividedClassCost(
            Share(0 if on_cpu is None else 1, 0),
            acc=self.whole if on_cpu is None else self.chain,
            cpu=cpu,
            link=link,
            alone=alone,
            issue=self.issue_whole if on_cpu is None else self.issue,
            nbytes=in_vram,
            kept=0 if pinned else in_vram,
            row_nbytes=0,
            on_host=0,
            read=max(0.0, link - beside) if self.in_place else 0.0,
            lies=pinned or in_vram > 0,
            streams=not pinned,
        )


def _line_below(x: Sequence[float], y: Sequence[float]) -> _Rise:
    """A line that is above none of the amounts y at x > 0, does not fall, and is not below 0."""
    low, high = (min(range(len(x)), key=lambda i: sign * x[i]) for sign in (1, -1))
    slope = max(0.0, (y[high] - y[low]) / (x[high] - x[low])) if x[high] > x[low] else 0.0
    begin = min(amount - slope * at for at, amount in zip(x, y))
    return _Rise(begin, slope) if begin >= 0 else _Rise(0.0, max(0.0, min(amount / at for at, amount in zip(x, y))))


def _outline(measure: Sequence[float]) -> list[tuple[float, float]]:
    """Few points, straight lines between which are never below (n, measure[n]): where some edges of their convex hull
    meet."""
    hull: list[tuple[int, float]] = []
    for point in enumerate(measure):
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], point):
            hull.pop()
        hull.append(point)
    edges = list(pairwise(hull))
    taken = sorted({round(i * (len(edges) - 1) / (MOST_BENDS - 1)) for i in range(MOST_BENDS)})
    bends = [(0.0, measure[0])]
    for one, other in pairwise(taken):
        (a, of_a), (b, of_b) = edges[one][0], edges[other][0]
        rise, next_rise = _slope(*edges[one]), _slope(*edges[other])
        x = (of_b - of_a + rise * a - next_rise * b) / (rise - next_rise)
        bends.append((x, of_a + rise * (x - a)))
    return [*bends, (float(len(measure) - 1), measure[-1])]


def _slope(one: tuple[float, float], other: tuple[float, float]) -> float:
    return (other[1] - one[1]) / (other[0] - one[0])
