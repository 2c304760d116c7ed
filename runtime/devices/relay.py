"""Hand-offs between the GPU and a thread that computes the CPU's parts: by numbers in page-locked memory, so that
neither waits for the thread that launches."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pshard.runtime.devices.device import Device
from pshard.runtime.devices.hand_offs import kernels_may_wait
from pshard.runtime.kernels.cpu import native
from pshard.runtime.kernels.cpu.recording import CallList
from pshard.runtime.memory.host.host_memory import map_memory

PATIENCE = 2.0  # seconds without an end of the CPU's runs, then the GPU is asked how it is
LINE = 32  # int32 from one number to the next: a cache line of either side, and of its neighbour


class Relay:
    """What of a micro-batch the CPU computes, in the order of its `runs`, each when the GPU asks for it.

    `tell` and `wait` queue kernels, also while a graph is captured.
    """

    def __init__(self, device: Device, runs: int, flags: torch.Tensor, kernels: tuple[Any, Any]) -> None:
        self._device, self._flags, self._kernels = device, flags, kernels
        numbers = flags.view(torch.int32).view(2, runs, LINE)
        self._asked, self._done = list(numbers[0]), list(numbers[1])
        self._numbers = numbers
        self._at = [(here.data_ptr(), there.data_ptr()) for here, there in zip(self._asked, self._done)]
        self._thread = native.Relay()
        self._turn: tuple[Any, Any] = None, None  # the lists of the last turn, how often it had them, and the turn

    def tell(self, run: int) -> None:
        """The GPU says that run's inputs are on the host, once all before this is done."""
        self._kernels[0][(1,)](self._asked[run], num_warps=1)

    def wait(self, run: int) -> None:
        """The GPU goes on when the CPU has done the run."""
        self._kernels[1][(1,)](self._done[run], num_warps=1)

    def start(self, lists: Sequence[CallList], times: int = 1) -> None:
        """Begin a micro-batch, or so many alike: the calls of its runs, which must live until `finish`."""
        asked = list(lists), times
        if self._turn[0] != asked:  # else each is the same object
            parts = [(*at, calls.words) for at, calls in zip(self._at, lists)] * times
            self._turn = asked, native.arrange_turn(parts)
        self._thread.start(self._turn[1])

    def finish(self) -> None:
        """Return when the CPU has done all runs. Raises RuntimeError when the GPU will not ask for one any more: it
        failed, or has nothing left to do."""
        if self._thread.finish(PATIENCE):
            return
        launched = self._device.mark()
        while not self._thread.finish(PATIENCE):
            if self._device.happened(launched) and not self._thread.finish(PATIENCE):
                raise RuntimeError("the GPU has done all its work and did not ask for all of the CPU's")

    def give_up(self) -> None:
        """Leave the micro-batch, after an error: the GPU waits for nobody any more. In any thread; an interrupt is
        raised once that is so."""
        try:
            self._free_gpu()
        except KeyboardInterrupt:
            self._free_gpu()  # else whatever it is given next would wait for ever
            raise

    def _free_gpu(self) -> None:
        self._thread.give_up()
        self._numbers[1].fill_(1)
        try:
            with self._device.current():
                launched = self._device.mark()
                while not self._device.happened(launched):  # who waits for a run several times takes each number back
                    self._numbers[1].fill_(1)
            self._device.synchronize()
        finally:
            self._numbers.zero_()

    def close(self) -> None:
        """End the thread and unlock the memory."""
        self._thread.close()
        self._device.page_unlock(self._flags)


def open_relay(device: Device, runs: int) -> Relay | None:
    """A relay for micro-batches of up to so many runs on the CPU; None where there is no GPU, no Triton, no C++ library
    or no page-locked memory, or kernels may not wait: hand-offs then go by events, and wait for the thread that
    launches."""
    if device.kind != "cuda" or not kernels_may_wait():
        return None
    kernels = _find_kernels() if native.is_available() and runs else None
    if kernels is None:
        return None
    flags = map_memory(2 * runs * LINE * 4)
    return Relay(device, runs, flags, kernels) if device.page_lock(flags) else None


def _find_kernels() -> tuple[Callable, Callable] | None:
    try:
        from pshard.runtime.kernels.gpu.triton_flags import await_kernel, tell_kernel
    except ImportError:
        return None
    return tell_kernel, await_kernel
