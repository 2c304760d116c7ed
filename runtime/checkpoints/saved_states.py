"""Checkpoints in a KV file: by key head or by some channels, so that any number of ranks writes and reads its own.

A block is what one layer keeps of one key head after some tokens: the matrices of its value heads, then of the
convolution's last inputs the columns of its queries, keys and values; of a short convolution the last inputs of PIECE
channels. Behind these, of a layer with n-grams, all of its convolution's last inputs, which every rank has. float32.
"""

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import torch

from pshard.cuts.rank_parts import Ranges
from pshard.model import ModelSpec
from pshard.runtime.checkpoints.checkpoints import Checkpoint
from pshard.runtime.residents import Snapshot
from pshard.units.delta_net import QUERY_KEY, TAIL, delta_of
from pshard.units.grams import KEY, channels_of, grams_of
from pshard.units.short_conv import PARTS, PIECE, conv_of


@dataclass(frozen=True)
class StateHead:
    """One key head of one layer, or PIECE channels: number among those of a checkpoint, its unit, head among this
    rank's `heads`."""

    number: int
    unit: str
    head: int
    heads: int


def find_states(spec: ModelSpec, held: Sequence[Ranges], rank: int) -> "SavedStates | None":
    """The blocks of a model that a rank has; None of one without such states. held: what of it every rank has."""
    if spec.config.conv and spec.config.keeps_fixed:
        return SavedTails(spec, held[rank])
    if not any(QUERY_KEY in unit.by_role for unit in spec.units):
        return None
    return SavedNetsAndGrams(spec, held, rank) if spec.config.grams else SavedNets(spec, held[rank])


class SavedStates(ABC):
    """The blocks of a model's states that a rank has."""

    def __init__(self, spec: ModelSpec, held: Ranges, role: str, heads: int, width: int) -> None:
        """held: what of the model this rank has; role: a matrix whose rows are cut as states are, `width` of them for
        each of a layer's `heads`."""
        units = [unit for unit in spec.units if role in unit.by_role]
        self.count = len(units) * heads  # blocks of a checkpoint
        found = list[StateHead]()
        for layer, unit in enumerate(units):
            matrix = unit.by_role[role]
            rows = held[unit.name].get(matrix.name, (0, 0))
            own = range(rows[0] // width, rows[1] // width)
            if rows[:2] == (0, matrix.rows):  # all of it, which may be queries and keys: nothing is cut
                own = range(heads)
            found += [StateHead(layer * heads + head, unit.name, at, len(own)) for at, head in enumerate(own)]
        self._heads = tuple(found)

    @property
    @abstractmethod
    def block_nbytes(self) -> int:
        """Bytes of a block."""

    @property
    def sizes(self) -> list[int]:
        """Bytes of every block of a checkpoint."""
        return [self.block_nbytes] * self.count

    def _is_written(self, place: StateHead) -> bool:
        """Whether it is this rank that writes a block that it has."""
        return True

    @abstractmethod
    def _views(self, states: Snapshot, place: StateHead) -> Iterator[torch.Tensor]:
        """Where a block's parts lie in a rank's states."""

    def write(self, file: BinaryIO, offsets: Sequence[int], states: Sequence[Checkpoint]) -> Iterator[tuple[int, int]]:
        """This rank's blocks of all checkpoints, to where all of them begin; (number, CRC) of each."""
        for i, one in enumerate(states):
            for place in filter(self._is_written, self._heads):
                number = i * self.count + place.number
                raw = torch.cat([part.reshape(-1) for part in self._views(one.states, place)]).numpy().tobytes()
                file.seek(offsets[number])
                file.write(raw)
                yield number, zlib.crc32(raw)

    def read(
        self, read_part: Callable[[int, str], bytearray], lengths: Sequence[int], like: Snapshot
    ) -> Iterator[Checkpoint]:
        """Checkpoints at these lengths, in tensors like those. read_part: gives a block by number and name."""
        for i, length in enumerate(lengths):
            states = {unit: tuple(torch.zeros_like(part) for part in parts) for unit, parts in like.items()}
            for place in self._heads:
                raw = read_part(i * self.count + place.number, f"state of {place.unit}")
                numbers, at = torch.frombuffer(raw, dtype=torch.float32), 0
                for view in self._views(states, place):
                    view.copy_(numbers[at : at + view.numel()].view(view.shape))
                    at += view.numel()
            yield Checkpoint(length, states)


class SavedNets(SavedStates):
    """Those of a gated delta net: a block for each key head."""

    def __init__(self, spec: ModelSpec, held: Ranges) -> None:
        self._delta = delta_of(spec.config)
        super().__init__(spec, held, QUERY_KEY, self._delta.key_heads, self._delta.head)

    @property
    def block_nbytes(self) -> int:
        group, d = self._delta.group, self._delta.head
        return 4 * (group * d * d + TAIL * (2 + group) * d)

    def _views(self, states: Snapshot, place: StateHead) -> Iterator[torch.Tensor]:
        """Matrices of value heads, columns of q, k and v."""
        (matrices, tails), d, group, head = states[place.unit], self._delta.head, self._delta.group, place.head
        own = [head + place.heads * i for i in range(group)]
        if not self._delta.tiled:
            own = [head * group + i for i in range(group)]
        yield from (matrices[value] for value in own)
        columns = [head, place.heads + head, *(2 * place.heads + value for value in own)]
        yield from (tails[:, d * column : d * (column + 1)] for column in columns)


class SavedTails(SavedStates):
    """Those of short convolutions: a block for each PIECE channels."""

    def __init__(self, spec: ModelSpec, held: Ranges) -> None:
        self._tail = conv_of(spec.config).taps - 1
        super().__init__(spec, held, PARTS[0], conv_of(spec.config).channels // PIECE, PIECE)

    @property
    def block_nbytes(self) -> int:
        return 4 * self._tail * PIECE

    def _views(self, states: Snapshot, place: StateHead) -> Iterator[torch.Tensor]:
        yield states[place.unit][0][:, PIECE * place.head : PIECE * (place.head + 1)]


class SavedNetsAndGrams(SavedNets):
    """The same, and behind them one of the layer with n-grams."""

    def __init__(self, spec: ModelSpec, held: Sequence[Ranges], rank: int) -> None:
        super().__init__(spec, held[rank])
        unit = next(unit for unit in spec.units if KEY in unit.by_role)
        name = unit.by_role[KEY].name
        holders = [r for r, own in enumerate(held) if any(own[unit.name].get(name, (0, 0))[:2])]
        self._grams, self._nbytes = unit.name, 4 * grams_of(spec.config).reach * channels_of(spec.config)
        if rank in holders:
            self._heads = (*self._heads, StateHead(self.count, unit.name, 0, 1))
        self._writes = rank == holders[0]
        self.count += 1

    @property
    def sizes(self) -> list[int]:
        return [*super().sizes[:-1], self._nbytes]

    def _is_written(self, place: StateHead) -> bool:
        return self._writes or place.unit != self._grams

    def _views(self, states: Snapshot, place: StateHead) -> Iterator[torch.Tensor]:
        if place.unit == self._grams:
            yield states[place.unit][0]
        else:
            yield from super()._views(states, place)
