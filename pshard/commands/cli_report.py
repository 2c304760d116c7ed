"""pshard-report: bench, plan and profile JSON to figures and one self-contained HTML page."""

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from pshard.commands.command_line import new_parser, run_cli

if TYPE_CHECKING:
    from pshard.reports.inputs import ReportInputs
    from pshard.routing.expert_map import ExpertMap
    from pshard.times.measurement import Timeline


def main(argv: list[str] | None = None) -> int:
    """Entry point of the command."""
    return run_cli(make_report, argv)


def make_report(argv: list[str]) -> int:
    """Read the files, write the report, print what was written (the page first)."""
    args = make_parser().parse_args(argv)

    from dataclasses import replace
    from datetime import UTC, datetime

    from pshard import __version__
    from pshard.reports.inputs import read_inputs
    from pshard.reports.write import write_report

    inputs = read_inputs(args.files)
    if args.model:
        timelines, experts = _ask_model(inputs, args)
        known = dict.fromkeys((*inputs.experts, *experts))  # a plan's JSON has them too
        inputs = replace(inputs, timelines=(*inputs.timelines, *timelines), experts=tuple(known))
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    for path in write_report(inputs, args.output, f"Made {made} by pshard-report {__version__}"):
        print(path)
    return 0


def make_parser() -> ArgumentParser:
    """The flags of pshard-report."""
    parser = new_parser("pshard-report", "Figures (PNG, SVG) and one HTML page from measurements, plans and profiles.")
    parser.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="JSON of pshard-bench (of a server too), pshard-plan --json or pshard-profile, or a plan registry",
    )
    parser.add_argument("-o", "--output", type=Path, default=Path("report"), help="folder (default: %(default)s)")
    parser.add_argument(
        "-m", "--model", type=Path, help="the plans' model: adds simulated timelines, and where experts lie"
    )
    parser.add_argument("--profile", type=Path, help="profile for -m (default: the FILEs', else this machine's)")
    return parser


def _ask_model(inputs: "ReportInputs", args: Namespace) -> "tuple[list[Timeline], list[ExpertMap]]":
    """Timelines of the decode tier and the largest tier of every plan, on rank 0, and where routed experts lie; where a
    registry has plans that were made by the profile, of these."""
    from pshard.errors import UserError
    from pshard.models import open_model
    from pshard.planner.explain import simulate_timelines
    from pshard.registries.fingerprint import profile_input
    from pshard.registries.profile_store import load_profile
    from pshard.routing.expert_map import map_experts

    profile = inputs.profiles[0] if inputs.profiles and not args.profile else load_profile(args.profile)
    with open_model(args.model) as model:
        spec = model.spec
    units = {unit.name for unit in spec.units}
    own = {v for plans in inputs.sets if profile_input(profile) in plans.inputs for v in plans.variants}
    chosen: list[Timeline] = []
    experts: list[ExpertMap] = []
    for v in (v for _, v in inputs.plans if v in own or not own):
        rank = v.ranks[0]
        other = f"{args.model} is not the model that was planned; pass the plans' own model with -m"
        if {place.unit for each in v.ranks for place in each.tiers[0].placements} != units:
            raise UserError(other)
        try:
            timelines = simulate_timelines(spec, profile, v)
        except ValueError:  # names of units agree, and not the number of experts
            raise UserError(other) from None
        decode = rank.tiers.index(rank.covering(v.workload.sequences))
        chosen += [timelines[i] for i in dict.fromkeys((decode, len(timelines) - 1))]
        experts += map_experts(spec, v)
    return chosen, experts


if __name__ == "__main__":
    sys.exit(main())
