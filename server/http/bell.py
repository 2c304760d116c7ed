"""Wakes an event loop from another thread, which keeps Python's lock."""

import asyncio
import ctypes
import os
import weakref
from collections.abc import Callable

_C = ctypes.PyDLL(None)  # the lock stays with who calls: `CDLL`, and a socket's `send`, give it to the one that wakes
_C.write.argtypes, _C.write.restype = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t), ctypes.c_ssize_t


class Bell:
    """Has the loop that runs call `answer` after each `ring`; once where it was rung several times."""

    def __init__(self, answer: Callable[[], None]) -> None:
        self._answer = answer
        self._heard, self._rung = os.pipe()
        for end in (self._heard, self._rung):
            os.set_blocking(end, False)
            weakref.finalize(self, os.close, end)
        asyncio.get_running_loop().add_reader(self._heard, self._hear)  # holds it until the loop is closed

    def ring(self) -> None:
        """From any thread. Nobody hears it when the loop has been closed."""
        _C.write(self._rung, b"!", 1)

    def _hear(self) -> None:
        os.read(self._heard, 4096)
        self._answer()
