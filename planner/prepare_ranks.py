"""From a model, a machine and a workload to one task a rank: cut, tiers that fit, costs, bounds, weights."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from pshard.cuts.layer_cuts import join_seconds
from pshard.cuts.rank_parts import cut_ranks
from pshard.errors import Shortage, UserError
from pshard.machine import MachineProfile
from pshard.model import ModelSpec
from pshard.plan import NOTHING_LEARNT, Correction
from pshard.planner.price.draft import Room, rank_room
from pshard.planner.price.host_limits import explain_shortage, holds, host_fits, share_host
from pshard.planner.price.page_locks import guess_staged, locked
from pshard.planner.price.profile_tables import Tables, find_tables
from pshard.planner.price.tier_costs import TierCosts, tier_costs
from pshard.planner.price.tier_loads import TierLoad, raise_weights, tier_loads
from pshard.planner.program.bounds import rough_bound
from pshard.planner.program.unit_classes import group_units
from pshard.planner.rank_task import RankTask
from pshard.planner.search.candidates import (
    whole_tier,
)
from pshard.planner.search.rounds.choose_ubatch import choose_ubatch
from pshard.reserve import reserve_mib
from pshard.speculation import MTP, PROGRAMS
from pshard.units.kernel_names import kernel_names
from pshard.units.kinds import kinds_by_flag
from pshard.units.kv_cells import check_kv_types
from pshard.units.output import hold_output
from pshard.workload import Split, Workload

MOST_MIB = 1 << 24  # no device has more
OFF_DEVICE_SHARE = 0.99  # of a unit's time on the device: what the CPU must stay below


def prepare_ranks(
    spec: ModelSpec, profile: MachineProfile, workload: Workload, correction: Correction = NOTHING_LEARNT
) -> tuple[RankTask, ...]:
    """Cut the model, choose the largest micro-batch, and price every tier of every rank. Raises Shortage where the
    memory at hand cannot hold it, UserError when the profile lacks a table, or the GPU a kernel."""
    check_kernels(spec, profile, len(workload.vram_mib))
    check_kv_types(spec.config, workload.type_k, workload.type_v)
    if workload.split_mode == "tensor":
        _check_cut(spec, profile, workload)
    tables = find_tables(profile, correction)
    tiers = fitting_tiers(cut_ranks(for_drafts(spec, workload), split_of(workload)), workload, tables)
    tasks = price_roughly(spec, tables, workload, tiers)
    return _weigh(tasks, workload, choose_ubatch(tasks, workload))


def for_drafts(spec: ModelSpec, workload: Workload) -> ModelSpec:
    """The model as it is planned where its head drafts: it keeps states for it, and the output that both use stays in
    VRAM."""
    if PROGRAMS.get(workload.drafting.kind) != MTP:
        return spec
    units = tuple(hold_output(u) if u is spec.output else u for u in spec.units)
    return replace(spec, units=units, keeps_states=True)


def check_kernels(spec: ModelSpec, profile: MachineProfile, devices: int) -> None:
    """Raise UserError where one of so many accelerators cannot run a kernel that the model needs: no plan with it would
    run."""
    if not profile.refused:
        return
    used = {source for index in range(devices) for source in profile.sources(index)}
    needed = {name for unit in spec.units for o in unit.operations(spec.config) for name in kernel_names(o)}
    for refused in profile.refused:
        if refused.device in used and refused.kernel in needed:
            raise UserError(
                f"{spec.name} needs {refused.kernel}, which this GPU cannot run ({refused.why}); plan for the CPU, "
                "with a profile by: pshard-profile --device cpu"
            )


def _check_cut(spec: ModelSpec, profile: MachineProfile, workload: Workload) -> None:
    """Raises UserError for limits of units that the model lacks, and for GPUs that cannot share it."""
    there = {unit.kind.name for unit in spec.units}
    for flag, kind in kinds_by_flag().items():
        if kind.name in dict(workload.max_tp) and kind.name not in there:
            known = ", ".join(name for name, other in kinds_by_flag().items() if other.name in there)
            raise UserError(f"--max-tp {flag}: {spec.name} has no such units; choose from {known}")
    if may_choose_apart(spec, profile, len(workload.vram_mib)):
        names = ", ".join(dict.fromkeys(a.name for a in profile.accelerators))
        raise UserError(
            "-sm tensor needs like GPUs for a model with experts, as all ranks must choose the same ones to the last "
            f"bit, and these are {names}; use -sm layer"
        )


def may_choose_apart(spec: ModelSpec, profile: MachineProfile, devices: int) -> bool:
    """Whether the model has routers that would run on GPUs of several kinds, where last bits may differ."""
    if not any(unit.kind.routes for unit in spec.units):
        return False
    on_host = profile.ranks_here(devices)
    kinds = {(a.name, a.capability) for a in profile.accelerators if a.kind == "cuda" and a.index < on_host}
    return len(kinds) > 1


def price_tiers(spec: ModelSpec, tables: Tables, workload: Workload, tiers: tuple[int, ...]) -> tuple[RankTask, ...]:
    """Every rank's task for exactly these tiers, whether or not their scratch fits."""
    return _weigh(price_roughly(spec, tables, workload, tiers), workload, tiers[-1])


