"""Copies of weights and states to the device and back, in its lanes, with an account of what crossed the link."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from pshard.errors import UserError
from pshard.homes import DISK, HOST, Home
from pshard.model import ModelSpec
from pshard.runtime.devices.device import Device
from pshard.runtime.memory.beyond_host import Store
from pshard.runtime.memory.disk.disk_store import DiskStore
from pshard.runtime.memory.staging import DirectFill, StagingRing
from pshard.runtime.memory.states import Copies
from pshard.runtime.memory.weights import HostWeights, LentWeights
from pshard.units.divide_unit import Piece, Portion, find_portion


class Transfers:
    """Starts copies; those of weights that are not in page-locked memory go through a ring.

    Attributes:
        link_bytes: moved host to device since the start: weights, states, activations, and what kernels are expected to
            have read in host memory.
    """

    def __init__(
        self,
        device: Device,
        spec: ModelSpec,
        weights: HostWeights | LentWeights,
        stores: Mapping[Home, Store] | None = None,
    ) -> None:
        """stores: of homes beyond host memory."""
        self._device, self._spec, self._weights = device, spec, weights
        self._beyond = dict(stores or {})
        self._stores: dict[Home, HostWeights | LentWeights | Store] = {HOST: weights, **self._beyond}
        self._ring: StagingRing | None = None
        self._rings: dict[Home, StagingRing | DirectFill] = {}  # of homes beyond host memory
        self._refused = False  # the ring
        self.link_bytes = 0

    @property
    def ring_nbytes(self) -> int:
        """Bytes of the ring for what is in host memory; 0 without one."""
        return self._ring.nbytes if self._ring else 0

    def make_rings(self, may_lock: bool) -> None:
        """Rings for what is not in page-locked memory: for weights in host memory, where more may be locked, one that
        comes before them, as they take all there is; and one for each home beyond it. Raises UserError where the system
        locks none for that."""
        for home, store in self._beyond.items():
            if not store.held:  # tables, of which rows are read
                continue
            if self._device.kind == "cpu":
                self._rings[home] = DirectFill(self._device, store.fill, store.split)
                continue
            try:
                self._rings[home] = StagingRing(self._device, store.largest, store.fill, store.split, store.least)
            except MemoryError as error:
                raise UserError(f"{error}, for weights in {home.name!r}; raise the limit of locked memory") from None
        if may_lock and not self._weights.page_locked and self._device.fills:
            try:
                self._ring = StagingRing(self._device, self._weights.largest)
            except MemoryError:
                self._refused = True

    @property
    def notes(self) -> tuple[str, ...]:
        """A line for every fallback of what holds weights beyond host memory."""
        return tuple(note for store in self._beyond.values() for note in store.notes)

    @property
    def beyond_nbytes(self) -> int:
        """Bytes of host memory for what lives beyond it: rings, and what the stores have."""
        return sum(r.nbytes for r in self._rings.values()) + sum(s.nbytes for s in self._beyond.values())

    @property
    def read_bytes(self) -> int:
        """Bytes that were brought from beyond host memory since the start."""
        return sum(store.read_bytes for store in self._beyond.values())

    @property
    def waited(self) -> tuple[int, float]:
        """Of these bytes those that came while something waited for them, and the seconds of that."""
        each = [store.waited for store in self._beyond.values()]
        return sum(nbytes for nbytes, _ in each), sum(seconds for _, seconds in each)

    @property
    def may_lock(self) -> bool:
        """Whether weights may be page-locked: a refusal, here of the ring, is the last question."""
        return not self._refused

    def lock_weights(self) -> None:
        """Page-lock the weights as far as the system lets us, unless it refused the ring; it goes where none needs
        it."""
        if self.may_lock:
            self._weights.lock()
        if self._weights.page_locked:
            self._close_ring()

    @property
    def disk(self) -> DiskStore:
        """What holds the weights on disk, where a plan leaves some there."""
        store = self._beyond[DISK]
        assert isinstance(store, DiskStore)
        return store

    def held(self, unit: str, home: Home = HOST) -> Portion:
        """What a home has of a unit."""
        return self._stores[home].held[unit]

    def cut_portion(self, target: torch.Tensor, portion: Portion, home: Home = HOST) -> Copies:
        """The copies that bring what a portion is of a unit."""
        unit = portion.unit.name
        return self.cut(target, unit, find_portion(portion, self.held(unit, home)).pieces, home)

    def cut(self, target: torch.Tensor, unit: str, pieces: Iterable[Piece], home: Home = HOST) -> Copies:
        """The copies that bring these pieces of a unit's blob in a home to the device."""
        blob = self._stores[home].blob(unit)
        return tuple((target[p.to : p.to + p.nbytes], blob[p.start : p.start + p.nbytes]) for p in pieces)

    def bring_weights(self, unit: str, copies: Copies, after: Iterable[Any] = (), home: Home = HOST) -> Any:
        """Start the copies of a unit from its home; returns the event of their end."""
        ring = self._rings.get(home)
        if ring is None and self._ring is not None and not self._weights.is_locked(unit):
            ring = self._ring
        return self._start_in(ring.copy_in if ring else self._device.copy_in, copies, after)

    def bring(self, copies: Copies, after: Iterable[Any] = ()) -> Any:
        """Start copies to the device after some events; returns the event of their end, None when there are none."""
        return self._start_in(self._device.copy_in, copies, after)

    def _start_in(self, copy_in: Any, copies: Copies, after: Iterable[Any]) -> Any:
        done = None
        for to, origin in copies:  # which happen in turn, as all of a lane
            done = copy_in(to, origin, after if done is None else ())
            self.link_bytes += to.nbytes
        return done

    def take_back(self, copies: Copies, after: Iterable[Any] = ()) -> Any:
        """The same to the host."""
        done = None
        for to, origin in copies:
            done = self._device.copy_out(to, origin, after if done is None else ())
        return done

    def check(self) -> None:
        """Raise RuntimeError where something could not be brought from beyond host memory."""
        for store in self._beyond.values():
            store.check()

    def cancel(self) -> None:
        """Bring nothing more from beyond host memory."""
        for store in self._beyond.values():
            store.cancel()

    def close(self) -> None:
        """Give the rings back, and close the stores; no copy may be under way."""
        self._close_ring()
        for ring in self._rings.values():
            ring.close()
        for store in self._beyond.values():
            store.close()
        self._rings, self._beyond = {}, {}

    def _close_ring(self) -> None:
        if self._ring:
            self._ring.close()
            self._ring = None
