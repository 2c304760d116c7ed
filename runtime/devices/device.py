"""Accelerators: one arena, a compute lane, and a copy lane in each direction that run beside it.

CudaDevice uses streams and events; CpuDevice makes the CPU an accelerator with a bounded arena and real copies done by
a thread per direction, so that every mechanism runs, and is tested, without a GPU.
"""

import contextlib
import gc
import queue
import threading
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

import torch

from pshard.errors import UserError
from pshard.runtime.devices.copiers import Copiers, move
from pshard.runtime.devices.cuda_driver import (
    CudaEvent,
    current_context,
    destroy_events,
    launch_graph,
    queue_call,
    queue_copy,
    record_event,
)
from pshard.runtime.devices.row_copy import check_rows, copy_rows
from pshard.runtime.devices.streams import OnDevice, OnStream
from pshard.runtime.devices.usable_gpus import NEEDED, find_lack
from pshard.runtime.kernels.cpu import native
from pshard.runtime.memory.host.host_memory import map_memory

# up to here a kernel copies between device and host, not the copy engine: on the way in that has weights in its queue
KERNEL_SEND_BYTES = 16 << 20  # activations of 512 tokens; a unit of 221 MB ahead of them takes 4 ms
KERNEL_RECEIVE_BYTES = 512 << 10  # from the device little goes besides
# graphs take device memory beside the arena, some 0.2 MiB each of a prompt and 0.05 each of a small batch; past that
# many the one that was not used for the longest time goes
MOST_PROMPT_GRAPHS = 384  # three tiers of 64 layers
MOST_GRAPHS = MOST_PROMPT_GRAPHS + 900
# a stretch whose only work is copies has an empty graph, which is right; so has a timing that is rehearsed
warnings.filterwarnings("ignore", "The CUDA Graph is empty")


class Device(Protocol):
    """What the executor needs of an accelerator. Events come from its lanes and are waited for by them or the host."""

    kind: str
    locks: bool  # whether page-locking is more than an answer
    torch_device: torch.device
    fills: bool  # whether it has `fill`

    def allocate(self, nbytes: int) -> torch.Tensor: ...
    def page_lock(self, memory: torch.Tensor) -> bool: ...
    def page_unlock(self, memory: torch.Tensor) -> None: ...

    # copies take contiguous tensors, or matrices whose rows are contiguous, of one shape and type
    def copy_in(self, dst: torch.Tensor, src: torch.Tensor, after: Iterable[Any] = ()) -> Any: ...
    def copy_out(self, dst: torch.Tensor, src: torch.Tensor, after: Iterable[Any] = ()) -> Any: ...
    # within host memory, in a lane of its own; contiguous
    def fill(self, dst: torch.Tensor, src: torch.Tensor, after: Iterable[Any] = ()) -> Any: ...
    # a function of the C++ library with an address, in a lane of its own
    def call(self, function: Any, address: int, after: Iterable[Any] = ()) -> Any: ...
    def send(self, dst: torch.Tensor, src: torch.Tensor) -> None: ...
    def bring(self, dst: torch.Tensor, src: torch.Tensor) -> None: ...
    def receive(self, dst: torch.Tensor, src: torch.Tensor) -> None: ...
    def mark(self) -> Any: ...
    def wait(self, event: Any) -> None: ...
    def host_wait(self, event: Any) -> None: ...
    def happened(self, event: Any) -> bool: ...
    def synchronize(self) -> None: ...
    def current(self) -> Any: ...
    def computing(self) -> Any: ...
    def repeat(self, key: tuple, worth_it: bool, work: Callable[[], Any]) -> None: ...
    def forget_repeats(self) -> None: ...
    def process_bytes(self) -> int: ...
    def close(self) -> None: ...


def open_device(kind: str, index: int = 0) -> "CudaDevice | CpuDevice":
    """The accelerator "cuda" or "cpu". Raises UserError when there is no such device."""
    if kind == "cpu":
        return CpuDevice()
    if kind != "cuda":
        raise UserError(f"unknown device {kind!r}; choose cuda or cpu")
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        raise UserError(f"no CUDA device {index} on this machine; use --device cpu")
    if lack := find_lack(index):
        raise UserError(
            f"GPU {index} is not used: {lack.why}; {lack.remedy or NEEDED}, or use a profile of --device cpu"
        )
    return CudaDevice(index)


