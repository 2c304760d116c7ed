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

import pulp

from pshard.workload import MIB

MS = 1e3  # seconds in the objective's unit
TIDY = 1e-4  # price of link traffic that nothing waits for: prefer pinned where the time is the same
UNTIDY = 0.02  # price of one more streamed unit, of the largest copy: small units waste the slots' lookahead
GAP = 1e-3  # relative gap at which the solver may stop unless it is told otherwise
MANY = 16  # units of a class: one more or less of them hardly changes a bound
NEAR = 1e-6  # a solver's integers
THREADS = 1  # in every call: HiGHS refuses to solve with another number than the process's first call had
# HiGHS: trees of these small programs are done before searches in sub-problems and fresh starts pay for themselves
SMALL_TREES: dict[str, bool | int] = {
    "mip_heuristic_run_feasibility_jump": False,
    "mip_heuristic_run_rins": False,
    "mip_heuristic_run_rens": False,
    "mip_heuristic_run_root_reduced_cost": False,
    "mip_allow_restart": False,
    "mip_pscost_minreliable": 1,
}


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

    kind: str
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


@dataclass(frozen=True)
class TierProblem:
    """One tier's coefficients. `room`: arena bytes left for pins, slots, KV and stage. Seconds and bytes.

    `slots` take room; `lookahead` of them can be filled while one run of CPU units lasts (more than `slots` only
    when a bound for several choices is wanted). `round_trip`: hand-offs around a run of CPU units; `enter`: the
    hand-off after an embedding on the CPU, `leave`: the last one; `fixed`: whatever the placement. `all_contend`: the
    accelerator's work is host work too (the CPU as accelerator).
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
    return _run(program, problems, variables, left, gap, started)


def _has_many(problems: tuple[TierProblem, ...]) -> bool:
    return max(c.size for p in problems for c in p.classes) > MANY


def _solve_near_parts(program, problems, variables, time_limit: float, gap: float, started: float) -> Solution:
    """Solve with parts of units, then with whole ones near those: small trees both, and the first bounds the second.

    The program is afterwards as it was.
    """
    counts = [v for tier in variables for v in (*tier[0], *tier[1], *tier[2], *_flatten(tier[3]))]
    ranges = [(v.lowBound, v.upBound) for v in counts]
    for v in counts:
        v.cat = pulp.LpContinuous
    parts = _run(program, problems, variables, time_limit / 3, gap / 4, started)
    for v, (low, high) in zip(counts, ranges):
        v.cat = pulp.LpInteger
        if parts.counts:
            value = v.value() or 0.0
            v.bounds(max(low, floor(value + NEAR) - 1), min(high, ceil(value - NEAR) + 1))
    near = _run(program, problems, variables, time_limit / 3, gap / 2, started) if parts.counts else parts
    for v, ends in zip(counts, ranges):
        v.bounds(*ends)
    bound = min(parts.bound, near.objective)
    return replace(near, bound=bound, gap=(near.objective - bound) / near.objective if near.objective else 0.0)


def _flatten(cuts) -> list:
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
):
    """The program and its (pin, cpu, kv, cuts) variables by tier; see `solve_tiers`."""
    program = pulp.LpProblem("placement", pulp.LpMinimize)
    terms, variables = [], []
    kv_up = pulp.LpVariable("kv_up", cat="Binary")  # 1: smaller tiers have more KV in VRAM
    for t, problem in enumerate(problems):
        parts = relaxed and _has_many((problem,))
        pin, cpu, kv, cuts = _count_variables(t, problem, between, parts)
        variables.append((pin, cpu, kv, cuts))
        if host_kv == "none":
            for c, cost in enumerate(problem.classes):
                program += kv[c] >= (cost.size if cost.kv_nbytes else 0), f"kv_stays_{t}_{c}"
        stalls = host_kv == "stalls" and not relaxed
        terms.append(problem.weight * _add_tier(program, t, problem, pin, cpu, kv, cuts, relaxed, stalls, parts))
        if t:
            before = variables[t - 1]
            for c, cost in enumerate(problem.classes):
                in_part = pulp.lpSum(pinned for pinned, _ in before[3][c])
                program += pin[c] <= before[0][c] - in_part, f"pins_nested_{t}_{c}"
                if cost.kv_nbytes:
                    program += kv[c] - before[2][c] <= cost.size * (1 - kv_up), f"kv_nested_down_{t}_{c}"
                    program += before[2][c] - kv[c] <= cost.size * kv_up, f"kv_nested_up_{t}_{c}"
    if len(problems) > 1 and not relaxed:
        first, last = variables[0], variables[-1]
        for c, cost in enumerate(problems[0].classes):
            terms.append(MS * switch_seconds_per_byte * cost.nbytes * (first[0][c] - last[0][c]))
            for cut, (pinned, _) in zip(cost.cuts, first[3][c]):
                terms.append(MS * switch_seconds_per_byte * (cut.nbytes - cost.nbytes) * pinned)
            if cost.kv_nbytes and kv_switch and kv_switch[c]:
                moved = pulp.LpVariable(f"kv_moved_{c}", 0)
                program += moved >= first[2][c] - last[2][c], f"kv_in_{c}"
                program += moved >= last[2][c] - first[2][c], f"kv_out_{c}"
                terms.append(MS * kv_switch[c] * moved)
    program += pulp.lpSum(terms), "workload_ms"
    return program, variables


def _count_variables(t: int, problem: TierProblem, between, parts: bool):
    whole = tuple(Counts(c.size, c.size, c.size) for c in problem.classes)
    fewest, most = between or (tuple(Counts(0, 0, 0) for _ in whole), whole)
    category = pulp.LpContinuous if parts else pulp.LpInteger

    def counts(name: str, low: list[int], high: list[int]):
        return [pulp.LpVariable(f"{name}_{t}_{c}", *ends, category) for c, ends in enumerate(zip(low, high))]

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


def _add_tier(program, t: int, problem: TierProblem, pin, cpu, kv, cuts, relaxed: bool, stalls: bool, parts: bool):
    """Add one tier's variables and constraints; returns its milliseconds as an expression."""
    slot = pulp.LpVariable(f"slot_mib_{t}", 0)
    stage = pulp.LpVariable(f"stage_{t}", cat="Binary")
    total = pulp.LpVariable(f"ms_{t}", 0)
    trips = pulp.LpVariable(f"trips_{t}", 0)  # runs of CPU units beside the one that the embedding begins
    entered = pulp.LpVariable(f"entered_{t}", 0)
    reached = pulp.LpVariable(f"reached_{t}", cat="Binary")
    row_stage = pulp.LpVariable(f"row_stage_mib_{t}", 0)
    splits = [pulp.lpSum(n for pair in of_class for n in pair) for of_class in cuts]
    acc, host, link, one_slot, units, issue, staged, held = [], [], [], [], [], [], [], [problem.slots * slot]
    for c, cost in enumerate(problem.classes):
        pinned, streamed, on_acc = pin[c], cost.size - pin[c] - cpu[c], cost.size - cpu[c] - splits[c]  # whole ones
        for i, (cut, (in_arena, in_slot)) in enumerate(zip(cost.cuts, cuts[c])):
            pinned, streamed = pinned - in_arena, streamed - in_slot
            held.append(cut.nbytes / MIB * in_arena)
            acc.append(MS * cut.acc * (in_arena + in_slot))
            issue.append(MS * cut.issue * (in_arena + in_slot))
            link.append(MS * cut.link * in_slot)
            one_slot.append(MS * (cut.link + cut.alone) * in_slot)
            units.append(in_slot)
            for name, count, size, nbytes in (
                ("slot", in_slot, slot, cut.nbytes), ("rows", in_arena + in_slot, row_stage, cut.row_nbytes),
            ):  # fmt: skip
                small = parts and name == "rows"  # few bytes
                uses = pulp.LpVariable(f"cut_{name}_{t}_{c}_{i}", 0, 1, pulp.LpContinuous if small else pulp.LpInteger)
                program += count <= cost.size * uses, f"cut_{name}_{t}_{c}_{i}_if"
                program += size >= nbytes / MIB * uses, f"cut_{name}_{t}_{c}_{i}_holds"
        if cost.cuts:
            program += pinned >= 0, f"pinned_whole_{t}_{c}"
        held.append(cost.nbytes / MIB * pinned)
        acc.append(MS * cost.acc * on_acc)
        host.append(MS * (cost.cpu * cpu[c] + pulp.lpSum(cut.cpu * n for cut, p in zip(cost.cuts, cuts[c]) for n in p)))
        issue.append(MS * cost.issue * on_acc)
        if cost.kind == "embedding":
            program += streamed == 0, f"embedding_{t}_{c}"
            program += kv[c] == 0
            continue
        program += cost.size - cpu[c] <= cost.size * reached, f"reached_{t}_{c}"
        link.append(MS * cost.link * streamed)
        one_slot.append(MS * (cost.link + cost.acc) * streamed)
        units.append(streamed)
        program += streamed >= 0, f"placed_{t}_{c}"
        uses = pulp.LpVariable(f"streams_{t}_{c}", cat="Binary")
        program += streamed <= cost.size * uses, f"streams_{t}_{c}_if"
        program += slot >= cost.nbytes / MIB * uses, f"slot_{t}_{c}"
        if cost.kv_nbytes:
            on_host = cost.size - cpu[c] - kv[c]  # computed on the accelerator, KV on the host
            program += on_host >= 0, f"cpu_has_kv_on_host_{t}_{c}"
            program += on_host <= cost.size * stage, f"stage_{t}_{c}"
            held.append(cost.kv_nbytes / MIB * kv[c])
            link.append(MS * cost.kv_fetch * on_host)
            acc.append(MS * cost.kv_stall * on_host if stalls else 0)
            staged.append(MS * (cost.acc + cost.kv_cycle) * on_host if cost.kv_cycle else 0)
        else:
            program += kv[c] == 0
    held += [problem.stage_nbytes / MIB * stage, row_stage]
    program += pulp.lpSum(held) <= problem.room / MIB, f"arena_{t}"
    acc_ms, host_ms, link_ms = (
        pulp.lpSum(acc) + MS * (problem.fixed + problem.enter * entered + problem.leave * reached),
        pulp.lpSum(host),
        pulp.lpSum(link),
    )
    acc_ms = acc_ms + MS * problem.round_trip * trips
    on_cpu = {
        kind: pulp.lpSum(cpu[c] for c, cost in enumerate(problem.classes) if cost.kind == kind)
        for kind in ("attention", "ffn", "embedding", "output")
    }
    program += entered >= reached + on_cpu["embedding"] - 1, f"entered_{t}"
    if any(cost.cuts for cost in problem.classes):
        # a split unit after a CPU unit hides the hand-off to the accelerator, after others it needs one to the CPU
        lone = pulp.LpVariable(f"lone_splits_{t}", 0)
        program += lone >= pulp.lpSum(splits) - on_cpu["attention"], f"lone_splits_{t}_if"
        acc_ms = acc_ms + MS * (problem.round_trip * lone - problem.enter * pulp.lpSum(splits))
    # layers alternate, so a run of neighbours has at most one unit more of one kind than of the other; the one that
    # ends with the output does not go back
    program += trips >= on_cpu["ffn"] - on_cpu["attention"] - on_cpu["output"], f"ffn_runs_{t}"
    program += trips >= on_cpu["attention"] - on_cpu["ffn"] - 1, f"attention_runs_{t}"
    # one KV stage: between two layers that use it lie a fetch and a write-back, or what the CPU does there
    hidden = MS * max(c.kv_cycle for c in problem.classes) * pulp.lpSum([*cpu, *splits])
    stage_ms = pulp.lpSum(staged) + host_ms - hidden
    if problem.all_contend:
        acc_ms, host_ms = 0, acc_ms + host_ms
    works = [
        host[c] + MS * (cost.acc * (cost.size - cpu[c]) if problem.all_contend else 0)
        for c, cost in enumerate(problem.classes)
    ]
    # ms in which host work of each group and copies overlap
    both = [(group, pulp.LpVariable(f"both_{t}_{g}", 0)) for g, group in enumerate(contending_groups(problem))]
    slower = pulp.lpSum((1 - group.cpu_speed) * o for group, o in both)
    program += total >= acc_ms + host_ms + slower, f"serial_{t}"
    program += total >= link_ms + pulp.lpSum((1 - group.link_speed) * o for group, o in both), f"link_{t}"
    program += total >= pulp.lpSum(issue) + host_ms + slower, f"host_{t}"
    program += total >= stage_ms + (0 if problem.all_contend else slower), f"kv_stage_{t}"
    apart = pulp.lpSum(works[c] for group, _ in both for c in group.classes) + link_ms
    program += total >= apart - pulp.lpSum((g.link_speed + g.cpu_speed - 1) * o for g, o in both), f"dram_{t}"
    for g, (group, o) in enumerate(both):
        program += group.cpu_speed * o <= pulp.lpSum(works[c] for c in group.classes), f"both_host_{t}_{g}"
    copied = pulp.lpSum(group.link_speed * o for group, o in both)
    program += copied <= link_ms, f"both_link_{t}"
    if not problem.all_contend:  # while one run of CPU units lasts, each slot is filled once at most
        runs = trips + 1 + on_cpu["output"] + pulp.lpSum(splits)
        program += copied <= MS * _copies_beside_a_run(problem) * runs, f"lookahead_{t}"
    if problem.slots == 1:  # no copy runs while its slot is computed from
        program += total >= pulp.lpSum(one_slot), f"one_slot_{t}"
    if relaxed:
        return total
    largest = max((c.link for c in problem.classes if c.kind in ("attention", "ffn")), default=0.0)
    return total + TIDY * link_ms + UNTIDY * MS * largest * pulp.lpSum(units)


