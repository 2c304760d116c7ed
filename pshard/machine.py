"""MachineProfile: what a machine can do, measured with the runtime's own kernels or taken from datasheets. No torch."""

import os
from dataclasses import dataclass, replace
from typing import Any

from pshard.errors import UserError
from pshard.times.gpu_tiles import AUTO, TileChoice, settle_math
from pshard.times.stolen_time import DISTURBED

PROFILE_VERSION = 1
MEMORIES = ("pinned", "staged", "pageable")  # of copies, the fastest first
ACCELERATOR_TABLES = (
    "matmuls",
    "attention",
    "elementwise",
    "copies",
    "experts",
    "routes",
    "deltas",
    "in_place",
)  # whose rows name a device

AS_CARD = "PSHARD_AS_CARD"  # capability of the card that the GPU here is taken for, as 86: see docs/cards.md


def emulated_capability() -> int | None:
    """The capability of PSHARD_AS_CARD, which every process of a run inherits; None where GPUs are what they are."""
    text = os.environ.get(AS_CARD, "")
    if text and not text.isdecimal():
        raise UserError(f"environment variable {AS_CARD}: {text!r} is no capability such as 86; correct or unset it")
    return int(text) if text else None


@dataclass(frozen=True)
class HostInfo:
    """The CPU side. `isa` is what the host kernels dispatch to; `kernels` is "native" or "torch"."""

    cpu: str
    isa: str
    kernels: str
    cores: int
    numa_nodes: int
    l3_bytes: int
    memory_bytes: int
    threads: int  # the thread count that the profile chose and the runtime uses
    caches: tuple[tuple[str, int], ...] = ()  # ("L1d", bytes) ...


@dataclass(frozen=True)
class AcceleratorInfo:
    """One accelerator. `kind`: "cuda" or "cpu" (the CPU as accelerator: a bounded arena and real copies)."""

    kind: str
    index: int
    name: str
    memory_bytes: int
    pcie_generation: int = 0
    pcie_width: int = 0
    driver: str = ""
    capability: str = ""  # of a GPU: what its kernels are compiled for, as "9.0"

    @property
    def likeness(self) -> tuple[str, str, str, int]:
        """What accelerators have in common whose kernels take the same time."""
        return self.kind, self.name, self.capability, self.memory_bytes

    @property
    def link(self) -> tuple[int, int]:
        """What links have in common that are as fast."""
        return self.pcie_generation, self.pcie_width


@dataclass(frozen=True)
class RefusedKernel:
    """A kernel that an accelerator cannot run with any tile, by the name that `kernel_names` gives it, and why."""

    device: str
    kernel: str
    why: str


@dataclass(frozen=True)
class Reserve:
    """Bytes of VRAM that the profile's process took beside the context and what torch had allocated: kernels' code,
    libraries, stacks. `device` as in MatmulTiming."""

    device: str
    nbytes: int


@dataclass(frozen=True)
class MatmulTiming:
    """Seconds of x[tokens, cols] @ W[rows, cols].T with packed W, operands out of cache.

    `device`: "host", "acc" (the first accelerator, and those like it), or "acc1", "acc2"... (unlike ones).
    """

    device: str
    qtype: str
    rows: int
    cols: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class AttentionTiming:
    """Seconds of attention of one layer: `tokens` new tokens of each of `sequences` sequences, over `context` cells of
    each in all (past and new)."""

    device: str
    n_heads: int
    n_kv_heads: int
    head_dim: int
    kv_type: str
    tokens: int
    context: int
    seconds: float
    sequences: int = 1


@dataclass(frozen=True)
class ExpertTiming:
    """Seconds of all routed experts of a layer, `experts` of them with `d_expert` rows each, of which every token takes
    `used`, chosen at random: their gated products, results and weighted sum, added to the residual stream.

    `gate_qtype`: of gate and up; `down_qtype`: of down. Operands are out of cache; `device` as in MatmulTiming.
    """

    device: str
    gate_qtype: str
    down_qtype: str
    experts: int
    used: int
    d_expert: int
    d_model: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class InPlaceTiming:
    """Seconds of a layer's routed experts, each of `expert_nbytes`, that an accelerator's kernel reads over the link
    from page-locked host memory. `nbytes`: of those that so many tokens, which choose at random, are expected to use.
    """

    device: str
    expert_nbytes: int
    tokens: int
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class RouteTiming:
    """Seconds of a router: scores of `experts` experts from float32 [tokens, d_model], and the choice of `used` of
    them for every token. `qtype`: of its matrix."""

    device: str
    qtype: str
    experts: int
    used: int
    d_model: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class DeltaTiming:
    """Seconds of the gated delta net of one layer between its products: `tokens` new tokens of each of `sequences`
    sequences, whose states are out of cache. `device` as in MatmulTiming."""

    device: str
    key_heads: int
    value_heads: int
    head: int
    tokens: int
    sequences: int
    seconds: float


