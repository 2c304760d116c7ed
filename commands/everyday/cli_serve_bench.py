"""pshard bench --serve URL: what clients of an OpenAI server see under load, of ours or of any other."""

import argparse
import math
import os
import shlex
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pshard.commands.command_line import check_writable, new_parser, parse_count, parse_counts
from pshard.errors import UserError

if TYPE_CHECKING:
    from pshard.session.serve_bench.arrivals import Pattern
    from pshard.session.serve_bench.run_loads import LoadSetting
    from pshard.times.server_load import LoadPoint, ServerLoad


def wants_server(argv: list[str]) -> bool:
    """Whether words for pshard-bench are about a server."""
    return any(word.split("=")[0] == "--serve" for word in argv)


def make_parser() -> ArgumentParser:
    """The flags of pshard-bench --serve."""
    parser = new_parser("pshard-bench --serve", "Drive an OpenAI server over HTTP, and measure what its clients see.")
    server = parser.add_argument_group("the server")
    server.add_argument("--serve", metavar="URL", required=True, help="its address, such as http://127.0.0.1:8080")
    server.add_argument("--api-key", metavar="KEY", help="its key (default: PSHARD_API_KEY)")
    server.add_argument("--served-model", metavar="NAME", help="the model (default: the first that it lists)")
    server.add_argument("--api", choices=("completions", "chat"), default="completions", help="what is asked")
    server.add_argument("--name", default="", help="what tables and figures call the server (default: its address)")
    _add_load_flags(parser.add_argument_group("load"))
    _add_request_flags(parser.add_argument_group("requests"))
    out = parser.add_argument_group("results")
    out.add_argument(
        "--promise", type=_parse_promise, default={}, metavar="ttft=MS,gap=MS,end=MS",
        help="count requests that keep it: first text, every gap, the whole answer, in ms",
    )  # fmt: skip
    out.add_argument("-o", "--output", dest="form", choices=("md", "json"), default="md", help="format on stdout")
    out.add_argument("--json", dest="form", action="store_const", const="json", help="the same as -o json")
    out.add_argument("-of", "--output-file", type=Path, help="also write JSON to this file")
    out.add_argument("--figure", type=Path, metavar="FILE", help="draw first token, gap and rate over load (png, svg)")
    out.add_argument(
        "--beside", type=Path, action="append", default=[], metavar="FILE",
        help="JSON of another server's run: a part of table and figure",
    )  # fmt: skip
    return parser


def _add_load_flags(load: Any) -> None:
    load.add_argument(
        "--clients", type=parse_counts, default=(), metavar="N", help="closed loops of so many clients, as 1,4,16 (1)"
    )
    load.add_argument("--rate", type=_parse_rates, default=(), metavar="R", help="requests a second, as 0.5,1,2")
    load.add_argument("--burst", type=parse_count, default=1, metavar="N", help="of these so many at once (1)")
    load.add_argument(
        "--requests", type=parse_count, metavar="N", help="requests of each load (4 for each client, 32 at least)"
    )
    load.add_argument(
        "--seconds", type=_parse_seconds, default=3600.0, metavar="S", help="no new request after so long in a load"
    )
    load.add_argument("--warm-up", type=int, default=1, metavar="N", help="requests before each load (1)")
    load.add_argument("--timeout", type=_parse_seconds, default=600.0, metavar="S", help="of each request (600)")
    load.add_argument("--seed", type=int, default=0, help="of arrivals, lengths and prompts (0)")


def _add_request_flags(requests: Any) -> None:
    from pshard.session.serve_bench.lengths import FORMS

    requests.add_argument("-p", "--n-prompt", type=_lengths, default="512", metavar="TOKENS", help=f"prompts: {FORMS}")
    requests.add_argument("-n", "--n-gen", type=_lengths, default="128", metavar="TOKENS", help="answers, likewise")
    requests.add_argument(
        "--lengths", type=Path, metavar="FILE",
        help='JSON lines such as {"prompt": 512, "answer": 128}; a prompt may be a text',
    )  # fmt: skip
    requests.add_argument(
        "--shared-prefix", type=_parse_prefix, default="0", metavar="TOKENS[xN]",
        help="prompts begin with these tokens of their own, one of N prefixes",
    )  # fmt: skip
    requests.add_argument("--cancel", type=_parse_share, default=0.0, metavar="SHARE", help="clients that leave")
    requests.add_argument("--slow", type=_parse_share, default=0.0, metavar="SHARE", help="clients that read slowly")


def main(argv: list[str]) -> int:
    """Run what `argv` says; called by pshard-bench. Exit code 1 when no request of any load was answered whole."""
    args = make_parser().parse_args(argv)
    setting, patterns = _read_setting(args, argv), _read_patterns(args)
    others = _read_others(args.beside)

    from pshard.reports.tables.load_table import name_load
    from pshard.session.serve_bench.run_loads import run_loads

    def tell_point(point: "LoadPoint") -> None:
        print(f"{name_load(point)}: {point.requests} requests in {point.seconds:.1f} s", file=sys.stderr)

    load = run_loads(setting, patterns, lambda line: print(f"note: {line}", file=sys.stderr), tell_point)
    _write(load, others, args)
    return 0 if any(point.whole for point in load.points) else 1