@dataclass(frozen=True)
class Contending:
    """Classes (their positions) whose host work and copies hold each other up about alike; the group's best speeds."""

    classes: tuple[int, ...]
    link_speed: float
    cpu_speed: float


def contending_groups(problem: TierProblem) -> tuple[Contending, ...]:
    """Attention, which may read slowly for what it computes, and matrices; the embedding is only looked up."""
    groups = []
    for kinds in (("attention",), ("ffn", "output")):
        if members := [(i, c) for i, c in enumerate(problem.classes) if c.kind in kinds]:
            best = max(c.link_speed for _, c in members), max(c.cpu_speed for _, c in members)
            groups.append(Contending(tuple(i for i, _ in members), *best))
    return tuple(groups)


def _copies_beside_a_run(problem: TierProblem) -> float:
    """Most seconds of copies while one run of CPU units lasts: one into each slot, and one layer's KV."""
    return problem.lookahead * max(c.link for c in problem.classes) + max(c.kv_fetch for c in problem.classes)


def _solver(**options):
    """The name and the solver: HiGHS in this process when it is installed, else CBC."""
    if pulp.HiGHS().available():
        return "HiGHS", pulp.HiGHS(msg=False, threads=THREADS, **SMALL_TREES, **options)
    return "CBC", pulp.PULP_CBC_CMD(msg=False, threads=THREADS, **options)


