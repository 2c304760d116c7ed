"""Steps: what the planner simulates and the executor runs for one micro-batch, as nouns. No torch.

`nbytes` is what a step of the expected micro-batch moves: what it is priced by. Whatever copies is a `Move`.
"""

from dataclasses import dataclass
from functools import cached_property

from pshard.steps.move import Move
from pshard.units.share import AT_ONCE, Divisible, Wave
from pshard.units.state import StateShape

DEMAND = "demand"
BEFORE, AFTER = "before", "after"  # parts of a unit that one side computes: see Compute


@dataclass(frozen=True)
class Compute(Divisible):
    """Run a unit. `on`: "acc" or "cpu"; `source` of its weights: "arena", "slot", "host", "link" where the accelerator
    reads them in host memory, or "demand" where experts lie in slots that follow use and what these lack is brought
    there first, and where rows that are looked up are read from disk.

    Of a unit that both sides compute (`cpu_rows` > 0) a `part`: "share", what this side has of it, or "rest", what
    follows on the accelerator. Of one that goes on from a sum over the ranks (`Ports.between`): BEFORE or AFTER it.
    `kept_parts`: of a unit in a slot, so many lie in the arena.
    `reads`: bytes that the micro-batch is expected to read over the link, or on demand. `wave`: of a unit that comes to
    slots in several; what all of them give is added up with the last.
    `position`: of its kind in the model, "first", "layer" or "last"; "first" too where rows of a table come from disk.
    `state`: where it is, "vram" or "host" (a unit that runs on the accelerator finds it in the stage then); None
    without one.
    """

    unit: str
    on: str
    source: str
    slot: int | None = None
    part: str = ""
    cpu_rows: int = 0
    position: str = "layer"
    state: str | None = None
    kept_parts: int = 0
    reads: int = 0
    wave: Wave = AT_ONCE

    @property
    def is_divided(self) -> bool:
        """Whether it is a part of a unit that both sides compute."""
        return self.part not in ("", BEFORE, AFTER)


@dataclass(frozen=True)
class AllReduce:
    """Sum the ranks' partial outputs of a unit (float32 [tokens, d_model]) into the residual stream; or, with a port,
    those that it has left there, in place."""

    unit: str
    nbytes: int
    port: str = ""


@dataclass(frozen=True)
class Receive:
    """Take a micro-batch's hidden states (float32 [tokens, d_model]) from rank `source` to the accelerator's side, and
    what stands in other ports of these names."""

    source: int
    nbytes: int
    names: tuple[str, ...] = ("hidden",)


@dataclass(frozen=True)
class Send:
    """Hand hidden states on the accelerator's side to rank `target`, which takes them when it comes to it, and what
    stands in other ports of these names."""

    target: int
    nbytes: int
    names: tuple[str, ...] = ("hidden",)


@dataclass(frozen=True)
class Gather:
    """Collect the ranks' slices of the logits; in a pipeline the last rank has all, and the others bring 0 bytes."""

    unit: str
    nbytes: int


@dataclass(frozen=True)
class Free:
    """A staging slot's unit has been computed; the slot may be written again."""

    slot: int


@dataclass(frozen=True)
class Turns:
    """Steps that each of so many micro-batches of a sweep takes, one micro-batch after the other."""

    steps: "tuple[Step, ...]"
    batches: int


Step = Move | Compute | AllReduce | Receive | Send | Gather | Free | Turns


@dataclass(frozen=True)
class StepList:
    """`enter`: copies once when the tier is entered; `body`: one micro-batch, or one sweep of several."""

    enter: tuple[Move, ...]
    body: tuple[Step, ...]

    @cached_property
    def flat(self) -> tuple[Step, ...]:
        """The body with all turns one after the other."""
        found = list[Step]()
        for step in self.body:
            found += step.steps * step.batches if isinstance(step, Turns) else (step,)
        return tuple(found)

    @property
    def link_bytes(self) -> int:
        """Bytes that the body moves host to device, what kernels read there included."""
        return sum(
            s.reads if isinstance(s, Compute) else s.nbytes
            for s in self.flat
            if (isinstance(s, Compute) and s.source != DEMAND) or (isinstance(s, Move) and s.is_to_acc)
        )


@dataclass(frozen=True)
class StepShape:
    """Sizes of one micro-batch: new tokens, cells already cached (sum over its sequences), logit rows wanted.

    `sums_on_host`: ranks without accelerators sum where they computed; others sum on the accelerator. `apart`: how many
    unrelated tokens use as many experts as these, which may follow each other in a text; None: all of them.
    """

    tokens: int
    past: int
    logit_rows: int
    sequences: int = 1
    type_k: str = "bf16"
    type_v: str = "bf16"
    ranks: int = 1
    sums_on_host: bool = False
    apart: float | None = None

    @property
    def unrelated(self) -> float:
        """How many unrelated tokens use as many experts."""
        return self.tokens if self.apart is None else self.apart

    @property
    def states(self) -> StateShape:
        """What sizes the states of its sequences."""
        return StateShape(self.past + self.tokens, self.sequences, self.type_k, self.type_v)
