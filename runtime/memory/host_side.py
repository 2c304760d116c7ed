"""What a rank keeps in host memory beside weights: buffers that the link reads and writes, scratch of units that the
CPU computes, states that leave VRAM."""

import torch

from pshard.batch_sizes import LOGIT_ROWS
from pshard.buffers import row_stage_bytes, scratch_bytes, shared_index_words, widest_join
from pshard.model import ModelSpec
from pshard.plan import RankPlan
from pshard.routing.play_record import RoutingPlay
from pshard.runtime.blocks.block import Side, make_side
from pshard.runtime.blocks.rope_table import fill_tables
from pshard.runtime.devices.device import Device
from pshard.runtime.kernels.api import Kernels
from pshard.runtime.lent_rows import LentRows
from pshard.runtime.memory.host.host_memory import map_memory
from pshard.runtime.memory.picks import Picks
from pshard.runtime.memory.workspace import carve_workspace
from pshard.units.ports import BESIDE
from pshard.units.state import StateShape


class HostSide:
    """Host memory of one executor, page-locked up to the first refusal.

    Attributes:
        side: computes what the plan leaves to the CPU; its hidden rows are those of any micro-batch.
        ids: int64, tokens of any micro-batch, all in the vocabulary. grams: int64, rows of a table of n-grams that they
            take, as many of each; none where there is no such table.
        index: int32, of any micro-batch (`RowIndex` and rows of logits); logits: float32, flat, of the micro-batch
            under way; lent: places for those of a token of each sequence, which leave with whoever asked for them.
        rows: float32, flat: what the CPU has computed of a divided unit.
        states: by unit, uint8: those that are on the host in some tier.
        picks: which experts routers choose, where that is recorded; else None.
        is_locked: whether all of this is page-locked; locked: what is.
    """

    side: Side
    ids: torch.Tensor
    grams: torch.Tensor
    index: torch.Tensor
    logits: torch.Tensor
    lent: LentRows
    rows: torch.Tensor
    states: dict[str, torch.Tensor]

    def __init__(self, device: Device) -> None:
        self._device = device
        self.locked: list[torch.Tensor] = []
        self.is_locked = True
        self.picks: Picks | None = None

    def take(self, spec: ModelSpec, plan: RankPlan, shape: StateShape, kernels: Kernels, sums: bool) -> None:
        """Take the memory for all tiers. sums: whether ranks sum their parts of units."""
        tiers, config = plan.tiers, spec.config
        largest = tiers[-1].tokens
        hidden = self.allocate(largest * config.d_model * 4).view(torch.float32).view(largest, config.d_model)
        self.ids = self.allocate(largest * 8).view(torch.int64)
        each = config.grams.each if config.grams else 0
        self.grams = self.allocate(largest * each * 8).view(torch.int64) if each else torch.empty(0, dtype=torch.int64)
        self.index = self.allocate(shared_index_words(spec, largest, shape) * 4).view(torch.int32)
        self.logits = self.allocate(max(shape.sequences, LOGIT_ROWS) * config.vocab * 4).view(torch.float32)
        self.lent = LentRows(config.vocab, shape.sequences, self.allocate)
        nbytes = max(row_stage_bytes(t.tokens, widest_join(spec, t.placements)) for t in tiers)
        self.rows = (self.allocate(nbytes) if nbytes else torch.empty(0)).view(torch.float32)
        tokens, act = _tokens_on_cpu(spec, plan), kernels.act_dtype
        memory = torch.empty(scratch_bytes(spec, tokens, shape, act.itemsize), dtype=torch.uint8)
        space = carve_workspace(memory, spec, tokens, shape, act)
        space.tensors["hidden"] = hidden
        filled = {port for unit in spec.units if unit.kind.is_looked_up for port in unit.ports.writes}
        for port in space.tensors.keys() & set(BESIDE):  # likewise
            there = space.tensors[port]
            rows = largest if port in filled else there.shape[0]
            place = self.allocate(rows * there[0].nbytes).view(torch.float32)
            space.tensors[port] = place.view(rows, *there.shape[1:])
        if sums:  # a graph may fetch the CPU's part of a sum from there
            branch = self.allocate(space.tensors["branch"].nbytes)
            space.tensors["branch"] = branch.view(torch.float32).view(space.tensors["branch"].shape)
        fill_tables(config, space.tensors)
        self.side = make_side(kernels, space, config)
        self.states = {name: self.allocate(spec.unit(name).state_nbytes(config, shape)) for name in plan.kv_on_host}

    def take_picks(self, spec: ModelSpec, plan: RankPlan, records: bool, play: RoutingPlay | None) -> None:
        """Take the memory to which routers' choices come, of all tiers or of those that use slots; none where nobody
        asks for them, or the rank has no routers. Slots on demand look choices up where they are used. records: they
        are kept. play: see Picks."""
        routes, following = any(unit.kind.routes for unit in spec.units), [c for c in plan.caches if not c.is_on_demand]
        if routes and (records or play or following):
            most = plan.tiers[-1].tokens if records or play else max(cache.tokens for cache in following)
            self.picks = Picks(spec, most, self.allocate, records, play)

    def deal_picks(self, tokens: int) -> None:
        """See Picks.deal."""
        if self.picks is not None:
            self.picks.deal(tokens)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Page-locked host memory, up to the first refusal; it lives as long as this."""
        memory = map_memory(nbytes)
        if self.is_locked and self._device.page_lock(memory):
            self.locked.append(memory)
        else:
            self.is_locked = False
        return memory

    def unlock(self) -> None:
        """Page-locked memory must be unlocked before it is unmapped."""
        for memory in self.locked:
            self._device.page_unlock(memory)
        self.locked.clear()


def _tokens_on_cpu(spec: ModelSpec, plan: RankPlan) -> int:
    """Most tokens of a micro-batch of which the CPU computes something."""
    on_cpu = (
        tier.tokens
        for tier in plan.tiers
        if any(p.cpu_rows or (not p.is_on_acc and not spec.unit(p.unit).kind.is_looked_up) for p in tier.placements)
    )
    return max(on_cpu, default=1)
