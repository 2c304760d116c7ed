"""Units that are alike form one class: the integer program counts them instead of naming them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from pshard.model import ModelSpec
from pshard.planner.price.tier_costs import TierCosts
from pshard.routing.expert_uses import count_last
from pshard.units.divide_unit import list_shares
from pshard.units.share import Share
from pshard.units.unit import Unit, UnitKind

SIXTEENTHS = (4, 8, 12)  # of a divided unit that the CPU may have, or the arena beside a slot
QUARTERS = (0.25, 0.5, 0.75)  # of the choices: what the CPU may have of experts of which some are used more than others


@dataclass(frozen=True)
class UnitClass:
    """Like units in layer order. on_cpu: of parts that are used unlike, how many of the last the CPU may have too."""

    name: str
    kind: UnitKind
    units: tuple[Unit, ...]
    on_cpu: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        return len(self.units)

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(u.name for u in self.units)

    @property
    def nbytes(self) -> int:
        """Bytes of one of its units."""
        return self.units[0].packed_nbytes

    @cached_property
    def shares(self) -> tuple[Share, ...]:
        """How one of its units may be divided; none for what cannot be."""
        return list_shares(self.units[0], SIXTEENTHS, self.on_cpu)


def group_units(spec: ModelSpec, costs: Sequence[TierCosts] = ()) -> tuple[UnitClass, ...]:
    """Classes in order of first appearance, named `ffn0`, `ffn1`, ...; units of one cost the same in all tiers."""
    groups: dict[tuple, list[Unit]] = {}
    for unit in spec.units:
        groups.setdefault((unit.likeness, *(c.likeness(unit) for c in costs)), []).append(unit)
    seen: dict[str, int] = {}
    classes = []
    for units in groups.values():
        kind = units[0].kind
        number = seen.get(kind.name, 0)
        on_cpu = count_last(QUARTERS, spec.popularity.uses) if spec.popularity and kind.parts else ()
        classes.append(UnitClass(f"{kind.name}{number}", kind, tuple(units), on_cpu))
        seen[kind.name] = number + 1
    return tuple(classes)
