"""Units that are alike form one class: the integer program counts them instead of naming them."""

from dataclasses import dataclass

from pshard.model import ModelSpec, Unit


@dataclass(frozen=True)
class UnitClass:
    """Like units in layer order."""

    name: str
    kind: str
    units: tuple[Unit, ...]

    @property
    def size(self) -> int:
        return len(self.units)

    @property
    def nbytes(self) -> int:
        """Bytes of one of its units."""
        return self.units[0].packed_nbytes


def group_units(spec: ModelSpec) -> tuple[UnitClass, ...]:
    """Classes in order of first appearance, named `ffn0`, `ffn1`, ..."""
    groups: dict[tuple, list[Unit]] = {}
    for unit in spec.units:
        groups.setdefault(unit.likeness, []).append(unit)
    seen: dict[str, int] = {}
    classes = []
    for units in groups.values():
        kind = units[0].kind
        classes.append(UnitClass(f"{kind}{seen.get(kind, 0)}", kind, tuple(units)))
        seen[kind] = seen.get(kind, 0) + 1
    return tuple(classes)
