"""A tier as placements, with honest buffers and a simulated prediction."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from operator import getitem
from typing import Any

from pshard.buffers import arena_bytes, row_stage_bytes, scratch_bytes, state_stage_bytes
from pshard.homes import ACC, BACK, CPU, MOVING, ON_CPU, PINNED, READ, SITES, Home, list_lanes
from pshard.model import ModelSpec
from pshard.plan import Buffers, Placement, Prediction, Solve, Sweep, TierPlan
from pshard.planner.price.simulate import ROUNDS, Simulation, ranks_seconds, simulate_ranks, simulate_seconds
from pshard.planner.price.tier_costs import TierCosts
from pshard.predicted_times import count_swept
from pshard.quant import TENSOR_ALIGN, align
from pshard.reserve import TORCH_RESERVE_MIB
from pshard.steps.emit import StepEmitter, emit_steps
from pshard.steps.step import StepList, StepShape
from pshard.steps.sweep import sweep_steps, waiting_bytes
from pshard.units.divide_unit import count_waves, divided_sizes, find_wave, joined_width
from pshard.units.share import WHOLE, Share
from pshard.units.unit import Place, Unit, places_of, places_of_unit
from pshard.workload import Workload

UNPREDICTED = Prediction(0.0, 0.0, (), "", 0, 0)
UNSOLVED = Solve("unsolved", 0.0, 0.0, "")
_placement = lru_cache(1 << 14)(Placement)  # a search drafts the same few thousands of times
UNDIVIDED: Mapping[str, Share] = {}
SATURATED = 0.9  # a lane that works this share of the time limits it


@dataclass(frozen=True)
class UnitColumns:
    """A model's units in order: names, bytes, whether they have parts that may be read in place, and the whole unit's
    placement by where it is, with a state on the host. stateful: of units with a state their number, their name, and
    the same with it in VRAM; others: all other units with their numbers; held: numbers of those that may only be in
    VRAM, which searches move as all others."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    has_parts: tuple[bool, ...]
    whole: tuple[dict[str, Placement], ...]
    stateful: tuple[tuple[int, str, dict[str, Placement]], ...]
    others: tuple[tuple[int, Unit], ...]
    held: tuple[int, ...]


@dataclass(frozen=True)
class Beyond:
    """A home for what host memory does not hold. `host`: bytes of weights and KV cache that it may hold. `reads_rows`:
    whether it is known how long rows of a table take from there."""

    home: Home
    host: int
    reads_rows: bool = False


