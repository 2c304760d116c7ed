"""What a machine profile's timings must obey beyond their types: work takes time, and more of it more. No torch."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from pshard.machine import MachineProfile

UNLIKELY = 16.0  # times too slow beside another: of honest profiles, some of busy machines, the worst row is at 4.2
STALL = 0.02  # seconds that one timing may be too long because a core stood still


@dataclass(frozen=True)
class Point:
    """Seconds of work of a size, and the field that says so."""

    size: int
    seconds: float
    field: str


def check_timings(profile: MachineProfile) -> None:
    """Raise ValueError that names the field whose timing no machine has.

    Matmuls, attention, copies, sums, shares and reads take longer than nothing; element-wise work may take none, as
    some of it is a difference of two timings. Along each curve that the planner reads, of one operation by its size,
    more work takes no less time and no more than in proportion, roughly: a point is refused that UNLIKELY times that
    leaves too slow beside another by more than STALL, or beside which so two others are too slow. Others on a machine
    make timings longer, never shorter, so that one row that is too long may be noise; a damaged one is not.
    """
    for field, value in _amounts(profile):
        if not value > 0:
            raise ValueError(f"MachineProfile.{field} is {value:g}; it is above 0 on every machine")
    for points in _curves(profile):
        for point in points:
            slow = [p for p in points if p.seconds > _most(point, p.size)]
            if len(slow) > 1:
                raise ValueError(_describe(point, slow[0]))
            if slow and slow[0].seconds > _most(point, slow[0].size) + STALL:
                raise ValueError(_describe(slow[0], point))


def _most(beside: Point, size: int) -> float:
    """Seconds that work of a size takes at most, where another size takes what it does."""
    return UNLIKELY * beside.seconds * max(1.0, size / beside.size)


def _describe(wrong: Point, other: Point) -> str:
    return (
        f"MachineProfile.{wrong.field} is {wrong.seconds:g} for a size of {wrong.size}, which does not go with "
        f"{other.seconds:g} for {other.size} ({other.field})"
    )


def _amounts(profile: MachineProfile) -> Iterator[tuple[str, float]]:
    """Fields that are above 0, by name."""
    for table in ("matmuls", "attention", "copies", "collectives"):
        for i, row in enumerate(getattr(profile, table)):
            yield f"{table}[{i}].seconds", row.seconds
    for i, share in enumerate(profile.shares):
        for name in ("whole", "alone", "together"):
            yield f"shares[{i}].{name}", getattr(share, name)
    for i, read in enumerate(profile.reads):
        yield f"reads[{i}].rate", read.rate
    for i, accelerator in enumerate(profile.accelerators):
        yield f"accelerators[{i}].memory_bytes", accelerator.memory_bytes


def _curves(profile: MachineProfile) -> Iterator[list[Point]]:
    """Timings of the same work by how much of it there is."""
    curves: dict[tuple, list[Point]] = defaultdict(list)

    def add(table: str, place: int, key: tuple, size: int, seconds: float) -> None:
        curves[(table, *key)].append(Point(size, seconds, f"{table}[{place}].seconds"))

    for i, m in enumerate(profile.matmuls):
        add("matmuls", i, (m.device, m.qtype, m.rows, m.cols), m.tokens, m.seconds)
    for i, a in enumerate(profile.attention):
        heads = (a.n_heads, a.n_kv_heads, a.head_dim)
        add("attention", i, (a.device, heads, a.kv_type, a.tokens, a.sequences), a.context, a.seconds)
    for i, c in enumerate(profile.copies):
        add("copies", i, (c.device, c.direction, c.memory), c.nbytes, c.seconds)
    for i, s in enumerate(profile.collectives):
        add("collectives", i, (s.backend, s.ranks, s.dtype, s.copies), s.nbytes, s.seconds)
    yield from curves.values()
