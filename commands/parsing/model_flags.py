"""Which model: a plain word, -m, or -hf as in llama.cpp."""

import argparse
import os
from pathlib import Path
from typing import Any

from pshard.commands.command_line import env_default, find_model
from pshard.commands.parsing.list_devices import add_list_flag
from pshard.errors import UserError


def add_model_flags(group: Any) -> None:
    """Add the flags to a parser, which also takes the model as a plain word, or to a group of it."""
    group.add_argument(
        "-m", "--model", metavar="MODEL",
        help="GGUF file or safetensors folder, also as a plain word (default: PSHARD_MODEL, else the demo)",
    )  # fmt: skip
    add_list_flag(group)
    group.add_argument(
        "-hf", "--hf-repo", metavar="REPO[:QUANT]", help="a repository of the Hub, as llama.cpp names it"
    )


def add_cache_flag(group: Any, what: str) -> None:
    """The flag that says where packed files lie. what: becomes of them."""
    group.add_argument(
        "--disk-cache",
        type=Path,
        default=env_default("DISK_CACHE", Path, None),
        metavar="DIR",
        help=f"folder of packed files: {what} (default: that of pshard pack)",
    )


def choose_model(args: argparse.Namespace) -> Path:
    """The model that was named; without one PSHARD_MODEL or the bundled demo. Raises UserError for several."""
    return find_model(named_model(args))


def check_model_place(args: argparse.Namespace) -> None:
    """Raise UserError where the model that is named is no file or folder here and none of the Hub, before anything else
    that is missing is looked for."""
    from pshard.hub.reference import parse_reference
    from pshard.models.stored import check_there

    named = named_model(args) or os.environ.get("PSHARD_MODEL")
    if named and parse_reference(named) is None:
        check_there(Path(named).expanduser())


def named_model(args: argparse.Namespace) -> str | None:
    """The one model that the command line names, if any. Raises UserError for several."""
    if "RANK" in os.environ and args.model:  # who starts ranks adds -m, with the place of the same model
        return args.model
    named = [name for name in (args.reference, args.model, args.hf_repo) if name]
    if len(named) > 1:
        raise UserError(f"{named[0]} and {named[1]} are two models; give one")
    return named[0] if named else None
