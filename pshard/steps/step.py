"""Steps: what the planner simulates and the executor runs for one micro-batch, as nouns. No torch.

`nbytes` is what a step of the expected micro-batch moves: what it is priced by. A copy whose bytes are `decided` only
when it runs (the cells in use) has no other size than that in its step; whoever runs it asks
what is to be copied. All other copies move `nbytes`, and activations the rows that there are.
"""

from dataclasses import dataclass

from pshard.units.share import Divisible
from pshard.units.state import StateShape


@dataclass(frozen=True)
class CopyIn(Divisible):
    """Copy a unit's blob from host memory to a staging slot. Occupies the link (h2d) and host DRAM.

    `cpu_rows`, `kept_parts`: of a divided unit; these stay behind.
    """

    unit: str
    slot: int
    nbytes: int
    cpu_rows: int = 0
    kept_parts: int = 0


@dataclass(frozen=True)
class Refill:
    """Use the experts that have come to slots in VRAM, and begin to copy those that were decided on since: the next
    micro-batch waits for them. Occupies the link (h2d) and host DRAM. `nbytes`: as many as are expected."""

    nbytes: int


@dataclass(frozen=True)
class FetchKV:
    """Copy what a unit's state holds of the micro-batch's sequences (of a KV cache the used cells) from host memory to
    the stage that states share. Occupies the link (h2d) and host DRAM."""

    unit: str
    nbytes: int
    decided: bool = True


@dataclass(frozen=True)
class Compute(Divisible):
    """Run a unit. `on`: "acc" or "cpu"; `source` of its weights: "arena", "slot", "host", or "link" where the
    accelerator reads them in host memory.

    Of a unit that both sides compute (`cpu_rows` > 0) a `part`: "share", what this side has of it, or "rest", what
    follows on the accelerator. `kept_parts`: of a unit in a slot, so many lie in the arena.
    `reads`: bytes that the micro-batch is expected to read over the link.
    `position`: of its kind in the model, "first", "layer" or "last". `state`: where it is, "vram" or "host" (a unit
    that runs on the accelerator finds it in the stage then); None without one.
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


@dataclass(frozen=True)
class WriteBack:
    """Copy what has changed of a unit's state (of a KV cache the new cells) from the stage to host memory. Occupies the
    link (d2h)."""

    unit: str
    nbytes: int
    decided: bool = True


@dataclass(frozen=True)
class Handoff:
    """Move activations to the side ("acc" or "cpu") that computes next; the last one delivers logits to the host.

    `carries`: which of them, by the names of their buffers: the residual stream, what a router found, or both.
    """

    to: str
    nbytes: int
    carries: tuple[str, ...] = ("hidden",)


@dataclass(frozen=True)
class Join:
    """Bring what the CPU has computed of a divided unit, float32 [tokens, width], to the accelerator."""

    unit: str
    nbytes: int
    width: int


@dataclass(frozen=True)
class AllReduce:
    """Sum the ranks' partial outputs of a unit (float32 [tokens, d_model]) into the residual stream."""

    unit: str
    nbytes: int


@dataclass(frozen=True)
class Receive:
    """Take a micro-batch's hidden states (float32 [tokens, d_model]) from rank `source` to the accelerator's side."""

    source: int
    nbytes: int


@dataclass(frozen=True)
class Send:
    """Hand hidden states on the accelerator's side to rank `target`, which takes them when it comes to it."""

    target: int
    nbytes: int


@dataclass(frozen=True)
class Gather:
    """Collect the ranks' slices of the logits; in a pipeline the last rank has all, and the others bring 0 bytes."""

    unit: str
    nbytes: int


@dataclass(frozen=True)
class Free:
    """A staging slot's unit has been computed; the slot may be written again."""

    slot: int


Step = CopyIn | Refill | FetchKV | Compute | WriteBack | Handoff | Join | AllReduce | Receive | Send | Gather | Free


@dataclass(frozen=True)
class Bring(Divisible):
    """Bring what a tier holds in VRAM and the tier before did not: a unit's weights ("weights") or its state ("state").

    `cpu_rows`, `kept_parts`: of a divided unit; of one with kept parts only these are brought.
    """

    unit: str
    what: str
    cpu_rows: int = 0
    kept_parts: int = 0


@dataclass(frozen=True)
class StepList:
    """`enter`: copies once when the tier is entered; `body`: one micro-batch."""

    enter: tuple[CopyIn, ...]
    body: tuple[Step, ...]

    @property
    def link_bytes(self) -> int:
        """Bytes that one micro-batch moves host to device, what kernels read there included."""
        return sum(
            s.reads if isinstance(s, Compute) else s.nbytes
            for s in self.body
            if isinstance(s, CopyIn | Refill | FetchKV | Join | Compute) or (isinstance(s, Handoff) and s.to == "acc")
        )


@dataclass(frozen=True)
class StepShape:
    """Sizes of one micro-batch: new tokens, cells already cached (sum over its sequences), logit rows wanted.

    `sums_on_host`: ranks without accelerators sum where they computed; others sum on the accelerator.
    """

    tokens: int
    past: int
    logit_rows: int
    sequences: int = 1
    type_k: str = "bf16"
    type_v: str = "bf16"
    ranks: int = 1
    sums_on_host: bool = False

    @property
    def states(self) -> StateShape:
        """What sizes the states of its sequences."""
        return StateShape(self.past + self.tokens, self.sequences, self.type_k, self.type_v)
