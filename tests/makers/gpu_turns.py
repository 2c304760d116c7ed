"""Who uses the GPU when several workers run tests: one test may have it for itself, while others wait between two."""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FOLDER = Path(tempfile.gettempdir()) / f"pshard-tests-{os.getuid()}"  # of all runs of a user


@contextmanager
def take_turn(alone: bool, folder: Path = FOLDER) -> Iterator[None]:
    """Have the GPU beside others, or alone. Whoever waits to be alone goes before those that come later."""
    folder.mkdir(exist_ok=True)
    with (folder / "gate").open("w") as gate, (folder / "turn").open("w") as turn:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(turn, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(turn, fcntl.LOCK_UN)  # processes that the test has left may have the file open still