@dataclass(frozen=True)
class Room:
    """Sizes that bound every tier of one rank. `host`: bytes of weights and KV cache that all its tiers together may
    keep in host memory; None where that holds everything, or what it does not hold may live `beyond` it. `baselines`:
    what published strategies place in it."""

    spec: ModelSpec
    workload: Workload
    arena: int
    act_bytes: int
    ranks: int = 1
    host: int | None = None
    beyond: Beyond | None = None
    reserve_mib: int = TORCH_RESERVE_MIB
    _scratch: dict[int, int] = field(default_factory=dict, compare=False, repr=False)
    baselines: dict[tuple[str, tuple[int, ...]], Any] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def scratch(self, tokens: int) -> int:
        """Bytes of a tier that are there however its units are placed: scratch without the KV stage, states that stand,
        and slots for experts that follow use."""
        if tokens not in self._scratch:
            self._scratch[tokens] = self._scratch_bytes(tokens)
        return self._scratch[tokens] + self._standing

    @cached_property
    def _standing(self) -> int:
        """Bytes of states that stand: unlike scratch they depend on the largest micro-batch."""
        return self.spec.standing_nbytes(self.workload.state_shape)

    def _scratch_bytes(self, tokens: int) -> int:
        return self.cached + scratch_bytes(self.spec, tokens, self.workload.state_shape, self.act_bytes)

    @cached_property
    def cached(self) -> int:
        """Bytes of slots for experts that follow use, without those in host memory beside the accelerator."""
        return sum(cache.nbytes for cache in self.spec.caches if not cache.on_host)

    @property
    def sums(self) -> bool:
        """Whether it is one of several ranks that sum their parts."""
        return self.ranks > 1 and self.spec.neighbours is None

    def list_places(self, name: str) -> tuple[Place, ...]:
        """Legal placements of a unit."""
        return self._places[name]

    @cached_property
    def _places(self) -> dict[str, tuple[Place, ...]]:
        """Of every unit: searches that leave units on disk ask at every step."""
        found = {unit.name: places_of_unit(unit, self.sums) for unit in self.spec.units}
        for unit in self.spec.units:
            if not self._may_leave(unit):
                found[unit.name] = tuple(p for p in found[unit.name] if not SITES[p[0]].is_beyond_host)
        return found

    def _may_leave(self, unit: Unit) -> bool:
        """Whether a unit may live beyond host memory. A table that what drafts computes with, too, stays in memory."""
        if self.beyond is None:
            return False
        if not unit.kind.is_looked_up:
            return True
        lends = self.spec.head is not None and any(u.lent and u.name == unit.name for u in self.spec.head.units)
        return self.beyond.reads_rows and not lends

    @cached_property
    def least_slot(self) -> int:
        """Bytes of the largest unit that must be on the accelerator, and be streamed if it is not pinned."""
        each = (units[0] for units in self.spec.alike)
        bound = [u for u in each if all(SITES[site].is_on_acc for site, _ in places_of(u.kind, self.sums))]
        bound = [u for u in bound if any(SITES[site].moves_each_step for site, _ in places_of(u.kind, self.sums))]
        return max((align(u.packed_nbytes, TENSOR_ALIGN) for u in bound), default=0)

    @cached_property
    def columns(self) -> "UnitColumns":
        """The model's units by what a draft asks of all of them at once."""
        units = self.spec.units
        host, vram = (
            tuple({at: _placement(u.name, at, side if u.kind.state else None) for at in SITES} for u in units)
            for side in ("host", "vram")
        )
        stateful = tuple((i, u.name, vram[i]) for i, u in enumerate(units) if u.kind.state)
        others = tuple((i, u) for i, u in enumerate(units) if not u.kind.state)
        names, sizes = tuple(u.name for u in units), tuple(u.packed_nbytes for u in units)
        held = tuple(i for i, u in enumerate(units) if all(site == PINNED for site, _ in u.kind.places))
        return UnitColumns(names, sizes, tuple(bool(u.kind.parts) for u in units), host, stateful, others, held)

    @cached_property
    def states(self) -> dict[str, int]:
        """Bytes of each unit's state; 0 for units that keep none."""
        return self.spec.state_sizes(self.workload.state_shape)

    @cached_property
    def state_stage(self) -> int:
        """Bytes of the stage that units with their state on the host share."""
        return state_stage_bytes(self.spec, self.workload.state_shape)


def rank_room(
    spec: ModelSpec,
    workload: Workload,
    budget_mib: int,
    kind: str,
    act_bytes: int,
    ranks: int = 1,
    reserve_mib: int = TORCH_RESERVE_MIB,
) -> Room:
    """The room that a budget gives one rank's part of the model; of a GPU's, `reserve_mib` are left to torch and the
    kernels."""
    arena = arena_bytes(budget_mib, kind, reserve_mib)
    return Room(spec, workload, arena, act_bytes, ranks, reserve_mib=reserve_mib)


