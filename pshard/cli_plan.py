"""pshard-plan: decide where every unit of a model lives in every token tier, and write it to the plan registry."""

import argparse
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from pshard.cli_support import (
    env_default,
    find_model,
    new_parser,
    parse_count,
    parse_mib,
    parse_mib_list,
    run_cli,
)
from pshard.errors import UserError
from pshard.model import KV_TYPES
from pshard.split_flags import (
    add_split_flags,
    check_split_flags,
    count_devices,
    count_nodes,
    given_ratios,
    wants_ratios,
)
from pshard.workload import MIB, Workload, binding_limits


def main(argv: list[str] | None = None) -> int:
    """Entry point of the command; returns the exit code."""
    return run_cli(_run, argv)


def _parse(argv: list[str]) -> argparse.Namespace:
    p = new_parser("pshard-plan", "Plan where every unit of a model lives and computes, and write the plan registry.")
    p.add_argument("-m", "--model", metavar="MODEL", help="GGUF file or Hugging Face folder (default: PSHARD_MODEL)")
    p.add_argument(
        "--vram", "-mva", "--max-vram-alloc", dest="vram", type=parse_mib_list, metavar="MIB[,MIB...]",
        help="VRAM budget in MiB, one per device (12000, 11.5G; default: all of the accelerator's memory)",
    )  # fmt: skip
    p.add_argument("-c", "--ctx-size", type=parse_count, metavar="N", help="KV cells of all sequences (8192)")
    p.add_argument("-np", "--parallel", type=parse_count, metavar="N", help="sequences at once (default: 1)")
    p.add_argument("-ub", "--ubatch-size", type=parse_count, metavar="N", help="largest micro-batch (default: 4096)")
    p.add_argument("-ctk", "--cache-type-k", choices=KV_TYPES, default=None, help="KV cache type of keys (bf16)")
    p.add_argument("-ctv", "--cache-type-v", choices=KV_TYPES, default=None, help="KV cache type of values (bf16)")
    p.add_argument("--prompt", type=parse_count, metavar="N", help="expected prompt length (4096, or half of -c)")
    p.add_argument("--generated", type=parse_count, metavar="N", help="expected answer length (default: 256)")
    add_split_flags(p, otherwise="equal", reduce_dtype=Workload.reduce_dtype)
    p.add_argument("--profile", type=Path, metavar="FILE", help="machine profile (default: this machine's)")
    p.add_argument("--registry", type=Path, metavar="PATH", help="registry to write (default: beside the model)")
    p.add_argument("--strategy", default="ilp", metavar="NAME", help="ilp (default) or a published strategy's name")
    p.add_argument("--explain", action="store_true", help="list units, what binds, what a better machine would bring")
    p.add_argument("--sweep", type=_sweep, metavar="A:B:STEP", help="plan a range of budgets (MiB) in one go")
    p.add_argument("--json", action="store_true", help="print the plan as JSON, and nothing else, on stdout")
    p.add_argument(
        "--emit", choices=("llama.cpp",),
        help="print arguments that realise the decode tier's static part; with --json a list beside the plan",
    )  # fmt: skip
    p.add_argument(
        "--validate", action=argparse.BooleanOptionalAction, default=None,
        help="run the best few plans and keep the fastest (default: where that takes a moment on this machine)",
    )  # fmt: skip
    p.add_argument("--validate-seconds", type=_seconds, default=60.0, metavar="S", help="time for it (default: 60 s)")
    p.add_argument("--time-limit", type=_seconds, default=10.0, metavar="S", help="solver's limit (default: 10 s)")
    args = p.parse_args(argv)
    if args.vram is None and args.sweep is None:
        args.vram = env_default("VRAM", parse_mib_list, None)
    if args.ctx_size is None:
        args.ctx_size = env_default("CTX_SIZE", parse_count, None)
    if args.validate is None:
        args.validate = env_default("VALIDATE", _yes_or_no, None)
    if args.validate and args.strategy != "ilp":
        raise UserError("--validate and --strategy exclude each other; pshard-bench measures a published strategy")
    if args.tensor_split == "auto" and args.strategy != "ilp":
        raise UserError("-ts auto and --strategy exclude each other; give the published strategy its ratios")
    if args.split_mode == "auto" and args.strategy != "ilp":
        raise UserError("-sm auto and --strategy exclude each other; give the published strategy its split")
    if args.vram and args.sweep:
        raise UserError("--vram and --sweep exclude each other; a sweep lists its own budgets")
    check_split_flags(args)
    return args


