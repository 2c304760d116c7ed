"""The CUDA driver's own interface, for what a step asks of it dozens of times: copies, events, graphs.

torch makes several objects of its own for each such call. After a CPU kernel, which leaves nothing of them in the
caches, that takes 88 to 123 us a copy and 38 to 60 a graph, and the host thread is what such a step waits for.
"""

import ctypes
from functools import cache
from typing import Any

_NOT_READY = 600  # CUDA_ERROR_NOT_READY
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING


@cache
def cuda_driver() -> ctypes.CDLL:
    """The driver's library, its functions told what they take."""
    library, handle, size = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p, ctypes.c_size_t
    for name, takes in (
        ("cuCtxGetCurrent", (ctypes.POINTER(ctypes.c_void_p),)),
        ("cuCtxSetCurrent", (handle,)),
        ("cuEventCreate", (ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint)),
        ("cuEventDestroy_v2", (handle,)),
        ("cuEventQuery", (handle,)),
        ("cuEventRecord", (handle, handle)),
        ("cuEventSynchronize", (handle,)),
        ("cuGraphLaunch", (handle, handle)),
        ("cuLaunchHostFunc", (handle, handle, handle)),
        ("cuMemcpyAsync", (ctypes.c_uint64, ctypes.c_uint64, size, handle)),
        ("cuMemcpy2DAsync_v2", (handle, handle)),
        ("cuStreamWaitEvent", (handle, handle, ctypes.c_uint)),
    ):
        getattr(library, name).argtypes = takes
    return library


def check(status: int, what: str) -> None:
    """Raises RuntimeError for a status that is not success; `what` the driver did not do."""
    if status:
        raise RuntimeError(f"the driver refused {what} (CUDA error {status})")


def current_context() -> int:
    """This thread's context (its handle); 0 where it has none."""
    context = ctypes.c_void_p()
    check(cuda_driver().cuCtxGetCurrent(ctypes.byref(context)), "to say its context")
    return context.value or 0


def enter_context(context: int) -> None:
    """Make a context this thread's. torch's own calls give a thread the device's, the driver's do not."""
    if current_context() != context:
        check(cuda_driver().cuCtxSetCurrent(context), "its context to a thread")


class CudaEvent:
    """A place in a stream. Its handle goes back to `spare` when nobody has the event any more: who was told to wait for
    it still waits for what it was when told."""

    __slots__ = ("_spare", "handle")

    def __init__(self, handle: int, spare: list[int]) -> None:
        self.handle, self._spare = handle, spare

    def __del__(self) -> None:
        self._spare.append(self.handle)

    def hold(self, stream: int) -> None:
        """What a stream is given from now on waits for the event."""
        check(cuda_driver().cuStreamWaitEvent(stream, self.handle, 0), "to wait for an event")

    def synchronize(self) -> None:
        """Returns when the event has happened."""
        check(cuda_driver().cuEventSynchronize(self.handle), "to go on")

    def happened(self) -> bool:
        """Whether it has happened, without waiting."""
        status = cuda_driver().cuEventQuery(self.handle)
        check(status if status != _NOT_READY else 0, "to go on")
        return status == 0


def record_event(stream: int, spare: list[int]) -> CudaEvent:
    """An event at the end of a stream (its handle) as it is now; of a handle in `spare`, if there is one."""
    event = CudaEvent(spare.pop() if spare else _create_event(), spare)
    check(cuda_driver().cuEventRecord(event.handle, stream), "an event")
    return event


def _create_event() -> int:
    handle = ctypes.c_void_p()
    check(cuda_driver().cuEventCreate(ctypes.byref(handle), _NO_TIMING), "an event")
    return int(handle.value or 0)


def destroy_events(spare: list[int]) -> None:
    """Give handles back to the driver."""
    while spare:
        cuda_driver().cuEventDestroy_v2(spare.pop())


def queue_copy(dst: int, src: int, nbytes: int, stream: int) -> None:
    """Queue a copy between addresses on device and host. Raises RuntimeError when the driver refuses."""
    check(cuda_driver().cuMemcpyAsync(dst, src, nbytes, stream), f"a copy of {nbytes} bytes")


def queue_call(function: Any, address: int, stream: int) -> None:
    """Queue a call of a C function with an address, in a thread of the driver: no Python runs then. Raises RuntimeError
    when the driver refuses."""
    check(cuda_driver().cuLaunchHostFunc(stream, ctypes.cast(function, ctypes.c_void_p), address), "a call on the host")


def launch_graph(graph: int, stream: int) -> None:
    """Queue an executable graph (its handle). Raises RuntimeError when the driver refuses."""
    check(cuda_driver().cuGraphLaunch(graph, stream), "a graph")
