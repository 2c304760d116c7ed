"""pshard models: which models there are, how large they are, and how fast their plans are predicted to be; and which
packed files, which it also deletes."""

import json
import os
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import TYPE_CHECKING

from pshard.commands.command_line import new_parser, run_cli
from pshard.commands.parsing.model_flags import add_cache_flag
from pshard.errors import UserError
from pshard.packed_file import packed_folder
from pshard.print_table import print_whole, show_size

if TYPE_CHECKING:
    from pshard.session.list_models import FoundModel, PlannedRate


def main(argv: list[str] | None = None) -> int:
    """Entry point of the command; returns the exit code."""
    return run_cli(_main, argv)


def make_parser() -> ArgumentParser:
    """The flags of pshard models."""
    parser = new_parser("pshard-models", "List models: in FOLDERs (default: here), planned before, in the Hub's cache.")
    parser.usage = f"{parser.prog} [FOLDER...] [flags]"
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="where to look, not below")
    parser.add_argument(
        "--unpack", metavar="MODEL", help="delete a model's packed file, or one by its name (all: every one)"
    )
    add_cache_flag(parser, "listed after the models")
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    return parser


def _main(argv: list[str]) -> int:
    args = make_parser().parse_args(argv)
    if args.unpack:
        return _unpack(args.unpack, packed_folder(args.disk_cache))
    for folder in args.folders:
        if not folder.is_dir():
            raise UserError(f"{folder} is no folder; give one that has models, or none for this one")
    beside = Path(os.environ.get("PSHARD_MODEL", "")).expanduser().parent  # it may name a model of the Hub
    folders = args.folders or list(dict.fromkeys((Path(), *([beside] if beside.is_dir() else []))))

    from pshard.session.list_models import find_damage, list_models, list_packed_as_found

    found = [*map(find_damage, list_models(folders)), *list_packed_as_found(packed_folder(args.disk_cache))]
    if args.json:
        from pshard.jsonio import to_json

        print(json.dumps(to_json([{**vars(model), "path": str(model.path)} for model in found]), indent=1))
        return 0
    if not found:
        print(
            "no models here, none planned before, none in the Hub's cache; name a folder that has some", file=sys.stderr
        )
        return 0
    _print(found)
    return 0


def _unpack(name: str, folder: Path) -> int:
    from pshard.session.packed_models import remove_kept

    for kept in remove_kept(name, folder):
        print(f"deleted {kept.path}: {show_size(kept.nbytes)} are free again", file=sys.stderr)
    return 0


def _print(found: "list[FoundModel]") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("model", overflow="fold")
    table.add_column("size", justify="right")
    table.add_column("plans: budget, context, predicted rate of prompts and of answers", overflow="fold")
    for model in found:
        plans = "\n".join(map(_describe_rate, model.plans)) or model.problem or "none; pshard plan makes one"
        if model.packed_of and not model.problem:
            plans = f"packed file of {model.packed_of}"
        table.add_row(model.name, show_size(model.nbytes), plans)
    print_whole(table, Console())


def _describe_rate(rate: "PlannedRate") -> str:
    budget = ",".join(map(str, rate.vram_mib))
    tried = " (was run)" if rate.measured else ""
    return f"{budget} MiB, {rate.context} tokens: {rate.prompt:.4g} and {rate.decode:.3g} tok/s{tried}"


if __name__ == "__main__":
    sys.exit(main())
