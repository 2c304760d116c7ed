"""From nouns to the integer program's coefficients, and from its counts back."""

from collections import Counter

from pshard.batch_sizes import SMALL_BATCH
from pshard.buffers import row_stage_bytes
from pshard.homes import ON_CPU, PINNED, STREAMED
from pshard.plan import TierPlan
from pshard.planner.price.draft import Room
from pshard.planner.price.tier_costs import TierCosts
from pshard.planner.program.counts import Counts
from pshard.planner.program.tier_problems import ClassCost, DividedClassCost, TierProblem
from pshard.planner.program.unit_classes import UnitClass
from pshard.steps.emit import handed_nbytes, size_ports
from pshard.units.divide_unit import count_shares, divided_sizes, joined_width
from pshard.units.share import Share
from pshard.units.unit import Unit

FINE = (0.25, 0.5, 0.75, 1.0)  # of the parts that balance CPU and link: what prompts may leave to the CPU


def tier_problem(
    room: Room, classes: tuple[UnitClass, ...], costs: TierCosts, slots: int, divide: bool = False
) -> TierProblem:
    """Coefficients of one tier with that many staging slots; `divide`: into `offered_shares`, where there are any."""
    load = costs.load
    to_acc, to_cpu = (costs.handoff(side, _hidden_bytes(room, costs)) for side in ("acc", "cpu"))
    fixed, enter, leave = _ends(room, costs)
    return TierProblem(
        tokens=load.tokens,
        weight=load.weight,
        classes=tuple(_class_cost(room, cls, classes, costs, divide) for cls in classes),
        room=room.arena - room.scratch(load.tokens),
        slots=slots,
        lookahead=slots,
        stage_nbytes=room.state_stage,
        round_trip=to_acc + to_cpu,
        enter=enter,
        leave=leave,
        fixed=fixed,
        all_contend=costs.acc_contended is not None,
        copy_issue=costs.copy_issue,
        kv_issue=2 * costs.copy_issue * (1 + (load.past > 0)),
        host_room=room.host,
    )


def _hidden_bytes(room: Room, costs: TierCosts) -> int:
    return costs.load.tokens * room.spec.config.d_model * 4


def _ends(room: Room, costs: TierCosts) -> tuple[float, float, float]:
    """Seconds that the tier takes whatever the placement, and of the hand-offs at its two ends."""
    spec, hidden = room.spec, _hidden_bytes(room, costs)
    logits = costs.load.logit_rows * spec.config.vocab * 4
    enter, leave = costs.handoff("acc", hidden), min(costs.handoff("cpu", hidden), costs.handoff("cpu", logits))
    if spec.neighbours is None:
        sums = sum(u.ports.adds + len(u.summed) for u in spec.units) - len(spec.onto_parts)
        normed = len(spec.sum_norms) * costs.sum_norm if spec.sum_norms else 0.0
        sizes = size_ports(spec.config, costs.load.tokens)
        between = sum(costs.all_reduce(sizes[u.ports.between]) for u in spec.units if u.ports.between)
        return costs.turn + sums * costs.all_reduce(hidden) + between + normed, enter, leave
    # hidden states come to the accelerator and leave from it; all take part in the gather of the logits
    first, last = bool(spec.embedding.tensors), bool(spec.output.tensors)
    fixed = costs.turn + costs.tables.collective(costs.ranks, logits if last else 0)
    brought = handed_nbytes(spec, costs.load.tokens, spec.neighbours.brought)
    fixed += 0.0 if spec.neighbours.source is None else costs.hand_over(brought)
    return fixed, enter if first else 0.0, leave if last else 0.0


def _class_cost(
    room: Room, cls: UnitClass, classes: tuple[UnitClass, ...], costs: TierCosts, divide: bool
) -> ClassCost:
    name = cls.units[0].name
    unit = costs.units[name]
    between = min(  # accelerator work between two layers' KV
        (costs.units[c.units[0].name].acc for c in classes if c.kind.position == "layer" and not c.kind.state),
        default=0.0,
    )
    cycle = unit.kv_fetch + unit.kv_write if unit.kv_fetch else 0.0
    shares = offered_shares(cls, costs) if divide else ()
    in_place = costs.reads_in_place(cls.kind)
    over_link = costs.over_link(cls.kind, unit)
    speeds = [side[name] for side in (costs.contended, costs.acc_contended) if side]
    speeds += [costs.divided_speeds(name, share) for share in shares if share.cpu]
    return ClassCost(
        name=cls.name,
        kind=cls.kind,
        size=cls.size,
        nbytes=cls.nbytes,
        acc=unit.acc,
        cpu=unit.cpu,
        link=over_link,
        kv_nbytes=room.states[name],
        kv_fetch=unit.kv_fetch,
        issue=unit.issue,
        kv_stall=max(0.0, cycle - between),
        kv_cycle=cycle,
        link_speed=max(link for link, _ in speeds),
        cpu_speed=max(cpu for _, cpu in speeds),
        divided=tuple(_divided_cost(costs, cls, share) for share in shares),
        in_place=in_place,
        read=max(0.0, over_link - unit.acc) if in_place else 0.0,
    )


