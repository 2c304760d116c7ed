"""What tiles of attention, of latents and of many tokens' experts are chosen for, and the calls that try them."""

from collections.abc import Callable, Iterator

import torch

from pshard.model_config import Experts
from pshard.profile.effort import Shapes
from pshard.profile.timed.kernel_jobs import KV_TYPE
from pshard.profile.timed.time_experts import deal_routes, rotate_layers
from pshard.profile.timed.time_kernels import KernelBench, attention_buffers, index_rows
from pshard.profile.tuning.tile_cases import TileCase
from pshard.runtime.memory.workspace import view_buffers
from pshard.times.gpu_tiles import ANY_BATCH, INT8_EXPERTS, INT8_TYPES, experts_type, pairs_together
from pshard.units.kv_cells import KV_BLOCK, kv_blocks
from pshard.units.latent_attention import latent_pieces
from pshard.units.moe.routed import scratch_of
from pshard.units.operations import Attend, AttendLatent

PROMPTS = ((2048, 4096), (512, 512))  # new tokens, cells in all: on the second nothing may be lost
DECODING = ((1, 4096), (1, 1024))
ROOMS = (12, 48, 200)  # pairs of an expert, twice, of which tiles have 16, 64 and 128
INT8_PAIRS = 256  # of an expert, for which every tile in int8 has room
Calls = tuple[Callable[[int], None], torch.Tensor]


def attention_cases(shapes: Shapes) -> list[TileCase]:
    """All that is to be chosen for these shapes besides products, each kernel and type once."""
    found: dict[tuple[str, str, int], TileCase] = {}
    for case in (*_attention(shapes), *_latents(shapes), *_experts(shapes)):
        found.setdefault((case.kernel, case.qtype, case.tokens), case)
    return list(found.values())


def _attention(shapes: Shapes) -> Iterator[TileCase]:
    for heads in shapes.attention:
        padded, share = max(16, _power(heads.head_dim)), max(16, _power(heads.n_heads // heads.n_kv_heads))
        for kernel, points in ((f"prompt {padded}", PROMPTS), (f"decode {padded}x{share}", DECODING)):
            yield TileCase(kernel, KV_TYPE, ANY_BATCH, tuple((heads, *point) for point in points))


def _latents(shapes: Shapes) -> Iterator[TileCase]:
    for heads in shapes.latent:
        padded = max(16, _power(heads.rank))
        for kernel, points in ((f"latent prompt {padded}", PROMPTS), (f"latent decode {padded}", DECODING)):
            yield TileCase(kernel, KV_TYPE, ANY_BATCH, tuple((heads, *point) for point in points))


def _experts(shapes: Shapes) -> Iterator[TileCase]:
    for gate, down, width, rule in shapes.experts:
        for room in ROOMS:
            tokens = max(16, room * rule.count // (2 * rule.used))
            together = pairs_together(tokens * rule.used, rule.count)
            on = ((gate, down, width, rule, tokens),)
            yield TileCase("grouped gate", gate, together, on)
            yield TileCase("grouped down", down, together, on)
        if {gate, down} <= set(INT8_TYPES):
            tokens = INT8_PAIRS * rule.count // rule.used
            together = pairs_together(tokens * rule.used, rule.count)
            yield TileCase(INT8_EXPERTS, experts_type(gate, down), together, ((gate, down, width, rule, tokens),))


def _power(n: int) -> int:
    """The power of two that is n or more."""
    return 1 << (n - 1).bit_length()


def calls_of_attention(bench: KernelBench, heads: Attend, tokens: int, context: int) -> Calls:
    """A function of i that attends the last `tokens` of a context, over cache i, and where that goes."""
    cells = kv_blocks(context, 1) * KV_BLOCK
    caches = bench.pool.rotate_kv(cells, heads.n_kv_heads, heads.head_dim, KV_TYPE)
    qkv, out, partial = attention_buffers(bench, heads, tokens)
    rows, scale = index_rows(bench.device, tokens, context), heads.head_dim**-0.5
    attend = bench.kernels.attention
    return lambda i: attend(qkv, heads.heads, caches[i % len(caches)], rows, scale, out, partial), out


def calls_of_latents(bench: KernelBench, shape: AttendLatent, tokens: int, context: int) -> Calls:
    """The same over latents."""
    heads, _, width = shape.heads
    caches = bench.pool.rotate_latents(kv_blocks(context, 1) * KV_BLOCK, width, KV_TYPE)
    q, mixed = (bench.activations(tokens, heads * width).view(tokens, heads, width) for _ in range(2))
    few = torch.empty(tokens * latent_pieces(tokens, heads), heads, shape.rank + 2, device=bench.device)
    partial = few if tokens == 1 else None
    rows, scale, attend = index_rows(bench.device, tokens, context), width**-0.5, bench.kernels.attend_latent
    out = mixed[:, :, : shape.rank]
    return lambda i: attend(q, shape.rank, caches[i % len(caches)], rows, scale, mixed, partial), out


def calls_of_experts(bench: KernelBench, gate: str, down: str, width: int, rule: Experts, tokens: int) -> Calls:
    """A function of i that computes the experts of so many tokens, of layer i, and where that goes."""
    layers, act = rotate_layers(bench, (gate, down), width, rule), bench.kernels.act_dtype
    x, out = bench.activations(tokens, width), torch.zeros(tokens, width, device=bench.device)
    buffers = scratch_of(rule, width, tokens)
    memory = torch.empty(sum(b.nbytes(act.itemsize) for b in buffers), dtype=torch.uint8, device=bench.device)
    scratch, _ = view_buffers(memory, buffers, act)
    turns = deal_routes(rule, tokens, bench.device)

    def run(i: int) -> None:
        routes = turns[i // len(layers) % len(turns)]
        bench.kernels.experts(x, routes, layers[i % len(layers)], rule, out, scratch, False)

    return run, out