@dataclass(frozen=True)
class ElementwiseTiming:
    """Seconds of what a unit does beside matmuls and attention.

    `what`: "norm" (RMSNorm of [tokens, width]), "residual" (add), "rope" (rotate and store KV; width = all q and k
    columns), "silu_mul" (SwiGLU product), "embed" (rows looked up on the host); "two norms" (of what is added, and of
    what it is added to, in one launch); "streams" (what blocks give goes into several, and their norms) and "mix" of
    these, width = all of them; "index" (a choice of cells; width = numbers of keys, for each head of the queries). With
    tokens = width = 1 what a step costs the host: "step" (a unit, on either side), "copy" (to start a copy and to wait
    for it on the GPU), "run" (to begin a run of units), "launch" (of a unit's kernels for a prompt one by one); all but
    "step" not on CPUs. "verify": how much longer a step takes that verifies drafts; "draft" and "follow": what the
    first draft of another program and each further one take beside its units.
    """

    device: str
    what: str
    tokens: int
    width: int
    seconds: float


@dataclass(frozen=True)
class CopyTiming:
    """Seconds of one copy. `direction`: "h2d" or "d2h"; `device` as in MatmulTiming. `memory`: "pinned" (page-locked),
    "pageable" (the driver stages), or "staged" (pageable, through a page-locked ring that threads fill; only "h2d").
    """

    direction: str
    memory: str
    nbytes: int
    seconds: float
    device: str = "acc"


@dataclass(frozen=True)
class DiskTiming:
    """Seconds of reading so many bytes of a model's file past the page cache, in pieces of `block` bytes, `depth` at
    once. `block` and `depth` 0: of bringing a unit of so many packed bytes to host memory behind others, as runs do.
    `disk`: what holds the file, as the system calls it; `direct`: whether it takes reads past the page cache;
    `cpu_seconds`: of all cores together that bringing it took, which pack what was read; 0: not timed. `disturbed`: of
    a unit, the share of that time that others may have cost (stolen_time.py)."""

    disk: str
    direct: bool
    block: int
    depth: int
    nbytes: int
    seconds: float
    cpu_seconds: float = 0.0
    disturbed: float = 0.0


@dataclass(frozen=True)
class ReadTiming:
    """Host DRAM read rate, bytes per second, with that many threads."""

    threads: int
    rate: float


@dataclass(frozen=True)
class Contention:
    """Rates in bytes per second while several things use host DRAM or the link at once; 0 when not measured."""

    link_with_cpu: float = 0.0  # host-to-device copies while CPU kernels read
    cpu_with_link: float = 0.0  # what the CPU kernels read meanwhile
    h2d_with_d2h: float = 0.0
    d2h_with_h2d: float = 0.0
    cpu_alone: float = 0.0  # what the same CPU kernels read with nothing else going on


@dataclass(frozen=True)
class CollectiveTiming:
    """Seconds of an all-reduce (sum) of `nbytes` of float32 over `ranks`; on CUDA in a graph.

    `backend`: "shm", "gloo", "nccl", or a way through peers' memory: "rows", "pushed", "many-rows", "one-shot",
    "two-shot"; "normed": what a sum by rows takes longer with a norm of its own. `dtype`: what parts are rounded to.
    `copies`: whether host-to-device copies ran meanwhile.
    """

    backend: str
    ranks: int
    nbytes: int
    seconds: float
    dtype: str = "f32"
    copies: bool = False


@dataclass(frozen=True)
class ShareTiming:
    """Seconds of the same work with what one of `ranks` ranks on this host has of it.

    `what`: "matmul" (CPU kernels multiply `size` tokens) or "copy" (`size` bytes to the accelerator). `whole`: with all
    of the host's cores; `alone`: with the rank's own cores, over its own link, while the others wait; `together`: while
    all of them do it. Matmuls are of the slowest rank; copies of the one that loses most by the others, with `alone` as
    `whole`, since a link is no part of another.
    """

    ranks: int
    what: str
    size: int
    whole: float
    alone: float
    together: float


@dataclass(frozen=True)
class Provenance:
    """Where figures come from. `source`: "measured" or "datasheet"."""

    source: str
    date: str
    command: str
    pshard: str
    torch: str
    python: str
    os: str
    quick: bool = False
    notes: tuple[str, ...] = ()  # fallbacks that were used, one line each
    short: bool = False  # made in seconds by the first run of a model


BUSY = "other programs or machines had cores while"  # how a note on that begins


def describe_busy(what: str, share: float) -> tuple[str, ...]:
    """A note where others may have cost much of the time in which something, as "kernels were", was timed."""
    if share < DISTURBED:
        return ()
    return (f"{BUSY} {what} timed, which may have cost {share:.0%} of the time: profile again when nothing else runs",)


