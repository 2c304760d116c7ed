"""pshard doctor: what of this machine keeps models from running, or from running fast, and what to do about it."""

import json
import sys
from argparse import ArgumentParser

from pshard.commands.command_line import new_parser, run_cli
from pshard.commands.parsing.card_flags import add_card_flag
from pshard.errors import UserError
from pshard.jsonio import to_json

SIGNS = {"ok": ("ok", "green"), "note": ("note", "yellow"), "wrong": ("WRONG", "bold red")}


def main(argv: list[str] | None = None) -> int:
    """Entry point of the command; returns the exit code."""
    return run_cli(_main, argv)


def make_parser() -> ArgumentParser:
    """The flags of pshard doctor."""
    parser = new_parser("pshard-doctor", "Check this machine; the exit code is 1 when something is wrong.")
    parser.add_argument(
        "--gpu", action="store_true",
        help="run each GPU kernel once against the plain one, and print a table to paste into an issue",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")
    add_card_flag(parser)
    return parser


def _main(argv: list[str]) -> int:
    args = make_parser().parse_args(argv)
    if args.gpu and args.json:
        raise UserError("--gpu and --json exclude each other, as the table is for people; give one")
    if args.gpu:
        return _check_gpu()
    from rich.console import Console
    from rich.text import Text

    from pshard.session.readiness.diagnose import diagnose
    from pshard.session.readiness.say_version import describe_version

    if args.json:
        every = list(diagnose())
        told = {"version": describe_version(), "wrong": any(f.state == "wrong" for f in every), "found": to_json(every)}
        print(json.dumps(told, indent=1))
        return int(told["wrong"])
    out, wrong = Console(), False
    out.print(describe_version(), highlight=False, soft_wrap=True)
    for found in diagnose():
        sign, style = SIGNS[found.state]
        wrong = wrong or found.state == "wrong"
        line = Text.assemble((f"{sign:<6}", style), f"{found.what}: {found.says}")
        out.print(line, soft_wrap=True)
        if found.remedy:
            out.print(Text(f"      -> {found.remedy}"), soft_wrap=True)
    return int(wrong)


def _check_gpu() -> int:
    """The table of kernels, as Markdown, on stdout; what begins on a terminal's stderr."""
    from rich.console import Console

    from pshard.session.readiness.try_gpu import describe_gpu, show_row, try_gpu

    failed = count = 0
    with Console(stderr=True).status("opening the GPU") as status:
        rows = try_gpu(status.update)
        print(f"{describe_gpu()}\n\n| kernel | case | off by | us | |\n|---|---|---|---|---|")
        for row in rows:
            count, failed = count + 1, failed + (not row.passed)
            print(show_row(row), flush=True)
    print(f"\n{count} cases, {failed} failed" + "; please paste this into an issue" * bool(failed))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