def draft_tier(
    room: Room,
    tokens: int,
    where: Mapping[str, str],
    kv_vram: frozenset[str],
    slots: int,
    shares: Mapping[str, Share] = UNDIVIDED,
    in_place: bool | None = None,
    sweep: Sweep | None = None,
    waves: int = 1,
) -> TierPlan:
    """The tier with those placements; `where` by unit name, `kv_vram` names attention units with KV in VRAM.

    shares: of divided units. in_place: whether streamed parts are read in place where that can be; None: as is likely
    to be faster. sweep: of prompts, where something is streamed. waves: see TierPlan, where something comes in
    several; of a sweep one.
    """
    reads = room.spec.ways_to_read(tokens)[0] if in_place is None else in_place
    columns, states = room.columns, room.states
    places, whole, sizes = list(map(where.__getitem__, columns.names)), list(columns.whole), list(columns.sizes)
    for i in columns.held:
        places[i] = PINNED
    kv, staged, joined = 0, False, 0
    for i, name, with_kv in columns.stateful:
        if name in kv_vram:
            kv += states[name]
            whole[i] = with_kv
        elif places[i] != ON_CPU:
            staged = True
    placements, pinned = list(map(getitem, whole, places)), 0
    if shares:
        for i, unit in columns.others:
            if unit.name in shares:
                share = shares[unit.name]
                divided = divided_sizes(unit, share)
                sizes[i] = divided.brought
                pinned += divided.kept
                joined = max(joined, joined_width(unit, share, room.spec.config))
                placements[i] = _placement(unit.name, places[i], None, *share)
    pinned += sum([nbytes for nbytes, place in zip(sizes, places) if place == PINNED])
    streamed = [i for i, place in enumerate(places) if place in MOVING]
    copied = [i for i in streamed if not (reads and columns.has_parts[i] and MOVING[places[i]].is_readable)]
    if demanded := room.spec.demanded(tokens):
        copied = [i for i in copied if MOVING[places[i]].in_host_memory or columns.names[i] not in demanded]
    scratch = room.scratch(tokens) - room.cached + (room.state_stage if staged else 0)
    scratch += row_stage_bytes(tokens, joined)
    sweep = sweep if streamed else None
    coming, largest = len(copied), max([sizes[i] for i in copied], default=0)
    if waves > 1:
        units = [room.spec.unit(columns.names[i]) for i in copied]
        cut = [(unit, count_waves(unit, shares.get(unit.name, WHOLE), waves)) for unit in units]
        coming = sum(n for _, n in cut)
        largest = max([find_wave(u, 0, n).nbytes if n > 1 else sizes[i] for i, (u, n) in zip(copied, cut)], default=0)
    if sweep is not None:
        moving = {columns.names[i] for i in streamed}
        waiting = waiting_bytes(room.spec, tokens, room.workload.state_shape, moving, sweep.batches)
        scratch += sweep.batches * sum(waiting.values())
    buffers = Buffers(pinned, scratch, min(slots, coming), largest, kv, room.cached)
    reads, waves = len(copied) < len(streamed), waves if coming > len(copied) else 1
    return TierPlan(tokens, tuple(placements), buffers, UNPREDICTED, UNSOLVED, reads, sweep, waves)


def tier_steps(room: Room, tier: TierPlan, costs: TierCosts) -> StepList:
    """The steps of the expected micro-batch of this tier."""
    return emit_steps(room.spec, tier, _shape(room, costs))


def _shape(room: Room, costs: TierCosts) -> StepShape:
    load = costs.load
    return StepShape(
        load.tokens,
        load.sequences * load.past,
        load.logit_rows,
        load.sequences,
        room.workload.type_k,
        room.workload.type_v,
        room.ranks,
        costs.tables.kind == "cpu",
        apart=costs.setting.apart,
    )


def _timed_steps(room: Room, tier: TierPlan, costs: TierCosts) -> StepList:
    """The same for who only asks how long they take: units that cost the same go by one name, so that a search comes
    upon few steps that it has not priced yet."""
    shape = _shape(room, costs)
    key = id(room.spec), shape
    if key not in costs.emitters:
        costs.emitters[key] = StepEmitter(room.spec, shape, costs.stand_ins)  # has the model: its identity stays
    return costs.emitters[key].emit(tier)


