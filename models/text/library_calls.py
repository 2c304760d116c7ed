"""Calls of the `tokenizers` library that a damaged file can break."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from pshard.errors import UserError


@contextmanager
def name_failures(what: str) -> Iterator[None]:
    """Whatever the library raises, as a UserError that begins with `what`.

    Its panics are no Exceptions, and write a stack trace to stderr before they are raised: nothing is written there
    meanwhile. Any number of threads may be in such calls at once.
    """
    try:
        with _silence:
            yield
    except (UserError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise UserError(f"{what} ({error}); give token ids instead") from None


class _Silence:
    """No stderr of the process while any thread is within: the first one in turns it away, the last one out brings it
    back. Were each to do so by itself, one could take another's nothing for the real one, for ever."""

    def __init__(self) -> None:
        self._lock, self._within = threading.Lock(), 0
        self._stderr: int | None = None

    def __enter__(self) -> None:
        with self._lock:
            self._within += 1
            if self._within > 1:
                return
            with suppress(OSError):  # there is no stderr
                self._stderr = os.dup(2)
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, 2)
                os.close(nowhere)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._within -= 1
            if self._within == 0 and self._stderr is not None:
                os.dup2(self._stderr, 2)
                os.close(self._stderr)
                self._stderr = None


_silence = _Silence()