def _run(program, problems, variables, time_limit: float, allowed: float, started: float) -> Solution:
    name, solver = _solver(timeLimit=max(time_limit, 0.05), gapRel=allowed)
    program.solve(solver)
    seconds = time.perf_counter() - started
    if program.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        status = "infeasible" if program.status == pulp.LpStatusInfeasible else "unsolved"
        if status == "unsolved" and seconds < time_limit / 2:  # a plan without it would only be a baseline
            raise RuntimeError(f"{name} gave up after {seconds:.3f} of {time_limit:.1f} s without saying why")
        return Solution(status, 0.0, 0.0, 0.0, seconds, name, ())
    objective = pulp.value(program.objective) or 0.0
    counts = tuple(
        tuple(
            Counts(_units(pin[c]), _units(cpu[c]), _units(kv[c]), tuple((_units(a), _units(b)) for a, b in cuts[c]))
            for c in range(len(p.classes))
        )
        for p, (pin, cpu, kv, cuts) in zip(problems, variables)
    )
    proven = program.sol_status == pulp.LpSolutionOptimal and seconds < time_limit
    if name == "HiGHS":  # its own proof, whatever stopped it
        bound = min(program.solverModel.getInfo().mip_dual_bound + program.objective.constant, objective)
    else:
        bound = objective * (1 - allowed) if proven else _relaxation_value(program)
    gap = max(0.0, (objective - bound) / objective) if objective else 0.0
    return Solution("optimal" if proven else "feasible", objective / MS, bound / MS, gap, seconds, name, counts)


