"""pshard-report: bench, plan and profile JSON to figures and one self-contained HTML page."""

import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from pshard.cli_support import new_parser, run_cli

if TYPE_CHECKING:
    from pshard.machine import MachineProfile
    from pshard.measurement import Timeline
    from pshard.model import ModelSpec
    from pshard.plan import TierPlan, Variant
    from pshard.reports.inputs import ReportInputs
    from pshard.steps import Step


def main() -> int:
    """Entry point of the command."""
    return run_cli(make_report)


def make_report(argv: list[str]) -> int:
    """Read the files, write the report, print what was written (the page first)."""
    args = _parse(argv)

    from dataclasses import replace
    from datetime import UTC, datetime

    from pshard import __version__
    from pshard.reports.inputs import read_inputs
    from pshard.reports.write import write_report

    inputs = read_inputs(args.files)
    if args.model:
        inputs = replace(inputs, timelines=(*inputs.timelines, *_simulate_plans(inputs, args)))
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    for path in write_report(inputs, args.output, f"Made {made} by pshard-report {__version__}"):
        print(path)
    return 0


def _parse(argv: list[str]) -> Namespace:
    parser = new_parser("pshard-report", "Figures (PNG, SVG) and one HTML page from measurements, plans and profiles.")
    parser.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="JSON of pshard-bench -o json|jsonl, pshard-plan --json or pshard-profile, or a plan registry",
    )
    parser.add_argument("-o", "--output", type=Path, default=Path("report"), help="folder (default: %(default)s)")
    parser.add_argument("-m", "--model", type=Path, help="the plans' model: adds timelines of their steps, simulated")
    parser.add_argument("--profile", type=Path, help="profile for -m (default: the FILEs', else this machine's)")
    return parser.parse_args(argv)


def _simulate_plans(inputs: "ReportInputs", args: Namespace) -> list["Timeline"]:
    """Timelines of the decode and the largest tier of every plan, on rank 0."""
    from pshard.errors import UserError
    from pshard.machine_store import load_profile
    from pshard.models.model_file import open_model

    profile = inputs.profiles[0] if inputs.profiles and not args.profile else load_profile(args.profile)
    with open_model(args.model) as model:
        spec = model.spec
    units = {unit.name for unit in spec.units}
    timelines = []
    for _, variant in inputs.plans:
        tiers = variant.ranks[0].tiers
        if {place.unit for place in tiers[0].placements} != units:
            raise UserError(f"{args.model} is not the model that was planned; pass the plans' own model with -m")
        decode = variant.ranks[0].covering(variant.sequences)
        timelines += [simulate_step(spec, profile, variant, tier) for tier in dict.fromkeys((decode, tiers[-1]))]
    return timelines


def simulate_step(spec: "ModelSpec", profile: "MachineProfile", variant: "Variant", tier: "TierPlan") -> "Timeline":
    """What rank 0 does in one expected micro-batch of a tier, by the planner's simulation of the steps it executes."""
    from pshard.measurement import Timeline, TimelineEvent
    from pshard.parallel import cut_model
    from pshard.planner.costs import Tables, tier_costs
    from pshard.planner.draft import rank_room, simulate_tier
    from pshard.planner.load import tier_loads
    from pshard.workload import Workload

    v = variant
    workload = Workload(
        v.vram_mib, v.context, v.sequences, v.type_k, v.type_v, v.max_ubatch, v.prompt, v.generated, v.split_mode
    )
    tables, ranks = Tables(profile), len(v.ranks)
    piece = cut_model(spec, v.tensor_split, 0) if ranks > 1 else spec
    room = rank_room(piece, workload, v.vram_mib[0], tables.kind, tables.act_bytes, ranks)
    loads = tier_loads(workload, tuple(t.tokens for t in v.ranks[0].tiers))
    load = next(load for load in loads if load.tokens == tier.tokens)
    result = simulate_tier(room, tier, tier_costs(piece, tables, load, workload, ranks))
    events = (TimelineEvent(e.lane, e.start, e.end, name_step(e.step)) for e in result.events)
    kind = "decode step" if load.is_decode else f"micro-batch of {load.tokens} tokens"
    rank = f", rank 0 of {ranks}" if ranks > 1 else ""
    return Timeline(f"{spec.name}: one {kind} within {v.vram_mib[0]} MiB{rank}, simulated", tuple(events))


def name_step(step: "Step") -> str:
    """Short name of a step: "3.ffn" for the unit blk.3.ffn, whether copied or computed."""
    from pshard.steps import FetchKV, Free, Handoff, WriteBack

    if isinstance(step, Handoff | Free):
        return "hand-off" if isinstance(step, Handoff) else "free"
    unit = step.unit.removeprefix("blk.")
    return f"{unit} KV" if isinstance(step, FetchKV | WriteBack) else unit


if __name__ == "__main__":
    sys.exit(main())
