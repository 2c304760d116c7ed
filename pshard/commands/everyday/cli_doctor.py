"""pshard doctor: what of this machine keeps models from running, or from running fast, and what to do about it."""

import sys
from argparse import ArgumentParser

from pshard.commands.command_line import new_parser, run_cli

SIGNS = {"ok": ("ok", "green"), "note": ("note", "yellow"), "wrong": ("WRONG", "bold red")}


def main(argv: list[str] | None = None) -> int:
    """Entry point of the command; returns the exit code."""
    return run_cli(_main, argv)


def make_parser() -> ArgumentParser:
    """The flags of pshard doctor."""
    return new_parser("pshard-doctor", "Check this machine; the exit code is 1 when something is wrong.")


def _main(argv: list[str]) -> int:
    make_parser().parse_args(argv)
    from rich.console import Console
    from rich.text import Text

    from pshard.commands.program.say_version import describe_version
    from pshard.session.readiness.diagnose import diagnose

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


if __name__ == "__main__":
    sys.exit(main())
