"""pshard-plan: decide where every unit of a model lives in every token tier, and write it to the plan registry."""

import argparse
import json
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pshard.commands.command_line import run_cli
from pshard.commands.compare_folder import ask_outlook, compare_folder, see_machine
from pshard.commands.parsing.draft_flags import ask_drafts, find_draft_model
from pshard.commands.parsing.model_flags import check_model_place, choose_model, named_model
from pshard.commands.plan_flags import complete_plan_flags, make_parser
from pshard.commands.plan_output import (
    Planned,
    answer,
    as_json,
    emit_arguments,
    explain_plans,
    list_tight,
    list_unsaid_of,
    print_arguments,
    print_plans,
)
from pshard.commands.split_flags import wants_ratios
from pshard.errors import StaleRegistry, UserError
from pshard.hub.offer import find_offered, find_quants
from pshard.jsonio import to_json, write_text_atomically
from pshard.machine import MachineProfile
from pshard.plan import Trial, Variant
from pshard.registries.fingerprint import fingerprint_inputs
from pshard.registries.known_models import note_model
from pshard.registries.store import check_registry_place, load_registry, registry_path, save_variants
from pshard.session.planning_bar import planning_bar
from pshard.session.this_machine import free_host_bytes
from pshard.session.use_disk import name_least_ram
from pshard.speculation import NONE, DraftQuestion
from pshard.workload import Workload

if TYPE_CHECKING:
    from pshard.hub.reference import HubReference
    from pshard.model import ModelSpec
    from pshard.models import ModelFile
    from pshard.routing.record import RoutingRecord
    from pshard.routing.replay import Replay

Tell = Callable[[str], None]  # a line for the user, beside the output
Made = tuple[Variant | None, tuple[Trial, ...]]  # of one budget: None where it is too small
UNRECORDED = (
    "no routing record: experts are priced as if all were chosen alike, which real texts beat; "
    "pshard-run --record-routing FILE makes one, --routing FILE plans by it"
)


def main(argv: list[str] | None = None) -> int:
    """Entry point of the command; returns the exit code."""
    return run_cli(_run, argv)


def _run(argv: list[str]) -> int:
    args = complete_plan_flags(make_parser().parse_args(argv))
    from rich.console import Console

    from pshard.registries.profile_store import load_profile

    messages = Console(stderr=True)

    def tell(line: str) -> None:
        messages.print(line, highlight=False, soft_wrap=True, markup=False)

    offered = find_offered(named_model(args) or os.environ.get("PSHARD_MODEL"))
    check_model_place(args)  # before a profile is missed
    path = None if offered else choose_model(args)
    profile = load_profile(args.profile)
    elsewhere = _other_machine(profile)
    for difference in elsewhere:
        what = f"the profile is of another machine ({difference})"
        if args.profile is None:
            raise UserError(f"{what}; run pshard-profile, or plan for that machine with --profile")
        tell(f"note: {what}")
    if path is None:
        assert offered is not None
        _plan_offered(args, offered, profile, bool(elsewhere), tell)
        return 0
    if quants := find_quants(path):
        if len(quants) > 1:
            compare_folder(args, path, quants, profile, bool(elsewhere), tell)
            return 0
        path = path / quants[0].files[0].name
    registry = _find_registry(args, path, bool(elsewhere))
    planned = _plan_all(args, path, profile, bool(elsewhere), tell)
    said = _prepare_output(args, planned, bool(elsewhere), tell)
    if registry:
        for why in save_variants(registry, planned.spec.name, planned.inputs, planned.variants).notes:
            tell(f"note: {why}")
        if planned.record:
            from pshard.registries.routing_file import keep_record

            keep_record(registry, planned.record)
        note_model(path)
    said()
    where = registry or "not written, as the plan is for another machine; --registry FILE keeps it"
    tell(f"registry: {where}")
    return 0


