"""Flags that pshard-run and pshard-bench share, and the request they make."""

import argparse
from pathlib import Path

from pshard.cli_support import env_default, find_model, parse_count, parse_max_tp, parse_mib_list, parse_split
from pshard.errors import UserError
from pshard.model import KV_TYPES
from pshard.opening import Request
from pshard.workload import SPLIT_MODES


def add_plan_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that say which model and which plan."""
    group = parser.add_argument_group("model and plan")
    group.add_argument("-m", "--model", help="GGUF file or safetensors folder (default: PSHARD_MODEL, else the demo)")
    group.add_argument(
        "--vram",
        "-mva",
        "--max-vram-alloc",
        type=parse_mib_list,
        default=env_default("VRAM", parse_mib_list, None),
        metavar="MIB",
        help="VRAM budget in MiB (12000, 11.5G), one per device; the largest planned variant that fits is used",
    )
    context = env_default("CTX_SIZE", parse_count, None)
    group.add_argument("-c", "--ctx-size", type=parse_count, default=context, metavar="N", help="cells of the KV cache")
    group.add_argument(
        "-ctk", "--cache-type-k", choices=KV_TYPES, default="bf16", help="type of the keys' cache (bf16)"
    )
    group.add_argument(
        "-ctv", "--cache-type-v", choices=KV_TYPES, default="bf16", help="type of the values' cache (bf16)"
    )
    group.add_argument(
        "-sm",
        "--split-mode",
        choices=(*SPLIT_MODES, "auto"),
        default="none",
        help="split over devices (auto: as the fastest plan that fits)",
    )
    group.add_argument(
        "-ts", "--tensor-split", type=parse_split, default=(), metavar="R,R",
        help="share of each rank, as 3,1 (auto, or not given: the ratios of the plan that fits)",
    )  # fmt: skip
    group.add_argument(
        "--max-tp", type=parse_max_tp, default=(), metavar="UNIT=K", help="a plan that cuts units so (see pshard-plan)"
    )
    group.add_argument(
        "--reduce-dtype", choices=("f32", "bf16", "f16"), default="f32",
        help="ranks' parts are rounded to this before they are summed (default f32); bf16 halves what prompts exchange",
    )  # fmt: skip
    group.add_argument("--registry", type=Path, help="plan registry (default: beside the model, else the cache)")
    group.add_argument("--profile", type=Path, help="machine profile (default: this machine's, in the cache)")
    group.add_argument("--kernels", choices=("fast", "plain"), default="fast", help="plain: torch in float32, slow")
    group.add_argument("--replan", action="store_true", help="plan again before running")


def make_request(args: argparse.Namespace, sequences: int | None = None) -> Request:
    """The request that the flags make. Raises UserError for flags that do not go together."""
    if args.split_mode == "none" and (args.tensor_split or len(args.vram or ()) > 1):
        raise UserError("-ts and several budgets split the model over devices; add -sm tensor or layer")
    if args.split_mode not in ("tensor", "auto") and args.max_tp:
        raise UserError("--max-tp limits how units are cut; add -sm tensor")
    ratios = () if args.tensor_split == "auto" else args.tensor_split
    if ratios and len(args.vram or ()) > 1 and len(ratios) != len(args.vram):
        raise UserError(f"-ts has {len(ratios)} ratios and --vram {len(args.vram)} budgets; give one each")
    return Request(
        find_model(args.model),
        args.vram,
        args.ctx_size,
        sequences,
        args.cache_type_k,
        args.cache_type_v,
        args.split_mode,
        ratios,
        args.registry,
        args.profile,
        args.kernels,
        args.replan,
        max_tp=args.max_tp,
    )
