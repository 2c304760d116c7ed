"""What each process of a group of ranks runs: the parent decides, all make the same calls in the same order."""

import os
import pickle
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pshard.errors import KernelRefused, StepFailed, UserError, as_line
from pshard.machine import MachineProfile
from pshard.plan import Variant
from pshard.runtime.texts.text import BlockCounts, Piece, Row, Text
from pshard.server.life.how_to_run import HowToRun

if TYPE_CHECKING:
    from pshard.runtime.engine import Engine


@dataclass(frozen=True)
class RankTask:
    """The model that ranks load, and under which plan."""

    model: Path
    profile: MachineProfile
    variant: Variant
    how: HowToRun


@dataclass(frozen=True)
class Loaded:
    """Rank 0's answer to a task: notes of its engine."""

    notes: tuple[str, ...]


@dataclass(frozen=True)
class Open:
    """Open a text, which is called by a number from now on; seconds: as `TextPool.open`."""

    text: int
    ids: tuple[int, ...]
    salt: str
    seconds: float


@dataclass(frozen=True)
class Opened:
    """Rank 0's answer: how many tokens are there already; or why it is refused."""

    cached: int
    refused: str = ""


@dataclass(frozen=True)
class Close:
    """Close a text. Nobody answers."""

    text: int
    keep: bool


@dataclass(frozen=True)
class Missing:
    """How many blocks are lacking for texts to have so many tokens; rank 0 alone is asked, and answers an int."""

    wanted: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Count:
    """How blocks are used; rank 0 alone is asked, and answers BlockCounts."""


@dataclass(frozen=True)
class KeepSome:
    """Keep prefixes in files for so many seconds; rank 0 answers whether there are more."""

    seconds: float


@dataclass(frozen=True)
class StepCall:
    """Compute pieces (of each its text's number, and it without the text) under a tier of at least so many tokens."""

    pieces: tuple[tuple[int, Piece], ...]
    tier: int


@dataclass(frozen=True)
class Stepped:
    """Rank 0's answer to a step: rows, blocks, bytes over its link; or why it was refused, before anything changed."""

    rows: tuple[tuple[Row, ...], ...]
    counts: BlockCounts | None
    link_bytes: int
    refused: str = ""


@dataclass(frozen=True)
class CannotRun:
    """Any rank's last words, where loading again does not help: its GPU cannot run a kernel."""

    why: str


def main() -> int:
    """Entry point of a rank; the parent's end of the pipe is said on the command line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent has it too, and lets requests end
    return serve_to_the_end(Connection(int(sys.argv[1])), _serve)


def serve_to_the_end(pipe: Connection, serve: Callable[[Connection], None]) -> int:
    """Serve until the parent hangs up or this rank fails; the exit code."""
    try:
        serve(pipe)
    except EOFError:  # the parent is done with this group, or gone
        return 0
    except (UserError, StepFailed) as error:
        if isinstance(error, KernelRefused):
            with suppress(OSError):  # a parent that is gone
                pipe.send_bytes(pickle.dumps(CannotRun(str(error)), pickle.HIGHEST_PROTOCOL))
        print(f"error: {as_line(error)}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, UserError) else 1
    return 0


def _serve(pipe: Connection) -> None:
    from pshard.models import open_model
    from pshard.routing.order_experts import order_experts
    from pshard.server.life.local_machine import keep_prefixes
    from pshard.server.life.rehearse_steps import compiles_kernels, rehearse_steps
    from pshard.session.open_plan import Opened as OpenedPlan
    from pshard.session.start_engine import open_group, start_engine

    task: RankTask = pickle.loads(pipe.recv_bytes())
    file = open_model(task.model)
    file.spec = order_experts(file.spec, task.variant.popularity)
    opened = OpenedPlan(file, task.profile, task.variant, Path())
    group = open_group(opened, len(task.variant.ranks))
    with start_engine(opened, task.variant, task.how.kernels, group, exact=task.how.deterministic) as engine:
        if compiles_kernels(task.profile):
            rehearse_steps(engine, task.how.deterministic)
        keep_prefixes(engine, task.how.prefixes)
        group.barrier()
        try:
            answer_calls(pipe, engine, group.rank == 0)
        finally:
            engine.texts.finish_files()


def answer_calls(pipe: Connection, engine: "Engine", speaks: bool) -> None:
    """Make the parent's calls until it hangs up, which raises EOFError; `speaks`: rank 0 says what came of them, and
    first that the engine is loaded."""
    caller = Caller(engine)
    answer: Any = Loaded(engine.notes)
    while True:
        if answer is not None and speaks:
            pipe.send_bytes(pickle.dumps(answer, pickle.HIGHEST_PROTOCOL))
        answer = caller.call(pickle.loads(pipe.recv_bytes()))


class Caller:
    """Makes the parent's calls on a rank's engine."""

    def __init__(self, engine: "Engine") -> None:
        self._engine, self._pool = engine, engine.texts
        self._texts: dict[int, Text] = {}
        self._tier = 0

    def call(self, message: Any) -> Any:
        """Make a call; the answer, None where there is none. Raises StepFailed."""
        match message:
            case StepCall():
                return self._step(message)
            case Open():
                try:
                    text = self._texts[message.text] = self._pool.open(message.ids, message.salt, message.seconds)
                except UserError as error:
                    return Opened(0, str(error))
                return Opened(text.cached)
            case Close():
                self._pool.close(self._texts.pop(message.text), message.keep)
                return None
            case Missing():
                return self._pool.missing({self._texts[text]: cells for text, cells in message.wanted})
            case Count():
                return self._pool.counts()
            case KeepSome():
                return self._pool.keep_some(message.seconds)
        raise TypeError(f"no call is a {type(message).__name__}")

    def _step(self, message: StepCall) -> Stepped:
        if message.tier != self._tier:
            self._engine.texts.keep_tier(message.tier)
            self._tier = message.tier
        pieces = [replace(piece, text=self._texts[number]) for number, piece in message.pieces]
        try:
            rows = self._pool.step(pieces)
        except UserError as error:
            return Stepped((), None, 0, str(error))
        return Stepped(tuple(map(tuple, rows)), self._pool.counts(), self._engine.link_bytes)


if __name__ == "__main__":
    os._exit(main())
