"""pshard rm: delete a model that was fetched from the Hub."""

import sys
from argparse import ArgumentParser

from pshard.commands.command_line import new_parser, run_cli
from pshard.errors import UserError
from pshard.print_table import show_size


def main(argv: list[str] | None = None) -> int:
    """Entry point of the command; returns the exit code."""
    return run_cli(_main, argv)


def make_parser() -> ArgumentParser:
    """The flags of pshard rm."""
    about = "Delete a model from the Hub's cache, with its plans; files elsewhere are left alone."
    parser = new_parser("pshard-rm", about)
    parser.usage = f"{parser.prog} NAME [flags]"
    parser.add_argument("name", metavar="NAME", help="as pshard models lists it")
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")
    return parser


def _main(argv: list[str]) -> int:
    args = make_parser().parse_args(argv)

    from pshard.session.remove_model import find_removable, remove_model

    model = find_removable(args.name)
    size = show_size(model.nbytes)
    if not args.yes:
        if not sys.stdin.isatty():
            raise UserError(f"{model.name} ({size}) is deleted only when you say so; add -y")
        if input(f"delete {model.name} ({size})? [y/N] ").strip().lower() not in ("y", "yes"):
            print("nothing is deleted", file=sys.stderr)
            return 1
    freed = remove_model(model)
    print(f"deleted {model.name}: {show_size(freed)} are free again", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