def _units(variable) -> int:
    return round(variable.value() or 0)


def _relaxation_value(program) -> float:
    """Value of the linear relaxation: a bound that holds whatever the branch and bound got to. 0 when there is none."""
    _, solver = _solver(mip=False)
    program.solve(solver)
    return (pulp.value(program.objective) or 0.0) if program.status == pulp.LpStatusOptimal else 0.0


def fluid_seconds(problem: TierProblem, counts: tuple[Counts, ...], relaxed: bool = False) -> float:
    """The program's time of given counts, computed without a solver. Seconds."""
    acc = host = link = one_slot = issue = staged = hidden = 0.0
    longest = max(c.kv_cycle for c in problem.classes)
    works = []
    for cost, n in zip(problem.classes, counts):
        streamed = cost.size - n.pin - n.cpu - sum(s for _, s in n.cuts) if cost.kind != "embedding" else 0
        on_host = cost.size - n.cpu - n.kv if cost.kv_nbytes else 0
        work = cost.cpu * n.cpu
        for cut, (in_arena, in_slot) in zip(cost.cuts, n.cuts):
            acc += cut.acc * (in_arena + in_slot)
            work += cut.cpu * (in_arena + in_slot)
            issue += cut.issue * (in_arena + in_slot)
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
    reached = any(c.kind != "embedding" and c.size > n.cpu for c, n in zip(problem.classes, counts))
    on_cpu = dict.fromkeys(("attention", "ffn", "embedding", "output"), 0)
    for cost, n in zip(problem.classes, counts):
        on_cpu[cost.kind] += n.cpu
    acc += problem.fixed + (problem.leave + problem.enter * min(1, on_cpu["embedding"]) if reached else 0.0)
    least = max(0, on_cpu["ffn"] - on_cpu["attention"] - on_cpu["output"], on_cpu["attention"] - on_cpu["ffn"] - 1)
    splits = sum(n.split for n in counts)
    acc += problem.round_trip * (least + max(0, splits - on_cpu["attention"])) - problem.enter * splits
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
    if not problem.all_contend and (per_run := _copies_beside_a_run(problem)):
        more = [s + problem.round_trip * g.link_speed / per_run for s, g in zip(slower, groups)]
        rising.append((acc + host - problem.round_trip * (1 + on_cpu["output"] + least + splits), more))
    floor = max(stage, one_slot if problem.slots == 1 else 0.0)
    most = [sum(works[c] for c in g.classes) / g.cpu_speed for g in groups]
    apart = sum(works[c] for g in groups for c in g.classes) + link
    return max(floor, _least_time(rising, apart, groups, most, link))


