"""The integer program: how many units of each class are pinned, streamed and computed on the CPU, in every tier.

Sets: tiers, classes. Integers by tier and class: pin, cpu, kv (attention: layers with KV in VRAM), divided ones by rows
on the CPU; streamed is the rest. Constraints: those of `tier_rows.py` within a tier; pins and KV of all tiers are
nested, so that residency is a prefix of one order; what some tier lacks in VRAM has its place in host memory.
Objective: the workload's time, tier switches included. docs/planning.md derives it.
"""

from dataclasses import dataclass

from pshard.planner.program.counts import CountColumns, Counts, host_amounts, sum_pinned
from pshard.planner.program.tier_problems import TierProblem
from pshard.planner.program.tier_rows import MS, TierRows
from pshard.planner.solver.linear import Linear, Program, sum_of
from pshard.workload import MIB

MANY = 16  # units of a class: one more or less of them hardly changes a bound


@dataclass(frozen=True)
class Question:
    """What is asked of the tiers together; tiers ascend in tokens.

    switch_seconds_per_byte: time of bringing in one byte of pins between the largest tier and the smallest.
    kv_switch: by class, seconds of moving the used KV cells of one layer at that switch.
    relaxed: waits for KV are free, link traffic has no price, and of classes with many units parts may be counted: the
        objective is then a lower bound.
    host_kv: every fetch of a layer's KV from the host "stalls" the accelerator, or fetches are "hidden" (under CPU
        units, one each); or there are "none": all KV is in VRAM in every tier.
    between: by class, the fewest and the most pins and layers with KV in VRAM of every tier.
    """

    tiers: tuple[TierProblem, ...]
    switch_seconds_per_byte: float = 0.0
    kv_switch: tuple[float, ...] = ()
    relaxed: bool = False
    host_kv: str = "stalls"
    between: tuple[tuple[Counts, ...], tuple[Counts, ...]] | None = None


@dataclass(frozen=True)
class JointProgram:
    """The program in numbers, and its counts by tier and class."""

    program: Program
    counts: tuple[tuple[CountColumns, ...], ...]


def has_many(tiers: tuple[TierProblem, ...]) -> bool:
    """Whether some class has so many units that parts of them say nearly as much as whole ones."""
    return max(c.size for tier in tiers for c in tier.classes) > MANY


def write_program(asked: Question) -> JointProgram:
    """All columns and rows, and the goal in milliseconds."""
    program = Program()
    prices: list[Linear] = []
    counts: list[tuple[CountColumns, ...]] = []
    kv_up = program.switch("kv_up")  # 1: smaller tiers have more KV in VRAM
    stalls = asked.host_kv == "stalls" and not asked.relaxed
    for t, tier in enumerate(asked.tiers):
        rows = TierRows(program, t, tier, asked.relaxed, stalls, asked.relaxed and has_many((tier,)))
        counts.append(rows.count_columns(*(asked.between or _any_counts(tier))))
        if asked.host_kv == "none":
            for cost, n in zip(tier.classes, counts[t]):
                program.at_least(rows.name("kv_in_vram", cost.name), n.kv, cost.size if cost.kv_nbytes else 0)
        prices.append(tier.weight * rows.add(counts[t]))
        if t:
            _nest(rows, counts[t - 1], counts[t], kv_up)
    if asked.tiers[0].host_room is not None:
        _limit_host(program, asked.tiers, counts)
    if len(asked.tiers) > 1 and not asked.relaxed:
        prices += _price_switch(program, asked, counts[0], counts[-1])
    program.goal = sum_of(prices)
    return JointProgram(program, tuple(counts))


def _any_counts(tier: TierProblem) -> tuple[tuple[Counts, ...], tuple[Counts, ...]]:
    return tuple(Counts(0, 0, 0) for _ in tier.classes), tuple(Counts(c.size, c.size, c.size) for c in tier.classes)


def _nest(rows: TierRows, smaller: tuple[CountColumns, ...], larger: tuple[CountColumns, ...], kv_up: Linear) -> None:
    """A smaller tier pins whole at least what a larger one pins; KV is nested in either direction."""
    program, name = rows.program, rows.name
    for cost, small, large in zip(rows.problem.classes, smaller, larger):
        program.at_most(name("pins_nested", cost.name), large.pin, small.pin - sum_pinned(small))
        if cost.kv_nbytes:
            program.at_most(name("kv_not_more", cost.name), large.kv - small.kv, cost.size * (1 - kv_up))
            program.at_most(name("kv_not_less", cost.name), small.kv - large.kv, cost.size * kv_up)


def _limit_host(program: Program, tiers: tuple[TierProblem, ...], counts: list[tuple[CountColumns, ...]]) -> None:
    """What is not pinned whole, or has no KV in VRAM, in any tier has its place in host memory."""
    weights, cells = program.column("host_weights_mib"), program.column("host_kv_mib")
    for tier, of_tier in zip(tiers, counts):
        outside = host_amounts(tier, of_tier, MIB)
        for what, column, before in zip(("weights", "kv"), (weights, cells), tier.host_before):
            program.at_least(f"host_{what}_before(t{tier.tokens})", column, before / MIB)
        for what, column, least in zip(("weights", "kv"), (weights, cells), outside):
            program.at_least(f"host_{what}(t{tier.tokens})", column, least)
    program.at_most("host_room", weights + cells, (tiers[0].host_room or 0) / MIB)


def _price_switch(
    program: Program, asked: Question, smallest: tuple[CountColumns, ...], largest: tuple[CountColumns, ...]
) -> list[Linear]:
    """Milliseconds of what changes hands between the largest tier and the smallest."""
    prices: list[Linear] = []
    per_byte = MS * asked.switch_seconds_per_byte
    for c, (cost, small, large) in enumerate(zip(asked.tiers[0].classes, smallest, largest)):
        prices.append(per_byte * cost.nbytes * (small.pin - large.pin))
        for part, (pinned, _) in zip(cost.divided, small.divided):
            prices.append(per_byte * ((part.kept or part.nbytes) - cost.nbytes) * pinned)
        if cost.kv_nbytes and asked.kv_switch and asked.kv_switch[c]:
            moved = program.column(f"kv_moved({cost.name})", key=f"kv_moved_{c}")
            program.at_least(f"kv_brought_in({cost.name})", moved, small.kv - large.kv)
            program.at_least(f"kv_taken_out({cost.name})", moved, large.kv - small.kv)
            prices.append(MS * asked.kv_switch[c] * moved)
    return prices
