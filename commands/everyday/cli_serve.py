"""pshard serve: a model for many at once, behind OpenAI's API."""

import argparse
import os
import socket
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pshard.commands.command_line import new_parser, parse_concurrency, parse_count, parse_mib, run_cli
from pshard.commands.parsing.sampling_flags import add_sampler_flags, make_sampling
from pshard.commands.parsing.spec_flags import add_spec_flags, read_spec_flags
from pshard.commands.parsing.text_flags import add_thinking_flag, read_thinking
from pshard.commands.run_flags import add_batch_flags, add_plan_flags, make_request
from pshard.errors import UserError, name_cause
from pshard.planner.serving.size_load import check_slots
from pshard.session.choose_drafts import PLANNED
from pshard.speculation import AUTO
from pshard.times.running_requests import CONCURRENCY, MOST_CONCURRENCY

if TYPE_CHECKING:
    from pshard.server.http.guards import Door
    from pshard.server.jobs import Service
    from pshard.server.life.how_to_run import PrefixLimits
    from pshard.server.life.late_app import PreparedApp
    from pshard.server.life.serve_model import MakeApp, ServeRequest
    from pshard.server.snapshot import ServedModel
    from pshard.session.choose_drafts import DraftAsk

LOOPBACK = ("127.0.0.1", "::1", "localhost")
PREFIX_MIB = 256  # of host memory for prefixes on their way to files


def main(argv: list[str] | None = None) -> int:
    """Entry point of the command; returns the exit code."""
    return run_cli(_main, argv)


def make_parser() -> ArgumentParser:
    """The flags of pshard serve."""
    description = "Serve a model to many at once, as OpenAI's API; profile and plan first, where that was not done."
    parser = new_parser("pshard-serve", description, takes_model=True)
    add_plan_flags(parser)
    add_batch_flags(parser)
    _add_serving_flags(parser.add_argument_group("serving"))
    _add_door_flags(parser.add_argument_group("who may ask"))
    add_sampler_flags(parser)
    add_spec_flags(parser, "as the plan says")
    return parser


def _add_serving_flags(group: Any) -> None:
    group.add_argument(
        "-np", "--parallel", type=parse_count, metavar="N", help="texts at once at most (default: as the load needs)"
    )
    group.add_argument(
        "--concurrency", type=parse_concurrency, metavar="N",
        help="how many requests run at once on average: 1, few (4, the default), many (16), or a number; the plan for "
        "the nearest load is taken",
    )  # fmt: skip
    add_thinking_flag(group)
    group.add_argument("-a", "--alias", metavar="NAME", help="the model's name for clients (default: the file's)")
    group.add_argument(
        "--max-gap", type=_milliseconds, default=1000.0, metavar="MS",
        help="milliseconds between the tokens of a text at most, where the plan's tiers allow it (default 1000)",
    )  # fmt: skip
    group.add_argument("--queue", type=_whole, default=64, metavar="N", help="requests that may wait (default 64)")
    group.add_argument(
        "--request-timeout", type=_seconds, metavar="S", help="seconds that a request may take (default: any)"
    )
    group.add_argument(
        "--drain", type=_seconds, default=30.0, metavar="S",
        help="seconds that requests have to end when the server is told to (default 30)",
    )  # fmt: skip
    group.add_argument(
        "--sleep-idle", type=_seconds, metavar="S", help="free VRAM after so many seconds without a request"
    )
    group.add_argument(
        "--prefix-cache", type=parse_mib, metavar="MIB",
        help="keep prefixes of texts in files, for later starts too, through so much host memory (with --sleep-idle "
        f"{PREFIX_MIB}, else none are kept)",
    )  # fmt: skip
    group.add_argument(
        "--prefix-files", type=parse_mib, default=8192, metavar="MIB", help="what these files may take (default 8192)"
    )
    group.add_argument(
        "--deterministic", action="store_true",
        help="steps run under one small tier, and experts stay where they are: other texts move no bit of an answer",
    )  # fmt: skip


def _add_door_flags(group: Any) -> None:
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1: this machine)")
    group.add_argument("--port", type=_port, default=8080, help="port (default 8080; 0: any that is free)")
    group.add_argument(
        "--api-key", action="append", default=[], metavar="KEY",
        help="a key that requests must have; may be given again (also: PSHARD_API_KEY)",
    )  # fmt: skip
    group.add_argument("--api-key-file", type=Path, metavar="FILE", help="keys from a file, one a line")
    group.add_argument("--no-api-key", action="store_true", help="let other machines ask without a key")
    group.add_argument(
        "--allow-host", action="append", default=[], metavar="NAME", help="a name by which clients call this server"
    )
    group.add_argument(
        "--cors-origins", action="append", default=[], metavar="ORIGIN", help="web pages that may ask; *: all"
    )


