"""pshard pull: fetch a model of the Hub."""

import sys
from argparse import ArgumentParser

from pshard.commands.command_line import new_parser, run_cli
from pshard.errors import UserError


def main(argv: list[str] | None = None) -> int:
    """Entry point of the command; returns the exit code."""
    return run_cli(_main, argv)


def make_parser() -> ArgumentParser:
    """The flags of pshard pull."""
    about = "Fetch a model of the Hub into its cache, where it is not there yet, and print where it lies."
    parser = new_parser("pshard-pull", about)
    parser.usage = f"{parser.prog} REPO[:QUANT] [flags]"
    parser.add_argument("reference", metavar="REPO[:QUANT]", help="as org/repo:Q4_K_M; pshard plan REPO compares them")
    return parser


def _main(argv: list[str]) -> int:
    reference = make_parser().parse_args(argv).reference

    from pshard.hub.fetch_model import fetch_model
    from pshard.hub.reference import parse_reference

    named = parse_reference(reference)
    if named is None:
        raise UserError(f"{reference} is no repository of the Hub; name one as org/repo or org/repo:Q4_K_M")
    print(fetch_model(named))
    return 0


if __name__ == "__main__":
    sys.exit(main())
