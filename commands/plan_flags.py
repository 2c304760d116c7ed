"""Flags of pshard-plan, and the workloads that they ask for."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pshard.commands.command_line import (
    check_writable,
    env_default,
    new_parser,
    parse_concurrency,
    parse_context,
    parse_count,
    parse_mib,
    parse_mib_list,
    parse_ram,
    settle_context,
)
from pshard.commands.parsing.card_flags import add_card_flag
from pshard.commands.parsing.draft_flags import add_draft_flags, read_draft_flags
from pshard.commands.parsing.math_flags import add_math_flag
from pshard.commands.parsing.model_flags import add_cache_flag, add_model_flags
from pshard.commands.split_flags import (
    add_split_flags,
    check_split_flags,
    count_nodes,
    given_ratios,
    wants_ratios,
)
from pshard.errors import UserError
from pshard.machine import MachineProfile
from pshard.planner.llama_cpp_arguments import PROGRAMS, check_emit
from pshard.planner.serving.size_load import LoadSizes, check_cells, size_load
from pshard.session.run_request import check_budgets, count_devices, suggest_budget
from pshard.session.this_machine import doubt_free_memory, free_by_driver
from pshard.times.running_requests import CONCURRENCY
from pshard.units.kv_cells import KV_TYPES
from pshard.workload import MIB, UNLIMITED_MIB, Workload, binding_limits, usual_ubatch

if TYPE_CHECKING:
    from pshard.model import ModelSpec


def make_parser() -> argparse.ArgumentParser:
    """The flags of pshard-plan."""
    p = new_parser("pshard-plan", "Plan where every unit of a model lives, and write the plan registry.", True)
    add_model_flags(p)
    p.add_argument(
        "--vram", "-mva", "--max-vram-alloc", dest="vram", type=parse_mib_list, metavar="MIB[,MIB...]",
        help="VRAM budget in MiB, one per device (12000, 11.5G; default: what is free less a margin)",
    )  # fmt: skip
    p.add_argument(
        "--ram", type=parse_ram, metavar="MIB",
        help="host memory for all that runs, in MiB (6G); the rest of the model stays on disk (default: all there is)",
    )  # fmt: skip
    add_cache_flag(p, "used where there is one")
    p.add_argument(
        "-c", "--ctx-size", type=parse_context, metavar="N",
        help="KV cells of all sequences (8192); 0: the model's context",
    )  # fmt: skip
    p.add_argument("-np", "--parallel", type=parse_count, metavar="N", help="sequences at once (default: 1)")
    p.add_argument(
        "-ub",
        "--ubatch-size",
        type=parse_count,
        metavar="N",
        help="largest micro-batch (default: 4096, or what holds --prompt, up to 16384)",
    )
    p.add_argument("-ctk", "--cache-type-k", choices=KV_TYPES, default=None, help="KV cache type of keys (bf16)")
    p.add_argument("-ctv", "--cache-type-v", choices=KV_TYPES, default=None, help="KV cache type of values (bf16)")
    p.add_argument(
        "--serve", action="store_true",
        help="plan for a server: requests come and go, and each number that runs at once is as often as it is likely",
    )  # fmt: skip
    p.add_argument(
        "--concurrency", type=parse_concurrency, metavar="N",
        help="with --serve: how many requests run at once on average: 1, few (4, the default), many (16), or a number",
    )  # fmt: skip
    p.add_argument("--prompt", type=parse_count, metavar="N", help="expected prompt length (4096, or half of -c)")
    p.add_argument("--generated", type=parse_count, metavar="N", help="expected answer length (default: 256)")
    add_split_flags(p, otherwise="equal", reduce_dtype=Workload.reduce_dtype)
    add_math_flag(p, Workload.prompt_math)
    p.add_argument("--profile", type=Path, metavar="FILE", help="machine profile (default: this machine's)")
    add_card_flag(p)
    p.add_argument("--registry", type=Path, metavar="PATH", help="registry to write (default: beside the model)")
    p.add_argument(
        "--routing", type=Path, metavar="FILE",
        help="a record of pshard-run --record-routing: the experts that it used most come first in VRAM",
    )  # fmt: skip
    add_draft_flags(p)
    p.add_argument("--strategy", default="ilp", metavar="NAME", help="ilp (default) or a published strategy's name")
    p.add_argument("--explain", action="store_true", help="list units, what binds, what a better machine would bring")
    p.add_argument(
        "--steps", nargs="?", type=parse_count, const=1, metavar="TIER",
        help="list the steps of the tier of so many tokens (1), with simulated times and lanes",
    )  # fmt: skip
    p.add_argument("--why", metavar="LAYER", help="what the next best place of a layer (17, output) costs")
    p.add_argument("--sweep", type=_sweep, metavar="A:B:STEP", help="plan a range of budgets (MiB) in one go")
    p.add_argument("--json", action="store_true", help="print the plan as JSON, and nothing else, on stdout")
    p.add_argument(
        "--emit", choices=PROGRAMS,
        help="print arguments that realise the decode tier's static part, for llama-cli and llama-server (llama.cpp) "
        "or for llama-bench; with --json a list beside the plan",
    )  # fmt: skip
    p.add_argument("--write-lp", type=Path, metavar="FILE", help="write the integer program too, in the LP format")
    p.add_argument(
        "--validate", action=argparse.BooleanOptionalAction, default=None,
        help="run the best few plans and keep the fastest (default: where that takes a moment on this machine)",
    )  # fmt: skip
    p.add_argument("--validate-seconds", type=_seconds, default=60.0, metavar="S", help="time for it (default: 60 s)")
    p.add_argument("--time-limit", type=_seconds, default=10.0, metavar="S", help="solver's CPU time (default: 10 s)")
    return p


def complete_plan_flags(args: argparse.Namespace) -> argparse.Namespace:
    """The flags with what the environment says. Raises UserError for those that do not go together."""
    if args.vram is None and args.sweep is None:
        args.vram = env_default("VRAM", parse_mib_list, None)
    if args.ram is None:
        args.ram = env_default("RAM", parse_ram, 0)
    if args.ctx_size is None:
        args.ctx_size = env_default("CTX_SIZE", parse_context, None)
    if args.validate is None:
        args.validate = env_default("VALIDATE", _yes_or_no, None)
    if args.validate and args.strategy != "ilp":
        raise UserError(
            "--validate and --strategy exclude each other; pshard-bench measures such a strategy: leave one out"
        )
    if args.tensor_split == "auto" and args.strategy != "ilp":
        raise UserError("-ts auto and --strategy exclude each other; give the published strategy its ratios")
    if args.split_mode == "auto" and args.strategy != "ilp":
        raise UserError("-sm auto and --strategy exclude each other; give the published strategy its split")
    if args.concurrency and not args.serve:
        raise UserError("--concurrency is the load of a server; add --serve")
    if args.serve and args.concurrency is None:
        args.concurrency = CONCURRENCY["few"]
    if args.emit:
        check_emit(args.emit, 1 + (args.split_mode in ("layer", "tensor")), args.cache_type_k, args.cache_type_v)
    if args.write_lp:
        _check_write_lp(args)
    if args.vram and args.sweep:
        raise UserError("--vram and --sweep exclude each other; give one, as a sweep lists its own budgets")
    if args.emit and (args.steps or args.why):
        raise UserError("--emit prints arguments and nothing else; leave out --steps and --why, or --emit")
    check_split_flags(args)
    read_draft_flags(args)
    return args


def _check_write_lp(args: argparse.Namespace) -> None:
    if args.split_mode != "none" or args.sweep or args.strategy != "ilp":
        raise UserError("--write-lp needs one plan for one device by the program; leave out -sm, --sweep, --strategy")
    check_writable(args.write_lp, "--write-lp", needs_folder=True)


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


def make_workloads(args: argparse.Namespace, spec: "ModelSpec", profile: MachineProfile) -> list[Workload]:
    """One workload per budget that was asked for. Raises UserError for lengths that do not fit the context, and
    for a budget above its device's memory."""
    args.ctx_size = settle_context(args.ctx_size, spec.config.context)
    sizes = _size_load(args, spec) if args.serve else _size_texts(args, spec)
    first = Workload(
        vram_mib=args.vram or _free_budgets(args, profile),
        context=sizes.context,
        sequences=sizes.sequences,
        type_k=args.cache_type_k or Workload.type_k,
        type_v=args.cache_type_v or Workload.type_v,
        max_ubatch=args.ubatch_size or usual_ubatch(sizes.prompt),
        prompt=sizes.prompt,
        generated=sizes.generated,
        split_mode=args.split_mode,
        tensor_split=given_ratios(args),
        reduce_dtype=args.reduce_dtype,
        concurrency=args.concurrency or 0,
        ram_mib=args.ram,
        prompt_math=args.prompt_math,
    )
    if first.sequences > first.max_ubatch:
        raise UserError(
            f"-ub {first.max_ubatch} is less than one token for each of -np {first.sequences} sequences; "
            f"give -ub {first.sequences} or more"
        )
    if args.numa:
        first = replace(first, vram_mib=first.vram_mib * (count_nodes(args, profile) // len(first.vram_mib)))
    elif len(first.vram_mib) == 1:
        flag = "-sm" if args.split_mode == "auto" else "-ts"
        devices = count_devices(first.tensor_split, wants_ratios(args), profile, flag)
        first = replace(first, vram_mib=first.vram_mib * devices)
    first = replace(first, max_tp=binding_limits(args.max_tp, len(first.vram_mib)))
    if args.sweep:
        budgets = [(mib,) * len(first.vram_mib) for mib in args.sweep]
        check_budgets(budgets[-1], profile, "--sweep")
        return [replace(first, vram_mib=each) for each in budgets]
    if not args.vram:
        return [suggest_budget(first, spec, profile)]
    check_budgets(first.vram_mib, profile, "--vram")
    return [first]


def _size_load(args: argparse.Namespace, spec: "ModelSpec") -> LoadSizes:
    """Sizes for a server's load. Raises UserError for those that do not go together."""
    longest = spec.config.context or None
    sizes = size_load(args.concurrency, longest, args.parallel, args.ctx_size, args.prompt, args.generated)
    if longest and sizes.context > longest * sizes.sequences:
        raise UserError(
            f"-c {sizes.context} is more than the model's context of {longest} for each of {sizes.sequences} texts; "
            "give less"
        )
    return sizes


def _size_texts(args: argparse.Namespace, spec: "ModelSpec") -> LoadSizes:
    """Sizes for texts that all run at all times. Raises UserError for lengths that do not fit the context."""
    sequences = args.parallel or Workload.sequences
    most = (spec.config.context or Workload.context) * sequences
    context = args.ctx_size or min(Workload.context, most)
    if spec.config.context and context > most:
        each = f" for each of -np {sequences} sequences" if sequences > 1 else ""
        raise UserError(f"-c {context} is more than the model's context of {spec.config.context}{each}; give less")
    check_cells(context, sequences, each=2)  # a token of a prompt and one of its answer
    share = context // sequences
    prompt = args.prompt or min(Workload.prompt, max(1, share // 2))
    generated = args.generated or min(Workload.generated, share - prompt)
    if prompt + generated > share or generated < 1:
        shared = f", shared by -np {sequences} sequences" if sequences > 1 else ""
        raise UserError(
            f"--prompt {prompt} and --generated {generated} do not fit the context of {context}{shared}; "
            f"give -c {sequences * (prompt + max(1, generated))}"
        )
    return LoadSizes(context, sequences, prompt, generated)


def _free_budgets(args: argparse.Namespace, profile: MachineProfile) -> tuple[int, ...]:
    """All memory of the profiled accelerators that is free, where that can be asked; of CPUs as much as one wants."""
    if args.sweep:
        return args.sweep[:1]
    accelerators = profile.accelerators if args.split_mode != "none" else profile.accelerators[:1]
    if accelerators[0].kind == "cpu":
        return (UNLIMITED_MIB,) * len(accelerators)
    free = {} if args.profile else free_by_driver()
    if free and (doubt := doubt_free_memory()):
        print(f"note: {doubt}", file=sys.stderr)
    return tuple(free.get(a.index, int(0.95 * a.memory_bytes)) // MIB for a in accelerators)
