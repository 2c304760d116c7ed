"""What plans keep in host memory, and what there is for it: a limit of every plan.

What is not in VRAM in every tier has a copy there (pshard/on_host.py), and layers whose KV cache is not in VRAM in
every tier their cells; where the CPU is the accelerator its arena lies there too. All ranks of a host share it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from pshard.batch_sizes import SMALL_BATCH
from pshard.errors import NoPlan
from pshard.homes import DISK, READ, Home, list_far_homes
from pshard.machine import MachineProfile
from pshard.model import ModelSpec
from pshard.on_host import keep_on_host
from pshard.plan import TierPlan
from pshard.planner.price.draft import Beyond, Room
from pshard.planner.search.climb import SLOT_CHOICES
from pshard.workload import MIB, Workload

RESERVE = 2 << 30  # bytes left to the system, the process itself and what reading the model file caches...
RESERVED_SHARE = 16  # ...or this part of a small memory
# bytes of host memory that a process takes beside what is planned: Python, torch, the C++ library, rows of logits,
# rings and read-ahead. What a run took: docs/disk.md
PROCESS = {"cpu": 448 << 20, "cuda": 2304 << 20}


def usable_bytes(profile: MachineProfile, ranks: int) -> int:
    """Bytes of host memory for weights, KV cache and arenas of the CPU, of all hosts. Ranks on GPUs beyond those of the
    profile are on further hosts like it. A plan that comes near gets a note (shown/memory_use.py)."""
    memory = profile.host.memory_bytes
    if profile.ram_bytes:
        return count_hosts(profile, ranks) * max(0, profile.ram_bytes - process_bytes(profile, ranks))
    return count_hosts(profile, ranks) * (memory - min(RESERVE, memory // RESERVED_SHARE))


def process_bytes(profile: MachineProfile, ranks: int) -> int:
    """Bytes of host memory that the processes of so many ranks take on a host beside what is planned."""
    return profile.ranks_here(ranks) * PROCESS[profile.accelerators[0].kind]


def count_hosts(profile: MachineProfile, ranks: int) -> int:
    """On how many hosts like the profile's so many ranks are."""
    gpus = len(profile.accelerators) if profile.accelerators[0].kind == "cuda" else ranks
    return -(-ranks // (profile.ranks_per_host or max(1, gpus)))


def binds_host(spec: ModelSpec, profile: MachineProfile, workload: Workload) -> bool:
    """Whether host memory may be what limits a plan: it does not hold the whole model with all its states, and without
    a GPU the budgets beside them."""
    nbytes = spec.packed_nbytes + sum(u.state_nbytes(spec.config, workload.state_shape) for u in spec.units)
    if profile.accelerators[0].kind == "cpu":
        nbytes += sum(min(mib * MIB, 2 * nbytes) for mib in workload.vram_mib)
    return nbytes > usable_bytes(profile, len(workload.vram_mib))


def share_host(rooms: Sequence[Room], profile: MachineProfile, largest: int) -> tuple[Room, ...]:
    """The ranks' rooms with what each may keep in host memory, where that limits them.

    What a rank cannot hold in VRAM beside the scratch of its largest tier it gets, and of the rest a share by its
    bytes; where there is a home beyond host memory, a share of all. Raises NoPlan where arenas in host memory are too
    large for it, and there is such a home.
    """
    left = _left(rooms, profile, largest)
    totals = [_total(room) for room in rooms]
    if sum(totals) <= left:
        return tuple(rooms)
    if home := find_beyond(profile, len(rooms)):
        if left < 0:
            budget = ",".join(map(str, rooms[0].workload.vram_mib))
            lacks = f"host memory lacks {-left // MIB + 1} MiB for a budget of {budget} in it"
            raise NoPlan(f"{lacks}; give it more, or less --vram")
        shares, reads_rows = (max(0, left * t // sum(totals)) for t in totals), times_rows(profile)
        return tuple(replace(r, beyond=Beyond(home, share, reads_rows)) for r, share in zip(rooms, shares))
    needs = [_needed(room, largest) for room in rooms]
    spare = left - sum(needs)
    return tuple(replace(r, host=int(n + spare * t / sum(totals))) for r, n, t in zip(rooms, needs, totals))


def host_fits(rooms: Sequence[Room], profile: MachineProfile, largest: int) -> bool:
    """Whether host memory holds what the arenas cannot beside the scratch of the largest tier, were units divisible, or
    that may live beyond it."""
    return find_beyond(profile, len(rooms)) is not None or sum(_needed(room, largest) for room in rooms) <= _left(
        rooms, profile, largest
    )


def find_beyond(profile: MachineProfile, ranks: int) -> Home | None:
    """The first home beyond host memory whose lanes the profile has timed; several ranks have none on disk."""
    timed = {copy.direction for copy in profile.copies} | {READ.timed for _ in profile.unit_reads}
    timed_homes = (home for home in list_far_homes() if {lane.timed for lane in home.way_in} <= timed)
    return next((home for home in timed_homes if ranks == 1 or home is not DISK), None)


def times_rows(profile: MachineProfile) -> bool:
    """Whether the profile has small reads from disk, by which rows of a table are priced."""
    return any(row.block for row in profile.disks)


def explain_shortage(rooms: Sequence[Room], profile: MachineProfile, largest: int) -> tuple[str, int]:
    """One line about a model that no plan makes fit, but for what to do, and the bytes that it takes too many."""
    needed, left = sum(_needed(room, largest) for room in rooms), _left(rooms, profile, largest)
    budgets = ",".join(map(str, rooms[0].workload.vram_mib))
    why = (
        f"under {budgets} MiB, at least {needed >> 20} MiB of weights and KV cache stay in host memory, and the "
        f"machine has {max(0, left) >> 20} for them: it will not load"
    )
    return why, needed - left


def kept_bytes(room: Room, tiers: Iterable[TierPlan]) -> int:
    """Bytes of weights, slots for experts and KV cache that these tiers together keep in host memory."""
    weights = sum(cache.nbytes for cache in room.spec.caches if cache.on_host)
    for unit, *places in zip(room.spec.units, *(tier.placements for tier in tiers), strict=True):
        portion = keep_on_host(unit, places)
        weights += portion.nbytes if portion else 0
        if any(place.has_state_on_host for place in places):
            weights += room.states[unit.name]
    return weights


def holds(room: Room, tiers: Iterable[TierPlan]) -> bool:
    """Whether host memory holds what these tiers together keep there."""
    return room.host is None or kept_bytes(room, tiers) <= room.host


def _total(room: Room) -> int:
    return room.spec.packed_nbytes + sum(room.states.values())


def _needed(room: Room, largest: int) -> int:
    """Bytes that the arena does not hold beside the scratch of the largest tier. A prompt also has room for two slots:
    on the CPU what is not pinned would take longer than smaller micro-batches."""
    taken = room.scratch(largest)
    if largest > max(SMALL_BATCH, room.workload.answer_rows):
        taken += 2 * max((u.packed_nbytes for u in room.spec.units if u.layer >= 0), default=0)
    return max(0, _total(room) - max(0, room.arena - taken))


def _largest_arena(room: Room, largest: int) -> int:
    """Bytes of arena that no plan of a rank takes more than."""
    slots = max(SLOT_CHOICES) * max((u.packed_nbytes for u in room.spec.units), default=0)
    return _total(room) + room.scratch(largest) + room.state_stage + slots


def _left(rooms: Sequence[Room], profile: MachineProfile, largest: int) -> int:
    """Usable bytes less the arenas that lie in host memory too."""
    left = usable_bytes(profile, len(rooms))
    if profile.accelerators[0].kind == "cpu":
        left -= sum(min(room.arena, _largest_arena(room, largest)) for room in rooms)
    return left
