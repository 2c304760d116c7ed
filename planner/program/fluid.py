"""The program's time of given counts, computed without a solver: the least time that the tier's lines leave."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from pshard.planner.program.counts import Counts, number, place_units
from pshard.planner.program.tier_lines import Handoffs, TierLines, TimeLine, draw_lines, handoff_floors, sum_work
from pshard.planner.program.tier_problems import TierProblem, copies_beside_a_run

GOLDEN = (5**0.5 - 1) / 2
SECTIONS = 40  # of a range of overlaps: it is then a few billionths of what it was


@dataclass(frozen=True)
class _Overlaps:
    """What overlaps of host work and copies change, by group. Seconds.

    rising: lines that rise with them, and their `slopes`. falls: by how much the line of host memory falls. most: of a
    group. shares: of the link that copies keep meanwhile.
    """

    rising: list[TimeLine]
    slopes: list[tuple[float, ...]]
    falls: tuple[float, ...]
    most: list[float]
    shares: tuple[float, ...]


def fluid_seconds(problem: TierProblem, counts: tuple[Counts, ...], relaxed: bool = False) -> float:
    """The program's time of given counts. Seconds."""
    lines = _draw(problem, counts, relaxed)
    return _least_time(lines, _overlaps(problem, lines), 0.0)


def takes_at_least(problem: TierProblem, counts: tuple[Counts, ...], seconds: float) -> bool:
    """Whether the relaxed time of given counts is `seconds` or more."""
    lines = _draw(problem, counts, True)
    overlaps = _overlaps(problem, lines)
    if max(number(line.base) for line in overlaps.rising) >= seconds:
        return True
    return _least_time(lines, overlaps, seconds) >= seconds


def _draw(problem: TierProblem, counts: tuple[Counts, ...], relaxed: bool) -> TierLines:
    """The tier's lines, with hand-offs as few as the counts allow."""
    sums = sum_work(problem, counts, 1.0, not relaxed)
    reached = any(
        not cost.kind.is_looked_up and number(place_units(cost, n).off_cpu) > 0
        for cost, n in zip(problem.classes, counts)
    )
    least = {"handed_in": 0.0, "lone_divided": 0.0, "trips": 0.0}
    for floor in handoff_floors(problem, sums, reached):
        least[floor.of] = max(least[floor.of], number(floor.least))
    return draw_lines(problem, counts, sums, Handoffs(reached=reached, **least), 1.0)


def _overlaps(problem: TierProblem, lines: TierLines) -> _Overlaps:
    rising = [lines.serial, lines.link, lines.issue, lines.kv_stage]
    if lines.one_slot:
        rising.append(lines.one_slot)
    if lines.busy:
        rising.append(lines.busy)
    if lines.runs and (per_run := copies_beside_a_run(problem)):
        rising.append(_with_more_runs(lines, problem.round_trip / per_run))
    most = [number(work.most) / work.shares[i] for i, work in enumerate(lines.works)]
    slopes = list(zip(*(line.slopes for line in rising)))
    return _Overlaps(rising, slopes, tuple(-x for x in lines.host_memory.slopes), most, lines.copies.shares)


def _with_more_runs(lines: TierLines, price: float) -> TimeLine:
    """The serial line where copies are more than the runs allow: each second more takes `price` seconds of trips."""
    assert lines.runs
    base = number(lines.serial.base) - price * number(lines.runs.most)
    slopes = zip(lines.serial.slopes, lines.runs.shares)
    return TimeLine("serial_with_more_runs", base, tuple(slope + price * share for slope, share in slopes))


def _least_time(lines: TierLines, overlaps: _Overlaps, until: float) -> float:
    """The least time over the groups' overlaps with copies; any time below `until` where there is one."""
    bases = [number(line.base) for line in overlaps.rising]
    return _least_from(0, overlaps, bases, number(lines.host_memory.base), number(lines.copies.most), until)


def _least_from(
    g: int, overlaps: _Overlaps, bases: Sequence[float], falling: float, copies: float, until: float
) -> float:
    """The least time over the overlaps of group number g and those that follow it, where the others' are settled.

    It is convex in the overlaps: that of the last group is where a rising line meets the falling one, golden sections
    find those of the others.
    """
    last = len(overlaps.most) - 1
    if g > last:
        return max(falling, *bases)
    end = max(0.0, min(overlaps.most[g], copies / overlaps.shares[g]))
    slopes, gain = overlaps.slopes[g], overlaps.falls[g]
    if g == last:
        meets = [(falling - base) / (gain + s) for base, s in zip(bases, slopes) if gain + s > 0]
        overlap = min(max(0.0, min(meets, default=inf)), end)
        return max(falling - gain * overlap, *[base + s * overlap for base, s in zip(bases, slopes)])

    def at(overlap: float) -> float:
        rest = [base + slope * overlap for base, slope in zip(bases, slopes)]
        return _least_from(
            g + 1, overlaps, rest, falling - gain * overlap, copies - overlaps.shares[g] * overlap, until
        )

    if not overlaps.most[g]:
        return at(0.0)
    return _search_beside(at, end, until) if until and last == 1 else _search(at, end, until)


def _search(at: Callable[[float], float], high: float, until: float) -> float:
    """The least of a convex function between 0 and `high`, by golden sections; any value below `until`."""
    low = 0.0
    a, b = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    at_a, at_b = at(a), at(b)
    for _ in range(SECTIONS):
        if min(at_a, at_b) < until:
            break
        if at_a <= at_b:
            high, b, at_b = b, a, at_a
            a = high - GOLDEN * (high - low)
            at_a = at(a)
        else:
            low, a, at_a = a, b, at_b
            b = low + GOLDEN * (high - low)
            at_b = at(b)
    return min(at_a, at_b, at(high), at(0.0))


def _search_beside(at: Callable[[float], float], high: float, until: float) -> float:
    """A value of a convex function between 0 and `high` that is below `until` where there is one: golden sections end
    as soon as the lines through their points leave no room for less."""
    low, at_low, at_high = 0.0, at(0.0), at(high)
    a, b = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    at_a, at_b = at(a), at(b)
    for _ in range(SECTIONS):
        least = min(at_low, at_a, at_b, at_high)
        if least < until or high <= low:
            return least
        if at_a <= at_b:  # the least is left of b: right of a above the line through low, left of it above the other
            below = max((at_low - at_a) / (a - low) * (b - a), (at_b - at_a) / (b - a) * (a - low))
        else:
            below = max((at_high - at_b) / (high - b) * (b - a), (at_a - at_b) / (b - a) * (high - b))
        if min(at_a, at_b) - below >= until:
            return least
        if at_a <= at_b:
            high, at_high, b, at_b = b, at_b, a, at_a
            a = high - GOLDEN * (high - low)
            at_a = at(a)
        else:
            low, at_low, a, at_a = a, at_a, b, at_b
            b = low + GOLDEN * (high - low)
            at_b = at(b)
    return min(at_low, at_a, at_b, at_high)