@dataclass(frozen=True)
class MachineProfile:
    """All of it. Tables are rows in no particular order; the planner interpolates.

    A profile of several hosts, which are alike, has the tables of one; sums of more ranks than one host runs
    (`ranks_per_host`, ranks in order) are between them. 0: all ranks run on this host.
    """

    host: HostInfo
    accelerators: tuple[AcceleratorInfo, ...]
    matmuls: tuple[MatmulTiming, ...]
    attention: tuple[AttentionTiming, ...]
    elementwise: tuple[ElementwiseTiming, ...]
    copies: tuple[CopyTiming, ...]
    reads: tuple[ReadTiming, ...]
    contention: Contention
    handoff_seconds: float  # hidden vector accelerator -> host -> accelerator, without the work
    provenance: Provenance
    collectives: tuple[CollectiveTiming, ...] = ()
    shares: tuple[ShareTiming, ...] = ()
    lockable_bytes: int | None = None  # host memory that can be page-locked, where a limit was met
    tiles: tuple[TileChoice, ...] = ()  # that the matmuls of accelerators were timed with
    experts: tuple[ExpertTiming, ...] = ()  # none: not timed
    routes: tuple[RouteTiming, ...] = ()
    deltas: tuple[DeltaTiming, ...] = ()
    in_place: tuple[InPlaceTiming, ...] = ()  # none: priced as copies
    refused: tuple[RefusedKernel, ...] = ()  # each once for a device
    reserves: tuple[Reserve, ...] = ()  # none: not measured
    ranks_per_host: int = 0
    disks: tuple[DiskTiming, ...] = ()
    ram_bytes: int = 0  # of host memory that plans may take on each host, where --ram says so
    prompt_math: str = AUTO  # one of PROMPT_MATHS, where --prompt-math says so: timings are of "auto"
    version: int = PROFILE_VERSION

    @property
    def busy(self) -> str | None:
        """How much other programs or machines disturbed the timings, of kernels or disks; None where they did not."""
        notes = [note for note in self.provenance.notes if note.startswith(BUSY)]
        for disk in dict.fromkeys(row.disk for row in self.unit_reads):
            notes += describe_busy(f"{disk} was", max(row.disturbed for row in self.unit_reads if row.disk == disk))
        return "; ".join(notes) or None

    @property
    def unit_reads(self) -> tuple[DiskTiming, ...]:
        """How long disks take to bring units, as runs do."""
        return tuple(row for row in self.disks if not row.block)

    def of_disk(self, disk: str) -> "MachineProfile":
        """The profile with the timings of one disk alone."""
        return replace(self, disks=tuple(row for row in self.disks if row.disk == disk))

    def ranks_here(self, ranks: int) -> int:
        """How many of so many ranks share one host."""
        return min(ranks, self.ranks_per_host or ranks)

    def sources(self, index: int) -> tuple[str, ...]:
        """Whose rows are those of accelerator `index`, as devices of ACCELERATOR_TABLES: its own where it has any, else
        those of one before it that is like it, with such a link if possible, else "acc". Every host has the same."""
        index %= self.ranks_per_host or index + 1
        me = next((a for a in self.accelerators if a.index == index), None)
        like = [a for a in self.accelerators if me and a.index < index and a.likeness == me.likeness]
        like.sort(key=lambda a: (me is not None and a.link != me.link, a.index))
        found = []
        for table in ACCELERATOR_TABLES:
            there = {row.device for row in getattr(self, table)}
            names = (f"acc{i}" if i else "acc" for i in (index, *(a.index for a in like)))
            found.append(next((name for name in names if name in there), "acc"))
        return tuple(found)

    def of_accelerator(self, index: int) -> "MachineProfile":
        """The profile as accelerator `index` sees it: "acc" rows are its own."""
        names = dict(zip(ACCELERATOR_TABLES, self.sources(index)))
        if set(names.values()) == {"acc"}:
            return self
        tables: dict[str, Any] = {table: _rows_of(getattr(self, table), name) for table, name in names.items()}
        return replace(self, **tables)

    def reserve_of(self, index: int) -> int | None:
        """Bytes of the reserve of accelerator `index`, or of the one whose rows are its own; None: not measured."""
        timed = self.sources(index)[ACCELERATOR_TABLES.index("matmuls")] if self.reserves else ""
        return next((r.nbytes for r in self.reserves if r.device == timed), None)

    def tiles_of(self, index: int) -> tuple[TileChoice, ...]:
        """The tiles with which the matmuls were timed that are those of accelerator `index`; LIBRARY for products in
        int8 that `prompt_math` does not use."""
        timed = self.sources(index)[ACCELERATOR_TABLES.index("matmuls")]
        return settle_math((choice for choice in self.tiles if choice.device == timed), self.prompt_math)


def _rows_of(rows: tuple, device: str) -> tuple:
    """Rows of the host and of `device`, which is called "acc"."""
    kept = (row for row in rows if row.device in ("host", device))
    return tuple(replace(row, device="acc") if row.device == device else row for row in kept)
