"""pshard-report: bench, plan and profile JSON to figures and one self-contained HTML page."""

import sys
from pathlib import Path

from pshard.cli_support import new_parser, run_cli


def main() -> int:
    """Entry point of the command."""
    return run_cli(make_report)


def make_report(argv: list[str]) -> int:
    """Read the files, write the report, print what was written (the page first)."""
    parser = new_parser("pshard-report", "Figures (PNG, SVG) and one HTML page from measurements, plans and profiles.")
    parser.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="JSON of pshard-bench -o json|jsonl, pshard-plan --json or pshard-profile, or a plan registry",
    )
    parser.add_argument("-o", "--output", type=Path, default=Path("report"), help="folder (default: %(default)s)")
    args = parser.parse_args(argv)

    from datetime import UTC, datetime

    from pshard import __version__
    from pshard.reports.inputs import read_inputs
    from pshard.reports.write import write_report

    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    written = write_report(read_inputs(args.files), args.output, f"Made {made} by pshard-report {__version__}")
    for path in written:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
