"""Which units in host memory are page-locked where the system does not let all be, and which are staged."""

from collections.abc import Iterable, Sequence

from pshard.model import ModelSpec
from pshard.on_host import list_on_host
from pshard.plan import RankPlan
from pshard.planner.price.tier_costs import TierCosts, restage
from pshard.planner.search.residency_order import spread
from pshard.workload import Workload


def guess_staged(spec: ModelSpec, lockable: int | None, ranks: int) -> frozenset[str]:
    """Units priced as staged before there is a plan, where `ranks` share the host: those beyond the limit, were
    FFNs locked first, evenly spaced among the layers. The runtime locks what a plan streams first
    (`RankPlan.lock_order`): see `staged_units`."""
    if lockable is None:
        return frozenset()
    left, locked = lockable // ranks, set[str]()
    copied = {u.kind: u.kind.lock_order for u in spec.units if u.kind.lock_order is not None}
    for kind in sorted(copied, key=lambda kind: copied[kind]):
        units = [u for u in spec.units if u.kind is kind]
        fits = len(units)
        while sum(units[i].packed_nbytes for i in spread(len(units), fits)) > left:
            fits -= 1
        chosen = [units[i] for i in spread(len(units), fits)]
        locked |= {u.name for u in chosen}
        left -= sum(u.packed_nbytes for u in chosen)
        if fits < len(units):
            break
    return frozenset(u.name for u in spec.units if u.kind in copied and u.name not in locked)


def staged_units(
    spec: ModelSpec, plan: RankPlan, workload: Workload, lockable: int | None, ranks: int
) -> frozenset[str]:
    """Units that the runtime leaves beyond the limit under a plan: after KV on the host, in the plan's own order."""
    if lockable is None:
        return frozenset()
    states = sum(spec.unit(name).state_nbytes(spec.config, workload.state_shape) for name in plan.kv_on_host)
    left, staged = lockable // ranks - states, []
    for portion in list_on_host(spec, plan):
        left -= portion.nbytes
        if left < 0:  # the first refusal ends it
            staged.append(portion.unit.name)
    return frozenset(staged)


def stage_by(plan: RankPlan, costs: Sequence[TierCosts]) -> tuple[TierCosts, ...]:
    """Tiers' costs with the copies staged that are under this plan."""
    one = costs[0]
    profile = one.tables.profile
    staged = staged_units(one.spec, plan, one.workload, profile.lockable_bytes, profile.ranks_here(one.ranks))
    return tuple(restage(c, staged) for c in costs)


def locked(costs: Iterable[TierCosts]) -> tuple[TierCosts, ...]:
    """Tiers' costs were everything page-locked: no plan's are less."""
    return tuple(restage(c, frozenset()) for c in costs)
