"""Runs mutants and counts outcomes: see scripts/fuzz. A mutant is known by target, seed and number."""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fuzz.mutate_bytes import Mutant
from fuzz.targets import Target, make_targets

from pshard.planner.search.small import refine_units

HANGS = 20  # seconds for one mutant; most take milliseconds
KEPT = Path(__file__).resolve().parents[2] / "build" / "fuzz"


class MutantFailed(AssertionError):
    """One mutant's outcome was neither right nor an error for a user."""

    def __init__(self, target: str, seed: int, number: int, mutant: Mutant, cause: BaseException) -> None:
        how = f"scripts/fuzz {target} --seed {seed} --first {number} --mutants 1"
        super().__init__(f"{type(cause).__name__}: {str(cause)[:500]}; mutant: {mutant.what[:300]}; again by: {how}")
        self.mutant = mutant


def try_mutant(target: Target, seed: int, number: int) -> str:
    """The outcome of one mutant. Raises MutantFailed."""
    mutant = target.mutate(random.Random(f"{target.name} {seed} {number}"))
    try:
        with time_limit(HANGS):
            return target.judge(mutant)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # panics of libraries are no Exceptions
        raise MutantFailed(target.name, seed, number, mutant, error) from error


def count_outcomes(target: Target, seed: int, numbers: Iterable[int]) -> Counter[str]:
    """How often each outcome came. Raises MutantFailed at the first that must not come."""
    return Counter(try_mutant(target, seed, number) for number in numbers)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in what takes longer."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def main(argv: list[str] | None = None) -> int:
    """Returns 1 when a mutant failed; its file is kept in build/fuzz."""
    parser = argparse.ArgumentParser(prog="scripts/fuzz", allow_abbrev=False)
    parser.add_argument("targets", nargs="*", help="gguf, safetensors, ... (default: all)")
    parser.add_argument("--mutants", type=int, default=10_000, help="of each target (default 10000)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for each target at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first mutant")
    args = parser.parse_args(argv)
    os.environ["PSHARD_VALIDATE"] = "0"
    # as `shorten_searches` of the tests: how good plans are is no question here
    refine_units.MOST_UNITS = 0
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        makers = make_targets(Path(folder))
        if unknown := set(args.targets) - set(makers):
            parser.error(f"no target is called {', '.join(sorted(unknown))}; there are {', '.join(makers)}")
        for name in args.targets or makers:
            os.environ["PSHARD_CACHE"] = str(Path(folder) / name / "cache")
            failures += _run(makers[name](), args)
    return int(failures > 0)


def _run(target: Target, args: argparse.Namespace) -> int:
    start, outcomes = time.monotonic(), Counter[str]()
    for number in range(args.first, args.first + args.mutants):
        if time.monotonic() - start > args.seconds:
            break
        try:
            outcomes[try_mutant(target, args.seed, number)] += 1
        except MutantFailed as error:
            outcomes["FAILED"] += 1
            KEPT.mkdir(parents=True, exist_ok=True)
            (KEPT / f"{target.name}-{args.seed}-{number}").write_bytes(error.mutant.data)
            print(error, file=sys.stderr)
    counts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())
    print(f"{target.name}: {outcomes.total()} mutants in {time.monotonic() - start:.0f} s: {counts}", flush=True)
    return outcomes["FAILED"]


if __name__ == "__main__":
    sys.exit(main())
