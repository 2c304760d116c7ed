"""The lock of a file that several processes write: who waits for it is told, and by whom it is held."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from pshard.errors import UserError

LOCK_SECONDS = 30.0  # a writer holds the lock for milliseconds; waiting this long means that something hangs
QUIET_SECONDS = 2.0  # after which whoever waits is told
LOCKS, PROCESSES = Path("/proc/locks"), Path("/proc")


@contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Hold the lock of a file, which lies beside it. Raises UserError when another process does not let go of it."""
    place = path.with_name(f".{path.name}.lock")
    lock = FileLock(place)
    try:
        _take_or_tell(lock, place, str(path), f"{LOCK_SECONDS:.0f} s at most", LOCK_SECONDS - QUIET_SECONDS)
    except Timeout:
        what = f"{_name_holder(place)} has held the lock of {path} for {LOCK_SECONDS:.0f} s"
        raise UserError(f"{what}; end it or have it go on, and try again") from None
    try:
        yield
    finally:
        lock.release()


@contextmanager
def wait_for_lock(place: Path, what: str) -> Iterator[None]:
    """Hold the lock at `place` of `what` (for messages), however long another process works under it."""
    lock = FileLock(place)
    _take_or_tell(lock, place, what, "as long as it takes", -1)
    try:
        yield
    finally:
        lock.release()


def _take_or_tell(lock: FileLock, place: Path, what: str, how_long: str, seconds: float) -> None:
    """Take a lock; after QUIET_SECONDS say who has it. seconds: of waiting from then on, or -1 for no end. Raises
    UserError where no lock file can be made."""
    try:
        lock.acquire(timeout=QUIET_SECONDS)
    except Timeout:
        if not place.exists():  # the library tries again for ever where no file can be made
            raise UserError(f"no lock file can be made in {place.parent}; name another folder") from None
        who = f"{_name_holder(place)} holds the lock of {what}"
        print(f"note: {who}; waiting for it, {how_long}", file=sys.stderr)
        lock.acquire(timeout=seconds)


def _name_holder(place: Path) -> str:
    """The process that holds a lock, and whether it is stopped, as far as the system tells."""
    try:
        at = f":{os.stat(place).st_ino}"  # of the device a layered file system says another number
        rows = [line.split() for line in LOCKS.read_text().splitlines()]
        (number,) = {int(row[4]) for row in rows if row[1] == "FLOCK" and row[5].endswith(at)}
        state = (PROCESSES / str(number) / "stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, ValueError, IndexError):
        return "another process"
    return f"process {number}" + (", which is stopped," if state in "Tt" else "")
