"""The program's time of given counts, computed without a solver."""

from dataclasses import dataclass

from pshard.planner.program.ilp import Contending, Counts, TierProblem, contending_groups, copies_beside_a_run


@dataclass(frozen=True)
class _Lines:
    """What the time of counts is above. Seconds.

    floor: whatever overlaps. rising: without overlaps of host work and copies, and how it rises with the overlap of
    each of `groups`. apart: all in turn, less what overlaps: at most `most` of a group, and `link` of copies in all.
    """

    floor: float
    rising: list[tuple[float, list[float]]]
    apart: float
    groups: tuple[Contending, ...]
    most: list[float]
    link: float


def fluid_seconds(problem: TierProblem, counts: tuple[Counts, ...], relaxed: bool = False) -> float:
    """The program's time of given counts. Seconds."""
    lines = _draw_lines(problem, counts, relaxed)
    return max(lines.floor, _least_time(lines))


def takes_at_least(problem: TierProblem, counts: tuple[Counts, ...], seconds: float) -> bool:
    """Whether the relaxed time of given counts is `seconds` or more."""
    lines = _draw_lines(problem, counts, True)
    if max(lines.floor, *(base for base, _ in lines.rising)) >= seconds:
        return True
    return _least_time(lines, seconds) >= seconds


def _draw_lines(problem: TierProblem, counts: tuple[Counts, ...], relaxed: bool) -> _Lines:
    acc = host = link = one_slot = issue = staged = hidden = 0.0
    longest = max(c.kv_cycle for c in problem.classes)
    works = []
    for cost, n in zip(problem.classes, counts):
        streamed = cost.size - n.pin - n.cpu - sum(s for _, s in n.cuts) if not cost.kind.is_looked_up else 0
        on_host = cost.size - n.cpu - n.kv if cost.kv_nbytes else 0
        work = cost.cpu * n.cpu
        for cut, (in_arena, in_slot) in zip(cost.cuts, n.cuts):
            acc += cut.acc * (in_arena + in_slot)
            work += cut.cpu * (in_arena + in_slot)
            issue += cut.issue * (in_arena + in_slot) + problem.copy_issue * in_slot
            link += cut.link * in_slot
            one_slot += (cut.link + cut.alone) * in_slot
        acc += cost.acc * (cost.size - n.cpu - n.split) + (0.0 if relaxed else cost.kv_stall * on_host)
        staged += (cost.acc + cost.kv_cycle) * on_host if cost.kv_cycle else 0.0
        hidden += longest * (n.cpu + n.split)
        host += work
        works.append(work + (cost.acc * (cost.size - n.cpu) if problem.all_contend else 0.0))
        link += cost.link * streamed + cost.kv_fetch * on_host
        one_slot += (cost.link + cost.acc) * streamed
        issue += cost.issue * (cost.size - n.cpu - n.split)
        issue += problem.copy_issue * streamed + problem.kv_issue * on_host
    reached = any(not c.kind.is_looked_up and c.size > n.cpu for c, n in zip(problem.classes, counts))
    on_cpu = dict.fromkeys(("leads", "follows", "first", "last"), 0)
    for cost, n in zip(problem.classes, counts):
        on_cpu[cost.place] += n.cpu
    acc += problem.fixed + (problem.leave + problem.enter * min(1, on_cpu["first"]) if reached else 0.0)
    least = max(0, on_cpu["follows"] - on_cpu["leads"] - on_cpu["last"], on_cpu["leads"] - on_cpu["follows"] - 1)
    splits = sum(n.split for n in counts)
    acc += problem.round_trip * (least + max(0, splits - on_cpu["leads"])) - problem.enter * splits
    stage = staged + host - hidden
    if problem.all_contend:
        acc, host = 0.0, acc + host
    groups = contending_groups(problem)
    slower, held = [1 - g.cpu_speed for g in groups], [1 - g.link_speed for g in groups]
    rising = [
        (acc + host, slower),
        (link, held),
        (issue + host, slower),
        (0.0 if problem.all_contend else stage, slower),
    ]
    if not problem.all_contend and (per_run := copies_beside_a_run(problem)):
        more = [s + problem.round_trip * g.link_speed / per_run for s, g in zip(slower, groups)]
        rising.append((acc + host - problem.round_trip * (1 + on_cpu["last"] + least + splits), more))
    floor = max(stage, one_slot if problem.lookahead == 1 else 0.0)
    most = [sum(works[c] for c in g.classes) / g.cpu_speed for g in groups]
    apart = sum(works[c] for g in groups for c in g.classes) + link
    return _Lines(floor, rising, apart, groups, most, link)


def _least_time(lines: _Lines, until: float = 0.0) -> float:
    """The least time over the groups' overlaps with copies; any time below `until` where there is one.

    It is convex in the overlaps: that of the last group is where a rising line meets the falling one, golden sections
    find that of the other.
    """
    groups, most, link = lines.groups, lines.most, lines.link
    *others, last = range(len(groups))

    def best(rising: list[tuple[float, list[float]]], falls: float, copies: float) -> float:
        gain = groups[last].link_speed + groups[last].cpu_speed - 1
        end = min(most[last], copies / groups[last].link_speed)
        meet = min(((falls - base) / (gain + s[last]) if gain + s[last] > 0 else end) for base, s in rising)
        at = min(max(0.0, meet), end)
        return max(falls - gain * at, *(base + s[last] * at for base, s in rising))

    def total(first: float) -> float:
        group = groups[others[0]]
        rising = [(base + s[others[0]] * first, s) for base, s in lines.rising]
        gain = group.link_speed + group.cpu_speed - 1
        return best(rising, lines.apart - gain * first, link - group.link_speed * first)

    if not others or not most[others[0]]:
        return best(lines.rising, lines.apart, link)
    low, high = 0.0, min(most[others[0]], link / groups[others[0]].link_speed)
    ratio = (5**0.5 - 1) / 2
    a, b = high - ratio * (high - low), low + ratio * (high - low)
    at_a, at_b = total(a), total(b)
    for _ in range(40):
        if min(at_a, at_b) < until:
            break
        if at_a <= at_b:
            high, b, at_b = b, a, at_a
            a = high - ratio * (high - low)
            at_a = total(a)
        else:
            low, a, at_a = a, b, at_b
            b = low + ratio * (high - low)
            at_b = total(b)
    return min(at_a, at_b, total(high), total(0.0))
