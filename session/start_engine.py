"""From an opened plan to an engine that is ready: its ranks joined, the model loaded."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING

from pshard.plan import Variant
from pshard.session.byte_bar import byte_bar
from pshard.session.readiness.ready_kernels import kernels_ready

if TYPE_CHECKING:
    from pshard.routing.record import RoutingRecord
    from pshard.runtime.engine import Engine
    from pshard.runtime.memory.host.fresh_memory import FilledMemory
    from pshard.runtime.ranks.group import Group
    from pshard.session.open_plan import Opened

KERNELS = ("fast", "plain")
ELSEWHERE = (
    "the profile is not of ranks that are spread over hosts like these, so the plan has another price for their sums; "
    "pshard-profile under torchrun, as this command is started, times them"
)


def open_group(opened: "Opened", ranks: int) -> "Group":
    """Join the ranks of this run; sums on GPUs go the way that the profile found to be the fastest for their size."""
    from pshard.runtime.ranks.group import init_group

    profile, workload = opened.profile, opened.variant.workload
    kind, threads, in_turns = profile.accelerators[0].kind, profile.host.threads, workload.split_mode == "layer"
    group = init_group(ranks, kind, threads, in_turns, reduce_dtype=workload.reduce_dtype, timings=profile.collectives)
    if group.rank == 0 and group.local_size != profile.ranks_here(ranks):
        print(f"note: {ELSEWHERE}", file=sys.stderr)
    return group


def start_engine(
    opened: "Opened",
    variant: Variant,
    kernels: str = "fast",
    group: "Group | None" = None,
    on_close: Callable[[], None] = lambda: None,
    records: bool = False,
    checkpoints: bool = True,
    plays: "RoutingRecord | None" = None,
    exact: bool = False,
    filled: "FilledMemory | None" = None,
) -> "Engine":
    """Load the model under a variant on this machine's accelerator, with a progress bar on a terminal. records: which
    experts tokens use is kept for `Engine.record_routing`. checkpoints: of states that cannot be cut back are kept,
    where --ram does not say that host memory is for other things.
    plays, exact, filled: see build_engine."""
    from pshard.registries.profile_store import note_page_locks
    from pshard.runtime.build_engine import build_engine
    from pshard.runtime.checkpoints.checkpoints import CHECKPOINT_BYTES
    from pshard.runtime.devices.device import open_device
    from pshard.runtime.devices.threads import use_threads

    index = group.local_rank if group is not None and group.size > 1 else variant.workload.device
    device = open_device(opened.profile.accelerators[0].kind, index)
    if group is None or group.size == 1:  # a rank of several keeps the share of threads it was given
        use_threads(opened.profile.host.threads)
    ram_mib = variant.workload.ram_mib
    if ram_mib or any(rank.beyond_host for rank in variant.ranks):
        opened.file.leave_no_cache()
    ready: AbstractContextManager[None] = nullcontext()
    notes = list[str]()
    if device.kind == "cuda" and kernels == "fast":
        ready = kernels_ready(opened, variant, index, notes)
    spare = min(CHECKPOINT_BYTES, _spare_memory(group, filled)) if checkpoints and not ram_mib else 0
    with ExitStack() as loaded:  # closed where waiting for kernels is interrupted
        with ready, byte_bar(f"loading {opened.file.spec.name}", opened.file.spec.packed_nbytes) as progress:
            engine = build_engine(
                opened.file, variant, device, kernels=kernels, group=group, progress=progress, on_close=on_close,
                tiles=opened.profile.tiles_of(index), records=records, plays=plays, exact=exact, filled=filled,
                checkpoint_bytes=spare,
            )  # fmt: skip
            loaded.callback(engine.close)
        loaded.pop_all()
    engine.notes += tuple(notes)
    if group is None or group.size == 1:  # several ranks share what the system gives
        memory = engine.memory()
        refused = not memory.page_locked
        if device.locks and note_page_locks(memory.host_locked, refused) and refused:
            engine.notes += ("the limit of page-locking is remembered: pshard-plan plans with it from now on",)
    return engine


def _spare_memory(group: "Group | None", filled: "FilledMemory | None") -> int:
    """Bytes of host memory that this rank may take beside what its plan counts: an eighth of what is free, however much
    of its weights' memory is filled by now."""
    import psutil

    free = psutil.virtual_memory().available + (filled.done if filled else 0)
    return free // (8 * (group.local_size if group else 1))
