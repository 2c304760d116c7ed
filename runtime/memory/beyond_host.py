"""Stores of weights that live beyond host memory: what holds them, and how their bytes come to host memory, from where
the link takes them. One for each home that a plan uses."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from pshard.cuts.rank_parts import Ranges
from pshard.errors import UserError
from pshard.homes import DISK, Home
from pshard.model import ModelSpec
from pshard.on_host import list_tables, list_whole
from pshard.plan import RankPlan
from pshard.runtime.devices.device import Device
from pshard.runtime.memory.disk.disk_store import DiskStore
from pshard.runtime.memory.weights import WeightSource
from pshard.units.divide_unit import Portion
from pshard.units.unit import Unit


class Store(Protocol):
    """What a home beyond host memory holds.

    held: of each unit that comes whole, by name; largest: bytes of the largest one; least: of a buffer that it can
    fill; notes: a line for every fallback; nbytes: of host memory that it takes; read_bytes: so many were read since
    the start; waited: those that came while a step or the ring waited for them, and the seconds of that.
    """

    held: Mapping[str, Portion]
    largest: int
    least: int

    @property
    def notes(self) -> tuple[str, ...]: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def read_bytes(self) -> int: ...

    @property
    def waited(self) -> tuple[int, float]: ...

    def load(self, source: WeightSource, ranges: Ranges | None, progress: Callable[[int], None]) -> None:
        """Make all of it ready; progress gets the bytes done since last time."""

    def blob(self, unit: str) -> torch.Tensor:
        """The bytes of a unit, that `fill` takes ranges of."""

    def split(self, src: torch.Tensor) -> list[int]:
        """How many bytes of a source each `fill` is to take, in turn."""

    def check(self) -> None:
        """Raise RuntimeError where something could not be brought: what came since then is not right."""

    def cancel(self) -> None:
        """Bring nothing more: whoever waits for it goes on, and what comes then is not right."""

    def fill(self, dst: torch.Tensor, src: torch.Tensor, after: Iterable[Any] = ()) -> Any:
        """Start to bring bytes to host memory after some events; returns the event of the end, as the device's are.
        Such copies happen in turn."""

    def close(self) -> None:
        """End its lanes; no copy may be under way."""


# of what comes whole, and of tables of which rows are read; a table may be both, under different tiers
Opener = Callable[[Device, tuple[Portion, ...], tuple[Unit, ...]], Store]
OPENERS: dict[str, Opener] = {DISK.name: DiskStore}


@contextmanager
def declare_store(home: Home, opener: Opener) -> Iterator[None]:
    """Say how the store of a home is opened, for as long as the context lasts."""
    OPENERS[home.name] = opener
    try:
        yield
    finally:
        del OPENERS[home.name]


def open_stores(spec: ModelSpec, plan: RankPlan, device: Device) -> dict[Home, Store]:
    """The stores that a plan uses. Raises UserError for a home that has none."""
    stores = {}
    for home in dict.fromkeys(plan.beyond_host.values()):
        if home.name not in OPENERS:
            raise UserError(
                f"the plan keeps weights in {home.name!r}, which cannot be read here; plan again without it"
            )
        stores[home] = OPENERS[home.name](device, list_whole(spec, plan, home), list_tables(spec, plan, home))
    return stores
