"""The integer program: how many units of each class are pinned, streamed and computed on the CPU, in every tier.

Sets: tiers t, classes c. Integers per (t, c): pin, cpu, kv (attention: layers with KV in VRAM); streamed is the rest.
Constraints: the arena holds pins, slots, KV and KV stage; the time of a tier is at least its serial compute, at least
its link traffic, and at least what both need while they contend for host DRAM; pins and KV of all tiers are nested, so
that residency is a prefix of one order. Objective: the workload's time, tier switches included. docs/planning.md
derives it.
"""

import time
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, floor

from pshard.planner.program.linear import Column, Linear, Program, sum_of
from pshard.planner.program.solvers import relax, solve, solver_name
from pshard.units.unit import UnitKind
from pshard.workload import MIB

MS = 1e3  # seconds in the objective's unit
TIDY = 1e-4  # price of link traffic that nothing waits for: prefer pinned where the time is the same
UNTIDY = 0.02  # price of one more streamed unit, of the largest copy: small units waste the slots' lookahead
GAP = 1e-3  # relative gap at which the solver may stop unless it is told otherwise
MANY = 16  # units of a class: one more or less of them hardly changes a bound
NEAR = 1e-6  # a solver's integers


@dataclass(frozen=True)
class CutCost:
    """Seconds and bytes of one unit of a class whose rows are split between accelerator and CPU in one tier.

    `acc` and `cpu` add up to its time: what the other side does meanwhile is in neither. `link` and `nbytes`: the
    accelerator's part; `alone`: what it computes once that is there. `row_nbytes`: where the CPU's rows come to.
    """

    acc: float
    cpu: float
    link: float
    alone: float
    issue: float
    nbytes: int
    row_nbytes: int


@dataclass(frozen=True)
class ClassCost:
    """Seconds and bytes of one unit of a class in one tier. `kv_nbytes`: its layer's KV in VRAM; 0 if it has none."""

    kind: UnitKind
    size: int
    nbytes: int
    acc: float
    cpu: float
    link: float
    kv_nbytes: int = 0
    kv_fetch: float = 0.0
    issue: float = 0.0  # host seconds to issue it on the accelerator
    kv_stall: float = 0.0  # what the accelerator waits for the fetch where nothing but accelerator work hides it
    kv_cycle: float = 0.0  # fetch and write-back of its layer's KV, between two computations from the one stage
    link_speed: float = 1.0  # 1 = alone; while host work on the unit and a copy overlap
    cpu_speed: float = 1.0
    cuts: tuple[CutCost, ...] = ()  # by rows on the CPU

    @property
    def place(self) -> str:
        """Where its units stand in the order of execution: "first", "last", or in a layer "leads" or "follows"."""
        return self.kind.position if self.kind.position != "layer" else "leads" if self.kind.leads else "follows"


@dataclass(frozen=True)
class TierProblem:
    """One tier's coefficients. `room`: arena bytes left for pins, slots, KV and stage. Seconds and bytes.

    `slots` take room; `lookahead` of them can be filled while one run of CPU units lasts (more than `slots` only
    when a bound for several choices is wanted). `round_trip`: hand-offs around a run of CPU units; `enter`: the
    hand-off after an embedding on the CPU, `leave`: the last one; `fixed`: whatever the placement. `all_contend`: the
    accelerator's work is host work too (the CPU as accelerator). `copy_issue`: host seconds to start the copy of a
    unit, `kv_issue`: the copies of an attention unit's KV on the host and back. `host_room`: bytes of weights and of
    KV that all tiers together may keep in host memory, where that is limited; `host_before`: what tiers that are placed
    already keep.
    """

    tokens: int
    weight: float
    classes: tuple[ClassCost, ...]
    room: int
    slots: int
    lookahead: int
    stage_nbytes: int
    round_trip: float
    enter: float
    leave: float
    fixed: float
    all_contend: bool = False
    copy_issue: float = 0.0
    kv_issue: float = 0.0
    host_room: int | None = None
    host_before: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Counts:
    """Units of one class: pinned, on the CPU (the rest is streamed), and with KV in VRAM.

    cuts: split ones by rows on the CPU, (pinned, streamed); they count among the pinned and the streamed ones.
    """

    pin: int
    cpu: int
    kv: int = 0
    cuts: tuple[tuple[int, int], ...] = ()

    @property
    def split(self) -> int:
        """Split units, wherever they are cut."""
        return sum(pinned + streamed for pinned, streamed in self.cuts)

    @property
    def pin_whole(self) -> int:
        """Pinned units that are not split."""
        return self.pin - sum(pinned for pinned, _ in self.cuts)


