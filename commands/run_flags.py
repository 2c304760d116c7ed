"""Flags that pshard-run and pshard-bench share, and the request they make."""

import argparse
from pathlib import Path
from typing import Any

from pshard.commands.command_line import (
    env_default,
    parse_context,
    parse_count,
    parse_mib_list,
    parse_ram,
    settle_context,
)
from pshard.commands.parsing.card_flags import add_card_flag
from pshard.commands.parsing.draft_flags import find_draft_model
from pshard.commands.parsing.math_flags import add_math_flag
from pshard.commands.parsing.model_flags import add_cache_flag, add_model_flags, choose_model
from pshard.commands.parsing.spec_flags import read_spec_flags
from pshard.commands.split_flags import add_split_flags, check_split_flags, count_nodes, given_ratios, wants_ratios
from pshard.registries.profile_store import load_profile
from pshard.session.readiness.unsaved import is_unsaved
from pshard.session.run_request import RunRequest, places_of
from pshard.session.start_engine import KERNELS
from pshard.speculation import NONE
from pshard.units.kv_cells import KV_TYPES


def add_plan_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that say which model and which plan."""
    group = parser.add_argument_group("model and plan")
    add_model_flags(group)
    group.add_argument(
        "--vram",
        "-mva",
        "--max-vram-alloc",
        type=parse_mib_list,
        default=env_default("VRAM", parse_mib_list, None),
        metavar="MIB",
        help="VRAM budget in MiB (12000, 11.5G), one per device; the largest planned variant that fits is used",
    )
    group.add_argument(
        "--ram",
        type=parse_ram,
        default=env_default("RAM", parse_ram, 0),
        metavar="MIB",
        help="host memory for all that runs, in MiB (6G); the rest of the model stays on disk (default: all there is)",
    )
    add_cache_flag(group, "written once there, where a run reads weights from disk")
    context = env_default("CTX_SIZE", parse_context, None)
    group.add_argument(
        "-c", "--ctx-size", type=parse_context, default=context, metavar="N",
        help="cells of the KV cache (4096, 4k; 0: the model's context)",
    )  # fmt: skip
    group.add_argument(
        "-ctk", "--cache-type-k", choices=KV_TYPES, default="bf16", help="type of the keys' cache (bf16)"
    )
    group.add_argument(
        "-ctv", "--cache-type-v", choices=KV_TYPES, default="bf16", help="type of the values' cache (bf16)"
    )
    add_split_flags(group, otherwise="those of the plan that fits")
    add_math_flag(group)
    group.add_argument("--registry", type=Path, help="plan registry (default: beside the model, else the cache)")
    group.add_argument("--profile", type=Path, help="machine profile (default: this machine's, in the cache)")
    add_card_flag(group)
    group.add_argument("--kernels", choices=KERNELS, default="fast", help="plain: torch in float32, slow")
    group.add_argument("--replan", action="store_true", help="plan again before running")


def add_batch_flags(group: Any) -> None:
    """Flags that say how many tokens are computed at once, as llama.cpp has them."""
    group.add_argument("-ub", "--ubatch-size", type=parse_count, metavar="N", help="largest micro-batch (plan's: 4096)")
    group.add_argument("-b", "--batch-size", type=parse_count, metavar="N", help="the same; the smaller one counts")


def make_request(args: argparse.Namespace, sequences: int | None = None, plans: bool = False) -> RunRequest:
    """The request that the flags make. plans: a plan that is missing is made. Raises UserError for flags that do not go
    together."""
    sizes = [n for n in (getattr(args, "ubatch_size", None), getattr(args, "batch_size", None)) if n]
    check_split_flags(args)
    model = choose_model(args)
    if args.ctx_size == 0:
        args.ctx_size = settle_context(0, _read_context(model))
    drafts = read_spec_flags(args).kind if "spec" in args else NONE
    return RunRequest(
        model=model,
        vram_mib=args.vram,
        ram_mib=args.ram,
        disk_cache=args.disk_cache,
        prompt_math=args.prompt_math,
        context=args.ctx_size,
        sequences=sequences,
        type_k=args.cache_type_k,
        type_v=args.cache_type_v,
        split_mode=args.split_mode,
        tensor_split=given_ratios(args),
        registry=args.registry,
        profile=args.profile,
        replan=args.replan,
        max_tp=args.max_tp,
        auto_ratios=wants_ratios(args),
        reduce_dtype=args.reduce_dtype,
        ubatch=min(sizes, default=None),
        plans=plans,
        drafts=drafts,
        draft_model=find_draft_model(args, drafts) if "spec" in args else None,
        devices=count_nodes(args, load_profile(args.profile)) if args.numa else None,
    )


def _read_context(model: Path) -> int | None:
    """The context that a model was made for."""
    from pshard.models import open_model

    with open_model(model) as file:
        return file.spec.config.context


def planned_flags(argv: list[str], request: RunRequest) -> list[str]:
    """The command line for ranks, once their plan is made: each would make it again, and might make another. They find
    what could not be kept where the request says."""
    unsaved = [(f, place) for f, place in places_of(request) if is_unsaved(place)]
    return [word for word in argv if word != "--replan"] + [f"{flag}={place}" for flag, place in unsaved]
