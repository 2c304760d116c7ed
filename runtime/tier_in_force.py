"""A tier while it is in force: its part of the arena, events of the lanes, and views that are made once."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from pshard.model import ModelSpec
from pshard.plan import TierPlan
from pshard.runtime.blocks.block import Residual, Side, Work, make_side
from pshard.runtime.devices.device import Device
from pshard.runtime.kernels.api import InnerNorm, Kernels, OpenNet, RowIndex, Segment, SequenceRows
from pshard.runtime.kernels.cpu import native
from pshard.runtime.kernels.cpu.recording import Recordings
from pshard.runtime.kernels.row_index import fill_rows, fill_sequences
from pshard.runtime.meanwhile import Meanwhile
from pshard.runtime.memory.arena import Arena, Carved
from pshard.runtime.memory.expert_slots import ExpertSlots
from pshard.runtime.memory.host_side import HostSide
from pshard.runtime.memory.states import Copies, Parts
from pshard.runtime.memory.transfers import Transfers
from pshard.runtime.ranks.group import Group
from pshard.steps.move import Move
from pshard.steps.step import Compute
from pshard.units.state import State, StateShape


@dataclass(frozen=True)
class IndexView:
    """Parts of one side's `memory` for a micro-batch's index (int32): see RowIndex, and the `wanted` logits' rows.
    slots and offsets: of SequenceRows; empty without. filled: see RowIndex."""

    memory: torch.Tensor
    begin: torch.Tensor
    position: torch.Tensor
    blocks: torch.Tensor
    recent: torch.Tensor | None
    wanted: torch.Tensor
    slots: torch.Tensor
    offsets: torch.Tensor
    filled: int

    @cached_property
    def numbers(self) -> np.ndarray:
        """Its memory on the host, in numpy's words."""
        return self.memory.numpy()

    def rows(
        self, segments: tuple[Segment, ...], cells: int, window: int, spans: Any = None, told: bool = True
    ) -> RowIndex:
        """The index of segments that was written here; `window` of the layers that have one. told: whether the longest
        segment is."""
        longest = 1 << (max(s.tokens for s in segments) - 1).bit_length() if told else 0  # few graphs are captured
        sequences = SequenceRows(self.slots, self.offsets, longest) if self.offsets.numel() else None
        whole = RowIndex(
            self.begin, self.position, self.blocks, segments, cells, spans, sequences=sequences, filled=self.filled
        )
        if self.recent is None:
            return whole
        own = tuple(replace(s, blocks=s.recent) for s in segments)
        return replace(whole, recent=replace(whole, blocks=self.recent, segments=own, window=window))


@dataclass(frozen=True)
class BoundUnit:
    """A step's unit with its weights and state where they lie in this tier. `is_partial`: a rank's part of a sum;
    `begun`: which the unit before has begun. opens: `Unit.opens_with_norm`. norm, leaves: `Block.first_norm` and
    `Block.ends_in_product`, of a unit that is whole. ends: `Block.inner_norm`, of a unit that is no part of a sum."""

    run: Callable[[Work, Residual], None]
    is_partial: bool
    begun: bool = False
    opens: bool = False
    norm: torch.Tensor | None = None
    leaves: bool = False
    ends: Callable[[Work], InnerNorm | None] | None = None


@dataclass(frozen=True)
class StagedState:
    """A state that passes through the stage: its law, and its parts there and on the host."""

    law: State
    there: Parts
    here: Parts


