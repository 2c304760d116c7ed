"""pshard-profile: measure this machine and write its profile."""

import argparse
import json
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

from pshard.commands.command_line import check_writable, env_default, new_parser, run_cli
from pshard.commands.parsing.card_flags import add_card_flag
from pshard.errors import UserError
from pshard.jsonio import to_json


def main(argv: list[str] | None = None) -> int:
    """Entry point of the command; returns the exit code."""
    return run_cli(_run, argv)


def make_parser() -> argparse.ArgumentParser:
    """The flags of pshard-profile."""
    description = "Measure this machine with the kernels that will run, for pshard-plan."
    parser = new_parser("pshard-profile", description, takes_model=True)
    parser.add_argument("--quick", action="store_true", help="a minute or two: fewer shapes, shorter timings")
    several: dict[str, Any] = {"action": "append", "default": []}
    exactly = "also time exactly this model's matrices; several: one profile for all of them"
    parser.add_argument("-m", "--model", metavar="MODEL", **several, help=exactly)
    hub = "the same of a repository of the Hub"
    parser.add_argument("-hf", "--hf-repo", metavar="REPO[:QUANT]", **several, help=hub)
    parser.add_argument(
        "-o", "--output", type=Path, metavar="PATH", help="file to write (default: in the cache folder)"
    )
    parser.add_argument(
        "-t", "--threads", type=_thread_count, metavar="N", help="CPU threads (default: the count that reads fastest)"
    )
    parser.add_argument("-dev", "--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU")
    add_card_flag(parser)
    parser.add_argument("--json", action="store_true", help="print the profile as JSON, and nothing else, on stdout")
    parser.set_defaults(threads=env_default("THREADS", _thread_count, None), device=env_default("DEVICE", str, None))
    return parser


def _thread_count(text: str) -> int:
    try:
        count = int(text)
    except ValueError:
        count = 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of threads (1 or more)")
    return count


def _run(argv: list[str]) -> int:
    args = make_parser().parse_args(argv)
    from pshard.runtime.ranks.started import started_ranks

    if started_ranks():
        return _profile_hosts(args, argv)
    models = [_model_spec(name) for name in _named_models(args)]
    if args.output is not None:
        check_writable(args.output, "-o")
    else:
        from pshard.registries.profile_store import check_profile_place

        check_profile_place()

    from rich.console import Console

    from pshard.profile.compare_profiles import compare_profiles
    from pshard.profile.effort import full_effort, join_shapes, model_shapes, quick_effort
    from pshard.profile.identify import (
        count_cores,
        default_accelerator,
        identify_accelerators,
        last_cache_bytes,
        usable_memory,
    )
    from pshard.profile.measure import ProfileRequest, measure_machine
    from pshard.profile.show_profile import print_changes, print_profile

    if args.threads is not None and args.threads > count_cores():
        raise UserError(f"-t {args.threads}: this process may use {count_cores()} cores; give at most that many")
    effort = (quick_effort if args.quick else full_effort)(last_cache_bytes(), usable_memory())
    accelerator = args.device or default_accelerator()
    devices = len(identify_accelerators(accelerator))
    request = ProfileRequest(
        accelerator=accelerator,
        effort=effort,
        model=join_shapes([model_shapes(model, devices) for model in models]) if models else None,
        threads=args.threads,
        command=shlex.join(["pshard-profile", *argv]),
    )
    previous = _previous_profile(args.output)
    messages = Console(stderr=True)
    profile = _measure_with_bar(request, measure_machine, messages)
    path = _save(profile, args.output)
    if args.json:
        print(json.dumps(to_json(profile), indent=1))
    else:
        out = Console()
        print_profile(profile, out)
        if previous is not None:
            print_changes(compare_profiles(previous, profile), previous.provenance.date, out)
    messages.print(f"profile: {path}", highlight=False, soft_wrap=True)
    return 0


def _profile_hosts(args: argparse.Namespace, argv: list[str]) -> int:
    """What each rank of several hosts runs under torchrun; rank 0 says what came of it."""
    from rich.console import Console

    from pshard.profile.show_profile import print_profile
    from pshard.session.profile_hosts import HostsRequest, profile_hosts

    if args.output is None:
        raise UserError("a profile of several hosts is a file of its own, for --profile FILE; give -o FILE")
    if _named_models(args) or args.threads:
        raise UserError("-m and -t are for the profile of one host, from which that of several is made; leave them out")
    command = shlex.join(["pshard-profile", *argv])
    profile, first = profile_hosts(HostsRequest(args.output, args.device, args.quick, command))
    if first and args.json:
        print(json.dumps(to_json(profile), indent=1))
    elif first:
        print_profile(profile, Console())
    print(f"profile: {args.output} ({platform.node()})", file=sys.stderr)
    return 0


def _named_models(args: argparse.Namespace) -> list[str]:
    return [name for name in (args.reference, *args.model, *args.hf_repo) if name]


def _model_spec(reference: str) -> Any:
    from pshard.models import open_model
    from pshard.session.find_model import resolve_model

    return open_model(resolve_model(reference)).spec


def _previous_profile(path: Path | None) -> Any:
    from pshard.registries.profile_store import load_profile

    try:
        return load_profile(path)
    except UserError:
        return None  # none yet, or one that cannot be read any more: there is nothing to compare with


def _save(profile: Any, path: Path | None) -> Path:
    from pshard.registries.profile_store import save_profile

    return save_profile(profile, path)


def _measure_with_bar(request: Any, measure: Any, console: Any) -> Any:
    """Run with a progress bar on a terminal, and without one on a pipe."""
    from pshard.profile.measure import expected_seconds

    minutes = expected_seconds(request) / 60
    if not request.effort.quick:
        console.print(f"A full profile takes about {max(1, round(minutes))} min here; --quick takes less than one.")
    if not console.is_terminal:
        return measure(request, lambda label, share: None)
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=1.0)

        def show(label: str, share: float) -> None:
            bar.update(task, description=label, completed=share)

        return measure(request, show)


if __name__ == "__main__":
    sys.exit(main())
