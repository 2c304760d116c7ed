"""What every kernel needs of every card, compiled without a GPU: see scripts/cards."""

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from cards.compile_launch import Needs, ask_compiler, assemble_launch, digest_launch, lay_out_launch

MOST_SPILLED = 64  # bytes a thread, of a kernel of decoding
KEPT = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pshard-cards" / "needs.json"
KEPT_AT_ONCE = 512  # launches: who ends a run of an hour early has most of it
ROOT = Path(__file__).resolve().parents[2]
SOURCES = (  # of kernels, tiles and launches; and which Triton
    "runtime/kernels/gpu", "runtime/kernels/api.py", "runtime/ranks/peer_memory.py", "pshard/units", "pshard/quant.py",
    "pshard/times/gpu_tiles.py", "profile/timed", "tests/cards", "constraints.txt",
)  # fmt: skip


class Part(NamedTuple):
    """What is compiled for a card: assembled or only laid out; which launches, see `launches.list_launches`."""

    capability: int
    assembled: bool
    candidates: bool
    few_rows: bool
    exchanges: bool = False


QUICK = (Part(86, False, True, False), Part(80, False, False, False), Part(90, False, False, False))
WHOLE = tuple(Part(card, True, card in (86, 90), True, True) for card in (80, 86, 89, 90, 100, 120))


@dataclass(frozen=True)
class Line:
    """A row of the table. launch: a `Launch`."""

    capability: int
    launch: Any
    needs: Needs
    limit: int
    decodes: bool

    @property
    def fault(self) -> str:
        """Why this card cannot run it as it should; empty where it can."""
        if self.needs.error:
            return self.needs.error
        if self.needs.shared > self.limit:
            return f"{self.needs.shared} bytes of shared memory, the card has {self.limit}"
        if self.decodes and self.launch.default and (self.needs.spilled or 0) > MOST_SPILLED:
            return f"spills {self.needs.spilled} bytes a thread, a kernel of decoding may spill {MOST_SPILLED}"
        return ""

    @property
    def cells(self) -> tuple[str, ...]:
        """As the table has it: kernel, of what, tile, target, shared bytes, limit, registers, spilled bytes."""
        some = ("-" if n is None else str(n) for n in (self.needs.registers, self.needs.spilled))
        tile = self.launch.tile.removeprefix("Tile").strip("()")
        kernel = self.launch.request.kernel.removesuffix("_kernel")
        target, shared = f"sm_{self.capability}", str(self.needs.shared)
        return kernel, self.launch.label, tile, target, shared, str(self.limit), *some


def list_lines(parts: Sequence[Part], processes: int) -> list[Line]:
    """Every launch of these parts with what it needs; what was found out before of the same source is not compiled."""
    kept = read_kept()
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        listed = list(zip(parts, pool.map(_list_part, parts)))
        laid_out, assembled = list[tuple[str, Any, int]](), dict[str, tuple[Any, list[tuple[str, int]]]]()
        for part, (launches, _, _) in listed:
            for key, (asked, launch) in launches.items():
                if key in kept:
                    continue
                if part.assembled:
                    assembled.setdefault(asked, (launch.request, []))[1].append((key, part.capability))
                else:
                    laid_out.append((key, launch.request, part.capability))
        for some in _in_pieces(laid_out):
            found = pool.map(lay_out_launch, *([task[i] for task in some] for i in (1, 2)), chunksize=4)
            kept |= keep({key: needs for (key, *_), needs in zip(some, found)})
        for piece in _in_pieces(list(assembled.values())):
            cards = [[card for _, card in named] for _, named in piece]
            every = pool.map(assemble_launch, [request for request, _ in piece], cards)
            kept |= keep({key: n for (_, named), needs in zip(piece, every) for (key, _), n in zip(named, needs)})
    return [
        Line(part.capability, launch, kept[key], limit, launch.request.kernel in decoding)
        for part, (launches, limit, decoding) in listed
        for key, (_, launch) in launches.items()
    ]


def _in_pieces(tasks: list[Any]) -> Iterator[list[Any]]:
    return (tasks[first : first + KEPT_AT_ONCE] for first in range(0, len(tasks), KEPT_AT_ONCE))


def read_kept() -> dict[str, Needs]:
    """What was found out before, by `digest_launch`."""
    try:
        return {key: Needs(**needs) for key, needs in json.loads(KEPT.read_text()).items()}
    except (OSError, ValueError, TypeError):
        return {}


def keep(found: dict[str, Needs]) -> dict[str, Needs]:
    """Add to what `read_kept` gives, and return it; what could not be compiled is tried again."""
    from pshard.jsonio import write_text_atomically

    KEPT.parent.mkdir(parents=True, exist_ok=True)
    new = {key: needs for key, needs in found.items() if not needs.error}
    write_text_atomically(KEPT, json.dumps({key: asdict(needs) for key, needs in (read_kept() | new).items()}))
    return found


def digest_sources() -> str:
    """Names all that launches and what they need follow from."""
    paths = [
        path for name in SOURCES for path in ([ROOT / name] if (ROOT / name).is_file() else (ROOT / name).rglob("*.py"))
    ]
    read = sha256()
    for path in sorted(paths):
        read.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return read.hexdigest()


def _list_part(part: Part) -> tuple[dict[str, tuple[str, Any]], int, set[str]]:
    """By their digests what the compiler is asked for and the launches, the card's limit, and which kernels decode: in
    a process of its own, as this imports torch."""
    from cards.launches import DECODING, list_launches

    from pshard.runtime.kernels.gpu.card_limits import KNOWN_CARDS

    card = KNOWN_CARDS[part.capability]
    brief = not part.assembled
    found = list_launches(card, part.candidates, part.few_rows, part.exchanges, brief)
    named = {
        digest_launch(launch.request, part.capability, part.assembled): (ask_compiler(launch.request), launch)
        for launch in found
    }
    return named, card.shared_block, DECODING


def print_table(lines: Iterable[Line]) -> None:
    """A row for every launch."""
    print("kernel | of | tile | target | shared | limit | registers | spilled")
    for line in lines:
        print(" | ".join(line.cells))


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 1 where something does not compile, exceeds its card or spills too much, or without Triton."""
    parser = argparse.ArgumentParser(prog="scripts/cards", description=__doc__)
    parser.add_argument(
        "--whole", action="store_true", help="assemble everything for six cards: half an hour or more on 16 cores"
    )
    parser.add_argument("--faults", action="store_true", help="print only what a card cannot run")
    parser.add_argument("--if-changed", action="store_true", help="nothing, where the same sources passed before")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="that compile at once")
    given = parser.parse_args(arguments)
    if find_spec("triton") is None:
        print("scripts/cards: Triton is not installed; scripts/setup installs it", file=sys.stderr)
        return 1
    passed = KEPT.with_name("passed-whole" if given.whole else "passed-quick")
    sources, started = digest_sources(), time.monotonic()
    if given.if_changed and passed.exists() and passed.read_text() == sources:
        print("scripts/cards: the same sources passed before")
        return 0
    lines = list_lines(WHOLE if given.whole else QUICK, given.processes)
    faults = [line for line in lines if line.fault]
    print_table(faults if given.faults else lines)
    for line in faults:
        print(f"sm_{line.capability} cannot run {line.cells[0]} of {line.cells[1]} ({line.cells[2]}): {line.fault}")
    print(f"{len(lines)} launches compiled, {len(faults)} faults, {time.monotonic() - started:.0f} s")
    if not faults:
        KEPT.parent.mkdir(parents=True, exist_ok=True)
        passed.write_text(sources)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
