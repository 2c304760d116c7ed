"""Host memory as the system gives it: of exact size, zeroed, in huge pages where there are some. No torch."""

import ctypes
import mmap
import os
import re
import sys
import threading
from pathlib import Path

from pshard.errors import UserError
from pshard.runtime.kernels.cpu import native

MEMORY_INFO = Path("/proc/meminfo")  # fields: proc_meminfo(5)
PIECE = 16 << 20  # bytes that a thread fills before it asks whether to go on
FILLERS = 4  # threads at most: virtual machines get fresh memory at 0.2 to 2 GB/s for each


def map_fresh(nbytes: int) -> mmap.mmap:
    """Private memory that is not touched yet, at least a page of it.

    Notes once where the system says that it has not so much: it grants it, and may end a process when it is filled. It
    may also have more: sandboxes and virtual machines get memory as they fill it. Raises UserError when it refuses.
    """
    if nbytes > (free := available_bytes()):
        _note_shortage(free >> 20)
    # private: the system's huge pages are for memory that is not shared, unless it is set up otherwise
    flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    try:
        memory = mmap.mmap(-1, max(nbytes, mmap.PAGESIZE), **flags)
    except OSError as error:
        raise UserError(
            f"cannot take {nbytes >> 20} MiB of host memory ({error.strerror}); free some or run a smaller model"
        ) from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


_noted: list[int] = []  # free MiB of the shortage that was told of


def _note_shortage(free_mib: int) -> None:
    if not _noted:
        _noted.append(free_mib)
        print(
            f"note: the system says that {free_mib} MiB of host memory are free, which is too little; "
            "if it ends this run, free some or run a smaller model",
            file=sys.stderr,
        )


def available_bytes() -> int:
    """Host memory and swap that can be had without ending anything, as the system says; no limit where it does not."""
    try:
        text = MEMORY_INFO.read_text()
    except OSError:
        return sys.maxsize
    found = dict(re.findall(r"^(MemAvailable|SwapFree): +(\d+) kB$", text, re.MULTILINE))
    return sum(map(int, found.values())) << 10 if "MemAvailable" in found else sys.maxsize


class FilledMemory:
    """Fresh memory that threads fill with pages, from its beginning: whoever writes there later need not wait for them.

    What is written there meanwhile stays. It is touched, as madvise's MADV_POPULATE_WRITE holds up whatever maps files:
    with that the import of torch took 10 s instead of 2. Without the C++ library nothing is filled.

    Attributes:
        memory: see `map_fresh`; nbytes: how much of it was asked for.
    """

    def __init__(self, nbytes: int) -> None:
        self.memory, self.nbytes = map_fresh(nbytes), nbytes
        self._stopped = False
        self._next, self._lock = 0, threading.Lock()
        count = min(FILLERS, max(1, (os.cpu_count() or 1) // 2)) if native.is_available() else 0
        self._threads = [threading.Thread(target=self._fill, name="fill", daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _fill(self) -> None:
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        while not self._stopped:
            with self._lock:
                at, self._next = self._next, self._next + PIECE
            if at >= self.nbytes:
                return
            native.touch(start + at, min(PIECE, self.nbytes - at))

    @property
    def done(self) -> int:
        """Bytes that are filled, or are being filled."""
        return min(self._next, self.nbytes) if self._threads else 0

    def wait(self) -> None:
        """Return when all is filled."""
        for thread in self._threads:
            thread.join()

    def stop(self) -> None:
        """Fill no more, once the pieces at hand are done."""
        self._stopped = True
        self.wait()

    def release(self) -> None:
        """Give it back, where nobody has taken it."""
        self.stop()
        self.memory.close()
