"""Contexts of a thread on a CUDA device, entered several times a token while the GPU has nothing to do.

torch's own ask for the device's index and whether there is one, some 5 us each time.
"""

import torch

from pshard.runtime.devices.cuda_driver import enter_context


class OnStream:
    """torch operators go to a stream."""

    __slots__ = ("_before", "_stream")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._before = torch.cuda.current_stream(self._stream.device_index)
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_stream(self._before)


class OnDevice:
    """Calls of any thread are for the device of this index: torch's, and by its `context` the driver's, which a thread
    that torch has not met yet lacks."""

    __slots__ = ("_context", "_device")

    def __init__(self, index: int, context: int) -> None:
        self._device, self._context = torch.cuda.device(index), context

    def __enter__(self) -> None:
        self._device.__enter__()
        enter_context(self._context)

    def __exit__(self, *error: object) -> None:
        self._device.__exit__(*error)
