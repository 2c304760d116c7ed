"""Units that are alike form one class: the integer program counts them instead of naming them."""

from dataclasses import dataclass
from functools import cached_property

from pshard.model import ModelSpec
from pshard.units.divide_rows import share_rows
from pshard.units.unit import Unit, UnitKind

SHARES = (4, 8, 12)  # sixteenths of an FFN's rows of gate and up that the CPU may have of a divided one


@dataclass(frozen=True)
class UnitClass:
    """Like units in layer order."""

    name: str
    kind: UnitKind
    units: tuple[Unit, ...]

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
    def cpu_row_choices(self) -> tuple[int, ...]:
        """Rows that the CPU may have of a divided one of its units, by share; none for what cannot be divided."""
        return tuple(sorted({share_rows(self.units[0], share) for share in SHARES} - {0}))


def group_units(spec: ModelSpec, staged: frozenset[str] = frozenset()) -> tuple[UnitClass, ...]:
    """Classes in order of first appearance, named `ffn0`, `ffn1`, ...; units in `staged` are unlike the others."""
    groups: dict[tuple, list[Unit]] = {}
    for unit in spec.units:
        groups.setdefault((unit.likeness, unit.name in staged), []).append(unit)
    seen: dict[str, int] = {}
    classes = []
    for units in groups.values():
        kind = units[0].kind
        number = seen.get(kind.name, 0)
        classes.append(UnitClass(f"{kind.name}{number}", kind, tuple(units)))
        seen[kind.name] = number + 1
    return tuple(classes)
