"""From nouns to the integer program's coefficients, and from its counts back."""

from collections import Counter

from pshard.batch_sizes import SMALL_BATCH
from pshard.buffers import row_stage_bytes
from pshard.plan import TierPlan
from pshard.planner.price.costs import TierCosts
from pshard.planner.price.draft import Room
from pshard.planner.program.ilp import ClassCost, Counts, CutCost, TierProblem
from pshard.planner.program.unit_classes import UnitClass


def tier_problem(
    room: Room, classes: tuple[UnitClass, ...], costs: TierCosts, slots: int, split: bool = False
) -> TierProblem:
    """Coefficients of one tier with that many staging slots; `split`: FFNs may be split where `may_split` says."""
    spec, load, split = room.spec, costs.load, split and may_split(costs)
    rows = []
    between = min(
        (costs.units[c.units[0].name].acc for c in classes if c.kind.position == "layer" and not c.kind.state),
        default=0.0,
    )
    for cls in classes:
        unit = costs.units[cls.units[0].name]
        kv = room.states[cls.units[0].name]
        cycle = unit.kv_fetch + unit.kv_write if unit.kv_fetch else 0.0
        stall = max(0.0, cycle - between)
        speeds = [side[cls.units[0].name] for side in (costs.contended, costs.acc_contended) if side]
        cut_rows = cls.cut_rows if split else ()
        speeds += [costs.split_speeds(cls.units[0].name, n) for n in cut_rows]
        rows.append(
            ClassCost(
                cls.kind, cls.size, cls.nbytes, unit.acc, unit.cpu, unit.link,
                kv, unit.kv_fetch, unit.issue, stall, cycle,
                max(link for link, _ in speeds), max(cpu for _, cpu in speeds),
                tuple(_cut_cost(costs, cls, n) for n in cut_rows),
            )
        )  # fmt: skip
    hidden, logits = load.tokens * spec.config.d_model * 4, load.logit_rows * spec.config.vocab * 4
    to_acc, to_cpu = costs.handoff("acc", hidden), costs.handoff("cpu", hidden)
    enter, leave = to_acc, min(to_cpu, costs.handoff("cpu", logits))
    if spec.neighbours is None:
        parts = sum(cls.size for cls in classes if cls.kind.adds)
        fixed = parts * costs.all_reduce(hidden)
    else:  # hidden states come to the accelerator and leave from it; all take part in the gather of the logits
        first, last = bool(spec.units[0].tensors), bool(spec.units[-1].tensors)
        fixed = costs.tables.collective(costs.ranks, logits if last else 0)
        fixed += 0.0 if spec.neighbours.source is None else costs.tables.hand_over(hidden)
        enter, leave = enter if first else 0.0, leave if last else 0.0
    return TierProblem(
        load.tokens,
        load.weight,
        tuple(rows),
        room.arena - room.scratch(load.tokens),
        slots,
        slots,
        room.state_stage,
        to_acc + to_cpu,
        enter,
        leave,
        fixed,
        costs.acc_contended is not None,
        costs.copy_issue,
        2 * costs.copy_issue * (1 + (load.past > 0)),
        room.host,
    )


def may_split(costs: TierCosts) -> bool:
    """Whether FFNs of this tier may be split: few tokens, and an accelerator that works beside the CPU."""
    return costs.tables.kind != "cpu" and costs.load.tokens <= SMALL_BATCH


def _cut_cost(costs: TierCosts, cls: UnitClass, cpu_rows: int) -> CutCost:
    """Of what both sides do at once the longer counts; where that is the accelerator's part, the CPU's is free."""
    cut = costs.split(cls.units[0].name, cpu_rows)
    waits = cut.cpu >= cut.acc_rows  # the accelerator for the CPU
    return CutCost(
        cut.issue + cut.join + cut.down + (0.0 if waits else cut.acc_rows),
        cut.cpu if waits else 0.0,
        cut.link,
        cut.acc_rows + cut.down,
        2 * cut.issue + (0.0 if waits else cut.cpu),
        cut.nbytes,
        row_stage_bytes(costs.load.tokens, cpu_rows),
    )


def count_tier(classes: tuple[UnitClass, ...], tier: TierPlan) -> tuple[Counts, ...]:
    """The counts that a tier's placements amount to."""
    places = {p.unit: p for p in tier.placements}
    counted = []
    for cls in classes:
        of_class = Counter((p.where, p.cpu_rows) for p in (places[u.name] for u in cls.units))
        pinned, cpu = (sum(n for (where, _), n in of_class.items() if where == side) for side in ("pinned", "cpu"))
        kv = sum(places[u.name].kv == "vram" for u in cls.units) if cls.kind.state else 0
        cuts = tuple((of_class["pinned", rows], of_class["streamed", rows]) for rows in cls.cut_rows)
        counted.append(Counts(pinned, cpu, kv, cuts))
    return tuple(counted)
