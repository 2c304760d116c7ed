"""pshard pack: write a model's packed file, which runs read weights on disk from."""

import sys
from argparse import ArgumentParser

from pshard.commands.command_line import new_parser, run_cli
from pshard.commands.parsing.model_flags import add_cache_flag, add_model_flags, choose_model


def main(argv: list[str] | None = None) -> int:
    """Entry point of the command; returns the exit code."""
    return run_cli(_main, argv)


def make_parser() -> ArgumentParser:
    """The flags of pshard pack."""
    about = "Write what a run reads from disk as it is computed with, and print where: reads need no packing then."
    parser = new_parser("pshard-pack", about, takes_model=True)
    add_model_flags(parser)
    add_cache_flag(parser, "where it is written")
    return parser


def _main(argv: list[str]) -> int:
    args = make_parser().parse_args(argv)
    model = choose_model(args)

    from pshard.models import open_model
    from pshard.packed_file import packed_folder
    from pshard.session.packed_models import pack_model

    with open_model(model) as file:
        print(pack_model(file, packed_folder(args.disk_cache), lambda line: print(line, file=sys.stderr)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