def may_divide(costs: TierCosts) -> bool:
    """Whether units of this tier may be divided by `UnitClass.shares`: few tokens, and an accelerator that works beside
    the CPU."""
    return costs.tables.kind != "cpu" and costs.load.tokens <= SMALL_BATCH


def may_spread(costs: TierCosts, cls: UnitClass) -> bool:
    """Whether the CPU may have any number of the parts of units of a class, in tiers of any size."""
    return costs.tables.kind != "cpu" and cls.kind.parts is not None and count_shares(cls.units[0]) > 1


def offered_shares(cls: UnitClass, costs: TierCosts) -> tuple[Share, ...]:
    """How the program may divide units of a class. In tiers of many tokens only what is copied, and finely: there a few
    parts take the CPU as long as the link takes for all others."""
    if may_divide(costs):
        return cls.shares
    if not may_spread(costs, cls):
        return ()
    most = balanced_parts(costs, cls.units[0])
    return tuple(Share(n) for n in sorted({max(1, round(most * part)) for part in FINE}))


def balanced_parts(costs: TierCosts, unit: Unit) -> int:
    """The fewest parts of a streamed unit that take the CPU as long as the link takes for the others."""
    low, high = 1, count_shares(unit) - 1
    while low < high:
        middle = (low + high) // 2
        cost = costs.divided(unit.name, Share(middle))
        low, high = (low, middle) if cost.cpu >= costs.over_link(unit.kind, cost) else (middle + 1, high)
    return low


def _divided_cost(costs: TierCosts, cls: UnitClass, share: Share) -> DividedClassCost:
    """Of what both sides do at once the longer counts; where that is the accelerator's part, the CPU's is free."""
    unit = cls.units[0]
    cost = costs.divided(unit.name, share)
    waits = cost.cpu >= cost.acc  # the accelerator for the CPU
    launches = 2 if share.cpu else 1
    in_place = costs.reads_in_place(unit.kind)
    over_link = costs.over_link(unit.kind, cost)
    return DividedClassCost(
        share=share,
        acc=(cost.issue if share.cpu else 0.0) + cost.join + cost.rest + (0.0 if waits else cost.acc),
        cpu=cost.cpu if waits else 0.0,
        link=over_link,
        alone=cost.acc + cost.rest,
        issue=launches * cost.issue + (0.0 if waits else cost.cpu),
        nbytes=cost.nbytes,
        kept=cost.kept,
        row_nbytes=row_stage_bytes(costs.load.tokens, joined_width(unit, share, costs.spec.config)),
        on_host=divided_sizes(unit, share).on_host,
        read=max(0.0, over_link - max(cost.acc, cost.cpu)) if in_place else 0.0,
        lies=may_divide(costs),
    )


def _count_divided(of_class: Counter, share: Share) -> tuple[int, int]:
    """Units of that share: in the arena, not there."""
    streamed = of_class[STREAMED, share]
    return (streamed, 0) if share.kept else (of_class[PINNED, share], streamed)


def count_tier(classes: tuple[UnitClass, ...], tier: TierPlan) -> tuple[Counts, ...]:
    """The counts that a tier's placements amount to."""
    places = {p.unit: p for p in tier.placements}
    counted = []
    for cls in classes:
        of_class = Counter((p.where, p.share) for p in (places[u.name] for u in cls.units))
        in_arena = sum(places[u.name].in_arena for u in cls.units)
        cpu = sum(n for (where, _), n in of_class.items() if where == ON_CPU)
        kv = sum(places[u.name].has_state_in_vram for u in cls.units) if cls.kind.state else 0
        divided = tuple(_count_divided(of_class, share) for share in cls.shares)
        counted.append(Counts(in_arena, cpu, kv, divided))
    return tuple(counted)
