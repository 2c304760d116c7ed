"""pshard-plan: decide where every unit of a model lives in every token tier, and write it to the plan registry."""

import argparse
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from pshard.commands.command_line import find_model, run_cli
from pshard.commands.plan_flags import make_workloads, parse_plan_flags
from pshard.commands.split_flags import wants_ratios
from pshard.errors import UserError
from pshard.workload import Workload


def main(argv: list[str] | None = None) -> int:
    """Entry point of the command; returns the exit code."""
    return run_cli(_run, argv)


def _run(argv: list[str]) -> int:
    args = parse_plan_flags(argv)
    from rich.console import Console

    from pshard.models import open_model
    from pshard.planner.show_plan import print_explanation, print_trials, print_variant
    from pshard.registries.fingerprint import fingerprint_inputs
    from pshard.registries.profile_store import load_profile
    from pshard.registries.store import load_registry, registry_path, save_variants

    path = find_model(args.model)
    profile = load_profile(args.profile)
    out, messages = Console(stderr=args.json), Console(stderr=True)
    other_machine = _other_machine(profile)
    for difference in other_machine:
        what = f"the profile is of another machine ({difference})"
        if args.profile is None:
            raise UserError(f"{what}; run pshard-profile, or plan for that machine with --profile")
        messages.print(f"note: {what}", highlight=False, soft_wrap=True)
    # plans for another machine would push this one's out of its registry
    registry = None if other_machine and args.registry is None else registry_path(path, args.registry)
    if registry and registry.is_file():
        load_registry(registry)  # that it cannot be written to is told before minutes of planning
    with open_model(path) as model:
        spec, inputs = model.spec, fingerprint_inputs(model.fingerprint_inputs(), profile)
        workloads = make_workloads(args, spec, profile)
        why_not = _why_not_validate(args, spec, profile, workloads[0], other_machine)
        if why_not:
            messages.print(f"note: not validated: {why_not}", highlight=False, soft_wrap=True)
        made = [_plan(args, model, profile, workload, why_not is None, messages) for workload in workloads]
    variants = [v for v, _ in made if v is not None]
    trials = [t for v, t in made if v is not None]
    if not variants:
        raise UserError("no budget of the sweep is large enough; raise --sweep")
    if args.write_lp:
        _write_lp(args.write_lp, spec, profile, workloads[0], variants[0])
    emitted = []
    if args.emit:  # refused before anything is written
        from pshard.planner.llama_cpp_arguments import llama_arguments

        units = {u.name: u for u in spec.units}
        emitted = [llama_arguments(variant, units) for variant in variants]
    if args.split_mode != "none" and not profile.collectives:
        text = "note: the profile has no collectives; what ranks exchange is priced as copies through host memory"
        messages.print(text, highlight=False, soft_wrap=True)
    saved = save_variants(registry, spec.name, inputs, variants) if registry else None
    for why in saved.notes if saved else ():
        messages.print(f"note: {why}", highlight=False, soft_wrap=True)
    gains: dict[int, tuple] = {}
    if args.explain:
        from pshard.planner.explain import explain_gains

        loads = [replace(v.workload, max_ubatch=workloads[0].max_ubatch) for v in variants]
        gains = {
            i: explain_gains(spec, profile, load, v, args.strategy)
            for i, (v, load) in enumerate(zip(variants, loads))
            if v.plan_needed
        }
    if not args.json and not args.emit:
        for i, variant in enumerate(variants):
            print_trials(trials[i], out)
            print_variant(variant, out)
            if args.explain:
                print_explanation(variant, gains.get(i, ()), out)
    if args.json:
        data = _as_json(spec, profile, workloads[0], inputs, variants, gains)
        print(json.dumps(data | ({args.emit: emitted} if args.emit else {}), indent=1))
    elif emitted:
        for variant, arguments in zip(variants, emitted):
            print(arguments if len(emitted) == 1 else f"{variant.vram_mib[0]} MiB: {arguments}")
    where = registry or "not written, as the plan is for another machine; --registry FILE keeps it"
    messages.print(f"registry: {where}", highlight=False, soft_wrap=True)
    return 0


def _why_not_validate(
    args: argparse.Namespace, spec: Any, profile: Any, workload: Workload, other_machine: list[str]
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
    why = "the profile is of another machine" if other_machine else why_impossible(profile, workload)
    if why and args.validate:
        raise UserError(f"--validate is not possible: {why}")
    return why


def _plan(
    args: argparse.Namespace, model: Any, profile: Any, workload: Workload, validate: bool, messages: Any
) -> tuple[Any, tuple]:
    """The variant of one budget and what was tried for it; in a sweep, None for a budget that is too small."""
    from pshard.errors import NoPlan
    from pshard.planner.choose_mode import alone_on, plan_split
    from pshard.planner.make_plan import plan_baseline
    from pshard.session.try_plans import SPLIT, choose_by_trial

    def say(line: str) -> None:
        messages.print(f"note: {line}", highlight=False, soft_wrap=True)

    try:
        if args.strategy != "ilp":
            return plan_baseline(args.strategy, model.spec, profile, workload), ()
        if validate and args.split_mode != "auto":
            return choose_by_trial(model, profile, workload, args.time_limit, args.validate_seconds, say)
        settled = plan_split(model.spec, profile, workload, wants_ratios(args), args.time_limit)
        if validate and len(settled.ranks) == 1:
            one = alone_on(workload, settled.device)
            chosen, trials = choose_by_trial(model, profile, one, args.time_limit, args.validate_seconds, say)
            return replace(chosen, considered=settled.considered), trials
        if validate:
            say(f"not validated: {SPLIT}")
        return settled, ()
    except NoPlan as error:
        if args.sweep is None:
            raise
        messages.print(f"skipped: {error}", highlight=False, soft_wrap=True)
        return None, ()


def _write_lp(file: Path, spec: Any, profile: Any, workload: Workload, variant: Any) -> None:
    from pshard.planner.write_lp import lp_of_plan

    try:
        file.write_text(lp_of_plan(spec, profile, workload, variant.correction), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--write-lp: cannot write {file}: {error.strerror}") from None


def _other_machine(profile: Any) -> list[str]:
    """What of the profile differs from this machine, as far as it shows without torch."""
    import os

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


def _as_json(spec: Any, profile: Any, workload: Workload, inputs: Any, variants: list, gains: dict) -> dict:
    """The registry of these variants, the simulated timelines of the last one, and what was explained."""
    from datetime import UTC, datetime

    from pshard.jsonio import to_json
    from pshard.plan import Registry
    from pshard.planner.explain import simulate_timelines
    from pshard.registries.fingerprint import digest

    created = datetime.now(UTC).isoformat(timespec="seconds")
    registry = Registry(digest(inputs), tuple(inputs), spec.name, created, tuple(variants))
    last = variants[-1]
    return {
        "registry": to_json(registry),
        "timelines": to_json(simulate_timelines(spec, profile, last)),
        "gains": to_json([{"vram_mib": variants[i].vram_mib, "what_if": g} for i, g in gains.items()]),
    }


if __name__ == "__main__":
    sys.exit(main())
