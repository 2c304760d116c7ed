"""Host memory for weights, filled with pages while the imports that loading needs take their seconds. No torch."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pshard.errors import UserError
from pshard.on_host import list_on_host
from pshard.runtime.ranks.started import started_ranks
from pshard.session.open_plan import check_plan
from pshard.session.run_request import RunRequest, full_workload, wanted_workload
from pshard.session.this_machine import free_by_driver
from pshard.session.use_disk import limit_ram, may_need_disk
from pshard.workload import MIB

if TYPE_CHECKING:
    from pshard.runtime.memory.host.fresh_memory import FilledMemory

WORTH_IT = 2 << 30  # bytes: less is filled as it is packed, in no time


def fill_ahead(request: RunRequest) -> "FilledMemory | None":
    """Start to fill the host memory that one rank's weights will take under the request's plan; None where it is not
    known yet, or little.

    Ranks, and hosts with several NUMA nodes, have theirs filled by the threads that use it, near which it then is. What
    is wrong with the request, `open_plan` says.
    """
    if request.ranks > 1 or request.replan or started_ranks() or not _is_large(request.model):
        return None
    try:
        nbytes = _plan_bytes(request)
    except (UserError, ValueError):
        return None
    if nbytes < WORTH_IT:
        return None
    from pshard.runtime.memory.host.fresh_memory import FilledMemory

    return FilledMemory(nbytes)


def _is_large(model: Path) -> bool:
    files = [model] if model.is_file() else model.glob("*.safetensors")
    return sum(file.stat().st_size for file in files) >= WORTH_IT


def _plan_bytes(request: RunRequest) -> int:
    """Bytes of the host arena under the plan that serves the request; 0 where that is not for one rank here."""
    from pshard.models.attach_draft import open_drafted
    from pshard.registries.choose import choose_variant
    from pshard.registries.fingerprint import fingerprint_inputs
    from pshard.registries.profile_store import load_profile
    from pshard.registries.store import load_registry, own_plans, registry_path
    from pshard.routing.order_experts import order_experts
    from pshard.runtime.memory.host.host_arena import arrange_blobs

    profile = load_profile(request.profile)
    if profile.host.numa_nodes > 1:
        return 0
    if request.vram_mib is None and profile.accelerators[0].kind == "cuda":
        free = free_by_driver()
        if 0 not in free:
            return 0
        request = replace(request, vram_mib=(free[0] // MIB,))
    with open_drafted(request.model, request.draft_model) as file:
        profile = replace(limit_ram(profile, request.ram_mib), disks=())
        want = wanted_workload(request, profile)
        if may_need_disk(file.spec, profile, full_workload(request, want, file.spec)):
            return 0  # what stays on disk is timed first
        spec, inputs = file.spec, fingerprint_inputs(file.fingerprint_inputs(), profile)
    plans = own_plans(load_registry(registry_path(request.model, request.registry)), inputs, "")
    variant = choose_variant(plans, want, "").variant
    if len(variant.ranks) > 1:
        return 0
    spec = order_experts(spec, variant.popularity)
    check_plan(spec, variant, profile)
    return arrange_blobs(list_on_host(spec, variant.ranks[0])).nbytes
