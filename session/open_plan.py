"""Opens a model with its profile and registry, and chooses the variant that serves a request."""

import os
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pshard.errors import CannotWrite, NotPlanned, StaleRegistry, UserError
from pshard.machine import MachineProfile
from pshard.on_disk import mark_made
from pshard.plan import PlanSet, Variant
from pshard.registries.known_models import note_model
from pshard.routing.order_experts import order_experts
from pshard.session.packed_models import use_packed
from pshard.session.readiness.unsaved import is_unsaved, place_unsaved
from pshard.session.run_request import RunRequest, full_workload, places_of, suggest_budget, wanted_workload
from pshard.session.this_machine import check_machine, doubt_free_memory, free_host_bytes
from pshard.session.use_disk import limit_ram, may_need_disk, name_least_ram, recall_disk, use_disk
from pshard.speculation import ASSUMED_ACCEPTANCE, AUTO, MTP, PLANNED_DRAFTS, PROGRAMS, DraftQuestion
from pshard.units.kv_cells import check_kv_types
from pshard.workload import Workload

if TYPE_CHECKING:
    from pshard.model import ModelSpec
    from pshard.models import ModelFile
    from pshard.planner.shown.memory_use import MemoryUse
    from pshard.registries.choose import Choice
    from pshard.registries.fingerprint import Inputs
    from pshard.routing.record import RoutingRecord


WORTH_TELLING = 0.8  # of what is free: a plan that takes less may be much slower than another one


@dataclass(frozen=True)
class Opened:
    """A model file with the profile of this machine and the variant that serves the request."""

    file: "ModelFile"
    profile: MachineProfile
    variant: Variant
    registry: Path
    why: str = ""  # how the variant compared with others, where -sm auto left it to a run


def open_plan(request: RunRequest) -> Opened:
    """Open the model and choose its variant, or make one where the request says so.

    Raises UserError: no profile, a stale plan, no plan that can be made; and where none is to be made, NotPlanned.
    """
    from pshard.models.attach_draft import open_drafted
    from pshard.planner.price.prompt_math import describe_no_int8
    from pshard.registries.fingerprint import fingerprint_inputs
    from pshard.registries.profile_store import load_profile
    from pshard.registries.store import describe_other_locks, load_registry, own_plans, registry_path

    file = open_drafted(request.model, request.draft_model)
    check_kv_types(file.spec.config, request.type_k, request.type_v)
    profile = load_profile(request.profile)
    check_machine(profile, request.profile)
    machine = replace(limit_ram(profile, request.ram_mib), prompt_math=request.prompt_math or Workload.prompt_math)
    want = wanted_workload(request, machine)
    full = full_workload(request, want, file.spec)
    late = list[str]()  # where no plan is made, the error says all
    profile, known = _see_disk(request, file, machine, full, late)
    path = registry_path(request.model, request.registry)
    inputs, serving = (fingerprint_inputs(file.fingerprint_inputs(), p) for p in (profile, known))
    if request.draft_model is not None:
        check_kv_types(file.of_head().spec.config, request.type_k, request.type_v)
    elif PROGRAMS.get(request.drafts) == MTP:
        file.of_head()  # which says why there is none
    if not request.vram_mib:
        full = suggest_budget(full, file.spec, profile)
    command = replan_command(request, full)

    def choose() -> "Choice":
        registry = load_registry(path, command)
        plans = own_plans(registry, serving, f"{command} (or add --replan)")
        found = _choose_for(request.drafts, _keep_asked(plans, request, command), want, command)
        if other := describe_other_locks(registry, found.variant, serving):
            tell_once(f"note: the plan was made for another limit ({other}); for a plan for this one run: {command}")
        return found

    if request.replan:
        _, path = _plan_again(request, full, file, profile, path, inputs)
    try:
        choice = choose()
    except (NotPlanned, StaleRegistry) as error:
        if not request.plans:
            raise
        planned = path.exists()
        made, path = _plan_again(request, full, file, profile, path, inputs)
        if planned:
            tell_once(f"note: {str(error).split('; run: ')[0]}; so it was planned anew")
        _tell_made(file.spec, profile, made, path, command, not request.vram_mib)
        choice = choose()
    for line in late:
        tell_once(line)
    if choice.variant.ranks[0].beyond_host and not profile.disks:
        profile, file.spec = known, mark_made(file)
    on_gpu = profile.accelerators[0].kind == "cuda"
    if request.plans and on_gpu and not request.vram_mib and (note := _describe_waste(choice.variant, full, command)):
        tell_once(note)
    try:
        check_plan(order_experts(file.spec, choice.variant.popularity), choice.variant, profile)
    except ValueError as error:
        raise UserError(f"the registry {path} is corrupt: {error}; delete it and run: {command}") from None
    file.spec = order_experts(file.spec, choice.variant.popularity)  # predictions are made by it too
    note_model(request.model)
    workload = choice.variant.workload
    profile = replace(profile, prompt_math=workload.prompt_math)
    if note := describe_no_int8(file.spec, profile):
        tell_once(f"note: {note}")
    workload = replace(workload, reduce_dtype=request.reduce_dtype or workload.reduce_dtype)
    return Opened(file, profile, replace(choice.variant, workload=workload), path, choice.why)


