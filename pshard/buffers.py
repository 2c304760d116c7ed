"""Sizes of everything in the arena beside weights: one place, used by the planner and by the runtime's allocation."""

from dataclasses import dataclass

from pshard.model import ModelConfig, ModelSpec, kv_nbytes
from pshard.quant import align

BUFFER_ALIGN = 256
DEQUANT_BYTES = 80 << 20  # dequantised tile for large batches, at most; a whole matrix where it is smaller
SMALL_BATCH = 64  # up to here kernels read packed weights in place; above, tiles are dequantised for a library GEMM
# above, a CPU's AMX tiles are faster than its vectors; 16 tokens took 1.31 ms against 1.13 (25600x5120 Q4_0, 16 cores)
TILE_TOKENS = 16
ATTENTION_SPLITS = 64  # most pieces that one decode attention is cut into along the context
DECODE_PROGRAMS = 1024  # a decode attention is cut until about this many programs run
TORCH_RESERVE_MIB = 320  # of a CUDA budget: kernels' code, CUDA graphs, cuBLAS workspace (282 measured on an H100)
LOGIT_ROWS = 64  # rows of logits computed at once
KV_BLOCK = 64  # cells that a sequence takes from the KV cache at once; a tile of attention lies in one or in whole ones


@dataclass(frozen=True)
class Buffer:
    """A scratch buffer: shape in elements of `dtype` ("f32" or "act", the activations' type)."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def nbytes(self, act_bytes: int) -> int:
        n = 4 if self.dtype == "f32" else act_bytes
        for s in self.shape:
            n *= s
        return align(n, BUFFER_ALIGN)


def scratch_buffers(config: ModelConfig, tokens: int, sequences: int, context: int) -> tuple[Buffer, ...]:
    """Every scratch buffer that a micro-batch of `tokens` tokens needs on the device, however its units are placed."""
    heads, kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    rows = min(tokens, max(sequences, LOGIT_ROWS))
    buffers = [
        Buffer("hidden", (tokens, config.d_model), "f32"),
        Buffer("normed", (tokens, config.d_model), "act"),
        Buffer("branch", (tokens, config.d_model), "f32"),
        Buffer("qkv", (tokens, heads + 2 * kv), "act"),
        Buffer("mixed", (tokens, heads), "act"),
        Buffer("gate_up", (tokens, 2 * config.d_ffn), "act"),
        Buffer("logits", (rows, config.vocab), "f32"),
        Buffer("index", (3 * tokens + kv_blocks(context, sequences),), "f32"),
        Buffer("rope", (2, longest_sequence(config, context), config.rope.dims // 2), "f32"),
    ]
    # every tier may be given few tokens: those attend in pieces along the context
    most = max(n * decode_splits(n, config.n_kv_heads) for n in range(1, min(tokens, SMALL_BATCH) + 1))
    buffers.append(Buffer("partial", (most, config.n_heads, config.head_dim + 2), "f32"))
    return tuple(buffers)


def decode_splits(tokens: int, n_kv_heads: int) -> int:
    """Most pieces along the context that the decode attention of so many rows is cut into."""
    return min(ATTENTION_SPLITS, max(1, DECODE_PROGRAMS // (tokens * max(1, n_kv_heads))))


def dequant_bytes(spec: ModelSpec, tokens: int, act_bytes: int) -> int:
    """Bytes of the tile that packed weights are dequantised into in large batches; 0 when kernels read them packed."""
    if tokens <= SMALL_BATCH:
        return 0
    largest, widest = spec.largest_matrix
    return align(max(min(largest * act_bytes, DEQUANT_BYTES), 16 * widest * act_bytes), BUFFER_ALIGN)


def kv_stage_bytes(config: ModelConfig, context: int, sequences: int, type_k: str, type_v: str) -> int:
    """Bytes of the stage for one layer's KV when a layer keeps its KV on the host but attends on the device."""
    return kv_layer_bytes(config, context, sequences, type_k, type_v)


def scratch_bytes(spec: ModelSpec, tokens: int, sequences: int, act_bytes: int, context: int) -> int:
    """Bytes of scratch in the arena for micro-batches of up to `tokens` tokens, without staging slots and KV stage."""
    fixed = sum(b.nbytes(act_bytes) for b in scratch_buffers(spec.config, tokens, sequences, context))
    return fixed + dequant_bytes(spec, tokens, act_bytes)


def kv_layer_bytes(config: ModelConfig, context: int, sequences: int, type_k: str, type_v: str) -> int:
    """Bytes of one layer's KV cache of `context` cells that `sequences` share."""
    return kv_cells_bytes(kv_blocks(context, sequences) * KV_BLOCK, config.n_kv_heads * config.head_dim, type_k, type_v)


def kv_blocks(context: int, sequences: int) -> int:
    """Blocks of a KV cache of `context` cells that `sequences` share: equal shares of it have whole blocks."""
    return sequences * -(-context // (sequences * KV_BLOCK))


def longest_sequence(config: ModelConfig, context: int) -> int:
    """Cells that one sequence may have in a KV cache of `context` cells."""
    return min(context, config.context or context)


def kv_cells_bytes(cells: int, width: int, type_k: str, type_v: str) -> int:
    """Bytes of cells of `width` numbers each for keys and for values; values begin where vectors may."""
    return sum(align(cells * kv_nbytes(kind, width), BUFFER_ALIGN) for kind in (type_k, type_v))


def arena_bytes(budget_mib: int, kind: str) -> int:
    """Bytes of the arena that a budget allows on an accelerator of that kind ("cuda" or "cpu")."""
    reserve = TORCH_RESERVE_MIB if kind == "cuda" else 0
    return max(0, budget_mib - reserve) << 20
