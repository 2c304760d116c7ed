"""KV cache of every layer: `context` cells for each sequence, in the arena from the right or in host memory."""

from dataclasses import dataclass

import torch

from pshard.buffers import kv_layer_bytes
from pshard.model import KV_ELEMENT_BYTES, ModelConfig
from pshard.runtime.kernels.api import LayerKV

KV_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


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
    """k and v [sequences, context, G, d] as views of uint8 memory of at least `layer_nbytes`."""
    extents = (shape.sequences, shape.context, n_kv_heads, head_dim)
    count = shape.sequences * shape.context * n_kv_heads * head_dim
    split = count * KV_ELEMENT_BYTES[shape.type_k]
    end = split + count * KV_ELEMENT_BYTES[shape.type_v]
    k = memory[:split].view(KV_DTYPES[shape.type_k]).view(extents)
    v = memory[split:end].view(KV_DTYPES[shape.type_v]).view(extents)
    return LayerKV(k, v)


def used_spans(source: LayerKV, target: LayerKV, spans: list[tuple[int, int, int]]) -> list:
    """Pairs (target, source) of contiguous tensors for the cells [from, to) of each (sequence, from, to)."""
    return [
        (b[sequence, start:stop], a[sequence, start:stop])
        for sequence, start, stop in spans
        if stop > start
        for a, b in ((source.k, target.k), (source.v, target.v))
    ]
