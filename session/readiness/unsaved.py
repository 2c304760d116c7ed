"""What a run makes for itself and cannot keep, as on a read-only or full disk: it lies in memory until the run ends."""

import tempfile
from functools import cache
from pathlib import Path

from pshard.errors import UserError

IN_MEMORY = "/dev/shm"


@cache
def _folder() -> tempfile.TemporaryDirectory:
    for place in (IN_MEMORY, None):  # then wherever temporary files lie
        try:
            return tempfile.TemporaryDirectory(prefix="pshard-", dir=place)
        except OSError as error:
            problem = error
    raise UserError(f"no file can be written, temporary ones neither: {problem.strerror}; set TMPDIR to a folder")


def place_unsaved(name: str) -> Path:
    """Where a file of this name lies until this process ends. Raises UserError where nothing can be written at all."""
    return Path(_folder().name) / name


def is_unsaved(place: Path | None) -> bool:
    """Whether a file is one of those."""
    return place is not None and _folder.cache_info().currsize > 0 and place.parent == Path(_folder().name)
