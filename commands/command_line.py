"""What every command shares: one-line errors with exit code 2, sizes with suffixes, lists and ranges, model lookup."""

import argparse
import math
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pshard.commands.parsing.command_parser import CommandParser
from pshard.commands.standard_streams import flush_output, open_closed_streams, silence_failing
from pshard.errors import StepFailed, UserError, as_line
from pshard.jsonio import FULL, check_place
from pshard.paths import bundled_model
from pshard.times.running_requests import CONCURRENCY, MOST_CONCURRENCY
from pshard.workload import Limits, parse_limits

LONGEST_LIST = 1000
# memory comes in powers of two: a card of 8GB has 8192 MiB
_SUFFIX = {
    unit: mib
    for letter, mib in (("m", 1.0), ("g", 1024.0), ("k", 1 / 1024))
    for unit in (letter, f"{letter}b", f"{letter}ib")
} | {"": 1.0}
THOUSAND = 1024  # of tokens, where a context is said as 4k


def run_cli(main: Callable[[list[str]], int], argv: list[str] | None = None) -> int:
    """Run a command's main. UserError and output that cannot be written become one line on stderr and exit code 2,
    StepFailed 1, Ctrl-C 130."""
    with noted_interrupts() as interrupts:
        try:
            open_closed_streams()
            code = main(sys.argv[1:] if argv is None else argv)
            flush_output()
            return code
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except (KeyboardInterrupt, Exception) as error:
            if interrupts or isinstance(error, KeyboardInterrupt):
                print("interrupted", file=sys.stderr)
                return 130
            if isinstance(error, OSError):
                error = _blame_output(error)
            if not isinstance(error, UserError | StepFailed):
                raise
            print(f"error: {as_line(error)}", file=sys.stderr)
            return 2 if isinstance(error, UserError) else 1


def _blame_output(error: OSError) -> Exception:
    """The error as a user's, where it is that of an output stream, or of a full disk; else itself."""
    full = error.errno in FULL
    name = silence_failing() or (error.filename or "all of the output" if full else None)
    advice = "free some space" if full else "send it elsewhere"
    return error if name is None else UserError(f"cannot write {name}: {error.strerror}; {advice}")


@contextmanager
def noted_interrupts() -> Iterator[list[int]]:
    """A list that holds the signal's number once Ctrl-C was pressed.

    Libraries that are being imported swallow the KeyboardInterrupt, and fail later with whatever they then lack.
    """
    noted: list[int] = []

    def note(number: int, _: Any) -> None:
        noted.append(number)
        raise KeyboardInterrupt

    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # neither ignored nor someone else's
    if not ours or threading.current_thread() is not threading.main_thread():
        yield noted
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def new_parser(prog: str, description: str, takes_model: bool = False) -> CommandParser:
    """A parser that refuses abbreviated flags and reports errors in one line. takes_model: also as a plain word."""
    return CommandParser(prog, description, takes_model)