def _least_time(
    rising: list[tuple[float, list[float]]],
    apart: float,
    groups: tuple[Contending, ...],
    most: list[float],
    link: float,
) -> float:
    """The least time over the groups' overlaps with copies, each at most `most` and `link` seconds of copies in all.

    The time is above every line (seconds without overlap, slopes) of `rising`, and above `apart` (all in turn) less
    what overlaps. It is convex in the overlaps: that of the last group is where a rising line meets the falling one,
    golden sections find that of the other.
    """
    *others, last = range(len(groups))

    def best(lines: list[tuple[float, list[float]]], falls: float, copies: float) -> float:
        gain = groups[last].link_speed + groups[last].cpu_speed - 1
        end = min(most[last], copies / groups[last].link_speed)
        meet = min(((falls - base) / (gain + s[last]) if gain + s[last] > 0 else end) for base, s in lines)
        at = min(max(0.0, meet), end)
        return max(falls - gain * at, *(base + s[last] * at for base, s in lines))

    def total(first: float) -> float:
        group = groups[others[0]]
        lines = [(base + s[others[0]] * first, s) for base, s in rising]
        gain = group.link_speed + group.cpu_speed - 1
        return best(lines, apart - gain * first, link - group.link_speed * first)

    if not others or not most[others[0]]:
        return best(rising, apart, link)
    low, high = 0.0, min(most[others[0]], link / groups[others[0]].link_speed)
    ratio = (5**0.5 - 1) / 2
    for _ in range(40):
        a, b = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, b) if total(a) <= total(b) else (a, high)
    return min(total(low), total(high), total(0.0))


def held_bytes(problem: TierProblem, counts: tuple[Counts, ...]) -> int:
    """Bytes of the arena (without scratch) that given counts take."""
    pins = kv = slot = row_stage = 0
    for cost, n in zip(problem.classes, counts):
        pins += cost.nbytes * n.pin_whole
        kv += cost.kv_nbytes * n.kv
        if cost.kind != "embedding" and cost.size > n.pin + n.cpu + sum(streamed for _, streamed in n.cuts):
            slot = max(slot, cost.nbytes)
        for cut, (pinned, streamed) in zip(cost.cuts, n.cuts):
            pins += cut.nbytes * pinned
            slot = max(slot, cut.nbytes if streamed else 0)
            row_stage = max(row_stage, cut.row_nbytes if pinned + streamed else 0)
    staged = any(cost.kv_nbytes and cost.size > n.cpu + n.kv for cost, n in zip(problem.classes, counts))
    return pins + kv + problem.slots * slot + row_stage + (problem.stage_nbytes if staged else 0)
