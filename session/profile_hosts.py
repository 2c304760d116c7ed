"""The profile of several hosts: that of one of them, with sums that were timed between the ranks of all."""

import datetime
import os
import platform
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pshard.errors import UserError
from pshard.machine import CollectiveTiming, MachineProfile
from pshard.profile.effort import full_effort, quick_effort
from pshard.profile.identify import default_accelerator, last_cache_bytes, usable_memory
from pshard.profile.timed.collective_times import time_sums
from pshard.registries.profile_store import load_profile, save_profile
from pshard.runtime.ranks.group import init_group
from pshard.runtime.ranks.started import started_ranks
from pshard.session.this_machine import check_machine

if TYPE_CHECKING:
    from pshard.runtime.ranks.group import Group

ONE_HOST = (
    "pshard-profile times the ranks of one host by itself: start it without torchrun, or with --nnodes on several"
)


@dataclass(frozen=True)
class HostsRequest:
    """What to measure between hosts. `output`: the file, on every host; `accelerator`: "cuda", "cpu" or None, as a
    profile takes it by default; `command`: for the provenance."""

    output: Path
    accelerator: str | None
    quick: bool
    command: str


def profile_hosts(request: HostsRequest) -> tuple[MachineProfile, bool]:
    """Time sums between the ranks that torchrun started, add them to the profile of rank 0's host, and write the same
    file on every host; also whether this is rank 0. Every rank calls it.

    Raises UserError, on every rank and before anything is timed or written: ranks of one host only, hosts that run
    unlike numbers of ranks, no profile of rank 0's host, a host that is unlike it, a place that cannot be written to.
    """
    if os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]) == os.environ["WORLD_SIZE"]:
        raise UserError(ONE_HOST)
    kind = request.accelerator or default_accelerator()
    with closing(init_group(started_ranks(), kind)) as group:
        here = group.broadcast(group.local_size)
        base = _share_base(group, kind)
        _agree(group, lambda: _check_place(group, here, request.output, base))
        effort = (quick_effort if request.quick else full_effort)(last_cache_bytes(), usable_memory())
        sums = time_sums(group, kind, effort.sums)
        profile = group.broadcast(_join(base, sums, here, group.size, request))
        if group.local_rank == 0:
            save_profile(profile, request.output)
        group.barrier()
        return profile, group.rank == 0


def _share_base(group: "Group", kind: str) -> MachineProfile:
    """The profile of rank 0's host, on every rank."""
    found: list[MachineProfile] = []

    def load() -> None:
        if group.rank == 0:
            found.append(load_profile())
            if found[0].accelerators[0].kind != kind:
                raise UserError(f"its profile has {found[0].accelerators[0].kind} ranks, not {kind}; give --device")

    _agree(group, load)
    return group.broadcast(found)[0]


def _check_place(group: "Group", on_first: int, output: Path, base: MachineProfile) -> None:
    """Raise UserError for what is wrong with this rank's host."""
    if group.local_size != on_first:
        raise UserError(f"it runs {group.local_size} ranks and the first host {on_first}; start as many on each")
    if base.ranks_per_host:
        raise UserError("its own profile is of several hosts; run pshard-profile there without torchrun")
    check_machine(base)
    folder = output.absolute().parent
    if not os.access(folder, os.W_OK) or output.is_dir():
        raise UserError(f"{output} cannot be written; choose another place with -o")


def _agree(group: "Group", check: Callable[[], None]) -> None:
    """Raise the first rank's UserError on all ranks: those of other hosts would wait for one that ended."""
    said = None
    try:
        check()
    except UserError as error:
        said = f"rank {group.rank} on {platform.node()}: {error}"
    for problem in group.gather(said):
        if problem is not None:
            raise UserError(problem)


def _join(
    base: MachineProfile, sums: tuple[CollectiveTiming, ...], on_one: int, ranks: int, request: HostsRequest
) -> MachineProfile:
    """The profile of one host with sums between several; those within a host stay."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    note = (
        f"sums of {ranks} ranks were timed between {ranks // on_one} hosts, all else on one, on {base.provenance.date}"
    )
    provenance = replace(base.provenance, date=now, command=request.command, notes=(*base.provenance.notes, note))
    within = tuple(c for c in base.collectives if c.ranks <= on_one)
    shares = tuple(s for s in base.shares if s.ranks <= on_one)
    return replace(base, collectives=(*within, *sums), shares=shares, provenance=provenance, ranks_per_host=on_one)