# a tier's columns, by class: units pinned, on the CPU, layers with KV in VRAM, split ones by rows and place
_Tier = tuple[list[Column], list[Column], list[Column], list[list[list[Column]]]]


@dataclass(frozen=True)
class Solution:
    """What a solver found. `status`: "optimal", "feasible" (a limit was hit first), "infeasible" or "unsolved".

    `objective` and `bound` in seconds; gap = (objective - bound) / objective. counts[tier][class].
    """

    status: str
    objective: float
    bound: float
    gap: float
    seconds: float
    solver: str
    counts: tuple[tuple[Counts, ...], ...]


def solve_tiers(
    problems: tuple[TierProblem, ...],
    switch_seconds_per_byte: float = 0.0,
    kv_switch: tuple[float, ...] = (),
    time_limit: float = 10.0,
    relaxed: bool = False,
    host_kv: str = "stalls",
    between: tuple[tuple[Counts, ...], tuple[Counts, ...]] | None = None,
    gap: float = GAP,
) -> Solution:
    """Solve all tiers at once; tiers ascend in tokens, and a smaller tier pins at least what a larger one pins.

    switch_seconds_per_byte: time of bringing in one byte of pins between the largest tier and the smallest.
    kv_switch: by class, seconds of moving the used KV cells of one layer at that switch.
    relaxed: waits for KV are free, link traffic has no price, and of classes with many units parts may be counted: the
        objective is then a lower bound.
    host_kv: every fetch of a layer's KV from the host "stalls" the accelerator, or fetches are "hidden" (under CPU
        units, one each); or there are "none": all KV is in VRAM in every tier.
    between: by class, the fewest and the most pins and layers with KV in VRAM of every tier.
    gap: relative distance to the bound at which the solver may stop.
    """
    started = time.perf_counter()
    program, variables = _write_program(problems, switch_seconds_per_byte, kv_switch, relaxed, host_kv, between)
    if not relaxed and _has_many(problems):
        near = _solve_near_parts(program, problems, variables, time_limit, gap, started)
        if near.counts and near.gap <= gap:
            return near
    left = max(time_limit - (time.perf_counter() - started), time_limit / 3)
    return _run(program, problems, variables, left, gap, started)[0]


def _has_many(problems: tuple[TierProblem, ...]) -> bool:
    return max(c.size for p in problems for c in p.classes) > MANY


def _solve_near_parts(
    program: Program,
    problems: tuple[TierProblem, ...],
    variables: list[_Tier],
    time_limit: float,
    gap: float,
    started: float,
) -> Solution:
    """Solve with parts of units, then with whole ones near those: small trees both, and the first bounds the second.

    The program is afterwards as it was.
    """
    counts = [v.at for pin, cpu, kv, cuts in variables for v in (*pin, *cpu, *kv, *_flatten(cuts))]
    low, high = list(program.low), list(program.high)
    for at in counts:
        program.whole[at] = False
    parts, values = _run(program, problems, variables, time_limit / 3, gap / 4, started)
    for at in counts:
        program.whole[at] = True
        if parts.counts:
            program.low[at] = max(low[at], floor(values[at] + NEAR) - 1)
            program.high[at] = min(high[at], ceil(values[at] - NEAR) + 1)
    near = _run(program, problems, variables, time_limit / 3, gap / 2, started)[0] if parts.counts else parts
    program.low, program.high = low, high
    bound = min(parts.bound, near.objective)
    return replace(near, bound=bound, gap=(near.objective - bound) / near.objective if near.objective else 0.0)


