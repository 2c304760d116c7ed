"""How many units of a class are where: as numbers that a solver found, or as columns of the program."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from pshard.planner.program.tier_problems import ClassCost, DividedClassCost, TierProblem
from pshard.planner.solver.linear import Amount, Column


@dataclass(frozen=True)
class Counts:
    """Units of one class: pinned, on the CPU (the rest is streamed), and with KV in VRAM.

    divided: those that are divided, by share, (in the arena, not there); they count among the pinned and the streamed
    ones. One of which some parts are kept in the arena is there, though it is streamed too.
    """

    pin: int
    cpu: int
    kv: int = 0
    divided: tuple[tuple[int, int], ...] = ()

    @property
    def n_divided(self) -> int:
        """Divided units, whatever their rows."""
        return sum(pinned + streamed for pinned, streamed in self.divided)

    @property
    def pin_whole(self) -> int:
        """Pinned units that are not divided."""
        return self.pin - sum(pinned for pinned, _ in self.divided)


class CountColumns(NamedTuple):
    """Counts as columns of the program."""

    pin: Column
    cpu: Column
    kv: Column
    divided: tuple[tuple[Column, Column], ...]

    def flatten(self) -> list[Column]:
        return [self.pin, self.cpu, self.kv, *(column for pair in self.divided for column in pair)]


class AnyCounts(Protocol):
    """`Counts` or `CountColumns`."""

    @property
    def pin(self) -> Amount: ...
    @property
    def cpu(self) -> Amount: ...
    @property
    def kv(self) -> Amount: ...
    @property
    def divided(self) -> Sequence[tuple[Amount, Amount]]: ...


class ClassUnits(NamedTuple):
    """Where the units of one class are, as counts say it. Whole ones: `pinned`, `streamed`, `on_acc` (both of these),
    `off_cpu` (divided ones too). `kv_on_host`: computed on the accelerator with KV in host memory."""

    divided: Amount
    pinned: Amount
    streamed: Amount
    on_acc: Amount
    off_cpu: Amount
    kv_on_host: Amount


def place_units(cost: ClassCost, n: AnyCounts) -> ClassUnits:
    """The formulas of what is not counted itself."""
    divided: Amount = 0
    pinned, streamed = n.pin, cost.size - n.pin - n.cpu
    for in_arena, in_slot in n.divided:
        divided = divided + in_arena + in_slot
        pinned, streamed = pinned - in_arena, streamed - in_slot
    off_cpu = cost.size - n.cpu
    kv_on_host = off_cpu - n.kv if cost.kv_nbytes else 0
    return ClassUnits(divided, pinned, streamed, off_cpu - divided, off_cpu, kv_on_host)


def copied_units(part: DividedClassCost, in_arena: Amount, elsewhere: Amount) -> Amount:
    """Divided units of one share that are copied to a slot: with parts kept in the arena, those that are there."""
    return in_arena if part.kept else elsewhere


def host_amounts(problem: TierProblem, counts: Sequence[AnyCounts], unit: int = 1) -> tuple[Amount, Amount]:
    """Weights and KV that have their place in host memory under given counts, in units of so many bytes: all that is
    not pinned but what divided units have in VRAM, and layers whose KV is not in VRAM."""
    weights: Amount = 0
    cells: Amount = 0
    for cost, n in zip(problem.classes, counts):
        weights = weights + cost.nbytes / unit * (cost.size - n.pin)
        for i, (in_arena, _) in enumerate(n.divided):  # a problem may have no costs of what another tier divides
            on_host = cost.divided[i].on_host if cost.divided else cost.nbytes
            weights = weights + on_host / unit * in_arena
        if cost.kv_nbytes:
            cells = cells + cost.kv_nbytes / unit * (cost.size - n.kv)
    return weights, cells


def host_bytes(problem: TierProblem, counts: tuple[Counts, ...]) -> tuple[int, int]:
    """Bytes of weights and of KV in host memory under given counts, were this the only tier."""
    weights, cells = (round(number(amount)) for amount in host_amounts(problem, counts))
    return weights, cells


def sum_pinned(n: AnyCounts) -> Amount:
    """Units of which a part is pinned."""
    found: Amount = 0
    for pinned, _ in n.divided:
        found = found + pinned
    return found


def number(amount: Amount) -> float:
    """The amount of counts that are numbers. Raises TypeError for an expression."""
    if not isinstance(amount, float | int):
        raise TypeError("the value of an expression is not known before a solver has run")
    return amount