def price_roughly(spec: ModelSpec, tables: Tables, workload: Workload, tiers: tuple[int, ...]) -> tuple[RankTask, ...]:
    """Costs and rough bounds of every rank and tier; nothing in them depends on the largest micro-batch."""
    tasks: list[RankTask] = []
    for part in take_parts(spec, tables, workload, tiers):
        task = part.price(tier_loads(workload, tiers))
        alike = next((other.rough_bounds for other in tasks if other.is_like(task)), None)
        tasks.append(replace(task, rough_bounds=alike or bound_roughly(task)))
    return tuple(tasks)


def bound_roughly(task: RankTask) -> tuple[float, ...]:
    """Seconds by tier that no plan of whole units can beat, by linear relaxation."""
    return tuple(rough_bound(task.room, task.classes, cost) for cost in locked(task.costs))


@dataclass(frozen=True)
class Part:
    """What a rank has of the model, before it is priced. staged: units that are guessed to lie beyond what can be
    page-locked; ranks: how many there are."""

    rank: int
    share: float
    room: Room
    tables: Tables
    staged: frozenset[str]
    ranks: int

    @property
    def priced_by(self) -> tuple:
        """What it costs depends on, of parts under the same budgets and flags."""
        return self.room.spec, self.room.arena, self.room.host, self.room.beyond, self.tables, self.staged, self.ranks

    def price(self, loads: Sequence[TierLoad]) -> RankTask:
        """Its task, without bounds."""
        spec, workload = self.room.spec, self.room.workload
        costs = tuple(tier_costs(spec, self.tables, n, workload, self.ranks, self.staged) for n in loads)
        return RankTask(self.rank, self.share, self.room, group_units(spec, costs), costs, (), True)


def take_parts(spec: ModelSpec, tables: Tables, workload: Workload, tiers: tuple[int, ...]) -> Iterator[Part]:
    """The ranks' parts of the model in turn."""
    specs = cut_ranks(for_drafts(spec, workload), split_of(workload))
    rooms = share_host(_rooms(specs, workload, workload.vram_mib, tables), tables.profile, tiers[-1])
    for rank, (share, room) in enumerate(zip(rank_shares(workload), rooms)):
        own = tables.of_accelerator(workload.device + rank)
        staged = guess_staged(room.spec, own.profile.lockable_bytes, own.profile.ranks_here(len(rooms)))
        yield Part(rank, share, room, own, staged, len(rooms))


def _weigh(tasks: tuple[RankTask, ...], workload: Workload, largest: int) -> tuple[RankTask, ...]:
    """The tasks without tiers above `largest`, each tier with its weight in the round."""
    workload = replace(workload, max_ubatch=largest)
    tiers = tuple(c.load.tokens for c in tasks[0].costs if c.load.tokens <= largest)
    seconds = [join_seconds(workload.split_mode, [bounds]) for bounds in zip(*(t.rough_bounds for t in tasks))]
    for n, s in zip(tiers, seconds):  # what a profile that looks like one may still add up to
        if not 0 < s < inf:
            raise UserError(f"the profile's figures give {s} s for {n} tokens; run pshard-profile again")
    loads = raise_weights(tier_loads(workload, tiers), seconds[: len(tiers)])
    whole = [whole_tier(t.room, largest) for t in tasks]
    needed = not all(w.buffers.total <= t.room.arena and holds(t.room, (w,)) for t, w in zip(tasks, whole))
    needed = needed or any(_favours_host(c) for t in tasks for c, n in zip(t.costs, loads) if not n.rare)
    weighed: list[RankTask] = []
    for t in tasks:
        room, costs = replace(t.room, workload=workload), tuple(replace(c, load=n) for c, n in zip(t.costs, loads))
        twin = next((other for other in weighed if other.is_like(t)), None)
        weighed.append(replace(t, room=room, costs=costs, plan_needed=needed, twin=twin))
    return tuple(weighed)