def _flatten(cuts: list[list[list[Column]]]) -> list[Column]:
    return [v for of_class in cuts for pair in of_class for v in pair]


@lru_cache(256)  # tiers are bounded roughly first, then again
def relaxation_bound(problems: tuple[TierProblem, ...], host_kv: str = "hidden") -> float:
    """Weighted seconds that no counts of these tiers can beat, by the linear relaxation: quick, and rather low."""
    program, _ = _write_program(problems, relaxed=True, host_kv=host_kv)
    return _relaxation_value(program) / MS


def _write_program(
    problems: tuple[TierProblem, ...],
    switch_seconds_per_byte: float = 0.0,
    kv_switch: tuple[float, ...] = (),
    relaxed: bool = False,
    host_kv: str = "stalls",
    between: tuple[tuple[Counts, ...], tuple[Counts, ...]] | None = None,
) -> tuple[Program, list[_Tier]]:
    """The program and its (pin, cpu, kv, cuts) variables by tier; see `solve_tiers`."""
    program = Program()
    terms: list[Linear] = []
    variables: list[_Tier] = []
    kv_up = program.switch("kv_up")  # 1: smaller tiers have more KV in VRAM
    for t, problem in enumerate(problems):
        parts = relaxed and _has_many((problem,))
        pin, cpu, kv, cuts = _count_variables(program, t, problem, between, parts)
        variables.append((pin, cpu, kv, cuts))
        if host_kv == "none":
            for c, cost in enumerate(problem.classes):
                program.at_least(kv[c], (cost.size if cost.kv_nbytes else 0))
        stalls = host_kv == "stalls" and not relaxed
        terms.append(problem.weight * _add_tier(program, t, problem, variables[t], relaxed, stalls, parts))
        if t:
            before = variables[t - 1]
            for c, cost in enumerate(problem.classes):
                in_part = sum_of(pinned for pinned, _ in before[3][c])
                program.at_most(pin[c], before[0][c] - in_part)
                if cost.kv_nbytes:
                    program.at_most(kv[c] - before[2][c], cost.size * (1 - kv_up))
                    program.at_most(before[2][c] - kv[c], cost.size * kv_up)
    if problems[0].host_room is not None:
        _limit_host(program, problems, variables)
    if len(problems) > 1 and not relaxed:
        first, last = variables[0], variables[-1]
        for c, cost in enumerate(problems[0].classes):
            terms.append(MS * switch_seconds_per_byte * cost.nbytes * (first[0][c] - last[0][c]))
            for cut, (pinned, _) in zip(cost.cuts, first[3][c]):
                terms.append(MS * switch_seconds_per_byte * (cut.nbytes - cost.nbytes) * pinned)
            if cost.kv_nbytes and kv_switch and kv_switch[c]:
                moved = program.column(f"kv_moved_{c}")
                program.at_least(moved, first[2][c] - last[2][c])
                program.at_least(moved, last[2][c] - first[2][c])
                terms.append(MS * kv_switch[c] * moved)
    program.goal = sum_of(terms)
    return program, variables


def _limit_host(program: Program, problems: tuple[TierProblem, ...], variables: list[_Tier]) -> None:
    """What is not pinned whole, or has no KV in VRAM, in any tier has its place in host memory."""
    weights, cells = program.column("host_weights_mib"), program.column("host_kv_mib")
    for problem, (pin, _, kv, cuts) in zip(problems, variables):
        for column, before in zip((weights, cells), problem.host_before):
            program.at_least(column, before / MIB)
        outside = [
            cost.nbytes / MIB * (cost.size - pin[c] + sum_of(pinned for pinned, _ in cuts[c]))
            for c, cost in enumerate(problem.classes)
        ]
        program.at_least(weights, sum_of(outside))
        layers = [
            cost.kv_nbytes / MIB * (cost.size - kv[c]) for c, cost in enumerate(problem.classes) if cost.kv_nbytes
        ]
        program.at_least(cells, sum_of(layers))
    program.at_most(weights + cells, (problems[0].host_room or 0) / MIB)


