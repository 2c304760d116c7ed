"""-sm, -ts, --max-tp and --numa: how a model is spread over devices, said the same way to every command."""

import argparse
from typing import Any

from pshard.collectives import REDUCE_DTYPES
from pshard.commands.command_line import parse_max_tp, parse_split
from pshard.errors import UserError
from pshard.machine import MachineProfile
from pshard.workload import SPLIT_MODES


def add_split_flags(parser: Any, otherwise: str, reduce_dtype: str | None = None) -> None:
    """Add the flags to a parser or a group of one. otherwise: whose ratios and limits are taken when none are given.

    reduce_dtype: the type of sums then; None: the plan's.
    """
    parser.add_argument(
        "-sm", "--split-mode", choices=(*SPLIT_MODES, "auto"), default="none",
        help="split over devices; auto: one device, layer or tensor, as is predicted to be the fastest",
    )  # fmt: skip
    parser.add_argument(
        "-ts", "--tensor-split", type=parse_split, default=(), metavar="R,R",
        help=f"ratios of the split (3,1; default: {otherwise}), or auto: those predicted to be the fastest",
    )  # fmt: skip
    parser.add_argument(
        "--max-tp", type=parse_max_tp, default=(), metavar="UNIT=K[,UNIT=K]",
        help="cut a kind of unit (attn, ffn, experts, shared, head) over K ranks at most (default: all; -ts auto also "
        "chooses these)",
    )  # fmt: skip
    parser.add_argument(
        "--numa", action="store_true",
        help="a CPU rank for each NUMA node, on its cores and memory; one --vram is for each (implies -sm tensor)",
    )  # fmt: skip
    default = reduce_dtype or "that of the plan"
    parser.add_argument(
        "--reduce-dtype", choices=REDUCE_DTYPES, default=reduce_dtype,
        help=f"type of ranks' parts as they are summed; auto: bf16 for prompts between GPUs, else f32 ({default})",
    )  # fmt: skip


def check_split_flags(args: argparse.Namespace) -> None:
    """Give --numa its split mode; raise UserError for those flags, or a --vram, that do not go together."""
    if args.numa and args.split_mode == "none":
        args.split_mode = "tensor"
    budgets, ratios = len(args.vram or ()), given_ratios(args)
    if args.tensor_split and args.split_mode == "none":
        raise UserError("-ts needs -sm tensor or layer")
    if args.max_tp and args.split_mode not in ("tensor", "auto"):
        raise UserError("--max-tp needs -sm tensor")
    if budgets > 1 and args.split_mode == "none":
        raise UserError(f"{budgets} budgets for one device; add -sm tensor or layer to split the model over {budgets}")
    if ratios and budgets > 1 and len(ratios) != budgets:
        raise UserError(f"-ts has {len(ratios)} ratios and --vram {budgets} budgets; give one each")


def given_ratios(args: argparse.Namespace) -> tuple[float, ...]:
    """The ratios that were given as numbers; none with "auto"."""
    return () if args.tensor_split == "auto" else args.tensor_split


def wants_ratios(args: argparse.Namespace) -> bool:
    """Whether the planner is to choose ratios: it was asked to, or it chooses the mode and none are given."""
    return args.tensor_split == "auto" or (args.split_mode == "auto" and not args.tensor_split)


def count_nodes(args: argparse.Namespace, profile: MachineProfile) -> int:
    """NUMA nodes of the profiled host, each of which gets a rank with --numa. Raises UserError when ranks are GPUs, or
    --vram or -ts are for another number of ranks."""
    if profile.accelerators[0].kind != "cpu":
        raise UserError("--numa is for ranks on CPUs; ranks on GPUs take the cores and memory of their nodes anyway")
    nodes = profile.host.numa_nodes
    for flag, given in (("--vram", len(args.vram or ())), ("-ts", len(given_ratios(args)))):
        if given > 1 and given != nodes:
            raise UserError(
                f"--numa: {flag} is for {given} ranks, the host has {nodes} NUMA node{'s' * (nodes > 1)}; give {nodes}"
            )
    return nodes
