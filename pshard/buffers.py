"""Sizes of everything in the arena beside weights: one place, used by the planner and by the runtime's allocation."""

from collections.abc import Iterable
from dataclasses import replace

from pshard.batch_sizes import LOGIT_ROWS, SMALL_BATCH
from pshard.model import ModelSpec
from pshard.plan import Placement
from pshard.quant import BUFFER_ALIGN, align
from pshard.units.divide_unit import joined_width
from pshard.units.kv_cells import KV_BLOCK, kv_blocks, longest_sequence
from pshard.units.scratch import Buffer
from pshard.units.state import StateShape

MOST_TABLE = 1 << 16  # blocks in the index of a micro-batch whose sequences share many: it is sent with each
DEQUANT_BYTES = 80 << 20  # dequantised tile for large batches, at most; a whole matrix where it is smaller
# of a staging ring: buffers, and bytes of each: few enough to be in the cache when the copy engine reads them
BUFFERS, CHUNK = 4, 8 << 20
STATES = "states"  # scratch: the residual stream of every token, as the output normalises it
# scratch: weights that normalise sums over ranks, one row for each of `ModelSpec.sum_norms`; and behind it what the
# stream is multiplied by then, of four numbers the first: rows begin where vectors may
SUM_NORMS = "sum_norms"


def scratch_buffers(spec: ModelSpec, tokens: int, shape: StateShape) -> tuple[Buffer, ...]:
    """Every scratch buffer that a micro-batch of `tokens` tokens needs on the device, however its units are placed:
    the residual stream's, and what each kind of unit asks for."""
    config = spec.config
    buffers = [
        Buffer("hidden", (tokens, config.d_model), "f32"),
        Buffer("normed", (tokens, config.d_model), "act"),
        Buffer("branch", (tokens, config.d_model), "f32"),
        Buffer("logits", (logit_rows(tokens, shape.sequences), config.vocab), "f32"),
        Buffer("index", (index_words(spec, tokens, shape),), "f32"),
    ]
    if spec.keeps_states:
        buffers.append(Buffer(STATES, (tokens, config.d_model), "f32"))
    if spec.sum_norms:
        buffers.append(Buffer(SUM_NORMS, (len(spec.sum_norms), config.d_model + 4), "f32"))
    for kind in dict.fromkeys(unit.kind for unit in spec.units):
        if kind.scratch:
            buffers += kind.scratch(kind.sees(config), tokens, shape)
    found: dict[str, Buffer] = {}  # kinds that are alike name the same ones
    for buffer in buffers:
        same = found.setdefault(buffer.name, buffer)
        found[buffer.name] = replace(same, shape=tuple(map(max, same.shape, buffer.shape)))
    return tuple(found.values())


def index_words(spec: ModelSpec, tokens: int, shape: StateShape) -> int:
    """Words of what says where each row of a micro-batch stands; layers with a window have blocks of their own, and
    states of a fixed size ask for the bounds of sequences."""
    words = 3 * tokens + (2 if spec.config.window else 1) * kv_blocks(shape.context, shape.sequences)
    return words + (2 * min(tokens, shape.sequences) + 1 if spec.config.keeps_fixed else 0)


def shared_index_words(spec: ModelSpec, tokens: int, shape: StateShape) -> int:
    """As `index_words`, with tables that are long enough for sequences that share blocks, of which each counts its own:
    as far as MOST_TABLE goes. Taken where a tier leaves the room."""
    longest = -(-longest_sequence(spec.config, shape.context) // KV_BLOCK)
    wished = min(min(tokens, shape.sequences) * longest, MOST_TABLE)
    more = max(0, wished - kv_blocks(shape.context, shape.sequences))
    return index_words(spec, tokens, shape) + (2 if spec.config.window else 1) * more


def table_room(spec: ModelSpec, tokens: int, shape: StateShape, words: int) -> int:
    """Blocks of all sequences of a micro-batch together that an index of so many words has room for."""
    spare = words - index_words(spec, tokens, shape)
    return kv_blocks(shape.context, shape.sequences) + spare // (2 if spec.config.window else 1)


def logit_rows(tokens: int, sequences: int) -> int:
    """Rows of logits that are computed at once in micro-batches of `tokens` tokens."""
    return min(tokens, max(sequences, LOGIT_ROWS))


def dequant_bytes(spec: ModelSpec, tokens: int, act_bytes: int) -> int:
    """Bytes of the tile that packed weights are dequantised into in large batches; 0 when kernels read them packed."""
    if tokens <= SMALL_BATCH:
        return 0
    largest, widest = spec.largest_matrix
    return align(max(min(largest * act_bytes, DEQUANT_BYTES), 16 * widest * act_bytes), BUFFER_ALIGN)


def scratch_bytes(spec: ModelSpec, tokens: int, shape: StateShape, act_bytes: int) -> int:
    """Bytes of scratch in the arena for micro-batches of up to `tokens` tokens, without slots and state stage."""
    fixed = sum(b.nbytes(act_bytes) for b in scratch_buffers(spec, tokens, shape))
    return fixed + dequant_bytes(spec, tokens, act_bytes)


def state_stage_bytes(spec: ModelSpec, shape: StateShape) -> int:
    """Bytes of the stage for one layer's state, where a unit keeps its state on the host but computes on the device."""
    return max(spec.state_sizes(shape).values(), default=0)


def row_stage_bytes(tokens: int, width: int) -> int:
    """Bytes on the accelerator for what the CPU has computed of a divided unit: float32 [tokens, width]."""
    return align(4 * tokens * width, BUFFER_ALIGN)


def widest_join(spec: ModelSpec, placements: Iterable[Placement]) -> int:
    """Elements a token that the CPU hands over of any divided unit; 0 without one."""
    return max((joined_width(spec.unit(p.unit), p.share, spec.config) for p in placements if p.cpu_rows), default=0)


def arena_bytes(budget_mib: int, kind: str, reserve_mib: int) -> int:
    """Bytes of the arena that a budget allows on an accelerator of that kind ("cuda" or "cpu"); of a GPU's budget
    `reserve_mib` are kept, see `pshard/reserve.py`."""
    return max(0, budget_mib - (reserve_mib if kind == "cuda" else 0)) << 20
