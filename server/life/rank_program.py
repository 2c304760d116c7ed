"""What each process of a server's group of ranks runs: the parent decides, and all carry out its orders."""

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
from pshard.session.lead_ranks import follow

if TYPE_CHECKING:
    from pshard.runtime.engine import Engine


@dataclass(frozen=True)
class RankTask:
    """The model that ranks load, with the one that drafts for it, and under which plan; drafts: of a text's step at
    most."""

    model: Path
    profile: MachineProfile
    variant: Variant
    how: HowToRun
    drafts: int = 0
    draft_model: Path | None = None


@dataclass(frozen=True)
class Stepped:
    """What came of a step: rows, blocks, bytes over the link of rank 0."""

    rows: tuple[tuple[Row, ...], ...]
    counts: BlockCounts
    link_bytes: int


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
    from pshard.models.attach_draft import open_drafted
    from pshard.routing.order_experts import order_experts
    from pshard.server.life.local_machine import keep_prefixes
    from pshard.server.life.rehearse_steps import compiles_kernels, rehearse_steps
    from pshard.session.open_plan import Opened as OpenedPlan
    from pshard.session.start_engine import open_group, start_engine

    task: RankTask = pickle.loads(pipe.recv_bytes())
    file = open_drafted(task.model, task.draft_model)
    file.spec = order_experts(file.spec, task.variant.popularity)
    opened = OpenedPlan(file, task.profile, task.variant, Path())
    group = open_group(opened, len(task.variant.ranks))
    with start_engine(opened, task.variant, task.how.kernels, group, exact=task.how.deterministic) as engine:
        if compiles_kernels(task.profile):
            rehearse_steps(engine, task.how.deterministic, task.drafts)
        keep_prefixes(engine, task.how.prefixes)
        group.barrier()
        try:
            follow_parent(pipe, engine, group.rank == 0)
        finally:
            engine.texts.finish_files()


def follow_parent(pipe: Connection, engine: "Engine", speaks: bool) -> None:
    """Carry out the parent's orders until it hangs up, which raises EOFError; `speaks`: rank 0 says what came of them,
    and first the notes of the loaded engine."""

    def answer(found: Any) -> None:
        if speaks:
            pipe.send_bytes(pickle.dumps(found, pickle.HIGHEST_PROTOCOL))

    answer(engine.notes)
    follow(TextsByNumber(engine), lambda: pickle.loads(pipe.recv_bytes()), answer)


class TextsByNumber:
    """An engine's texts, which the parent knows by numbers. All ranks make the same calls, but of what only looks."""

    def __init__(self, engine: "Engine") -> None:
        self._engine, self._pool = engine, engine.texts
        self._texts: dict[int, Text] = {}
        self._tier = 0
        self.counts, self.keep_some = self._pool.counts, self._pool.keep_some

    def open(self, number: int, ids: tuple[int, ...], salt: str, seconds: float) -> int:
        """As `TextPool.open`; how many tokens are there already."""
        self._texts[number] = self._pool.open(ids, salt, seconds)
        return self._texts[number].cached

    def close(self, number: int, keep: bool) -> None:
        """As `TextPool.close`."""
        self._pool.close(self._texts.pop(number), keep)

    def count_draft_rows(self) -> int:
        """As `TextPool.most_rows`; never None, which is no answer."""
        return self._pool.most_rows

    def draft(self, asked: tuple[tuple[int, tuple[int, ...], int], ...], p_min: float) -> list[tuple[int, ...]]:
        """Tokens that may follow texts of these numbers, behind tokens that they lack: so many each at most. p_min: see
        `Ask`."""
        from pshard.runtime.speculation.rank_drafts import Program
        from pshard.runtime.speculation.second_program import Ask

        drafter = self._engine.drafter
        assert isinstance(drafter, Program), "a plan by which it drafts has it"
        asks = [Ask(self._texts[number], tokens, most, p_min) for number, tokens, most in asked]
        return drafter.draft(asks, self._pool.settle)

    def commit(self, number: int, length: int, later: bool) -> list[int]:
        """As `TextPool.commit`."""
        return self._pool.commit(self._texts[number], length, later)

    def missing(self, wanted: dict[int, int]) -> int:
        """As `TextPool.missing`."""
        return self._pool.missing({self._texts[number]: cells for number, cells in wanted.items()})

    def step(self, numbers: tuple[int, ...], pieces: tuple[Piece, ...], tier: int) -> Stepped:
        """Compute pieces, whose texts have these numbers, under a tier of at least so many tokens."""
        if tier != self._tier:
            self._pool.keep_tier(tier)
            self._tier = tier
        rows = self._pool.step([replace(piece, text=self._texts[n]) for n, piece in zip(numbers, pieces)])
        return Stepped(tuple(map(tuple, rows)), self._pool.counts(), self._engine.link_bytes)


if __name__ == "__main__":
    os._exit(main())
