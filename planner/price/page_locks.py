"""Which units in host memory are page-locked where the system does not let all be, and which are staged."""

from collections.abc import Iterable, Sequence

from pshard.buffers import kv_layer_bytes
from pshard.model import ModelSpec
from pshard.plan import RankPlan
from pshard.planner.price.costs import TierCosts, restage
from pshard.planner.search.residency_order import spread
from pshard.workload import Workload

COPIED = ("ffn", "attention", "output")  # kinds in the order in which plans stream them; the embedding never is


def guess_staged(spec: ModelSpec, lockable: int | None, ranks: int) -> frozenset[str]:
    """Units that are priced as staged before there is a plan: those beyond the limit, were FFNs locked first, evenly
    spaced among the layers. The runtime locks what a plan streams first (`RankPlan.lock_order`): see `staged_units`."""
    if lockable is None:
        return frozenset()
    left, locked = lockable // ranks, set[str]()
    for kind in COPIED:
        units = [u for u in spec.units if u.kind == kind]
        fits = len(units)
        while sum(units[i].packed_nbytes for i in spread(len(units), fits)) > left:
            fits -= 1
        chosen = [units[i] for i in spread(len(units), fits)]
        locked |= {u.name for u in chosen}
        left -= sum(u.packed_nbytes for u in chosen)
        if fits < len(units):
            break
    return frozenset(u.name for u in spec.units if u.kind in COPIED and u.name not in locked)


def staged_units(
    spec: ModelSpec, plan: RankPlan, workload: Workload, lockable: int | None, ranks: int
) -> frozenset[str]:
    """Units that the runtime leaves beyond the limit under a plan: after KV on the host, in the plan's own order."""
    if lockable is None:
        return frozenset()
    w = workload
    layer = kv_layer_bytes(spec.config, w.context, w.sequences, w.type_k, w.type_v)
    left, staged = lockable // ranks - layer * len(plan.kv_on_host), []
    for name in plan.lock_order:
        left -= spec.unit(name).packed_nbytes
        if left < 0:  # the first refusal ends it
            staged.append(name)
    return frozenset(staged)


def stage_by(plan: RankPlan, costs: Sequence[TierCosts]) -> tuple[TierCosts, ...]:
    """Tiers' costs with the copies staged that are under this plan."""
    one = costs[0]
    staged = staged_units(one.spec, plan, one.workload, one.tables.profile.lockable_bytes, one.ranks)
    return tuple(restage(c, staged) for c in costs)


def locked(costs: Iterable[TierCosts]) -> tuple[TierCosts, ...]:
    """Tiers' costs were everything page-locked: no plan's are less."""
    return tuple(restage(c, frozenset()) for c in costs)
