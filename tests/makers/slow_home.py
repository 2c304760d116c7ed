"""A third home of weights for tests: host memory from which a thread brings bytes slowly. Declared as a real one is."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from pshard.cuts.rank_parts import Ranges
from pshard.homes import LINK, Home, Lane, declare_home
from pshard.machine import CopyTiming, MachineProfile
from pshard.runtime.devices.device import CopyThread, Device
from pshard.runtime.memory.beyond_host import declare_store
from pshard.runtime.memory.weights import WeightSource, pack_portion
from pshard.units.divide_unit import Portion
from pshard.units.unit import Unit

RATE = 1e9  # bytes a second
LATENCY = 1e-4  # seconds of each copy
READ = Lane("read", "read")
SLOW = Home("slow", (READ, LINK))


class SlowMemory:
    """Blobs in host memory, of which each copy takes its time. `read_bytes`: so many were brought."""

    def __init__(self, device: Device, portions: tuple[Portion, ...]) -> None:
        self.held = {portion.unit.name: portion for portion in portions}
        self.largest = max(portion.nbytes for portion in portions)
        self._blobs = {name: torch.empty(p.nbytes, dtype=torch.uint8) for name, p in self.held.items()}
        self._lane = CopyThread("slow", self._move)
        self.read_bytes = self.nbytes = 0
        self.waited = 0, 0.0
        self.least, self.notes = self.largest, tuple[str, ...]()

    def _move(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        time.sleep(LATENCY + src.nbytes / RATE)
        dst.copy_(src)
        self.read_bytes += src.nbytes

    def load(self, source: WeightSource, ranges: Ranges | None, progress: Callable[[int], None]) -> None:
        for name, portion in self.held.items():
            pack_portion(source, portion, self._blobs[name], ranges)
            progress(portion.nbytes)

    def blob(self, unit: str) -> torch.Tensor:
        return self._blobs[unit]

    def fill(self, dst: torch.Tensor, src: torch.Tensor, after: Iterable[Any] = ()) -> Any:
        return self._lane.submit(dst, src, after)

    def split(self, src: torch.Tensor) -> list[int]:
        return [src.numel()]

    def check(self) -> None:
        pass

    cancel = check

    def close(self) -> None:
        self._lane.end()
        self._lane.join()


@contextmanager
def declare_slow_home() -> Iterator[list[SlowMemory]]:
    """The home is there for planner, simulator, check and runtime; gives the stores that are opened meanwhile."""
    opened: list[SlowMemory] = []

    def open_slow(device: Device, portions: tuple[Portion, ...], tables: tuple[Unit, ...]) -> SlowMemory:
        assert not tables  # they live on disk or in host memory
        opened.append(SlowMemory(device, portions))
        return opened[-1]

    with declare_home(SLOW), declare_store(SLOW, open_slow):
        yield opened


def with_slow_home(profile: MachineProfile, rate: float = RATE) -> MachineProfile:
    """The machine with timings of the home's lane."""
    rows = tuple(CopyTiming(READ.timed, "pinned", n, LATENCY + n / rate) for n in (1 << k for k in range(10, 31, 2)))
    return replace(profile, copies=profile.copies + rows)