def _plan_offered(
    args: argparse.Namespace, reference: "HubReference", profile: MachineProfile, elsewhere: bool, tell: Tell
) -> None:
    """Plan a model of the Hub that is not here from its header, and compare it with what else its repository has.

    Nothing is written: a plan is made again when the file is here. Raises UserError as fetching a header does, and for
    flags that need the file.
    """
    for flag, given in (("--registry", args.registry), ("--validate", args.validate), ("--routing", args.routing)):
        if given:
            raise UserError(
                f"{flag} needs the model here, and {reference} is not; fetch it with pshard run {reference}"
            )
    args.validate = False
    from pshard.hub.compare_quants import choose_quant, compare_quants
    from pshard.hub.offer import open_offer

    with open_offer(reference) as offer:
        planned = _plan_all(args, offer.path, profile, elsewhere, tell)
        said = _prepare_output(args, planned, elsewhere, tell)
        if not args.json:
            said()  # before the others, which take half a second each
        known = {offer.model.label: planned.variants[0]}
        ask = partial(ask_outlook, args, profile, elsewhere)
        outlooks = compare_quants(offer.models, offer.headers, ask, known)
        if args.json:
            with planning_bar(f"planning what {reference.repo} has"):
                all_of_them = tuple(outlooks)
            chosen, why = choose_quant(all_of_them)
            said({"offered": to_json(all_of_them), "we_would_take": chosen.label if chosen else None, "because": why})
            return
        if not args.emit:
            from pshard.hub.show_quants import print_quants

            terms, named = planned.variants[0].terms, (reference.repo, offer.model.label)
            print_quants(named, offer.models, outlooks, terms, planning_bar)
    tell(f"registry: not written, as the model is not here; pshard run {reference} fetches it")


def _prepare_output(args: argparse.Namespace, planned: Planned, elsewhere: bool, tell: Tell) -> Callable[..., None]:
    """Work out all that is to be said of the plans, and tell what they lack; what is returned says it, as JSON beside
    what it is given. Raises UserError for what cannot be said, before anything is written."""
    from pshard.planner.price.prompt_math import describe_no_int8

    profile = planned.profile
    if args.write_lp:
        _write_lp(args.write_lp, planned.spec, profile, planned.asked, planned.variants[0])
    asked = answer(planned, args.steps, args.why)
    emitted = emit_arguments(planned, args.emit) if args.emit else []
    for line in list_unsaid_of(planned) if args.emit else ():
        tell(f"note: {line}")
    free = None if elsewhere or args.profile else free_host_bytes()
    for line in list_tight(planned, free):
        tell(f"note: {line}")
    if note := describe_no_int8(planned.spec, profile):
        tell(f"note: {note}")
    for gap in list_gaps(profile, args.split_mode != "none", planned.spec.config.experts is not None):
        tell(f"note: {gap}")

    def say(more: dict[str, Any] | None = None) -> None:
        explained = explain_plans(planned, args.strategy) if args.explain else None
        if args.json:
            said = as_json(planned, explained, asked) | ({args.emit: emitted} if args.emit else {})
            print(json.dumps(said | (more or {}), indent=1))
        elif args.emit:
            print_arguments(planned, emitted)
        else:
            print_plans(planned, explained, asked)

    return say


def list_gaps(profile: MachineProfile, splits: bool, routes: bool) -> list[str]:
    """What is wrong with the profile, and what it lacks for a plan that splits a model, or for a model with routed
    experts, and how that is priced instead."""
    gaps = [f"the profile is of a busy machine: {profile.busy}"] if profile.busy else []
    if splits and not profile.collectives:
        gaps.append("the profile has no collectives; what ranks exchange is priced as copies through host memory")
    if routes and not profile.experts:
        gaps.append("the profile has no routed experts; they are priced as matrices; pshard-profile -m times a model's")
    elif routes and not profile.in_place and profile.accelerators[0].kind != "cpu":
        gaps.append(
            "the profile has no experts that are read over the link in place; that is priced as a copy, which is "
            "faster; pshard-profile -m times a model's"
        )
    return gaps


def _find_registry(args: argparse.Namespace, model: Path, elsewhere: bool) -> Path | None:
    """Where plans are written; None for those for another machine, which no run here takes.

    Raises UserError for a place that cannot be written to, before minutes of planning.
    """
    if elsewhere and args.registry is None:
        return None
    registry = registry_path(model, args.registry)
    check_registry_place(registry)
    if registry.is_file():
        with suppress(StaleRegistry):  # its plans will give way to these
            load_registry(registry)
    return registry


