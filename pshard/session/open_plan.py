"""Opens a model with its profile and registry, and chooses the variant that serves a request."""

import os
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pshard.errors import UserError
from pshard.machine import MachineProfile
from pshard.plan import Variant
from pshard.routing.order_experts import order_experts
from pshard.session.run_request import RunRequest, full_workload, suggest_budget, wanted_workload
from pshard.session.this_machine import check_machine
from pshard.units.kv_cells import check_kv_types
from pshard.workload import Workload

if TYPE_CHECKING:
    from pshard.model import ModelSpec
    from pshard.models import ModelFile
    from pshard.registries.fingerprint import Inputs


@dataclass(frozen=True)
class Opened:
    """A model file with the profile of this machine and the variant that serves the request."""

    file: "ModelFile"
    profile: MachineProfile
    variant: Variant
    registry: Path
    why: str = ""  # how the variant compared with others, where -sm auto left it to a run


def open_plan(request: RunRequest) -> Opened:
    """Open the model and choose its variant. Raises UserError: no profile, no plan, stale plan, no fitting variant."""
    from pshard.models import open_model
    from pshard.registries.choose import choose_variant
    from pshard.registries.fingerprint import fingerprint_inputs
    from pshard.registries.profile_store import load_profile
    from pshard.registries.store import load_registry, own_plans, registry_path

    file = open_model(request.model)
    check_kv_types(file.spec.config, request.type_k, request.type_v)
    profile = load_profile(request.profile)
    check_machine(profile)
    want = wanted_workload(request, profile)
    path = registry_path(request.model, request.registry)
    inputs = fingerprint_inputs(file.fingerprint_inputs(), profile)
    full = full_workload(request, want, file.spec)
    command = _replan_command(request, full if request.vram_mib else suggest_budget(full, file.spec))
    if request.replan:
        _plan_again(request, full, file.spec, profile, path, inputs)
    registry = load_registry(path, command)
    plans = own_plans(registry, inputs, f"{command} (or add --replan)")
    choice = choose_variant(plans, want, command)
    try:
        check_plan(order_experts(file.spec, choice.variant.popularity), choice.variant, profile)
    except ValueError as error:
        raise UserError(f"the registry {path} is corrupt: {error}; delete it and run: {command}") from None
    file.spec = order_experts(file.spec, choice.variant.popularity)  # predictions are made by it too
    workload = choice.variant.workload
    workload = replace(workload, reduce_dtype=request.reduce_dtype or workload.reduce_dtype)
    return Opened(file, profile, replace(choice.variant, workload=workload), path, choice.why)


def _replan_command(request: RunRequest, workload: Workload) -> str:
    """The pshard-plan command for a workload, with this request's places and choices."""
    from pshard.registries.choose import plan_command

    command = plan_command(str(request.model), workload)
    for flag, place in (("--registry", request.registry), ("--profile", request.profile)):
        if place is not None:
            command += f" {flag} {shlex.quote(str(place))}"
    return command + (" -ts auto" if request.auto_ratios and request.split_mode != "auto" else "")


def _plan_again(
    request: RunRequest, workload: Workload, spec: "ModelSpec", profile: MachineProfile, path: Path, inputs: "Inputs"
) -> None:
    """Plan the workload, by the popularity of experts that the registry at `path` knows, and keep its variant there.
    Raises UserError without a budget."""
    if request.vram_mib is None:
        raise UserError("--replan needs a budget: give --vram")
    from pshard.planner.choose_mode import plan_split
    from pshard.registries.store import recall_popularity, save_variants
    from pshard.session.planning_bar import planning_bar

    known = recall_popularity(path, inputs)
    with planning_bar(f"planning {spec.name}"):
        planned = plan_split(order_experts(spec, known), profile, workload, request.auto_ratios)
    for note in save_variants(path, spec.name, inputs, [planned]).notes:
        print(f"note: {note}", file=sys.stderr)


def settle_plan(request: RunRequest) -> tuple[RunRequest, int]:
    """How many processes run the model, and what to ask of each; a plan that is to be made anew is made here, once.

    Raises UserError as `open_plan` does, and for --replan under torchrun, whose ranks would each make a plan.
    """
    from pshard.runtime.ranks.group import started_ranks

    if request.replan and started_ranks() > 1:
        raise UserError("--replan is for one process; under torchrun run pshard-plan with the same flags first")
    auto = request.split_mode == "auto" or request.auto_ratios
    if not auto and not request.replan:
        return request, request.ranks
    opened = open_plan(request)
    opened.file.close()
    ranks = len(opened.variant.ranks)
    if started_ranks() not in (0, ranks):
        raise UserError(
            f"the plan that is taken ({opened.variant.way}) is for {ranks} rank{'s' * (ranks > 1)}, but "
            f"{started_ranks()} were started; start {ranks} with torchrun, or ask for a split with -sm and -ts"
        )
    says = ranks == 1 or started_ranks() > 0  # of those that this starts, rank 0 will
    if opened.why and says and os.environ.get("RANK", "0") == "0":
        print(f"note: {opened.why}", file=sys.stderr)
    return replace(request, replan=False), ranks


def check_plan(spec: "ModelSpec", variant: Variant, profile: MachineProfile) -> None:
    """Raise ValueError for a plan that the runtime cannot rely on: one that was edited, or damaged in a way that reads
    like a plan."""
    from pshard.cuts.rank_parts import cut_ranks
    from pshard.planner.check_plan import check_runnable

    check_runnable(cut_ranks(spec, variant.split), variant, profile.accelerators[0].kind)