@dataclass
class TierInForce:
    """Views of the arena and lane events while a tier for micro-batches of up to `tokens` tokens is in force.
    on_host: runs of units on the CPU, of all tiers. sequences: how many the engine has, where a gated delta net asks
    for them; else 0. looks_up: whether the accelerator looks ids up."""

    tokens: int
    side: Side
    carved: Carved
    on_host: Recordings
    sequences: int = 0
    looks_up: bool = False
    arrived: dict[int, Any] = field(default_factory=dict)  # slot -> event of the copy into it
    stage_free: list[Any] = field(default_factory=list)  # events after which a fetch may write to the state stage
    stage_ready: list[Any] = field(default_factory=list)  # events after which a unit may use the state stage
    arriving: dict[str, Any] = field(default_factory=dict)  # unit -> event of its weights or state that a switch brings
    # views made once, which take 60 us each: of units by step, of slots, of staged states by unit
    bound: dict[Compute, BoundUnit] = field(default_factory=dict)
    copies: dict[Move, Copies] = field(default_factory=dict)
    staged: dict[str, StagedState] = field(default_factory=dict)
    # by step and tokens: bytes that kernels are expected to read over the link
    reads: dict[tuple[Compute, int], int] = field(default_factory=dict)
    # views made once, by rows of logits, whether ranks put them together, and whether it is on the device
    tables: dict[tuple[int, bool, bool], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    # likewise, by tokens and logit rows of both sides: where the index is written first, on the host and on the device
    indexes: dict[tuple[int, int, int, int], tuple[IndexView, IndexView, IndexView]] = field(default_factory=dict)
    # by the number of segments, see RowIndex
    spans: dict[int, Any] = field(default_factory=dict)
    nets: tuple[list[OpenNet], ...] = ()  # see OpenRows
    draft: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int32))  # of an index

    def begin(self) -> "TierInForce":
        """It comes into force, when all lanes are idle; returns itself."""
        for events in (self.arrived, self.arriving, self.stage_free, self.stage_ready):
            events.clear()
        return self

    def index_rows(
        self, on_host: torch.Tensor, segments: tuple[Segment, ...], wanted: list[int], filled: tuple[int, int]
    ) -> tuple[IndexView, IndexView, IndexView]:
        """The index, written, in memory that no kernel reads; where it belongs in `on_host`; and on the device, where
        the first launch takes it. filled: rows, and rows of logits, that the accelerator computes: as many as there
        are, or more to fill it."""
        shape = sum(s.tokens for s in segments), len(wanted), *filled
        if shape not in self.indexes:
            memory, most = self.side.space.tensors["index"], self.side.space.tokens
            if not self.draft.numel():
                self.draft = torch.zeros(memory.shape, dtype=memory.dtype)
            room = IndexRoom(most, 2 if self.side.config.window else 1, self.sequences)
            places = self.draft, on_host[: memory.numel()], memory  # all in one copy
            self.indexes[shape] = (
                room.view(places[0], *filled, filled[0]),
                room.view(places[1], *shape[:2], filled[0]),
                room.view(places[2], *filled, filled[0]),
            )
        draft, here, there = self.indexes[shape]
        fill_rows(segments, draft.begin, draft.position, draft.blocks, draft.recent)
        if self.sequences:
            fill_sequences(segments, draft.slots, draft.offsets)
        draft.wanted.numpy()[:] = wanted + wanted[-1:] * (filled[1] - len(wanted))
        return draft, here, there

    def ids_rows(self, filled: int) -> torch.Tensor:
        """Where the token ids of so many rows lie on the accelerator while it looks them up, int64: a rank's part of a
        sum comes there later."""
        return self.side.space.tensors["branch"].flatten()[: 2 * filled].view(torch.int64)

    def grams_rows(self, filled: int, each: int) -> torch.Tensor:
        """The same, behind them, of `each` rows of a table of n-grams that each takes."""
        flat = self.side.space.tensors["branch"].flatten()
        return flat[2 * filled : 2 * filled * (1 + each)].view(torch.int64)

    def spans_of(self, n: int) -> Any:
        """Where RowIndex.spans lie of all micro-batches of n segments."""
        if n not in self.spans:
            self.spans[n] = native.make_spans([(0, 0, 0, 0)] * n)
        return self.spans[n]


def make_tier(
    spec: ModelSpec, tier: TierPlan, arena: Arena, kernels: Kernels, on_host: Recordings, states: StateShape
) -> TierInForce:
    """A tier that was not in force yet, carved from the arena; see TierInForce."""
    carved, sequences = arena.carve(tier), states.sequences if spec.config.keeps_fixed else 0
    side = make_side(kernels, carved.space, spec.config)
    first = (u for u in spec.units if u.kind.is_looked_up and u.is_here)
    looks_up = any(tier.placement(unit.name).is_on_acc for unit in first)
    return TierInForce(tier.tokens, side, carved, on_host, sequences, looks_up)


@dataclass(frozen=True)
class IndexRoom:
    """What an index has room for (see `index_words`): `most` tokens, so many tables of blocks, and sequences."""

    most: int
    tables: int
    sequences: int

    def view(self, memory: torch.Tensor, tokens: int, wanted: int, filled: int) -> IndexView:
        """The parts of its memory for so many tokens and logit rows, of a micro-batch of `filled` rows."""
        most, n = self.most, min(filled, self.sequences)
        begin, position, rows = memory[:tokens], memory[most : most + tokens], memory[2 * most : 2 * most + wanted]
        end = memory.numel() - (2 * min(most, self.sequences) + 1 if self.sequences else 0)
        blocks, *recent = memory[3 * most : end].chunk(self.tables)
        slots, offsets = memory[end : end + n], memory[end + n : end + 2 * n + 1 if n else end]
        tables = blocks, recent[0] if recent else None
        return IndexView(memory, begin, position, *tables, rows, slots, offsets, filled=filled)


@dataclass(frozen=True)
class RunContext:
    """What every micro-batch of an executor works with.

    Attributes:
        logit_widths: columns of the logits of each rank, when they are put together on the GPUs; else empty.
        join_cells: cells of a layer that the link moves while one more copy is issued.
        slots: experts that follow use. meanwhile: told when a step leaves Python for long.
    """

    spec: ModelSpec
    device: Device
    group: Group
    host: HostSide
    transfers: Transfers
    logit_widths: tuple[int, ...]
    join_cells: int
    slots: ExpertSlots
    meanwhile: Meanwhile = field(default_factory=Meanwhile)

    @cached_property
    def sum_rows(self) -> dict[str, int]:
        """Of units whose sum over the ranks is normalised, the row of the weight that does so."""
        return {unit: row for row, (unit, _) in enumerate(self.spec.sum_norms)}

    @property
    def sums(self) -> bool:
        """Whether ranks sum their parts of units."""
        return self.group.size > 1 and self.spec.neighbours is None
