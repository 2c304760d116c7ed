"""pshard ps: what servers of this machine hold, and what they do now."""

import json
import os
import sys
import urllib.error
import urllib.request
from argparse import ArgumentParser
from typing import Any
from urllib.parse import urlsplit

from pshard.commands.command_line import new_parser, run_cli
from pshard.errors import UserError

USUAL = "http://127.0.0.1:8080"
SECONDS = 5.0


def main(argv: list[str] | None = None) -> int:
    """Entry point of the command; returns the exit code."""
    return run_cli(_main, argv)


def make_parser() -> ArgumentParser:
    """The flags of pshard ps."""
    parser = new_parser("pshard-ps", f"Ask servers what they hold and do (default: {USUAL}).")
    parser.usage = f"{parser.prog} [URL...] [flags]"
    parser.add_argument("urls", nargs="*", metavar="URL", help=f"of a pshard serve, as {USUAL}")
    parser.add_argument("--api-key", metavar="KEY", default=os.environ.get("PSHARD_API_KEY"), help="the server's key")
    parser.add_argument("--json", action="store_true", help="print the same as JSON")
    return parser


def _main(argv: list[str]) -> int:
    args = make_parser().parse_args(argv)
    found = [ask_server(url, args.api_key) for url in args.urls or [USUAL]]
    if args.json:
        print(json.dumps(found, indent=1))
        return 0
    from rich.console import Console
    from rich.table import Table

    from pshard.print_table import print_whole

    table = Table(box=None, pad_edge=False)
    for heading in ("model", "state", "VRAM MiB", "context", "requests", "at"):
        table.add_column(heading, overflow="fold")
    for server in found:
        requests = f"{server['running']} of {server['slots']}"
        budget = ",".join(map(str, server["vram_mib"])) or "none"
        table.add_row(server["model"], server["state"], budget, str(server["context"]), requests, server["url"])
    print_whole(table, Console())
    return 0


def ask_server(url: str, key: str | None) -> dict[str, Any]:
    """What a server says of itself. Raises UserError where none answers."""
    if urlsplit(url).scheme not in ("http", "https"):
        raise UserError(f"{url!r} is no address of a server; give one as {USUAL}")
    props, slots = (_fetch(f"{url.rstrip('/')}/{path}", key) for path in ("props", "slots"))
    plan = props.get("plan") or {}
    return {
        "url": url,
        "model": props.get("model", ""),
        "state": props.get("state", ""),
        "vram_mib": plan.get("vram_mib", []),
        "context": plan.get("context", 0),
        "slots": props.get("total_slots", 0),
        "running": len(slots),
    }


def _fetch(url: str, key: str | None) -> Any:
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        advice = _advise(error.code)
        raise UserError(f"{url} answers {error.code}; {advice}") from None
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", error)
        raise UserError(f"no pshard serve answers at {url} ({why}); start one, or give its URL") from None


def _advise(status: int) -> str:
    words = {401: "give its key with --api-key", 403: "start it with --allow-host", 503: "it is loading: ask again"}
    return words.get(status, "give the URL of a pshard serve")


if __name__ == "__main__":
    sys.exit(main())
