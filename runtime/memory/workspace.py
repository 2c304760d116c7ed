"""Scratch tensors of one side (accelerator or host), carved from one piece of memory as pshard.buffers lists them."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from pshard.buffers import dequant_bytes, scratch_buffers
from pshard.model import ModelSpec
from pshard.units.scratch import Buffer
from pshard.units.state import StateShape


@dataclass(frozen=True)
class Workspace:
    """Named scratch tensors for micro-batches of up to `tokens` tokens; `tile` is the dequantisation tile."""

    tokens: int
    tensors: dict[str, torch.Tensor]
    tile: torch.Tensor

    def rows(self, name: str, n: int) -> torch.Tensor:
        """The first n rows of a scratch tensor."""
        return self.tensors[name][:n]


def carve_workspace(
    memory: torch.Tensor, spec: ModelSpec, tokens: int, shape: StateShape, act_dtype: torch.dtype
) -> Workspace:
    """Lay the scratch buffers into `memory` (uint8, at least scratch_bytes long)."""
    tensors, at = view_buffers(memory, scratch_buffers(spec, tokens, shape), act_dtype)
    tile = memory[at : at + dequant_bytes(spec, tokens, act_dtype.itemsize)]
    return Workspace(tokens, tensors, tile)


def view_buffers(
    memory: torch.Tensor, buffers: Iterable[Buffer], act_dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], int]:
    """Buffers one behind the other in `memory` (uint8), by name, and where they end."""
    tensors, at = {}, 0
    for buffer in buffers:
        dtype = torch.float32 if buffer.dtype == "f32" else act_dtype
        tensors[buffer.name] = _view(memory, at, buffer, dtype)
        at += buffer.nbytes(act_dtype.itemsize)
    for name in {"index", "order"} & set(tensors):
        tensors[name] = tensors[name].view(torch.int32)
    return tensors, at


def _view(memory: torch.Tensor, at: int, buffer: Buffer, dtype: torch.dtype) -> torch.Tensor:
    count = 1
    for extent in buffer.shape:
        count *= extent
    return memory[at : at + count * dtype.itemsize].view(dtype).view(buffer.shape)
