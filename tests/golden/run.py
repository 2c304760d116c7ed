"""Compares golden plans or logits with stored ones: see scripts/golden."""

import argparse
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

MOST_LINES = 40
STORED = Path(__file__).with_name("plans.json")


def main(argv: list[str] | None = None) -> int:
    """Returns 1 when something differs, 2 for names of cases that there are not."""
    parser = argparse.ArgumentParser(prog="scripts/golden", allow_abbrev=False)
    parser.add_argument("names", nargs="*", help='cases (default: all), or "logits FILE"')
    parser.add_argument("--accept", action="store_true", help="store what is found now")
    parser.add_argument("--device", default="cpu", help="of logits: cpu or cuda")
    args = parser.parse_args(argv)
    if args.names[:1] == ["logits"] and len(args.names) == 2:
        from golden.logits import digest_logits

        place = Path(args.names[1])
        found = digest_logits(args.device)
        return _compare(_read(place), found, place, args.accept or not place.exists())
    from golden.cases import CASES

    wanted = [case.name for case in CASES if not args.names or case.name in args.names]
    if unknown := set(args.names) - set(wanted):
        print(f"no case is called {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        found = dict(zip(wanted, pool.map(_digest_named, wanted)))
    stored = _read(STORED)
    if not args.names:
        return _compare(stored, found, STORED, args.accept)
    return _compare({n: stored[n] for n in wanted if n in stored} if not args.accept else stored, stored | found
                    if args.accept else found, STORED, args.accept)  # fmt: skip


def _digest_named(name: str) -> dict[str, Any]:
    from golden.cases import CASES
    from golden.digests import digest_case

    return digest_case(next(case for case in CASES if case.name == name))


def _read(place: Path) -> dict[str, Any]:
    return json.loads(place.read_text(encoding="utf-8")) if place.exists() else {}


def _compare(stored: dict[str, Any], found: dict[str, Any], place: Path, accept: bool) -> int:
    from golden.digests import find_differences

    found = json.loads(json.dumps(found))
    lines = list(find_differences(stored, found))
    for line in lines[:MOST_LINES]:
        print(line)
    if len(lines) > MOST_LINES:
        print(f"... and {len(lines) - MOST_LINES} more")
    if accept:
        place.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"{len(found)} cases, {len(lines)} differences{', stored' if accept else ''}")
    return int(bool(lines) and not accept)


if __name__ == "__main__":
    sys.exit(main())