def _see_disk(
    request: RunRequest, file: "ModelFile", machine: MachineProfile, full: Workload, late: list[str]
) -> tuple[MachineProfile, MachineProfile]:
    """The machine as plans for the workload see it, and as those of more context may, with what is known of the disk
    that they read from; the model's packed file is there if it may be needed and a folder for it was named. late: gets
    what is worth a line where a plan is made."""
    use_packed(file, request.disk_cache, may_need_disk(file.spec, machine, full), tell_once)
    profile = use_disk(file, machine, full, request.profile, tell_once, late.append)
    return profile, profile if profile.disks else recall_disk(file, machine)


def _keep_asked(plans: PlanSet, request: RunRequest, command: str) -> PlanSet:
    """The plans with micro-batches, and products of prompts, as the request wants them. Raises NotPlanned where there
    are none."""
    small = [v for v in plans.variants if request.ubatch is None or v.workload.max_ubatch <= request.ubatch]
    if plans.variants and not small:
        raise NotPlanned(f"no plan keeps its micro-batches to {request.ubatch} tokens; run: {command}")
    alike = tuple(v for v in small if request.prompt_math in (None, v.workload.prompt_math))
    if small and not alike:
        raise NotPlanned(f"no plan has --prompt-math {request.prompt_math}; run: {command}")
    return replace(plans, variants=alike)


def _choose_for(drafts: str, plans: PlanSet, want: Workload, command: str) -> "Choice":
    """The plan that serves, of those for who is to draft; where any drafter will do, else of all. Raises NotPlanned."""
    from pshard.registries.choose import choose_variant

    first = _those_for(list(plans.variants), drafts, command)
    try:
        return choose_variant(replace(plans, variants=tuple(first)), want, command)
    except NotPlanned:
        if drafts in PROGRAMS:
            raise
        return choose_variant(plans, want, command)


def _those_for(variants: list[Variant], drafts: str, command: str) -> list[Variant]:
    """Of plans those that go first by who is to draft, as --spec says. Raises NotPlanned where none has the head that
    is to."""
    headed = [v for v in variants if v.drafter]
    if drafts in PROGRAMS and variants and not headed:
        what = "the model's multi-token head" if PROGRAMS[drafts] == MTP else "the draft model"
        raise NotPlanned(f"no plan has {what}; run: {command}")
    if drafts in (*PROGRAMS, AUTO):
        return headed or variants
    return [v for v in variants if not v.drafter] or variants


def replan_command(request: RunRequest, workload: Workload) -> str:
    """The pshard-plan command for a workload, with this request's places and choices."""
    from pshard.registries.choose import plan_command

    command = plan_command(str(request.model), workload)
    for flag, place in places_of(request):
        if place is not None and not is_unsaved(place):
            command += f" {flag} {shlex.quote(str(place))}"
    command += f" --spec {request.drafts}" * (request.drafts in PROGRAMS)
    command += f" -md {shlex.quote(str(request.draft_model))}" * (request.draft_model is not None)
    return command + (" -ts auto" if request.auto_ratios and request.split_mode != "auto" else "")


def _plan_again(
    request: RunRequest, workload: Workload, file: "ModelFile", profile: MachineProfile, path: Path, inputs: "Inputs"
) -> tuple[Variant, Path]:
    """Plan the workload, by the popularity of experts that the registry at `path` knows and by the record that is kept
    beside it, and keep its variant there; returns it and where it is. A run goes on with a plan that cannot be kept."""
    from pshard.planner.choose_drafts import keep_drafts
    from pshard.planner.choose_mode import plan_split
    from pshard.planner.routing.plan_slots import plan_slots
    from pshard.registries.store import recall_popularity, save_variants
    from pshard.session.planning_bar import planning_bar

    known = recall_popularity(path, inputs)
    spec = order_experts(file.spec, known)
    record = _recall_record(path, file) if known else None
    with planning_bar(f"planning {spec.name}"):
        try:
            drafted = _plan_head(request, spec, profile, workload, path, file) if request.drafts in PROGRAMS else None
            planned = drafted or plan_split(spec, profile, workload, request.auto_ratios)
        except UserError as error:
            raise name_least_ram(error, spec, profile, workload) from None
        asked = replace(planned.workload, max_ubatch=workload.max_ubatch)
        planned = plan_slots(spec, profile, asked, planned, record)
        planned = keep_drafts(spec, profile, planned, drafted) if drafted else planned
    try:
        saved = save_variants(path, spec.name, inputs, [planned])
    except CannotWrite as error:
        if not request.plans:
            raise
        tell_once(f"note: the plan is for this run only: {error}")
        path = place_unsaved(path.name)
        saved = save_variants(path, spec.name, inputs, [planned])
    for note in saved.notes:
        print(f"note: {note}", file=sys.stderr)
    return planned, path