def _read_setting(args: Namespace, argv: list[str]) -> "LoadSetting":
    """Raises UserError for what would come to light only after measuring."""
    from pshard.session.serve_bench.drive import Bounds
    from pshard.session.serve_bench.lengths import read_lengths
    from pshard.session.serve_bench.run_loads import LoadSetting
    from pshard.session.serve_bench.target import parse_address
    from pshard.session.serve_bench.write_prompts import Misbehaviour

    for path, flag in ((args.output_file, "-of"), (args.figure, "--figure")):
        if path is not None:
            check_writable(path, flag)
    if args.figure is not None and args.figure.suffix not in (".png", ".svg"):
        raise UserError(f"--figure {args.figure}: give a name that ends in .png or .svg")
    if args.cancel + args.slow > 1:
        raise UserError("--cancel and --slow are shares of the same requests; give 1 at most together")
    if args.warm_up < 0:
        raise UserError(f"--warm-up is {args.warm_up}; give 0 or more")
    return LoadSetting(
        parse_address(args.serve),
        name=args.name,
        key=args.api_key or os.environ.get("PSHARD_API_KEY", ""),
        model=args.served_model,
        api=args.api,
        prompts=args.n_prompt,
        answers=args.n_gen,
        lines=read_lengths(args.lengths) if args.lengths else [],
        prefix=args.shared_prefix,
        odd=Misbehaviour(args.cancel, args.slow),
        requests=args.requests,
        warm_up=args.warm_up,
        bounds=Bounds(args.seconds, args.timeout),
        promise=args.promise,
        seed=args.seed,
        command=shlex.join(["pshard-bench", *_without_key(argv)]),
    )


def _without_key(argv: list[str]) -> list[str]:
    """The words of a command that a file may keep."""
    after = {i + 1 for i, word in enumerate(argv) if word == "--api-key"}
    words = ["KEY" if i in after else word for i, word in enumerate(argv)]
    return ["--api-key=KEY" if word.startswith("--api-key=") else word for word in words]


def _read_patterns(args: Namespace) -> "list[Pattern]":
    from pshard.session.serve_bench.arrivals import Pattern

    if args.clients and args.rate:
        raise UserError("--clients and --rate are two kinds of load; give one")
    if args.rate:
        return [Pattern(rate=rate, burst=args.burst) for rate in args.rate]
    if args.burst > 1:
        raise UserError("--burst is of requests that come at a --rate; give one")
    return [Pattern(clients=n) for n in args.clients or (1,)]


def _read_others(paths: list[Path]) -> "list[ServerLoad]":
    from pshard.reports.inputs import read_inputs

    found = [load for path in paths for load in read_inputs([path]).loads]
    if len(found) < len(paths):
        raise UserError("--beside takes JSON that pshard-bench --serve wrote; give such a file")
    return found


def _write(load: "ServerLoad", others: "list[ServerLoad]", args: Namespace) -> None:
    import json

    from pshard.jsonio import to_json, write_json_atomically
    from pshard.reports.tables.load_table import format_loads

    loads = [load, *others]
    print(format_loads(loads) if args.form == "md" else json.dumps(to_json(load), indent=1) + "\n", end="")
    try:
        if args.output_file is not None:
            write_json_atomically(args.output_file, load)
        if args.figure is not None:
            _draw(load, loads, args.figure)
    except OSError as error:
        raise UserError(
            f"cannot write {error.filename or 'the results'}: {error.strerror}; choose another place"
        ) from None


def _draw(load: "ServerLoad", loads: "list[ServerLoad]", path: Path) -> None:
    """Loads of the other kind, which --beside may have brought, are not drawn: they have no axis in common."""
    import io

    from pshard.jsonio import write_bytes_atomically
    from pshard.reports.figures.server_loads import draw_loads, group_loads

    pattern, drawn = load.points[0].pattern, io.BytesIO()
    group = group_loads(loads)[pattern]
    for other in loads:
        if not any(other is load for load, _ in group):
            print(f"note: {path} is without the run of {other.date}: it had loads of another kind", file=sys.stderr)
    draw_loads(pattern, group).savefig(drawn, format=path.suffix[1:], dpi=110)
    write_bytes_atomically(path, drawn.getvalue())


def _lengths(text: str) -> Any:
    from pshard.session.serve_bench.lengths import parse_lengths

    try:
        return parse_lengths(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _parse_prefix(text: str) -> Any:
    from pshard.session.serve_bench.write_prompts import SharedPrefix

    tokens, _, variants = text.partition("x")
    try:
        prefix = SharedPrefix(int(tokens), int(variants or 1))
    except ValueError:
        prefix = SharedPrefix(-1)
    if prefix.tokens < 0 or prefix.variants < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens (4096, or 4096x8 for 8 prefixes)")
    return prefix


def _parse_rates(text: str) -> tuple[float, ...]:
    return tuple(_positive(part, f"{text!r} is no list of requests per second (0.5,1,2)") for part in text.split(","))


def _parse_seconds(text: str) -> float:
    return _positive(text, f"{text!r} is no number of seconds above 0")


def _parse_share(text: str) -> float:
    share = 0.0 if text == "0" else _positive(text, f"{text!r} is no share of 0 to 1")
    if share > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share of 0 to 1")
    return share


def _parse_promise(text: str) -> dict[str, float]:
    from pshard.session.serve_bench.sum_up import PROMISES

    wrong = f"{text!r} is no promise such as ttft=2000,gap=200 (in ms; there are {', '.join(PROMISES)})"
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, most = part.partition("=")
        if name not in PROMISES:
            raise argparse.ArgumentTypeError(wrong)
        found[name] = _positive(most, wrong)
    return found


def _positive(text: str, wrong: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(wrong)
    return number
