"""Notices a rank that died or hangs: every rank beats through the store, and ends when another one's beat stops."""

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from math import inf

import torch.distributed as dist

from pshard.errors import UserError
from pshard.runtime.ranks.lifelines import open_lifelines
from pshard.runtime.ranks.start_ranks import end_line

BEAT_SECONDS = 0.5
LONGEST_BEAT = 2.0  # on a busy host
LOST_SECONDS = 10.0
GOODBYE_SECONDS = 3.0
EXIT_RANK_LOST = 75  # the group is broken for a reason that was printed; who started the ranks adds nothing to it


class RankWatch:
    """A daemon thread that beats for this rank and watches the beats of the others, one that watches the store, and
    with ranks on several hosts one that watches the connections to them.

    Silence is counted while this rank beats: a group that was stopped as a whole (Ctrl-Z) goes on. A store whose host
    stands still answers nothing, not even that time is up, hence the second thread.

    No thread may outlive Python: one that comes back from the store's C++ then would abort the process.

    The main thread may sit in a collective that never returns, so when a rank is lost the thread prints which one,
    gives the main thread a second to fail by itself, and ends the process.

    Attributes:
        lost: what to say about the rank that is gone, or None.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        meet_seconds: float,
        hosts: bool = False,
        address: str | None = None,
    ) -> None:
        """Wait until all ranks have come; raises UserError that names those that have not after `meet_seconds`.

        hosts: the ranks are on several; address: of this one, where it is known.
        """
        self.lost: str | None = None
        self._store, self._rank, self._size = store, rank, size
        self._closing = threading.Event()
        self._count = 0  # beats of this rank
        self._left = inf  # when rank 0 was seen to have said goodbye
        store.set(f"beat/{rank}", "0")
        end = time.monotonic() + meet_seconds
        while missing := [r for r in range(size) if not store.check([f"beat/{r}"])]:
            if time.monotonic() > end:
                late = f"rank {rank} waited {meet_seconds:.0f} s for rank {missing[0]}, which did not come"
                raise UserError(f"{late}; look at what it said, and start all again")
            time.sleep(0.01)
        self._lines = open_lifelines(store, rank, size, address, meet_seconds) if hosts else None
        self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)
        self._others = [threading.Thread(target=self._watch_store, name="store-watch", daemon=True)]
        if self._lines:
            self._others.append(threading.Thread(target=self._watch_lines, name="line-watch", daemon=True))
        for thread in (self._thread, *self._others):
            thread.start()
        atexit.register(self._stop)  # a rank that fails does not come to `close`

    def _stop(self) -> None:
        """End the threads."""
        self._closing.set()
        for thread in (self._thread, *self._others):
            thread.join(GOODBYE_SECONDS)

    def close(self) -> None:
        """Say goodbye, so that the others don't take the silence for a death. Rank 0, where the store is, goes last."""
        self._stop()
        atexit.unregister(self._stop)
        if self._lines:
            self._lines.close()
        if self._thread.is_alive() or time.monotonic() > self._left + GOODBYE_SECONDS:
            return  # the store does not answer, or is gone
        with contextlib.suppress(RuntimeError):  # the store's host may be gone
            self._store.set(f"beat/{self._rank}", "bye")
            end = time.monotonic() + GOODBYE_SECONDS
            while self._rank == 0 and time.monotonic() < end and not self._all_left():
                time.sleep(0.01)

    def _all_left(self) -> bool:
        return all(self._store.get(f"beat/{r}") == b"bye" for r in range(self._size))

    def verdict(self, wait_seconds: float) -> str | None:
        """What is known of a lost rank, waiting for the next beats to be missed if need be."""
        end = time.monotonic() + wait_seconds
        while self.lost is None and time.monotonic() < end:
            time.sleep(0.05)
        return self.lost

    def _run(self) -> None:
        others = [r for r in range(self._size) if r != self._rank]
        seen, silent = dict.fromkeys(others, ""), dict.fromkeys(others, 0.0)
        for passed in self._beats():
            try:
                self._store.set(f"beat/{self._rank}", str(self._count + 1))
                beats = {r: self._store.get(f"beat/{r}").decode() for r in others}
            except RuntimeError:
                return self._end("the ranks' meeting point (rank 0 or the process that started it) is gone")
            self._count += 1
            if beats.get(0) == "bye":  # the store goes with it: the work is done, and this rank is ending too
                self._left = time.monotonic()
                return None
            for rank, beat in beats.items():
                silent[rank] = silent[rank] + passed if beat in (seen[rank], "bye") else 0.0
                seen[rank] = beat
                if beat != "bye" and silent[rank] > LOST_SECONDS:
                    return self._end(f"rank {rank} died or hangs: no sign of life for {LOST_SECONDS:.0f} s")
        return None

    def _beats(self) -> Iterator[float]:
        """Until this rank closes, the seconds since the beat before: what is much longer, it stood still itself."""
        last = time.monotonic()
        while not self._closing.wait(BEAT_SECONDS):
            now = time.monotonic()
            yield min(now - last, LONGEST_BEAT)
            last = now

    def _watch_lines(self) -> None:
        assert self._lines is not None
        while not self._closing.is_set():
            dead = self._lines.find_dead(BEAT_SECONDS)
            if dead and not self._closing.wait(dead.patience):
                return self._end(f"rank {dead.rank} died: {dead.why}")
        return None

    def _watch_store(self) -> None:
        count, waited = 0, 0.0
        for passed in self._beats():
            if not self._thread.is_alive():
                return None
            count, waited = self._count, waited + passed if self._count == count else 0.0
            if waited > LOST_SECONDS:
                silent = f"the ranks' meeting point has not answered for {LOST_SECONDS:.0f} s"
                return self._end(f"rank 0 or the process that started it died or hangs: {silent}")
        return None

    def _end(self, reason: str) -> None:
        self.lost = reason
        if not self._closing.wait(1.0):
            end_line()
            print(f"error: rank {self._rank} stops: {reason}", file=sys.stderr, flush=True)
            os._exit(EXIT_RANK_LOST)