def _favours_host(cost: TierCosts) -> bool:
    """Whether some unit is faster on the CPU, hand-offs there and back included, than pinned: memory that holds
    everything does not settle such a tier."""
    nbytes = cost.load.tokens * cost.vector_bytes
    aside = cost.handoff("cpu", nbytes) + cost.handoff("acc", nbytes)
    units = (cost.units[u.name] for u in cost.spec.units if not u.kind.is_looked_up)
    return any(c.cpu + aside < c.acc * OFF_DEVICE_SHARE for c in units)


def rank_shares(workload: Workload) -> tuple[float, ...]:
    """Share of the model per rank; (1.0,) without a split. Raises UserError when budgets and ratios do not match."""
    n = len(workload.vram_mib)
    if workload.split_mode == "none":
        if n != 1:
            raise UserError(f"{n} budgets for one device; add -sm tensor or layer to split the model over {n}")
        return (1.0,)
    ratios = workload.tensor_split or (1.0,) * n
    if len(ratios) != n:
        raise UserError(f"--tensor-split has {len(ratios)} ratios and --vram {n} budgets; give one of each per device")
    total = sum(ratios)  # shares stay as they were given, to the last bit: registries compare them
    return ratios if abs(total - 1) < 1e-9 else tuple(r / total for r in ratios)


def split_of(workload: Workload) -> Split:
    """How the workload splits the model. Raises UserError as `rank_shares` does."""
    return Split(workload.split_mode, rank_shares(workload), workload.max_tp)


def fitting_tiers(specs: Sequence[ModelSpec], workload: Workload, tables: Tables) -> tuple[int, ...]:
    """Tiers whose scratch fits every rank's arena, and beside which host memory holds what the arenas do not.

    Raises Shortage when decoding does not fit, were units divisible.
    """

    def fits(tokens: int, rooms: Sequence[Room]) -> bool:
        on_device = all(r.scratch(tokens) + r.least_slot <= r.arena for r in rooms)
        return on_device and host_fits(rooms, tables.profile, tokens)

    def suffices(mib: int) -> bool:
        return fits(workload.answer_rows, _rooms(specs, workload, [mib] * len(specs), tables))

    rooms = _rooms(specs, workload, workload.vram_mib, tables)
    tiers = tuple(t for t in workload.tiers() if fits(t, rooms))
    if tiers and tiers[-1] >= workload.answer_rows:
        return tiers
    budgets = range(1, MOST_MIB)
    least = bisect_left(budgets, True, key=suffices)
    works = budgets[least] if least < len(budgets) else None
    if works is None or not host_fits(rooms, tables.profile, workload.answer_rows):
        why, missing = explain_shortage(rooms, tables.profile, workload.answer_rows)
        raise Shortage(why, max(1, missing), works)
    given = ",".join(map(str, workload.vram_mib))
    raise Shortage(f"--vram {given} MiB is too small for {specs[0].name}", 0, works)


def _rooms(specs: Sequence[ModelSpec], workload: Workload, budgets: Sequence[int], tables: Tables) -> tuple[Room, ...]:
    """The ranks' rooms under these budgets, host memory not yet shared out."""
    found = []
    for rank, (part, budget) in enumerate(zip(specs, budgets)):
        reserve = reserve_mib(tables.profile.reserve_of(workload.device + rank))
        left = budget - (workload.drafter_mib if part.head else 0)
        found.append(rank_room(part, workload, left, tables.kind, tables.act_bytes, len(specs), reserve))
    return tuple(found)
