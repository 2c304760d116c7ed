"""Runs of the host's kernels as one native call: recorded once, replayed where all arguments repeat.

The first time work runs as it is written, and what it calls of the C++ library is written down. After that the list is
all that runs: nothing of Python between two kernels, as with a CUDA graph on a GPU. Work that computes anything
otherwise (an operator of torch, a function of the library that may not be in a list) is never replayed.
"""

import ctypes
import struct
from collections.abc import Callable, Hashable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from pshard.runtime.kernels.cpu import native

MOST_WORDS = 8 << 20  # of all lists, 64 MiB: a token of a model of 80 layers takes some ten thousand


class Recordings:
    """Lists by key. Equal keys stand for equal calls: the same functions, sizes and addresses."""

    def __init__(self) -> None:
        self._lists: dict[Hashable, CallList | None] = {}
        self._words = 0

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        """Do the work, or replay what it did under that key before."""
        if key not in self._lists:
            calls = record(work)
            self._words += len(calls.words) if calls else 0
            while self._words > MOST_WORDS and self._lists:  # a micro-batch has a list for every run on the CPU
                oldest = self._lists.pop(next(iter(self._lists)))
                self._words -= len(oldest.words) if oldest else 0
            self._lists[key] = calls
        elif (calls := self._lists[key]) is not None:
            calls.replay()
        else:
            work()

    def knows(self, key: Hashable) -> bool:
        """Whether work was done under that key."""
        return key in self._lists

    def find(self, key: Hashable) -> "CallList | None":
        """What stands for the work under that key, where it was done before and may be replayed."""
        return self._lists.get(key)


class CallList:
    """Calls of the library, ready to be made again. Keeps alive what Python made for them, not what they work on.

    Attributes:
        words: as `native.replay` takes them.
    """

    def __init__(self, calls: list[tuple[str, tuple]]) -> None:
        words = [word for name, arguments in calls for word in (native.callable_number(name), *_words(name, arguments))]
        self.words = (ctypes.c_int64 * len(words))(*words)
        self._kept = [a for _, arguments in calls for a in arguments if isinstance(a, ctypes.Array)]

    def replay(self) -> None:
        """Make all calls."""
        native.replay(self.words)


def record(work: Callable[[], None]) -> CallList | None:
    """Do the work; its calls, or None when these are not all that it computes."""
    if not native.is_available():
        work()
        return None
    with native.recording() as calls, _Watch() as watch:
        work()
    if watch.computed or any(native.callable_number(name) < 0 for name, _ in calls):
        return None
    return CallList(calls)


class _Watch(TorchDispatchMode):
    """Notes whether operators of torch compute, which views do not."""

    def __init__(self) -> None:
        super().__init__()
        self.computed = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here: a hook that keeps dynamo away would import it, which takes a second."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.computed = self.computed or not func.is_view
        return func(*args, **(kwargs or {}))


def _words(name: str, arguments: tuple) -> list[int]:
    """Arguments as csrc/replay.cpp reads them: an address as a number, a float as its bits."""
    return [_word(letter, argument) for letter, argument in zip(native.letters(name), arguments, strict=True)]


def _word(letter: str, argument: Any) -> int:
    if letter == "f":
        return struct.unpack("<I", struct.pack("<f", argument))[0]
    if isinstance(argument, ctypes.Array):
        return ctypes.addressof(argument)
    return int(argument or 0)