def simulated_seconds(room: Room, tier: TierPlan, costs: TierCosts, rounds: int = ROUNDS) -> float:
    """Simulated steady-state seconds of the expected micro-batch of this tier."""
    return simulate_seconds(_timed_steps(room, tier, costs), costs, rounds)


def swept_seconds(room: Room, tier: TierPlan, costs: TierCosts) -> float:
    """Simulated seconds of each micro-batch of the expected prompt under a tier with a sweep, in the mean. Raises
    ValueError as `sweep_steps`."""
    assert tier.sweep is not None
    batches = max(1, count_swept(room.workload, tier.tokens))
    once, each = _timed_steps(room, tier, costs), min(batches, tier.sweep.batches)
    full, rest = divmod(batches, each)

    def simulate(count: int) -> float:
        return simulate_seconds(sweep_steps(room.spec, once, tier.tokens, count), costs)

    return (full * simulate(each) + (simulate(rest) if rest else 0.0)) / batches


def tier_seconds(rooms: Sequence[Room], tiers: Sequence[TierPlan], costs: Sequence[TierCosts]) -> tuple[float, ...]:
    """The same of one tier on every rank, as they run together."""
    steps = [_timed_steps(room, tier, cost) for room, tier, cost in zip(rooms, tiers, costs, strict=True)]
    return ranks_seconds(rooms[0].workload.split_mode, steps, costs)


def predict_tier(room: Room, tier: TierPlan, costs: TierCosts, bound: float) -> Prediction:
    """Simulated time of the tier, what it is made of, and what limits it."""
    return predict_ranks((room,), (tier,), (costs,), (bound,))[0]


def predict_ranks(
    rooms: Sequence[Room], tiers: Sequence[TierPlan], costs: Sequence[TierCosts], bounds: Sequence[float]
) -> tuple[Prediction, ...]:
    """The same of one tier on every rank; where ranks wait for each other at sums all take the same time."""
    steps = [_timed_steps(room, tier, cost) for room, tier, cost in zip(rooms, tiers, costs, strict=True)]
    results = simulate_ranks(rooms[0].workload.split_mode, steps, costs)
    return tuple(map(_describe, tiers, costs, bounds, steps, results))


def _describe(tier: TierPlan, costs: TierCosts, bound: float, steps: StepList, result: Simulation) -> Prediction:
    reads = sum(costs.units[p.unit].cpu_reads for p in tier.placements if not p.is_on_acc)
    reads += sum(costs.divided(p.unit, p.share).cpu_reads for p in tier.placements if p.cpu_rows)
    dram = costs.ranks * (steps.link_bytes + reads) / costs.tables.shared_rate
    dram = min(dram, result.seconds)  # caches may serve some of it
    busy = dict(result.busy) | {"dram": dram}
    looked_up = {unit.name for unit in costs.spec.units if unit.kind.is_looked_up}
    binds = _binding(busy, result.seconds, tier, looked_up)
    return Prediction(
        result.seconds, min(bound, result.seconds), tuple(busy.items()), binds, steps.link_bytes, costs.load.past
    )


def _binding(busy: dict[str, float], seconds: float, tier: TierPlan, looked_up: Collection[str]) -> str:
    """What limits the tier; "vram" when compute and link are both full, so that only more residency helps."""
    full = SATURATED * seconds
    all_resident = all(p.is_whole_in_arena for p in tier.placements if p.unit not in looked_up)
    if busy["acc"] >= full:
        return ACC
    if all_resident:  # but rows that are looked up
        return max(ACC, READ.name, key=lambda lane: busy.get(lane, 0.0))
    if busy["link"] >= full and busy["acc"] + busy["cpu"] >= full:
        return "vram"
    lanes = (ACC, CPU, *(lane.name for lane in list_lanes() if lane is not BACK))
    return max(lanes, key=lambda lane: busy.get(lane, 0.0))