def _main(argv: list[str]) -> int:
    args = make_parser().parse_args(argv)
    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise UserError(f"serving needs {' and '.join(missing)}; run: pip install 'pshard[serve]'")
    if "RANK" in os.environ:
        raise UserError("pshard serve starts its ranks itself; run it without torchrun")
    from pshard.server.life.serve_model import serve_model

    return serve_model(read_request(args), read_app(args))


def read_request(args: Namespace) -> "ServeRequest":
    """What the flags ask for. Raises UserError for those that do not go together."""
    from pshard.server.life.how_to_run import HowToRun
    from pshard.server.life.serve_model import ServeRequest
    from pshard.server.scheduling.promises import Promises

    load = args.concurrency or min(CONCURRENCY["few"], args.parallel or MOST_CONCURRENCY)
    check_slots(args.parallel or load, load)
    run, drafts = make_request(args, plans=True), _read_drafts(args)
    wanted = AUTO if drafts.kind == PLANNED else drafts.kind
    return ServeRequest(
        run=replace(run, sequences=args.parallel, concurrency=load, drafts=wanted),
        host=args.host,
        port=args.port,
        name=args.alias,
        drain=args.drain,
        sleep_idle=args.sleep_idle,
        promises=Promises(gap=args.max_gap / 1e3, queue=args.queue, whole=args.request_timeout),
        how=HowToRun(args.kernels, args.deterministic, _read_prefixes(args), drafts),
    )


def _read_drafts(args: Namespace) -> "DraftAsk":
    """Who drafts: whoever the plan says, where no flag does."""
    ask, said = read_spec_flags(args), args.spec or args.spec_type or args.draft_model
    return ask if said else replace(ask, kind=PLANNED)


def _read_prefixes(args: Namespace) -> "PrefixLimits | None":
    """What prefixes may take in files; a server that sleeps is not to lose them."""
    from pshard.server.life.how_to_run import PrefixLimits

    memory = args.prefix_cache if args.prefix_cache is not None else PREFIX_MIB if args.sleep_idle else 0
    return PrefixLimits(memory << 20, args.prefix_files << 20) if memory else None


def read_app(args: Namespace) -> "MakeApp":
    """What makes the application over a service. Raises UserError for a server that others would reach without a
    key."""
    door, sampling = read_door(args), make_sampling(args)

    def make(service: "Service", model: "ServedModel") -> "PreparedApp":
        from pshard.server.routes.make_app import make_app  # takes seconds, while the port is open already

        served = replace(model, arguments=read_thinking(args, model.template))
        return make_app(service, served, door=door, usual=sampling)

    return make


def read_door(args: Namespace) -> "Door":
    """Who may ask. Where a key is wanted a page of another server that makes its name point here has none; without one
    the name has to be this machine's. Raises UserError for a server that others would reach without a key."""
    from pshard.server.http.guards import LOCAL_HOSTS, Door

    keys, beyond = _read_keys(args), args.host not in LOOPBACK
    if beyond and not keys and not args.no_api_key:
        raise UserError(
            f"--host {args.host} lets other machines ask; give --api-key KEY, or --no-api-key to let them without one"
        )
    names = (*LOCAL_HOSTS, *args.allow_host, *((args.host, *_own_names()) if beyond else ()))
    hosts = ("*",) if beyond and keys and not args.allow_host else tuple(name.lower() for name in names)
    return Door(keys, hosts, beyond, tuple(args.cors_origins))


def _own_names() -> tuple[str, ...]:
    """Names of this machine in its network."""
    name = socket.gethostname()
    return (name, f"{name}.local")


def _read_keys(args: Namespace) -> tuple[str, ...]:
    """Keys of the flags, the file and the environment."""
    keys = [*args.api_key, *filter(None, [os.environ.get("PSHARD_API_KEY")])]
    if args.api_key_file is not None:
        try:
            lines = args.api_key_file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            what = f"--api-key-file: cannot read {args.api_key_file}: {name_cause(error)}"
            raise UserError(f"{what}; give a text file") from None
        found = [line.strip() for line in lines if line.strip()]
        if not found:
            raise UserError(f"--api-key-file: {args.api_key_file} has no key; write one a line")
        keys += found
    if "" in keys:
        raise UserError("--api-key is empty; give some letters")
    return tuple(keys)


def _seconds(text: str) -> float:
    return _number(text, "seconds")


def _milliseconds(text: str) -> float:
    return _number(text, "milliseconds")


def _number(text: str, what: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 < number < inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of {what} above 0")
    return number


def _whole(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 0 or more")
    return int(text)


def _port(text: str) -> int:
    if (number := _whole(text)) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port; ports are 0 to 65535")
    return number


if __name__ == "__main__":
    sys.exit(main())
