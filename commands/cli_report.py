"""pshard-report: bench, plan and profile JSON to figures and one self-contained HTML page."""

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from pshard.commands.command_line import new_parser, run_cli

if TYPE_CHECKING:
    from pshard.models import ModelFile
    from pshard.reports.inputs import ReportInputs
    from pshard.routing.expert_map import ExpertMap
    from pshard.routing.hits_over_time import HitCourse
    from pshard.routing.record import RoutingRecord
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
    from pshard.errors import UserError
    from pshard.registries.routing_file import is_routing
    from pshard.reports.inputs import read_inputs
    from pshard.reports.write import write_report

    records = [path for path in args.files if is_routing(path)]
    if records and not args.model:
        raise UserError(f"{records[0]} is a routing record: give the model that made it with -m, and its registry")
    inputs = read_inputs(path for path in args.files if path not in records)
    if args.model:
        timelines, experts, courses = _ask_model(inputs, args, records)
        known = dict.fromkeys((*inputs.experts, *experts))  # a plan's JSON has them too
        sources = (*inputs.sources, *map(str, records))
        inputs = replace(
            inputs, sources=sources, timelines=(*inputs.timelines, *timelines), experts=tuple(known),
            courses=tuple(courses),
        )  # fmt: skip
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
        help="JSON of pshard-bench (of a server too), pshard-plan --json or pshard-profile, a plan registry; with -m "
        "a record of pshard-run --record-routing too",
    )
    parser.add_argument("-o", "--output", type=Path, default=Path("report"), help="folder (default: %(default)s)")
    parser.add_argument(
        "-m", "--model", type=Path, help="the plans' model: adds simulated timelines, and where experts lie"
    )
    parser.add_argument("--profile", type=Path, help="profile for -m (default: the FILEs', else this machine's)")
    return parser


def _ask_model(
    inputs: "ReportInputs", args: Namespace, records: list[Path]
) -> "tuple[list[Timeline], list[ExpertMap], list[HitCourse]]":
    """Timelines of the decode tier and the largest tier of every plan, on rank 0, and where routed experts lie; where a
    registry has plans that were made by the profile, of these. records: of runs, whose hits are followed over time."""
    from dataclasses import replace

    from pshard.errors import UserError
    from pshard.models import open_model
    from pshard.planner.explain import simulate_timelines
    from pshard.registries.fingerprint import profile_input
    from pshard.registries.profile_store import load_profile
    from pshard.routing.expert_map import map_experts
    from pshard.routing.hits_over_time import follow_hits

    profile = inputs.profiles[0] if inputs.profiles and not args.profile else load_profile(args.profile)
    with open_model(args.model) as model:
        spec, runs = model.spec, [(path, _read_record(path, model)) for path in records]
    units = {unit.name for unit in spec.units}
    own = {v for plans in inputs.sets if profile_input(profile) in plans.inputs for v in plans.variants}
    chosen: list[Timeline] = []
    experts: list[ExpertMap] = []
    courses: list[HitCourse] = []
    for v in (v for _, v in inputs.plans if v in own or not own):
        rank = v.ranks[0]
        other = f"{args.model} is not the model that was planned; pass the plans' own model with -m"
        if {place.unit for each in v.ranks for place in each.tiers[0].placements} != units:
            raise UserError(other)
        try:
            timelines = simulate_timelines(spec, replace(profile, prompt_math=v.workload.prompt_math), v)
        except ValueError:  # names of units agree, and not the number of experts
            raise UserError(other) from None
        decode = rank.tiers.index(rank.covering(v.workload.answer_rows))
        chosen += [timelines[i] for i in dict.fromkeys((decode, len(timelines) - 1))]
        experts += map_experts(spec, v)
        for path, record in runs:
            courses += follow_hits(spec, v, record, path.name)
    return chosen, experts, courses


def _read_record(path: Path, model: "ModelFile") -> "RoutingRecord":
    """A record of this model. Raises UserError."""
    from pshard.errors import UserError
    from pshard.registries.routing_file import check_routing, read_routing

    if model.spec.config.experts is None:
        raise UserError(f"the model has no routed experts; leave out {path}")
    record = read_routing(path)
    check_routing(record, model, path)
    return record


if __name__ == "__main__":
    sys.exit(main())
