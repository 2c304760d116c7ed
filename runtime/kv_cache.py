"""KV cache of every layer: `context` cells for each sequence, in the arena from the right or in host memory."""

from dataclasses import dataclass

import torch

from pshard.buffers import BUFFER_ALIGN, kv_layer_bytes
from pshard.model import ModelConfig, kv_nbytes
from pshard.quant import align
from pshard.runtime.kernels.api import LayerKV

JOIN_BYTES = 512 << 10  # what the link moves while one more copy is issued (10 us at 50 GB/s)
KV_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "q8_0": torch.int8}


@dataclass(frozen=True)
class KVShape:
    """Extents of a cache: cells per sequence, sequences, element types."""

    context: int
    sequences: int
    type_k: str
    type_v: str


def layer_nbytes(config: ModelConfig, shape: KVShape) -> int:
    """Bytes of one layer's cache."""
    return kv_layer_bytes(config, shape.context, shape.sequences, shape.type_k, shape.type_v)


def view_layer(memory: torch.Tensor, n_kv_heads: int, head_dim: int, shape: KVShape) -> LayerKV:
    """k and v as views of uint8 memory of at least `layer_nbytes`: LayerKV's tensors."""
    views, at = [], 0
    for kind in (shape.type_k, shape.type_v):
        cell = kv_nbytes(kind, n_kv_heads * head_dim)
        nbytes = shape.sequences * shape.context * cell
        extents = (cell,) if kind == "q8_0" else (n_kv_heads, head_dim)
        views.append(memory[at : at + nbytes].view(KV_DTYPES[kind]).view(shape.sequences, shape.context, *extents))
        at += align(nbytes, BUFFER_ALIGN)
    return LayerKV(*views)


@dataclass(frozen=True)
class Rectangle:
    """The cells [start, stop) of the sequences [first, last)."""

    first: int
    last: int
    start: int
    stop: int

    @property
    def cells(self) -> int:
        return (self.last - self.first) * (self.stop - self.start)

    def join(self, other: "Rectangle") -> "Rectangle":
        """The smallest rectangle that holds both."""
        return Rectangle(self.first, other.last, min(self.start, other.start), max(self.stop, other.stop))


def join_spans(spans: list[tuple[int, int, int]], most: int) -> list[Rectangle]:
    """Rectangles that cover the cells [from, to) of each (sequence, from, to), sequences in rising order.

    Neighbours become one when that adds no more than `most` cells that nobody asked for; no sequence is covered that
    has no cells in `spans`.
    """
    joined: list[Rectangle] = []
    for sequence, start, stop in spans:
        if stop <= start:
            continue
        new = Rectangle(sequence, sequence + 1, start, stop)
        if joined and joined[-1].last == sequence:
            both = joined[-1].join(new)
            if both.cells - joined[-1].cells - new.cells <= most:
                joined[-1] = both
                continue
        joined.append(new)
    return joined


def used_pieces(source: LayerKV, target: LayerKV, spans: list[tuple[int, int, int]]) -> list[tuple]:
    """Pairs (target, source) of tensors [sequences, elements] with contiguous rows: the cells [from, to) of each
    (sequence, from, to), in as few pieces as pay.

    A piece may hold cells beside them. Copying those does no harm where source and target agree on the cells before
    `from`, as a stage does with the host's cache that it was filled from; what lies after `to` is in nobody's use.
    """
    if source.k.numel() == 0:  # another rank holds all of this layer's cache
        return []
    most = JOIN_BYTES // max(cache[0, 0].nbytes for cache in (source.k, source.v))
    return [
        (_rows_of(b, piece), _rows_of(a, piece))
        for piece in join_spans(spans, most)
        for a, b in ((source.k, target.k), (source.v, target.v))
    ]


def _rows_of(cache: torch.Tensor, piece: Rectangle) -> torch.Tensor:
    return cache[piece.first : piece.last, piece.start : piece.stop].flatten(1)
