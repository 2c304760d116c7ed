"""A model on several devices, each with a process of its own, as the scheduler of this process uses it.

The scheduler is here and decides alone; what it decides goes to all ranks in the same order, and rank 0 answers. So a
rank that dies takes no server with it: its end is seen, requests end with an error, and a new group is started.
"""

import pickle
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from math import inf
from multiprocessing.connection import Connection, wait
from typing import Any

from pshard.errors import KernelRefused, StepFailed, UserError
from pshard.runtime.ranks.start_ranks import StderrReader, end_ranks, start_rank
from pshard.runtime.texts.text import BlockCounts, Piece, Row, Text
from pshard.server.life.rank_program import CannotRun, RankTask, Stepped
from pshard.server.life.read_facts import allow_drafts
from pshard.server.scheduling.served_machine import Asked, PlanFacts, Pool, TextDrafter
from pshard.session.lead_ranks import Order, Refused
from pshard.speculation import PROGRAMS

WRITE_SECONDS = 20.0  # that a rank has to write its files at the end
MODULE = "pshard.server.life.rank_program"


class Ranks:
    """Processes of a group, and a pipe to each."""

    def __init__(
        self, pipes: Sequence[Connection], processes: Sequence[subprocess.Popen], readers: Sequence[StderrReader]
    ) -> None:
        self._pipes, self._processes, self._readers = list(pipes), list(processes), list(readers)
        self._lost = False  # a rank

    @classmethod
    def start(cls, ranks: int) -> "Ranks":
        """Start so many."""
        pairs = [socket.socketpair() for _ in range(ranks)]
        with socket.create_server(("127.0.0.1", 0)) as meeting_point:
            processes = [
                start_rank(rank, ranks, MODULE, [str(there.fileno())], meeting_point, (there.fileno(),))
                for rank, (_, there) in enumerate(pairs)
            ]
        for _, there in pairs:
            there.close()
        readers = [StderrReader(r, p) for r, p in enumerate(processes) if r > 0]
        return cls([Connection(here.detach()) for here, _ in pairs], processes, readers)

    def tell(self, message: Any, all_ranks: bool = True) -> None:
        """To all, or to rank 0. Raises StepFailed when one is gone, KernelRefused where its GPU cannot run a kernel."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        for pipe in self._pipes if all_ranks else self._pipes[:1]:
            self._send(pipe, data)

    def ask(self, call: str, *words: Any, all_ranks: bool = True) -> Any:
        """What rank 0 answers to an order, which goes to all, or to it alone. Raises UserError where it is refused, and
        as `tell` does."""
        self.tell(Order(call, words), all_ranks)
        return self.hear()

    def _send(self, pipe: Connection, data: bytes) -> None:
        try:
            pipe.send_bytes(data)
        except OSError:
            raise self._describe_loss() from None

    def hear(self) -> Any:
        """Rank 0's answer. Raises UserError where it refuses, else as `tell`: other ranks only ever speak by ending."""
        heard = wait(self._pipes)
        if heard != [self._pipes[0]]:
            raise self._describe_loss()
        try:
            answer = pickle.loads(self._pipes[0].recv_bytes())
        except (EOFError, OSError):
            raise self._describe_loss() from None
        if isinstance(answer, CannotRun):
            self._lost = True
            raise KernelRefused(self._name(0, answer.why))
        if isinstance(answer, Refused):
            raise UserError(answer.why)
        return answer

    def _describe_loss(self) -> StepFailed:
        """Which rank ended, and how; what one said before counts, whichever ended first."""
        self._lost = True
        for i, pipe in enumerate(self._pipes):
            if why := _last_words(pipe):
                return KernelRefused(self._name(i, why))
        end_of = (rank for rank, process in enumerate(self._processes) if _ended(process))
        rank = next(end_of, None)
        if rank is None:
            return StepFailed("a rank ended")
        return StepFailed(f"rank {rank} of {len(self._processes)} ended with code {self._processes[rank].returncode}")

    def _name(self, rank: int, why: str) -> str:
        return f"rank {rank} of {len(self._pipes)}: {why}"

    def close(self) -> None:
        """End all processes. They do so by themselves when their pipe ends, and have time to write files, unless one
        waits for a dead one."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            _ended(process, 1.0 if self._lost else WRITE_SECONDS)
        end_ranks(self._processes)
        for reader in self._readers:
            reader.finish(quiet=True)


def _last_words(pipe: Connection) -> str:
    """Why a rank says that loading again does not help, in what it has sent; "" where it does not."""
    try:
        while pipe.poll():
            message = pickle.loads(pipe.recv_bytes())
            if isinstance(message, CannotRun):
                return message.why
    except (EOFError, OSError):
        pass
    return ""


def _ended(process: subprocess.Popen, seconds: float = 0.2) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


class RankPool:
    """The pools of all ranks, which are alike: a `Pool`. Its texts have a number by which ranks know theirs."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._numbers = ranks, count()
        self._counts: BlockCounts | None = None
        self.tier, self.link_bytes = 0, 0

    def open(self, ids: Sequence[int], salt: str = "", seconds: float = inf) -> Text:
        """As `TextPool.open`."""
        text = Text([], 0, salt, next(self._numbers))
        text.cached = text.committed = self._ranks.ask("open", text.number, tuple(ids), salt, seconds)
        text.ids[:], self._counts = ids[: text.cached], None
        return text

    def missing(self, wanted: Mapping[Text, int]) -> int:
        """As `TextPool.missing`."""
        numbers = {text.number: cells for text, cells in wanted.items()}
        return self._ranks.ask("missing", numbers, all_ranks=False)

    def step(
        self,
        pieces: Sequence[Piece],
        meanwhile: Callable[[], None] = lambda: None,
        given_up: Callable[[], bool] = lambda: False,
    ) -> Sequence[Sequence[Row]]:
        """As `TextPool.step`; several ranks have no sweeps, so nobody asks `given_up`."""
        numbers = tuple(piece.text.number for piece in pieces)
        sent = tuple(replace(piece, text=None) for piece in pieces)  # type: ignore[arg-type]
        self._ranks.tell(Order("step", (numbers, sent, self.tier)))
        meanwhile()
        stepped: Stepped = self._ranks.hear()
        for piece in pieces:
            piece.text.ids += piece.ids
            if not piece.drafts:
                piece.text.committed = len(piece.text.ids)
        self._counts, self.link_bytes = stepped.counts, stepped.link_bytes
        return stepped.rows

    def commit(self, text: Text, length: int, later: bool = False) -> list[int]:
        """As `TextPool.commit`."""
        again = self._ranks.ask("commit", text.number, length, later)
        del text.ids[length - len(again) :]
        text.committed, self._counts = len(text.ids), None
        return again

    def close(self, text: Text, keep: bool = True) -> None:
        """As `TextPool.close`."""
        self._ranks.tell(Order("close", (text.number, keep)))
        self._counts = None

    def keep_some(self, seconds: float) -> bool:
        """As `TextPool.keep_some`."""
        self._counts = None
        return self._ranks.ask("keep_some", seconds)

    def counts(self) -> BlockCounts:
        """As `TextPool.counts`."""
        if self._counts is None:
            self._counts = self._ranks.ask("counts", all_ranks=False)
        assert self._counts is not None
        return self._counts


