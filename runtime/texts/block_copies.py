"""One KV block of all layers, and states at its end, as bytes on the host, and back to where a plan has them."""

from collections.abc import Iterator
from functools import cached_property
from itertools import chain
from typing import Any

import torch

from pshard.runtime.executor import Executor
from pshard.runtime.residents import Snapshot
from pshard.runtime.texts.follower import Follower, NoFollower


class BlockCopies:
    """Copies of one executor's blocks, of a rank's slice of the model, wherever its caches are; with what drafts beside
    it has of each block."""

    def __init__(self, executor: Executor, follower: Follower | None = None) -> None:
        self._executor, self._residents = executor, executor.residents
        self._follower = follower or NoFollower()
        laws = executor.spec.states(executor.states)
        self._layers = {name: bool(law.window) for name, law in laws.items() if law.grows}

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Bytes of the parts of a block: "cells", "window" and "states"."""
        cells = {name: sum(part[0].nbytes for part in self.caches(name == "window")) for name in ("cells", "window")}
        return {**cells, "states": self._residents.fixed_nbytes}

    def read(self, block: int, window: bool = False) -> bytes:
        """The cells of a block of the layers without a window, or of those with one."""
        self._executor.device.synchronize()
        with self._executor.device.current():
            parts = (cache[block] for cache in self.caches(window))
            return b"".join(part.to("cpu").contiguous().view(torch.uint8).numpy().tobytes() for part in parts)

    def write(self, block: int, raw: bytes, window: bool = False) -> None:
        """Make the cells of a block those of `read`. Raises ValueError when they are not as many bytes."""
        self._executor.device.synchronize()
        with self._executor.device.current(), self._executor.device.computing(), torch.inference_mode():
            _fill((cache[block] for cache in self.caches(window)), raw)

    def copy(self, source: int, target: int, window: bool = False) -> None:
        """Make the cells of a block those of another one."""
        self._executor.device.synchronize()
        with self._executor.device.current(), self._executor.device.computing(), torch.inference_mode():
            for cache in self.caches(window):
                cache[target].copy_(cache[source])

    def read_states(self, states: Snapshot) -> bytes:
        """A snapshot's bytes."""
        parts = chain.from_iterable(states[unit] for unit in sorted(states))
        return b"".join(part.contiguous().view(torch.uint8).numpy().tobytes() for part in parts)

    def make_states(self, raw: bytes) -> Snapshot:
        """The snapshot of which `read_states` gave these bytes. Raises ValueError when they are not as many."""
        states = self._residents.read_fixed(0)
        _fill(chain.from_iterable(states[unit] for unit in sorted(states)), raw)
        return states

    def caches(self, window: bool) -> Iterator[torch.Tensor]:
        """Keys and values of every such layer, [blocks, KV_BLOCK, ...], and the follower's."""
        if not window:
            yield from self._follower.caches()
        for unit, has_window in self._layers.items():
            if has_window == window:
                yield from _tensors_of(self._residents.state_now(unit))


def _tensors_of(state: Any) -> tuple[torch.Tensor, ...]:
    """Latents are one tensor; what another rank holds has no numbers."""
    parts = (state,) if isinstance(state, torch.Tensor) else (state.k, state.v)
    return tuple(part for part in parts if part.numel())


def _fill(parts: Iterator[torch.Tensor], raw: bytes) -> None:
    whole, at = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8), 0
    for part in parts:
        values = whole[at : at + part.nbytes]
        if values.numel() < part.nbytes:
            raise ValueError("a kept block has fewer bytes than the model's layers")
        part.copy_(values.clone().view(part.dtype).view(part.shape))
        at += part.nbytes
    if at != len(raw):
        raise ValueError("a kept block has more bytes than the model's layers")