def _yes_or_no(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError(f"{text!r} is neither 0 nor 1")
    return text == "1"


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds


def _sweep(text: str) -> tuple[int, ...]:
    """ "4000:24000:2000" -> budgets with both ends."""
    parts = text.split(":")
    if len(parts) != 3:
        raise argparse.ArgumentTypeError(f"{text!r} is not A:B:STEP (4000:24000:2000)")
    first, last, step = (parse_mib(part) for part in parts)
    if step < 1 or last < first or (last - first) // step > 200:
        raise argparse.ArgumentTypeError(f"{text!r} is no range of at most 200 budgets that ascends from A to B")
    return tuple(range(first, last + 1, step))


def _run(argv: list[str]) -> int:
    args = _parse(argv)
    from rich.console import Console

    from pshard.machine_store import load_profile
    from pshard.models import open_model
    from pshard.planner.host_memory import why_not_loadable
    from pshard.planner.show import print_explanation, print_trials, print_variant
    from pshard.registries.fingerprint import fingerprint_inputs
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
        workloads = _workloads(args, spec, profile)
        why_not = _why_not_validate(args, spec, profile, workloads[0], other_machine)
        if why_not:
            messages.print(f"note: not validated: {why_not}", highlight=False, soft_wrap=True)
        made = [_plan(args, model, profile, workload, why_not is None, messages) for workload in workloads]
    variants = [v for v, _ in made if v is not None]
    trials = [t for v, t in made if v is not None]
    if not variants:
        raise UserError("no budget of the sweep is large enough; raise --sweep")
    for why in filter(None, (why_not_loadable(spec, profile, v) for v in variants)):
        messages.print(f"note: {why}", highlight=False, soft_wrap=True)
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
            i: explain_gains(spec, profile, load, v)
            for i, (v, load) in enumerate(zip(variants, loads))
            if v.plan_needed
        }
    if not args.json and not args.emit:
        for i, variant in enumerate(variants):
            print_trials(trials[i], out)
            print_variant(variant, out)
            if args.explain:
                print_explanation(variant, gains.get(i, ()), out)
    emitted = []
    if args.emit:
        from pshard.planner.llama_cpp import llama_arguments

        kinds = {u.name: (u.kind, u.layer) for u in spec.units}
        emitted = [llama_arguments(variant, kinds) for variant in variants]
    if args.json:
        data = _as_json(spec, profile, workloads[0], inputs, variants, gains)
        print(json.dumps(data | ({args.emit: emitted} if args.emit else {}), indent=1))
    elif emitted:
        print("\n".join(emitted))
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
    from pshard.validating import why_impossible, why_not_worthwhile

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
    from pshard.errors import BudgetTooSmall
    from pshard.planner.modes import alone_on, plan_split
    from pshard.planner.plan import plan_baseline
    from pshard.validating import SPLIT, choose_by_trial

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
    except BudgetTooSmall as error:
        if args.sweep is None:
            raise
        messages.print(f"skipped: {error}", highlight=False, soft_wrap=True)
        return None, ()


def _workloads(args: argparse.Namespace, spec: Any, profile: Any) -> list[Workload]:
    """One workload per budget that was asked for."""
    sequences = args.parallel or Workload.sequences
    most = (spec.config.context or Workload.context) * sequences
    context = args.ctx_size or min(Workload.context, most)
    if spec.config.context and context > most:
        each = f" for each of -np {sequences} sequences" if sequences > 1 else ""
        raise UserError(f"-c {context} is more than the model's context of {spec.config.context}{each}; give less")
    share = context // sequences
    prompt = args.prompt or min(Workload.prompt, max(1, share // 2))
    generated = args.generated or min(Workload.generated, share - prompt)
    if prompt + generated > share or generated < 1:
        shared = f", shared by -np {sequences} sequences" if sequences > 1 else ""
        raise UserError(
            f"--prompt {prompt} and --generated {generated} do not fit the context of {context}{shared}; "
            f"give -c {sequences * (prompt + max(1, generated))}"
        )
    first = Workload(
        args.vram or _whole_memory(args, profile),
        context,
        sequences,
        args.cache_type_k or Workload.type_k,
        args.cache_type_v or Workload.type_v,
        args.ubatch_size or Workload.max_ubatch,
        prompt,
        generated,
        args.split_mode,
        given_ratios(args),
    )
    if first.sequences > first.max_ubatch:
        raise UserError(f"-ub {first.max_ubatch} is less than one token for each of -np {first.sequences} sequences")
    if args.numa:
        first = replace(first, vram_mib=first.vram_mib * (count_nodes(args, profile) // len(first.vram_mib)))
    elif len(first.vram_mib) == 1:
        flag = "-sm" if args.split_mode == "auto" else "-ts"
        devices = count_devices(first.tensor_split, wants_ratios(args), profile, flag)
        first = replace(first, vram_mib=first.vram_mib * devices)
    first = replace(
        first,
        max_tp=binding_limits(args.max_tp, len(first.vram_mib)),
        reduce_dtype=args.reduce_dtype,
    )
    if args.sweep:
        return [replace(first, vram_mib=(mib,) * len(first.vram_mib)) for mib in args.sweep]
    return [first]


def _whole_memory(args: argparse.Namespace, profile: Any) -> tuple[int, ...]:
    """The default budget: all memory of the profiled accelerators that is free, where that can be asked."""
    if args.sweep:
        return args.sweep[:1]
    accelerators = profile.accelerators if args.split_mode != "none" else profile.accelerators[:1]
    if not accelerators or accelerators[0].kind == "cpu":
        raise UserError("--vram is needed: the accelerator is the CPU, which has no memory of its own to fill")
    free = {} if args.profile else _free_memory()
    return tuple(free.get(a.index, int(0.95 * a.memory_bytes)) // MIB for a in accelerators)


def _free_memory() -> dict[int, int]:
    """Free bytes of each GPU, as the driver says."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = {i: pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())}
        return {i: int(pynvml.nvmlDeviceGetMemoryInfo(handle).free) for i, handle in handles.items()}
    except Exception:  # no driver: the profile's own figure stands
        return {}


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