class RankDrafter:
    """What drafts beside the texts of all ranks: a `TextDrafter`."""

    def __init__(self, ranks: Ranks, p_min: float) -> None:
        """p_min: see `Ask`."""
        self._ranks, self._p_min = ranks, p_min

    def draft(self, asked: Sequence[Asked]) -> list[tuple[int, ...]]:
        """As `TextDrafter.draft`."""
        sent = tuple((text.number, tuple(ids[len(text.ids) :]), most) for text, ids, most in asked)
        return self._ranks.ask("draft", sent, self._p_min)


class RankMachine:
    """A group of ranks: a `Machine`."""

    def __init__(self, ranks: Ranks, facts: PlanFacts) -> None:
        self._ranks = ranks
        self.facts = allow_drafts(facts, ranks.ask("count_draft_rows", all_ranks=False))
        self._pool = RankPool(ranks)
        self.pool: Pool = self._pool
        drafts = self.facts.drafts
        self.drafter: TextDrafter | None = RankDrafter(ranks, drafts.p_min) if drafts.kind in PROGRAMS else None

    @classmethod
    def start(cls, task: RankTask, facts: Callable[[tuple[str, ...]], PlanFacts]) -> "RankMachine":
        """Start the processes and load the model; facts: by the notes of rank 0. Raises StepFailed when one ends."""
        ranks = Ranks.start(len(task.variant.ranks))
        try:
            ranks.tell(task)
            return cls(ranks, facts(ranks.hear()))
        except BaseException:
            ranks.close()
            raise

    @property
    def link_bytes(self) -> int:
        """Bytes moved to the device of rank 0."""
        return self._pool.link_bytes

    def keep_tier(self, tokens: int) -> None:
        """Later steps run under a tier of at least so many tokens."""
        self._pool.tier = tokens

    def close(self) -> None:
        """End the processes."""
        self._ranks.close()
