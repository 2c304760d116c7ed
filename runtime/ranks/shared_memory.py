"""Sums, gathers and hand-overs between ranks of one host through shared memory (csrc/ranks/allreduce.cpp).

The memory is an anonymous file (memfd) of rank 0 that the others open through /proc: it has no name, so whatever way
the ranks end, the kernel frees it with the last of them.
"""

import ctypes
import json
import mmap
import os
import secrets
import time
from collections.abc import Callable, Sequence
from math import inf

import torch
import torch.distributed as dist

from pshard.runtime.kernels.cpu import native

SLOT_BYTES = 256 << 10  # a rank's part is exchanged in pieces of this size; they stay in the caches
MESSAGE_BYTES = 1 << 20  # at most so much is handed to another rank here; its inbox has room for four
POLL_SECONDS = 0.25  # the native call comes back so often to let Ctrl-C through
_TOKEN_BYTES = 16


class LateRank(RuntimeError):
    """A rank did not bring its part in time; `rank` is its number."""

    def __init__(self, rank: int, seconds: float) -> None:
        super().__init__(f"rank {rank} did not come to a sum within {seconds:.0f} s")
        self.rank = rank


class Exchange:
    """This rank's end of the shared memory. Sums and gathers must be made by all ranks in the same order.

    Results are the same bits on every rank: parts are added in rank order, in float32.
    """

    def __init__(self, memory: mmap.mmap, rank: int, ranks: int) -> None:
        self._c, self._memory, self._ranks = native.functions_of("exchange"), memory, ranks
        self._view = (ctypes.c_char * len(memory)).from_buffer(memory)
        at = ctypes.addressof(self._view)
        self._handle = self._c["open"](at, rank, ranks, SLOT_BYTES, MESSAGE_BYTES)

    def sum(self, tensor: torch.Tensor, timeout: float) -> None:
        """Sum a contiguous float32 CPU tensor over the ranks, in place. Raises LateRank."""
        if tensor.dtype != torch.float32 or not tensor.is_contiguous():
            raise ValueError(f"only contiguous float32 tensors are summed, not {tensor.dtype}")
        at, n = tensor.data_ptr(), tensor.numel()
        self._repeat(lambda: self._c["sum"](self._handle, at, n, POLL_SECONDS), timeout)

    def gather(self, part: torch.Tensor, sizes: Sequence[int], timeout: float) -> torch.Tensor:
        """All ranks' elements one after the other: contiguous part [sizes[rank]] -> [sum(sizes)]. Raises LateRank."""
        out = torch.empty(sum(sizes), dtype=part.dtype)
        each = (ctypes.c_int64 * self._ranks)(*(n * part.itemsize for n in sizes))
        at, nbytes, to = part.data_ptr(), part.nbytes, out.data_ptr()
        gather = self._c["gather"]
        self._repeat(lambda: gather(self._handle, at, nbytes, to, each, POLL_SECONDS), timeout)
        return out

    def put(self, tensor: torch.Tensor, target: int) -> None:
        """Leave a contiguous CPU tensor of at most MESSAGE_BYTES in the inbox of a rank, to which no other rank hands
        anything. Waits without limit for room."""
        at, nbytes = tensor.data_ptr(), tensor.nbytes
        self._repeat(lambda: self._c["put"](self._handle, at, nbytes, target, POLL_SECONDS), inf)

    def take(self, tensor: torch.Tensor, source: int) -> None:
        """Fill a contiguous CPU tensor with the next message of `source`, the only rank that hands anything to this
        one. Waits without limit."""
        at, nbytes = tensor.data_ptr(), tensor.nbytes
        self._repeat(lambda: self._c["take"](self._handle, at, nbytes, source, POLL_SECONDS), inf)

    def close(self) -> None:
        """Let go of the memory."""
        self._c["close"](self._handle)
        del self._view
        self._memory.close()

    def _repeat(self, call: Callable[[], int], timeout: float) -> None:
        late = call()
        if late >= 0:
            end = time.monotonic() + timeout
            while (late := call()) >= 0:
                if time.monotonic() > end:
                    raise LateRank(late, timeout)


def open_exchange(store: dist.Store, rank: int, ranks: int) -> Exchange | None:
    """Share memory with all ranks; None when they are not on one Linux host or the native library is missing."""
    memory, fd = None, -1
    if native.is_available() and hasattr(os, "memfd_create"):
        nbytes = native.functions_of("exchange")["nbytes"](ranks, SLOT_BYTES, MESSAGE_BYTES)
        if rank == 0:
            memory, fd = _create_memory(store, nbytes)
        else:
            memory = _open_memory(json.loads(store.get("exchange")), nbytes)
    elif rank == 0:
        store.set("exchange", "null")
    store.set(f"exchange/{rank}", "yes" if memory is not None else "no")
    everyone = all(store.get(f"exchange/{r}") == b"yes" for r in range(ranks))
    if fd >= 0:
        os.close(fd)  # every rank has mapped it by now
    return Exchange(memory, rank, ranks) if everyone and memory is not None else None


def _create_memory(store: dist.Store, nbytes: int) -> tuple[mmap.mmap, int]:
    fd = os.memfd_create("pshard-exchange")
    os.ftruncate(fd, nbytes + _TOKEN_BYTES)
    memory, token = mmap.mmap(fd, nbytes + _TOKEN_BYTES), secrets.token_bytes(_TOKEN_BYTES)
    memory[nbytes:] = token
    store.set("exchange", json.dumps({"path": f"/proc/{os.getpid()}/fd/{fd}", "token": token.hex()}))
    return memory, fd


def _open_memory(place: dict[str, str] | None, nbytes: int) -> mmap.mmap | None:
    """Map rank 0's memory; the token shows that it is that one and not another host's process of the same number."""
    if place is None:
        return None
    try:
        fd = os.open(place["path"], os.O_RDWR)
    except OSError:
        return None
    try:
        memory = mmap.mmap(fd, nbytes + _TOKEN_BYTES)
        return memory if memory[nbytes:].hex() == place["token"] else None
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)
