"""Where a head that drafts lives, and what a draft takes: a program of its own, in a part of the budget that the model
does not have."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import pairwise

from pshard.batch import Batch
from pshard.buffers import scratch_bytes
from pshard.cuts.rank_parts import cut_ranks
from pshard.homes import HOST, ON_CPU, PINNED, VRAM
from pshard.machine import MachineProfile
from pshard.model import ModelSpec
from pshard.plan import Buffers, Placement, Prediction, RankPlan, Solve, TierPlan, Variant
from pshard.planner.prepare_ranks import split_of
from pshard.planner.price.profile_tables import Tables, find_tables
from pshard.planner.price.tier_costs import LAST_OF_RANKS, TierCosts, tier_costs
from pshard.planner.price.tier_loads import TierLoad
from pshard.quant import TENSOR_ALIGN, align
from pshard.steps.emit import emit_steps
from pshard.steps.step import AllReduce, Gather, StepShape
from pshard.units.state import StateShape
from pshard.units.unit import Unit, places_of
from pshard.workload import Workload

ROWS = 16  # of a head's micro-batch: a step's drafts in one, prompts in many, and little room for logits
TOLD_BYTES = 512  # that one rank sends the others of a step's drafts
USUAL = 5  # drafts a step, by which it is decided whether a unit pays for its room in VRAM
_UNPREDICTED = Prediction(0.0, 0.0, (), "", 0, 0)
_BY_RULE = Solve("by rule", 0.0, 0.0, "", "head")


@dataclass(frozen=True)
class HeadPlan:
    """A head's plan on each rank that has some of it, and predicted seconds of a token through all its units; `first`:
    of a text's first draft beside them, `further`: of each other one; `told`: until all ranks know a step's drafts."""

    plans: tuple[RankPlan, ...]
    seconds: float
    first: float = 0.0
    further: float = 0.0
    told: float = 0.0

    @property
    def budget_mib(self) -> int:
        """Of each rank that has some."""
        return max(plan.budget_mib for plan in self.plans)

    def drafting(self, drafts: int) -> float:
        """Seconds of so many drafts."""
        return drafts * self.seconds + self.first + (drafts - 1) * self.further + self.told if drafts else 0.0


def plan_head(spec: ModelSpec, profile: MachineProfile, workload: Workload, in_vram: bool) -> HeadPlan:
    """The plan of a model's head on every rank that has some of it: whole, or slices, whose sums all wait for. in_vram:
    what pays for its room there is in VRAM; else the CPU has what it may, but for the output that the model has in
    VRAM."""
    parts, tables = cut_ranks(spec, split_of(workload)), find_tables(profile)
    having = [rank for rank, part in enumerate(parts) if part.head]
    own = [(rank, tables.of_accelerator(workload.device + rank)) for rank in having]
    found = [_plan_part(parts[rank], rank, timed, workload, in_vram, len(having)) for rank, timed in own]
    return HeadPlan(
        tuple(plan for one in found for plan in one.plans),
        max(one.seconds for one in found),
        max(one.first for one in found),
        max(one.further for one in found),
        tables.collective(len(parts), TOLD_BYTES) if len(having) < len(parts) else 0.0,
    )


def _plan_part(part: ModelSpec, rank: int, tables: Tables, workload: Workload, in_vram: bool, ranks: int) -> HeadPlan:
    """The plan of what a rank has of a head, beside its part of the model. ranks: that have some of it."""
    head, states = part.head, workload.state_shape
    assert head is not None
    past = min(workload.prompt + workload.generated // 2, max(0, workload.share - ROWS))
    costs = tier_costs(head, tables, TierLoad(Batch.even(1, 1, past)), workload, ranks)
    whole = part.packed_nbytes + sum(part.state_sizes(states).values()) < workload.vram_mib[rank] << 20
    sums = ranks > 1 and tables.kind != "cpu"

    def stays(unit: Unit) -> bool:
        cost, nbytes = costs.units[unit.name], unit.packed_nbytes + unit.state_nbytes(head.config, states)
        gained = USUAL * (cost.cpu - cost.acc)
        return tables.kind == "cpu" or whole or gained > tables.copy("h2d", nbytes)

    def must_stay(unit: Unit) -> bool:
        return bool(unit.lent) or all(site != ON_CPU for site, _ in places_of(unit.kind, sums))

    computed = [unit for unit in head.units if not unit.kind.is_looked_up]
    here = {unit.name for unit in computed if must_stay(unit) or (in_vram and stays(unit))}
    plan = place_head(head, states, tables.act_bytes, here, rank)
    places = plan.tiers[0].placements
    seconds = sum(
        (costs.units[p.unit].acc if p.is_on_acc else costs.units[p.unit].cpu)
        for p in places
        if not head.unit(p.unit).kind.is_looked_up
    )
    seconds += _sum_seconds(head, plan.tiers[0], costs)
    changes = 1 + sum(a.is_on_acc != b.is_on_acc for a, b in pairwise(places))
    handoff, follow = costs.handoff("acc", costs.vector_bytes), tables.elementwise("acc", "follow", 1, 1)
    if not (first := tables.elementwise("acc", "draft", 1, 1)):  # not timed: less than a token of the model takes
        return HeadPlan((plan,), seconds + changes * handoff, costs.turn, costs.turn)
    known = 1 + (not places[0].is_on_acc)  # hand-offs that are in it
    more = max(0, changes - known) * handoff
    first += more
    if ranks > 1:  # the first one that is there waits for the last
        first += (1 - 1 / LAST_OF_RANKS) * costs.turn
    launched = ranks == 1 or tables.kind != "cpu"  # CPUs that sum their parts wait for each other at each draft
    at_once = launched and launches_at_once(head, plan.tiers[0], ranks == 1 and tables.kind != "cpu")
    return HeadPlan((plan,), seconds, first, follow + more if at_once else first)


def launches_at_once(head: ModelSpec, tier: TierPlan, asks: bool) -> bool:
    """Whether all drafts of a text but the first are launched at once: where all is in VRAM, but for tables. asks: the
    accelerator can ask the CPU for what keeps nothing of a text, between units of its own."""
    computed = [p for p in tier.placements if not head.unit(p.unit).kind.is_looked_up]
    between = computed[0].is_on_acc and computed[-1].is_on_acc
    return between and all(p.is_on_acc or (asks and not head.unit(p.unit).kind.state) for p in computed)


def _sum_seconds(head: ModelSpec, tier: TierPlan, costs: TierCosts) -> float:
    """Seconds in which ranks sum their parts of a token, and put its logits together."""
    if costs.ranks < 2:
        return 0.0
    work, on_cpu = costs.workload, costs.tables.kind == "cpu"
    shape = StepShape(1, costs.load.past, 1, 1, work.type_k, work.type_v, costs.ranks, on_cpu)
    steps = emit_steps(head, tier, shape).body
    return sum(costs.meeting(step) for step in steps if isinstance(step, AllReduce | Gather))


def place_head(
    head: ModelSpec, states: StateShape, act_bytes: int, in_vram: Collection[str], rank: int = 0
) -> RankPlan:
    """The plan of a head of which these units are in VRAM, and the others on the CPU.

    states: those of the model's plan. act_bytes: of an activation on the accelerator. in_vram: of what a head is lent,
    what is there under all tiers of the model. rank: which has it.
    """

    def place(unit: Unit) -> Placement:
        here = unit.name in in_vram
        state = (VRAM if here else HOST).name if unit.kind.state else None
        return Placement(unit.name, PINNED if here else ON_CPU, state)

    placements = tuple(map(place, head.units))
    pins = tuple(p.unit for p in placements if p.in_arena)
    kept = tuple(p.unit for p in placements if p.has_state_in_vram)
    sizes = head.state_sizes(states)
    tokens = min(ROWS, states.batch or states.context)  # one tier: going from one to another takes milliseconds
    buffers = Buffers(
        pinned=sum(align(head.unit(name).packed_nbytes, TENSOR_ALIGN) for name in pins),
        scratch=scratch_bytes(head, tokens, states, act_bytes),
        slots=0,
        slot_bytes=0,
        kv=sum(sizes[name] for name in kept),
    )
    tier = TierPlan(tokens, placements, buffers, _UNPREDICTED, _BY_RULE)
    budget = -(-(buffers.total + TENSOR_ALIGN) >> 20)
    return RankPlan(rank, budget, 1.0, pins, kept, (tier,), reserve_mib=0)  # what torch takes is in the model's


def settle_head(head: ModelSpec, plan: RankPlan, variant: Variant) -> RankPlan:
    """A head's plan with what it is lent where the model's finished plan has it."""
    resident = variant.ranks[plan.rank].resident

    def settle(place: Placement) -> Placement:
        if not head.unit(place.unit).lent:
            return place
        return replace(place, where=PINNED if place.unit in resident else ON_CPU)

    tiers = tuple(replace(tier, placements=tuple(map(settle, tier.placements))) for tier in plan.tiers)
    pins = tuple(place.unit for place in tiers[0].placements if place.in_arena)
    return replace(plan, pin_order=pins, tiers=tiers)
