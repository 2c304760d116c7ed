"""Move: the one step that copies, whatever it copies: weights, experts, states, activations. No torch."""

from dataclasses import dataclass

from pshard.homes import ACC, BACK, COMPUTE, HOST, LINK, VRAM, Home, Lane
from pshard.units.share import AT_ONCE, WHOLE, Divisible, Share, Wave


@dataclass(frozen=True)
class Weights(Divisible):
    """What is brought of a unit: all of it, or of a divided one what neither the CPU has nor the arena beside a slot.

    `cpu_rows`, `kept_parts`: of a divided unit; these stay behind. `wave`: of one that comes in several.
    """

    unit: str
    cpu_rows: int = 0
    kept_parts: int = 0
    wave: Wave = AT_ONCE


@dataclass(frozen=True)
class Pins(Weights):
    """What a unit has in the arena for as long as a tier is in force; of one with kept parts only these."""


@dataclass(frozen=True)
class NewExperts:
    """The experts that were decided on since the last micro-batch. Those that have come since are used from now on."""

    unit: str = ""  # of many


@dataclass(frozen=True)
class UnitState:
    """What a unit's state holds of the micro-batch's sequences, or on the way back what has changed of it."""

    unit: str


@dataclass(frozen=True)
class Activations:
    """The micro-batch's rows in buffers of these names: the residual stream, what a router found, a part of a sum.
    The last ones that go to the host deliver the logits."""

    names: tuple[str, ...] = ("hidden",)
    unit: str = ""  # whoever comes next


@dataclass(frozen=True)
class Part:
    """What the CPU has computed of a divided unit, float32 [tokens, width]."""

    unit: str
    width: int


@dataclass(frozen=True)
class WaitingRows:
    """The micro-batch's rows in buffers of these names, which wait while others of a sweep have their turn: put away,
    or taken up again (`returns`)."""

    names: tuple[str, ...]
    returns: bool
    unit: str = ""  # of many


Portion = Weights | NewExperts | UnitState | Activations | Part | WaitingRows


@dataclass(frozen=True)
class Move:
    """Copy a portion from one home to another, in a lane.

    `nbytes` is what it moves in the expected micro-batch: what it is priced by. How much a state moves is decided when
    it runs (`is_decided_late`); of activations the rows that there are; all else moves `nbytes`.
    `lane`: where it queues; what comes from beyond host memory goes through the lanes of its home's way in before.
    `slot`: the staging slot that weights come to. `held`: of weights on disk, so many bytes lie in slots in memory, and
    are not read.
    """

    portion: Portion
    origin: Home
    to: Home
    lane: Lane
    nbytes: int
    slot: int | None = None
    held: int = 0

    @property
    def unit(self) -> str:
        """The unit whose portion it is; "" for those of several."""
        return self.portion.unit

    @property
    def share(self) -> Share:
        """How the unit is divided whose weights they are."""
        return self.portion.share if isinstance(self.portion, Weights) else WHOLE

    @property
    def wave(self) -> Wave:
        """Which wave it is of the unit whose weights they are."""
        return self.portion.wave if isinstance(self.portion, Weights) else AT_ONCE

    @property
    def activations(self) -> tuple[str, ...]:
        """The buffers whose rows it hands over; none where it copies something else."""
        return self.portion.names if isinstance(self.portion, Activations) else ()

    @property
    def part_width(self) -> int:
        """Columns of the CPU's part of a unit that it brings; 0 where it copies something else."""
        return self.portion.width if isinstance(self.portion, Part) else 0

    @property
    def is_decided_late(self) -> bool:
        """Whether how much is moved is decided when it runs: the cells in use."""
        return isinstance(self.portion, UnitState)

    @property
    def is_to_acc(self) -> bool:
        """Whether it brings something to the accelerator."""
        return self.to is VRAM and self.origin is not VRAM

    def brings(self, *portions: type) -> bool:
        """Whether it brings such a portion to the accelerator."""
        return self.is_to_acc and isinstance(self.portion, portions)

    def takes_back(self, *portions: type) -> bool:
        """Whether it takes such a portion to the host."""
        return not self.is_to_acc and isinstance(self.portion, portions)


def bring_weights(
    unit: str,
    slot: int,
    nbytes: int,
    share: Share = WHOLE,
    home: Home = HOST,
    held: int = 0,
    wave: Wave = AT_ONCE,
) -> Move:
    """Copy a unit's weights to a staging slot. Occupies the link and host DRAM, and the lanes of a home beyond that."""
    return Move(Weights(unit, *share, wave), home, VRAM, LINK, nbytes, slot, held)


def bring_pins(unit: str, share: Share = WHOLE, home: Home = HOST) -> Move:
    """Copy a unit's weights to their place in the arena, as a tier is entered."""
    return Move(Pins(unit, *share), home, VRAM, LINK, 0)


def bring_experts(nbytes: int) -> Move:
    """Use the experts that have come to slots in VRAM, and begin to copy those that were decided on since: the next
    micro-batch waits for them. `nbytes`: as many as are expected."""
    return Move(NewExperts(), HOST, VRAM, LINK, nbytes)


def fetch_state(unit: str, nbytes: int = 0) -> Move:
    """Copy a unit's state from host memory: for a micro-batch to the stage that states share, as a tier is entered to
    its place in VRAM."""
    return Move(UnitState(unit), HOST, VRAM, LINK, nbytes)


def write_state(unit: str, nbytes: int) -> Move:
    """Copy what has changed of a unit's state (of a KV cache the new cells) from the stage to host memory."""
    return Move(UnitState(unit), VRAM, HOST, BACK, nbytes)


def hand_over(to: str, nbytes: int, names: tuple[str, ...] = ("hidden",)) -> Move:
    """Move activations to the side, ACC or CPU, that computes next, or to the host at the end."""
    origin, target = (HOST, VRAM) if to == ACC else (VRAM, HOST)
    return Move(Activations(names), origin, target, COMPUTE, nbytes)


def join_part(unit: str, nbytes: int, width: int) -> Move:
    """Bring what the CPU has computed of a divided unit to the accelerator."""
    return Move(Part(unit, width), HOST, VRAM, COMPUTE, nbytes)


def put_aside(names: tuple[str, ...], nbytes: int, returns: bool = False) -> Move:
    """Let the micro-batch's rows wait while others of a sweep have their turn, or take them up again."""
    return Move(WaitingRows(names, returns), VRAM, VRAM, COMPUTE, nbytes)