def _count_variables(
    program: Program,
    t: int,
    problem: TierProblem,
    between: tuple[tuple[Counts, ...], tuple[Counts, ...]] | None,
    parts: bool,
) -> _Tier:
    whole = tuple(Counts(c.size, c.size, c.size) for c in problem.classes)
    fewest, most = between or (tuple(Counts(0, 0, 0) for _ in whole), whole)

    def counts(name: str, low: list[int], high: list[int]) -> list[Column]:
        return [program.column(f"{name}_{t}_{c}", *ends, whole=not parts) for c, ends in enumerate(zip(low, high))]

    none, sizes = [0] * len(problem.classes), [c.size for c in problem.classes]
    return (
        counts("pin", [n.pin for n in fewest], [n.pin for n in most]),
        counts("cpu", none, sizes),
        counts("kv", [n.kv for n in fewest], [n.kv for n in most]),
        [
            [counts(f"cut_{i}_{c}", [0, 0], [cost.size] * 2) for i in range(len(cost.cuts))]
            for c, cost in enumerate(problem.classes)
        ],
    )


def _add_tier(
    program: Program,
    t: int,
    problem: TierProblem,
    columns: _Tier,
    relaxed: bool,
    stalls: bool,
    parts: bool,
) -> Linear:
    """Add one tier's variables and constraints; returns its milliseconds as an expression."""
    pin, cpu, kv, cuts = columns
    slot = program.column(f"slot_mib_{t}")
    stage = program.switch(f"stage_{t}")
    total = program.column(f"ms_{t}")
    trips = program.column(f"trips_{t}")  # runs of CPU units beside the one that the embedding begins
    entered = program.column(f"entered_{t}")
    reached = program.switch(f"reached_{t}")
    row_stage = program.column(f"row_stage_mib_{t}")
    splits = [sum_of(n for pair in of_class for n in pair) for of_class in cuts]
    acc: list[Linear] = []
    host: list[Linear] = []
    link: list[Linear] = []
    one_slot: list[Linear] = []
    units: list[Linear] = []
    issue: list[Linear] = []
    staged: list[Linear] = []
    held: list[Linear] = [problem.slots * slot]
    for c, cost in enumerate(problem.classes):
        pinned: Linear = pin[c]
        streamed, on_acc = cost.size - pin[c] - cpu[c], cost.size - cpu[c] - splits[c]  # whole ones
        for i, (cut, (in_arena, in_slot)) in enumerate(zip(cost.cuts, cuts[c])):
            pinned, streamed = pinned - in_arena, streamed - in_slot
            held.append(cut.nbytes / MIB * in_arena)
            acc.append(MS * cut.acc * (in_arena + in_slot))
            issue.append(MS * (cut.issue * (in_arena + in_slot) + problem.copy_issue * in_slot))
            link.append(MS * cut.link * in_slot)
            one_slot.append(MS * (cut.link + cut.alone) * in_slot)
            units.append(in_slot)
            for name, count, size, nbytes in (
                ("slot", in_slot, slot, cut.nbytes), ("rows", in_arena + in_slot, row_stage, cut.row_nbytes),
            ):  # fmt: skip
                small = parts and name == "rows"  # few bytes
                uses = program.column(f"cut_{name}_{t}_{c}_{i}", 0, 1, whole=not small)
                program.at_most(count, cost.size * uses)
                program.at_least(size, nbytes / MIB * uses)
        if cost.cuts:
            program.at_least(pinned, 0)
        held.append(cost.nbytes / MIB * pinned)
        acc.append(MS * cost.acc * on_acc)
        host.append(MS * (cost.cpu * cpu[c] + sum_of(cut.cpu * n for cut, p in zip(cost.cuts, cuts[c]) for n in p)))
        issue.append(MS * cost.issue * on_acc)
        if cost.kind.is_looked_up:
            program.equal(streamed, 0)
            program.equal(kv[c], 0)
            continue
        program.at_most(cost.size - cpu[c], cost.size * reached)
        link.append(MS * cost.link * streamed)
        issue.append(MS * problem.copy_issue * streamed)
        one_slot.append(MS * (cost.link + cost.acc) * streamed)
        units.append(streamed)
        program.at_least(streamed, 0)
        uses = program.switch(f"streams_{t}_{c}")
        program.at_most(streamed, cost.size * uses)
        program.at_least(slot, cost.nbytes / MIB * uses)
        if cost.kv_nbytes:
            on_host = cost.size - cpu[c] - kv[c]  # computed on the accelerator, KV on the host
            program.at_least(on_host, 0)
            program.at_most(on_host, cost.size * stage)
            held.append(cost.kv_nbytes / MIB * kv[c])
            link.append(MS * cost.kv_fetch * on_host)
            issue.append(MS * problem.kv_issue * on_host)
            if stalls:
                acc.append(MS * cost.kv_stall * on_host)
            if cost.kv_cycle:
                staged.append(MS * (cost.acc + cost.kv_cycle) * on_host)
        else:
            program.equal(kv[c], 0)
    held += [problem.stage_nbytes / MIB * stage, row_stage]
    program.at_most(sum_of(held), problem.room / MIB)
    acc_ms, host_ms, link_ms = (
        sum_of(acc) + MS * (problem.fixed + problem.enter * entered + problem.leave * reached),
        sum_of(host),
        sum_of(link),
    )
    acc_ms = acc_ms + MS * problem.round_trip * trips
    on_cpu = {
        place: sum_of(cpu[c] for c, cost in enumerate(problem.classes) if cost.place == place)
        for place in ("leads", "follows", "first", "last")
    }
    program.at_least(entered, reached + on_cpu["first"] - 1)
    if any(cost.cuts for cost in problem.classes):
        # a split unit after a CPU unit hides the hand-off to the accelerator, after others it needs one to the CPU
        lone = program.column(f"lone_splits_{t}")
        program.at_least(lone, sum_of(splits) - on_cpu["leads"])
        acc_ms = acc_ms + MS * (problem.round_trip * lone - problem.enter * sum_of(splits))
    # layers alternate, so a run of neighbours has at most one unit more of one kind than of the other; the one that
    # ends with the output does not go back
    program.at_least(trips, on_cpu["follows"] - on_cpu["leads"] - on_cpu["last"])
    program.at_least(trips, on_cpu["leads"] - on_cpu["follows"] - 1)
    # one KV stage: between two layers that use it lie a fetch and a write-back, or what the CPU does there
    hidden = MS * max(c.kv_cycle for c in problem.classes) * sum_of([*cpu, *splits])
    stage_ms = sum_of(staged) + host_ms - hidden
    if problem.all_contend:
        acc_ms, host_ms = Linear({}), acc_ms + host_ms
    works = [
        host[c] + MS * (cost.acc * (cost.size - cpu[c]) if problem.all_contend else 0)
        for c, cost in enumerate(problem.classes)
    ]
    # ms in which host work of each group and copies overlap
    both = [(group, program.column(f"both_{t}_{g}")) for g, group in enumerate(contending_groups(problem))]
    slower = sum_of((1 - group.cpu_speed) * o for group, o in both)
    program.at_least(total, acc_ms + host_ms + slower)
    program.at_least(total, link_ms + sum_of((1 - group.link_speed) * o for group, o in both))
    program.at_least(total, sum_of(issue) + host_ms + slower)
    program.at_least(total, stage_ms + (0 if problem.all_contend else slower))
    apart = sum_of(works[c] for group, _ in both for c in group.classes) + link_ms
    program.at_least(total, apart - sum_of((g.link_speed + g.cpu_speed - 1) * o for g, o in both))
    for group, o in both:
        program.at_most(group.cpu_speed * o, sum_of(works[c] for c in group.classes))
    copied = sum_of(group.link_speed * o for group, o in both)
    program.at_most(copied, link_ms)
    if not problem.all_contend:  # while one run of CPU units lasts, each slot is filled once at most
        runs = trips + 1 + on_cpu["last"] + sum_of(splits)
        program.at_most(copied, MS * copies_beside_a_run(problem) * runs)
    if problem.lookahead == 1:  # no copy runs while its slot is computed from
        program.at_least(total, sum_of(one_slot))
    if relaxed:
        return total
    largest = max((c.link for c in problem.classes if c.kind.position == "layer"), default=0.0)
    return total + TIDY * link_ms + UNTIDY * MS * largest * sum_of(units)