class CudaDevice:
    """A CUDA GPU: compute stream, one copy stream each way, one that fills host buffers when copies are staged."""

    kind = "cuda"
    locks = True
    fills = native.is_available()  # a thread of the driver runs none of Python

    def __init__(self, index: int) -> None:
        self.torch_device, self._index = torch.device("cuda", index), index
        torch.cuda.set_device(index)
        torch.cuda.init()
        torch.zeros(1, device=self.torch_device)
        self._context = current_context()
        gc.collect()
        torch.cuda.empty_cache()  # what an earlier engine left is not this one's context
        self._context_bytes = self._used_bytes()
        self.compute = torch.cuda.Stream(self.torch_device)
        self._in = torch.cuda.Stream(self.torch_device)
        self._out = torch.cuda.Stream(self.torch_device)
        self._fill: tuple[torch.cuda.Stream, Copiers] | None = None  # from its first use on
        self._calls: torch.cuda.Stream | None = None  # likewise
        self._events: list[int] = []  # handles that no event has
        self._graphs: dict[tuple, tuple[int, torch.cuda.CUDAGraph]] = {}  # to launch, and its owner; last used last
        self._locked: dict[int, int] = {}  # page-locked host memory: first address -> bytes
        self._copy_small = _kernel_for_small_copies()

    def allocate(self, nbytes: int) -> torch.Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)
        except torch.cuda.OutOfMemoryError:
            free = torch.cuda.mem_get_info(self.torch_device)[0] >> 20
            raise UserError(
                f"cannot allocate {nbytes >> 20} MiB on the GPU; {free} MiB are free; give a smaller --vram"
            ) from None

    def page_lock(self, memory: torch.Tensor) -> bool:
        if memory.numel() == 0:
            return True
        # one registration: a copy that spans two of them is an invalid argument to the driver
        with torch.cuda.device(self.torch_device):  # also in a thread that never had one
            code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
        if code == 0:
            self._locked[memory.data_ptr()] = memory.numel()
            if self._serves(memory):
                return True
            self.page_unlock(memory)
        with contextlib.suppress(RuntimeError):  # the refusal must not surface in the next kernel's error check
            torch.zeros(1, device=self.torch_device)
        return False

    def _serves(self, memory: torch.Tensor) -> bool:
        """Whether the end of page-locked memory can be copied: past a ceiling drivers lock memory and then fail."""
        try:
            memory[-1:].to(self.torch_device, non_blocking=True)
            self.synchronize()
        except RuntimeError:
            return False
        return True

    def page_unlock(self, memory: torch.Tensor) -> None:
        if memory.numel():
            torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
            self._locked.pop(memory.data_ptr(), None)

    def copy_in(self, dst: torch.Tensor, src: torch.Tensor, after: Iterable[CudaEvent] = ()) -> CudaEvent:
        return self._copy(self._in.cuda_stream, dst, src, after)

    def copy_out(self, dst: torch.Tensor, src: torch.Tensor, after: Iterable[CudaEvent] = ()) -> CudaEvent:
        return self._copy(self._out.cuda_stream, dst, src, after)

    def fill(self, dst: torch.Tensor, src: torch.Tensor, after: Iterable[CudaEvent] = ()) -> CudaEvent:
        if self._fill is None:
            self._fill = torch.cuda.Stream(self.torch_device), Copiers()
        stream, copiers = self._fill[0].cuda_stream, self._fill[1]
        for event in after:
            event.hold(stream)
        copiers.queue(dst, src, stream)
        return record_event(stream, self._events)

    def call(self, function: Any, address: int, after: Iterable[CudaEvent] = ()) -> CudaEvent:
        if self._calls is None:
            self._calls = torch.cuda.Stream(self.torch_device)
        stream = self._calls.cuda_stream
        for event in after:
            event.hold(stream)
        queue_call(function, address, stream)
        return record_event(stream, self._events)

    def _copy(self, stream: int, dst: torch.Tensor, src: torch.Tensor, after: Iterable[CudaEvent]) -> CudaEvent:
        for event in after:
            event.hold(stream)
        if not (dst.is_contiguous() and src.is_contiguous() and dst.nbytes == src.nbytes):
            copy_rows(dst, src, stream)
        elif src.nbytes:  # else of a unit that another rank has
            queue_copy(dst.data_ptr(), src.data_ptr(), src.nbytes, stream)
        return record_event(stream, self._events)

    def send(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Host to device in the compute lane: activations don't queue behind weights."""
        with self.computing():
            self._transfer(dst, src, src, KERNEL_SEND_BYTES)

    def bring(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Device to host in the compute lane, without waiting for it."""
        with self.computing():
            self._transfer(dst, src, dst, KERNEL_RECEIVE_BYTES)

    def receive(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Device to host after all compute so far; returns when `dst` holds it."""
        self.bring(dst, src)
        self.compute.synchronize()

    def _transfer(self, dst: torch.Tensor, src: torch.Tensor, on_host: torch.Tensor, most: int) -> None:
        if self._copy_small and suits_kernel(dst, src, most) and self._is_locked(on_host):
            self._copy_small(dst, src)
        else:
            dst.copy_(src, non_blocking=True)

    def _is_locked(self, memory: torch.Tensor) -> bool:
        start, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes
        return any(at <= start and end <= at + nbytes for at, nbytes in self._locked.items())

    def mark(self) -> CudaEvent:
        return record_event(self.compute.cuda_stream, self._events)

    def wait(self, event: CudaEvent) -> None:
        """Work given to the compute lane from now on starts after the event."""
        event.hold(self.compute.cuda_stream)

    def host_wait(self, event: CudaEvent) -> None:
        """Returns when the event has happened."""
        event.synchronize()

    def happened(self, event: CudaEvent) -> bool:
        """Whether the event has happened, without waiting."""
        return event.happened()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def current(self) -> OnDevice:
        """Context in which calls of any thread are for this device."""
        return OnDevice(self._index, self._context)

    def computing(self) -> OnStream:
        """Context, in `current()`, in which torch operators go to the compute lane."""
        return OnStream(self.compute)

    def repeat(self, key: tuple, worth_it: bool, work: Callable[[], Any]) -> None:
        """Do work whose kernels, addresses and launch sizes are the same for equal keys: captured once as a CUDA graph
        and replayed. Called in `computing()`."""
        graph = self._graphs.pop(key, None) if worth_it else None
        if graph is not None:
            self._graphs[key] = graph  # the last to go
            launch_graph(graph[0], self.compute.cuda_stream)
            return
        work()  # compiles kernels, which a capture must not do
        if worth_it:
            self.compute.synchronize()
            if len(self._graphs) >= MOST_GRAPHS:
                del self._graphs[next(iter(self._graphs))]
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured, stream=self.compute, capture_error_mode="thread_local"):
                work()
            self._graphs[key] = captured.raw_cuda_graph_exec(), captured

    def forget_repeats(self) -> None:
        """Drop what `repeat` captured: the memory that it uses is about to go."""
        self._graphs.clear()

    def _used_bytes(self) -> int:
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return total - free

    def process_bytes(self) -> int:
        """Device memory taken since this object was made, by the driver's figure: the context is not in it."""
        return self._used_bytes() - self._context_bytes

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # an error of the GPU was raised where it was met
            self.synchronize()
        self.forget_repeats()
        destroy_events(self._events)
        if self._fill is not None:
            self._fill[1].close()


def suits_kernel(dst: torch.Tensor, src: torch.Tensor, most: int) -> bool:
    """Whether a kernel can copy this, and what is in host memory is no more than so many bytes."""
    alike = dst.dtype == src.dtype and dst.is_contiguous() and src.is_contiguous()
    return alike and src.nbytes <= most and src.nbytes % 4 == 0


def _kernel_for_small_copies() -> Callable[[torch.Tensor, torch.Tensor], None] | None:
    """None without Triton; `choose_kernels` says so."""
    try:
        from pshard.runtime.kernels.gpu.triton_copy import copy_words
    except ImportError:
        return None
    return copy_words


class CpuEvent:
    """Done when finished; carries the error of the copy that failed.

    One lock of C's, taken until then: an interrupt inside `threading.Event` can leave its lock taken for good, and then
    the copy thread stands still in finishing the event.
    """

    __slots__ = ("_done", "_error", "_gate")

    def __init__(self) -> None:
        self._done, self._gate = False, threading.Lock()
        self._error: BaseException | None = None
        self._gate.acquire()

    def finish(self, error: BaseException | None = None) -> None:
        """Call once."""
        self._error, self._done = error, True
        self._gate.release()

    @property
    def happened(self) -> bool:
        """Whether it is finished, with an error or without."""
        return self._done

    @property
    def succeeded(self) -> bool:
        """Whether it has happened, and without an error."""
        return self._done and self._error is None

    def wait(self) -> None:
        """Return when it is finished. Raises RuntimeError when the copy failed."""
        while not self._done:
            if self._gate.acquire(timeout=0.05):  # who is interrupted here keeps the gate: the others look again
                self._gate.release()
        if self._error is not None:
            raise RuntimeError("a copy failed") from self._error


class CopyThread:
    """Runs copies in order. After one that failed none is made, as on a GPU: whoever waits for the last of several
    learns of it."""

    def __init__(self, name: str, move: Callable[[torch.Tensor, torch.Tensor], None] = move) -> None:
        self._move = move
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, dst: torch.Tensor, src: torch.Tensor, after: Iterable[CpuEvent]) -> CpuEvent:
        check_rows(dst, src)
        return self.do(partial(self._move_all, dst, src), after)

    def do(self, work: Callable[[], None], after: Iterable[CpuEvent]) -> CpuEvent:
        """Have anything done in its turn."""
        done = CpuEvent()
        self._queue.put((work, tuple(after), done))
        return done

    def _move_all(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        for to, origin in _contiguous_parts(dst, src):
            self._move(to, origin)

    def _run(self) -> None:
        failed: BaseException | None = None
        while (item := self._queue.get()) is not None:
            work, after, done = item
            if failed is not None:
                done.finish(failed)
                continue
            try:
                for event in after:
                    event.wait()
                work()
                done.finish()
            except BaseException as error:
                failed = error
                done.finish(error)

    def end(self) -> None:
        """Take no more copies."""
        self._queue.put(None)

    def join(self) -> None:
        """Return when all copies are done, or have failed."""
        self._thread.join()


def _contiguous_parts(dst: torch.Tensor, src: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """The tensors themselves, or their rows."""
    whole = dst.is_contiguous() and src.is_contiguous()
    return [(dst, src)] if whole else list(zip(dst, src, strict=True))


class CpuDevice:
    """The CPU as accelerator. Compute is synchronous; copies run on their threads."""

    kind = "cpu"
    locks = False
    torch_device = torch.device("cpu")
    fills = True

    def __init__(self) -> None:
        self._in, self._out = CopyThread("copy-in"), CopyThread("copy-out")
        self._fill: tuple[CopyThread, Copiers] | None = None  # from its first use on
        self._calls: CopyThread | None = None  # likewise
        self._allocated = 0
        self._last: list[CpuEvent] = []

    def allocate(self, nbytes: int) -> torch.Tensor:
        self._allocated += nbytes
        return map_memory(nbytes)

    def page_lock(self, memory: torch.Tensor) -> bool:
        return True

    def page_unlock(self, memory: torch.Tensor) -> None:
        pass

    def copy_in(self, dst: torch.Tensor, src: torch.Tensor, after: Iterable[Any] = ()) -> CpuEvent:
        return self._track(self._in.submit(dst, src, after))

    def copy_out(self, dst: torch.Tensor, src: torch.Tensor, after: Iterable[Any] = ()) -> CpuEvent:
        return self._track(self._out.submit(dst, src, after))

    def fill(self, dst: torch.Tensor, src: torch.Tensor, after: Iterable[Any] = ()) -> CpuEvent:
        if self._fill is None:
            copiers = Copiers()
            self._fill = CopyThread("copy-fill", copiers.copy), copiers
        return self._track(self._fill[0].submit(dst, src, after))

    def call(self, function: Any, address: int, after: Iterable[Any] = ()) -> CpuEvent:
        if self._calls is None:
            self._calls = CopyThread("calls")
        return self._track(self._calls.do(partial(function, address), after))

    def _track(self, event: CpuEvent) -> CpuEvent:
        self._last = [e for e in self._last if not e.succeeded] + [event]
        return event

    def send(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        dst.copy_(src)

    bring = receive = send

    def mark(self) -> CpuEvent:
        event = CpuEvent()
        event.finish()
        return event

    def wait(self, event: CpuEvent) -> None:
        event.wait()

    host_wait = wait

    def happened(self, event: CpuEvent) -> bool:
        return event.happened

    def synchronize(self) -> None:
        for event in self._last:
            event.wait()

    def current(self) -> Any:
        return contextlib.nullcontext()

    def computing(self) -> Any:
        return torch.inference_mode()

    def repeat(self, key: tuple, worth_it: bool, work: Callable[[], Any]) -> None:
        work()

    def forget_repeats(self) -> None:
        pass

    def process_bytes(self) -> int:
        return self._allocated

    def close(self) -> None:
        lanes = [self._in, self._out, *([self._fill[0]] if self._fill else ()), *([self._calls] if self._calls else ())]
        for lane in lanes:  # all before any is joined: they wait for each other's copies
            lane.end()
        for lane in lanes:
            lane.join()
        if self._fill is not None:
            self._fill[1].close()