def _plan_all(args: argparse.Namespace, path: Path, profile: MachineProfile, elsewhere: bool, tell: Tell) -> Planned:
    """A plan for every budget that was asked for. Raises UserError when there is none."""
    from pshard.models.attach_draft import open_drafted
    from pshard.planner.other_places import find_layer

    with open_drafted(path, find_draft_model(args, args.spec)) as model:
        for note in model.notes:
            tell(f"note: {note}")
        if args.why:
            find_layer(model.spec, args.why)  # a name that there is not is told before minutes of planning
        late = list[str]()  # where no plan is made, the error says all
        profile, workloads = see_machine(args, model, profile, elsewhere, tell, late.append)
        inputs = fingerprint_inputs(model.fingerprint_inputs(), profile)
        record = _use_record(args.routing, model) if args.routing else None
        if record is None and model.spec.config.experts is not None:
            tell(f"note: {UNRECORDED}")
        drafts = _ask_drafts(args, path, model, tell)
        why_not = _why_not_validate(args, model.spec, profile, workloads[0], elsewhere)
        if why_not:
            tell(f"note: not validated: {why_not}")
        how = How(why_not is None, record, drafts)
        made = [_plan(args, model, profile, workload, how, tell) for workload in workloads]
        if args.strategy == "ilp" and why_not is not None and record is None:
            made = _keep_fast(model.spec, profile, made)
    found = [(variant, trials) for variant, trials in made if variant is not None]
    if not found:
        raise UserError("no budget of the sweep is large enough; raise --sweep")
    for line in late:
        tell(line)
    variants, trials = zip(*found)
    replay = _replay(record) if record else None
    skipped = tuple(w.vram_mib for w, (variant, _) in zip(workloads, made) if variant is None)
    return Planned(
        model.spec, profile, inputs, workloads[0], variants, trials, replay=replay, record=record, skipped=skipped
    )


def _keep_fast(spec: "ModelSpec", profile: MachineProfile, made: list[Made]) -> list[Made]:
    """The plans of a sweep, each with the one of a smaller budget in its place where that is faster."""
    from pshard.planner.make_plan import no_slower

    kept, fastest = list[Made](), None
    for variant, trials in made:
        if variant is not None:
            variant = fastest = no_slower(spec, profile, variant, fastest)
        kept.append((variant, trials))
    return kept


def _replay(record: "RoutingRecord") -> "Replay":
    """What a record says of hit rates."""
    from pshard.routing.replay import replay_record

    return replay_record(record)


def _use_record(path: Path, model: "ModelFile") -> "RoutingRecord":
    """Plan the model by a routing record; returns it. Raises UserError for a record that cannot be used."""
    from pshard.registries.routing_file import check_routing, read_routing
    from pshard.routing.measure_popularity import measure_popularity
    from pshard.routing.order_experts import order_experts

    record = read_routing(path)
    check_routing(record, model, path)
    model.spec = order_experts(model.spec, measure_popularity(record))
    return record


def _why_not_validate(
    args: argparse.Namespace, spec: "ModelSpec", profile: MachineProfile, workload: Workload, elsewhere: bool
) -> str | None:
    """Why plans are not run before one is written ("": that was asked for); None when they are. Raises UserError when
    --validate is given but they cannot be."""
    if args.validate is False:
        return ""
    if args.strategy != "ilp":
        return "a published strategy is written as it is"
    if args.sweep and not args.validate:
        return "a sweep; --validate does it for every budget"
    from pshard.session.try_plans import why_impossible, why_not_worthwhile

    if not args.validate and (why := why_not_worthwhile(profile, spec.packed_nbytes)):
        return why
    why = "the profile is of another machine" if elsewhere else why_impossible(profile, workload)
    if why and args.validate:
        raise UserError(f"--validate is not possible: {why}; leave it out")
    return why


def _ask_drafts(args: argparse.Namespace, path: Path, model: "ModelFile", tell: Tell) -> DraftQuestion | None:
    """Which drafts are asked for; tells where an acceptance is from that was not given."""
    from pshard.registries.acceptance_file import recall_acceptance
    from pshard.speculation import ASSUMED, AUTO, LOOKUP, LOOKUP_DRAFT, LOOKUP_MTP, MTP, PROGRAMS, RECORDED

    if args.spec == NONE:
        return None
    kind = args.spec
    if kind == AUTO:
        kind = LOOKUP if model.spec.head is None else LOOKUP_DRAFT if args.draft_model else LOOKUP_MTP
    if PROGRAMS.get(kind) == MTP:
        model.of_head()  # which says why there is none
    recorded = recall_acceptance(registry_path(path, args.registry), model.fingerprint_inputs(), kind)
    asked = ask_drafts(args, kind, recorded)
    if asked.acceptance.source == ASSUMED:
        tell(
            f"note: no acceptance is recorded: {asked.acceptance} is assumed for drafts of {asked.kind}, "
            f"{SAID_OF[PROGRAMS.get(kind, LOOKUP)]}; pshard-run --record-acceptance records it, --spec-rates gives it"
        )
    if asked.acceptance.source == RECORDED:
        held = asked.acceptance
        tell(
            f"note: as recorded, {held.share:.0%} of steps have drafts, and the first, the first two, ... of these are "
            f"all accepted with chances of {held}"
        )
    return asked


SAID_OF = {
    "lookup": "as in a first turn of chat",
    "mtp": "as published of Qwen3.6-35B-A3B",
    "draft": "as published of Qwen3 with small drafters",
}