def parse_mib(text: str) -> int:
    """ "12000", "12000M", "11.5G" -> MiB. Raises argparse.ArgumentTypeError."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)", text.strip())
    if not match or match[2].lower() not in _SUFFIX:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size in MiB (12000, 12000M, 11.5G, 8GB)")
    mib = int(float(match[1]) * _SUFFIX[match[2].lower()])
    if mib < 1 and float(match[1]) > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is less than 1 MiB")
    return mib


def parse_ram(text: str) -> int:
    """As parse_mib, and more than nothing. Raises argparse.ArgumentTypeError."""
    mib = parse_mib(text)
    if mib < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no memory; without it all there is may be taken")
    return mib


def parse_mib_list(text: str) -> tuple[int, ...]:
    """ "12000,8000" -> one budget per device."""
    return tuple(parse_mib(part) for part in text.split(","))


def parse_count(text: str) -> int:
    """A whole number of 1 or more. Raises argparse.ArgumentTypeError."""
    if not re.fullmatch("[0-9]+", text.strip()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def parse_context(text: str) -> int:
    """Tokens of context: "4096", "4k"; "0" is as many as the model has. Raises argparse.ArgumentTypeError."""
    match = re.fullmatch("([0-9]+)([kK]?)", text.strip())
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens (4096, 4k; 0: the model's)")
    return int(match[1]) * (THOUSAND if match[2] else 1)


def settle_context(asked: int | None, longest: int | None) -> int | None:
    """Tokens of context: as many as were asked for, those of the model (`longest`) where 0 was. Raises UserError where
    the model does not say."""
    if asked == 0 and not longest:
        raise UserError("-c 0 is the model's context, and its file does not say it; give a number")
    return longest if asked == 0 else asked


def parse_concurrency(text: str) -> int:
    """A word of CONCURRENCY, or a number up to MOST_CONCURRENCY. Raises argparse.ArgumentTypeError."""
    if text.strip() in CONCURRENCY:
        return CONCURRENCY[text.strip()]
    if re.fullmatch("[0-9]{1,4}", text.strip()) and 1 <= int(text) <= MOST_CONCURRENCY:
        return int(text)
    words = ", ".join(CONCURRENCY)
    raise argparse.ArgumentTypeError(f"{text!r} is neither one of {words} nor a number from 1 to {MOST_CONCURRENCY}")


def parse_ints(text: str) -> tuple[int, ...]:
    """Lists and ranges as in llama-bench: "512", "1,4,16", "1-4" (also "1-9+2", "1-64*2"), at most LONGEST_LIST."""
    numbers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+)(?:([+*])(\d+))?)?", part.strip())
        if not match:
            raise argparse.ArgumentTypeError(f"{part!r} is not a number or range (4, 1-4, 1-9+2, 1-64*2)")
        first, last = int(match[1]), int(match[2] or match[1])
        op, step = match[3] or "+", int(match[4] or 1)
        if (op == "+" and step < 1) or (op == "*" and (step < 2 or first < 1)):
            raise argparse.ArgumentTypeError(f"{part!r} never reaches its end")
        if first > last:
            raise argparse.ArgumentTypeError(f"{part!r} ends before it begins")
        while first <= last:
            if len(numbers) == LONGEST_LIST:
                raise argparse.ArgumentTypeError(f"{text!r} lists more than {LONGEST_LIST} numbers")
            numbers.append(first)
            first = first + step if op == "+" else first * step
    return tuple(numbers)


def parse_counts(text: str) -> tuple[int, ...]:
    """As parse_ints, and every number is 1 or more."""
    if 0 in (numbers := parse_ints(text)):
        raise argparse.ArgumentTypeError(f"{text!r} has a 0; each is 1 or more")
    return numbers


def parse_ratios(text: str) -> tuple[float, ...]:
    """ "3,1" or "3/1" -> (0.75, 0.25). Raises argparse.ArgumentTypeError."""
    try:
        numbers = [float(part) for part in re.split("[,/]", text)]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of ratios (3,1)") from None
    if any(n < 0 for n in numbers) or not 0 < sum(numbers) < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: ratios are 0 or more, and one is above 0")
    return tuple(n / sum(numbers) for n in numbers)


def parse_split(text: str) -> tuple[float, ...] | str:
    """Ratios as `parse_ratios` reads them, or "auto"."""
    return text if text == "auto" else parse_ratios(text)


def parse_max_tp(text: str) -> Limits:
    """ "attn=2,head=1". Raises argparse.ArgumentTypeError."""
    try:
        return parse_limits(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def check_writable(path: Path, flag: str, needs_folder: bool = False) -> None:
    """Complain before minutes of measuring, not after them. Raises UserError when no file can be written there, or its
    folder is missing and will not be made."""
    if needs_folder and not path.absolute().parent.is_dir():
        raise UserError(f"{flag}: there is no folder {path.parent}; make it first")
    if path.is_dir():
        raise UserError(f"{flag} {path}: is a folder; give a file name")
    if path.exists() and not path.is_file():
        raise UserError(f"{flag} {path}: is not a regular file; give a file name")
    try:
        check_place(path)
    except OSError as error:
        advice = "free some space" if error.errno in FULL else "choose another place"
        raise UserError(f"{flag} {path}: cannot be written: {error.strerror}; {advice}") from None


def env_default(name: str, convert: Callable, fallback):
    """Value of PSHARD_<name> converted, else the fallback. The command line wins over both."""
    text = os.environ.get(f"PSHARD_{name}")
    if text is None:
        return fallback
    try:
        return convert(text)
    except (argparse.ArgumentTypeError, ValueError) as error:
        raise UserError(f"environment variable PSHARD_{name}: {error}; correct or unset it") from None


def find_model(given: str | None) -> Path:
    """The model that was asked for: the flag, PSHARD_MODEL, or the bundled demo (and says so on stderr).

    One of the Hub is fetched first where it is not here. Raises UserError as `resolve_model`.
    """
    from pshard.session.find_model import resolve_model

    if given:
        return resolve_model(given)
    if os.environ.get("PSHARD_MODEL"):
        path = resolve_model(os.environ["PSHARD_MODEL"])
        _say(f"model: {path} (from PSHARD_MODEL)")
        return path
    bundled = bundled_model()
    if bundled is None:
        raise UserError("no model given and the bundled one is not installed; give one, or set PSHARD_MODEL")
    _say(f"model: {bundled} (the bundled demo; choose another with -m)")
    return bundled


def _say(line: str) -> None:
    """A line on stderr, once when several ranks run the same command."""
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr)