def _plan_head(
    request: RunRequest,
    spec: "ModelSpec",
    profile: MachineProfile,
    workload: Workload,
    registry: Path,
    file: "ModelFile",
) -> Variant:
    """The plan with the number of drafts of a head or a draft model that is predicted to be the fastest, one at
    least."""
    from pshard.planner.choose_drafts import choose_drafts
    from pshard.planner.choose_mode import plan_split
    from pshard.registries.acceptance_file import recall_acceptance

    kind = request.drafts
    recorded = recall_acceptance(registry, file.fingerprint_inputs(), kind)
    question = DraftQuestion(kind, recorded or ASSUMED_ACCEPTANCE[kind], PLANNED_DRAFTS)

    def plan(asked: Workload) -> Variant:
        chooses = request.auto_ratios and not asked.tensor_split  # ratios are settled before what drafts is planned
        return plan_split(spec, profile, asked, chooses)

    start = replace(workload, tensor_split=()) if request.auto_ratios else workload
    return choose_drafts(plan, spec, profile, start, question)


def _recall_record(registry: Path, file: "ModelFile") -> "RoutingRecord | None":
    """The routing record beside a registry; None, and a note, where there is none that can be used."""
    from pshard.registries.routing_file import recall_record

    try:
        record = recall_record(registry, file)
    except UserError as error:
        tell_once(f"note: planned without slots for experts that follow use: {error}")
        return None
    if record is None:
        tell_once(
            "note: planned without slots for experts that follow use, as no routing record is kept beside the "
            "registry; pshard-plan --routing FILE keeps one"
        )
    return record


def _describe_waste(variant: Variant, full: Workload, command: str) -> str | None:
    """What to say when a plan leaves much of what is free, though more would help it; else None."""
    used, there = sum(variant.workload.vram_mib), sum(full.vram_mib)
    if not variant.plan_needed or used >= WORTH_TELLING * there:
        return None
    return f"note: the plan takes {used} MiB of VRAM, {there} are free; for a plan of these: {command}"


def _tell_made(
    spec: "ModelSpec", profile: MachineProfile, variant: Variant, registry: Path, command: str, of_free: bool
) -> None:
    """Say what was planned, where it is kept, and the command that plans it again; note when host memory is short, and
    when what is free of a GPU, which the plan is `of_free` for, is doubtful."""
    from pshard.planner.shown.memory_use import describe_tight, measure_use

    use = measure_use(spec, profile, variant)
    on_gpu = profile.accelerators[0].kind == "cuda"
    tell_once(describe_made(variant, use, on_gpu, registry, command))
    if line := describe_tight(use, free_host_bytes()):
        tell_once(f"note: {line}")
    if profile.busy:
        tell_once(f"note: the profile is of a busy machine: {profile.busy}")
    if of_free and on_gpu and (doubt := doubt_free_memory()):
        tell_once(f"note: {doubt}")


def describe_made(variant: Variant, use: "MemoryUse", on_gpu: bool, registry: Path, command: str) -> str:
    """What was planned, how much memory it takes, where it is kept, and the command that plans it again."""
    from pshard.planner.serving.show_promise import show_rate
    from pshard.planner.shown.show_summary import of_all
    from pshard.predicted_times import decode_rate, first_token_seconds

    w = variant.workload
    budget, rate = ",".join(map(str, w.vram_mib)), decode_rate(variant)
    memory = f"{budget} MiB of VRAM, " * on_gpu + f"{use.host} host memory{use.own}"
    kept = "not kept" if is_unsaved(registry) else f"kept in {registry}"
    return (
        f"plan: {memory}, {w.context} tokens of context; predicted are {show_rate(rate)} tok/s{of_all(w)} after "
        f"{first_token_seconds(variant):.3g} s for a prompt of {w.prompt}; {kept}\n"
        f"      to plan it again, or otherwise: {command}"
    )


def tell_once(line: str) -> None:
    """A line on stderr, once when several ranks run the same command."""
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr)


def settle_plan(request: RunRequest) -> tuple[RunRequest, int]:
    """How many processes run the model, and what to ask of each; a plan that is to be made anew is made here, once.

    Raises UserError as `open_plan` does, and for --replan under torchrun, whose ranks would each make a plan.
    """
    from pshard.runtime.ranks.started import started_ranks

    if request.replan and started_ranks() > 1:
        raise UserError("--replan is for one process; under torchrun run pshard-plan with the same flags first")
    auto = request.split_mode == "auto" or request.auto_ratios
    request = replace(request, plans=request.plans and started_ranks() < 2)  # each would make a plan
    if not auto and not request.replan and not (request.plans and request.ranks > 1):
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
    kept = opened.registry if is_unsaved(opened.registry) else request.registry
    return replace(request, replan=False, plans=False, registry=kept), ranks


def check_plan(spec: "ModelSpec", variant: Variant, profile: MachineProfile) -> None:
    """Raise ValueError for a plan that the runtime cannot rely on: one that was edited, or damaged in a way that reads
    like a plan."""
    from pshard.cuts.rank_parts import cut_ranks
    from pshard.planner.check_plan import check_runnable
    from pshard.planner.prepare_ranks import for_drafts

    check_runnable(cut_ranks(for_drafts(spec, variant.workload), variant.split), variant, profile.accelerators[0].kind)