@dataclass(frozen=True)
class How:
    """How plans are made: whether the best are run, by which routing record, and which drafts they may have."""

    validates: bool
    record: "RoutingRecord | None"
    drafts: DraftQuestion | None


def _plan(
    args: argparse.Namespace, model: "ModelFile", profile: MachineProfile, workload: Workload, how: How, tell: Tell
) -> Made:
    """The variant of one budget and what was tried for it; in a sweep, None for a budget that is too small."""
    from pshard.errors import NoPlan
    from pshard.planner.choose_drafts import choose_drafts, keep_drafts
    from pshard.planner.choose_mode import plan_split
    from pshard.planner.make_plan import plan_baseline

    def plan(asked: Workload) -> Variant:
        chooses = wants_ratios(args) and not asked.tensor_split  # ratios are settled before what drafts is planned
        return plan_split(model.spec, profile, asked, chooses, args.time_limit)

    try:
        if args.strategy != "ilp":
            return plan_baseline(args.strategy, model.spec, profile, workload, record=how.record), ()
        if how.drafts is None:
            return _plan_places(args, model, profile, workload, how, tell)
        with planning_bar(f"planning {model.spec.name} with drafts"):
            chosen = choose_drafts(plan, model.spec, profile, workload, how.drafts)
        drafts = {name: getattr(chosen.workload, name) for name in ("drafting", "acceptance", "drafter_mib")}
        asked = replace(workload, **drafts)
        variant, trials = _plan_places(args, model, profile, asked, how, tell, chosen)
        assert variant is not None
        return keep_drafts(model.spec, profile, variant, chosen), trials
    except NoPlan as error:
        if args.sweep is None:
            raise name_least_ram(error, model.spec, profile, workload) from None
        tell(f"skipped: {error}")
        return None, ()


def _plan_places(
    args: argparse.Namespace,
    model: "ModelFile",
    profile: MachineProfile,
    workload: Workload,
    how: How,
    tell: Tell,
    settled: Variant | None = None,
) -> Made:
    """The variant of a workload by the program, and what was tried for it. settled: what it was planned as already."""
    from pshard.planner.choose_mode import alone_on, plan_split
    from pshard.planner.routing.plan_slots import plan_slots, why_no_slots
    from pshard.planner.shown.machine_words import words_for
    from pshard.routing.play_record import keep_last
    from pshard.session.try_plans import SPLIT, choose_by_trial

    words = words_for(profile)

    def say(line: str) -> None:
        tell(f"note: {words.say(line)}")

    def try_on_one(asked: Workload) -> tuple[Variant, tuple[Trial, ...]]:
        played = keep_last(record) if record else None
        return choose_by_trial(model, profile, asked, args.time_limit, args.validate_seconds, say, played)

    validate, record = how.validates, how.record
    if validate and args.split_mode != "auto":
        return try_on_one(workload)
    if settled is None:
        with planning_bar(f"planning {model.spec.name}"):
            settled = plan_split(model.spec, profile, workload, wants_ratios(args), args.time_limit)
    if validate and len(settled.ranks) == 1:
        chosen, trials = try_on_one(alone_on(workload, settled.workload.device))
        return replace(chosen, considered=settled.considered), trials
    if validate:
        say(f"not validated: {SPLIT}")
    asked = replace(settled.workload, max_ubatch=workload.max_ubatch)
    if record and (why := why_no_slots(settled)):
        say(why)
    with planning_bar(f"planning {model.spec.name} with slots"):
        return plan_slots(model.spec, profile, asked, settled, record, args.time_limit), ()


def _write_lp(file: Path, spec: "ModelSpec", profile: "MachineProfile", workload: Workload, variant: "Variant") -> None:
    from pshard.planner.write_lp import lp_of_plan

    try:
        write_text_atomically(file, lp_of_plan(spec, profile, workload, variant.correction))
    except OSError as error:
        raise UserError(f"--write-lp: cannot write {file}: {error.strerror}; choose another place") from None


def _other_machine(profile: MachineProfile) -> list[str]:
    """What of the profile differs from this machine, as far as it shows without torch."""
    found = []
    cpu = _cpu_name()
    if cpu and re.sub(r"\s+", " ", profile.host.cpu) != cpu:
        found.append(f"CPU {profile.host.cpu}, here {cpu}")
    elif profile.host.threads > (os.cpu_count() or 1):
        found.append(f"{profile.host.threads} threads, here {os.cpu_count()} cores")
    return found


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return re.sub(r"\s+", " ", match[1]).strip() if match else ""


if __name__ == "__main__":
    sys.exit(main())