@dataclass(frozen=True)
class Contending:
    """Classes (their positions) whose host work and copies hold each other up about alike; the group's best speeds."""

    classes: tuple[int, ...]
    link_speed: float
    cpu_speed: float


def contending_groups(problem: TierProblem) -> tuple[Contending, ...]:
    """Attention, which may read slowly for what it computes, and matrices; the embedding is only looked up."""
    groups = []
    for what in ("state", "weights"):
        if members := [(i, c) for i, c in enumerate(problem.classes) if c.kind.contends == what]:
            best = max(c.link_speed for _, c in members), max(c.cpu_speed for _, c in members)
            groups.append(Contending(tuple(i for i, _ in members), *best))
    return tuple(groups)


def copies_beside_a_run(problem: TierProblem) -> float:
    """Most seconds of copies while one run of CPU units lasts: one into each slot, and one layer's KV."""
    return problem.lookahead * max(c.link for c in problem.classes) + max(c.kv_fetch for c in problem.classes)


def _run(
    program: Program,
    problems: tuple[TierProblem, ...],
    variables: list[_Tier],
    time_limit: float,
    allowed: float,
    started: float,
) -> tuple[Solution, list[float]]:
    """The solution, and the values of the program's columns."""
    found = solve(program, max(time_limit, 0.05), allowed)
    name, seconds = solver_name(), time.perf_counter() - started
    if not found.values:
        if found.status == "unsolved" and seconds < time_limit / 2:  # a plan without it would only be a baseline
            raise RuntimeError(f"{name} gave up after {seconds:.3f} of {time_limit:.1f} s without saying why")
        return Solution(found.status, 0.0, 0.0, 0.0, seconds, name, ()), []

    def units(column: Column) -> int:
        return round(found.values[column.at])

    objective = program.goal.value(found.values)
    counts = tuple(
        tuple(
            Counts(units(pin[c]), units(cpu[c]), units(kv[c]), tuple((units(a), units(b)) for a, b in cuts[c]))
            for c in range(len(p.classes))
        )
        for p, (pin, cpu, kv, cuts) in zip(problems, variables)
    )
    proven = found.status == "optimal" and seconds < time_limit
    if found.bound is not None:  # the solver's own proof, whatever stopped it
        bound = min(found.bound + program.goal.constant, objective)
    else:
        bound = objective * (1 - allowed) if proven else _relaxation_value(program)
    gap = max(0.0, (objective - bound) / objective) if objective else 0.0
    status = "optimal" if proven else "feasible"
    return Solution(status, objective / MS, bound / MS, gap, seconds, name, counts), found.values


def _relaxation_value(program: Program) -> float:
    """Value of the linear relaxation: a bound that holds whatever the branch and bound got to. 0 when there is none."""
    found = relax(program)
    return program.goal.value(found.values) if found.status == "optimal" else 0.0


def host_bytes(problem: TierProblem, counts: tuple[Counts, ...]) -> tuple[int, int]:
    """Bytes of weights and of KV in host memory under given counts, were this the only tier."""
    pairs = list(zip(problem.classes, counts))
    weights = sum(cost.nbytes * (cost.size - n.pin_whole) for cost, n in pairs)
    return weights, sum(cost.kv_nbytes * (cost.size - n.kv) for cost, n in pairs)
