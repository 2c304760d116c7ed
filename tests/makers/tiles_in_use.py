"""Another matrix unit than the machine's best for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pshard.runtime.kernels.cpu import native


@contextmanager
def tiles_in_use(name: str) -> Iterator[None]:
    """Products of many tokens on "amx", on "emulated" tiles or on none (""); skips the test where there is no such."""
    best = native.tiles() if native.is_available() else ""
    if name == best:
        yield
        return
    try:
        native.set_tiles(name)
    except (RuntimeError, ValueError) as error:
        pytest.skip(str(error))
    try:
        yield
    finally:
        native.set_tiles(best)
