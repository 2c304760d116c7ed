"""What other threads leave for the one that owns the engine."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from pshard.server.scheduling.request import Request


@dataclass(frozen=True)
class Move:
    """To the planned budget of so many MiB; the future says under which plan."""

    mib: int
    future: "Future[str]"


@dataclass(frozen=True)
class Taken:
    """Posts, in the order in which they came: jobs, ids of jobs to be cancelled, and moves."""

    jobs: tuple[Request, ...]
    cancels: frozenset[str]
    moves: tuple[Move, ...]


class Posts:
    """A letter box."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._jobs: deque[Request] = deque()
        self._cancels: set[str] = set()
        self._moves: deque[Move] = deque()

    def add_job(self, run: Request) -> None:
        """A job that is to run."""
        with self.changed:
            self._jobs.append(run)
            self.changed.notify()

    def cancel(self, job_id: str) -> None:
        """A job that is to end."""
        with self.changed:
            self._cancels.add(job_id)
            self.changed.notify()

    def add_move(self, move: Move) -> None:
        """A move, to be made between steps."""
        with self.changed:
            self._moves.append(move)
            self.changed.notify()

    def take(self) -> Taken:
        """All posts."""
        with self.changed:
            taken = Taken(tuple(self._jobs), frozenset(self._cancels), tuple(self._moves))
            self._jobs.clear()
            self._cancels.clear()
            self._moves.clear()
        return taken

    def wait(self, seconds: float, until: Callable[[], bool]) -> None:
        """Wait for a post, or something else that `until` tells, at most so long."""
        with self.changed:
            self.changed.wait_for(lambda: bool(self._jobs or self._cancels or self._moves) or until(), seconds)

    @property
    def cancels(self) -> frozenset[str]:
        """Ids of jobs that are to be cancelled, which have not been taken."""
        with self.changed:
            return frozenset(self._cancels)

    @property
    def jobs(self) -> tuple[Request, ...]:
        """Those that have not been taken."""
        return tuple(self._jobs)
