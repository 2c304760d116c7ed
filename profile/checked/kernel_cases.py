"""Calls that reach every kernel of a GPU, on random operands that depend on nothing but the case: what a fast and a
plain kernel make of them can be compared."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from pshard.batch_sizes import SMALL_BATCH
from pshard.model_config import Experts
from pshard.profile.timed.operands import random_record
from pshard.profile.timed.time_kernels import NORM_EPS, index_rows
from pshard.quant import QUANT_TYPES, ROW_BLOCK
from pshard.runtime.kernels.api import (
    DeltaWeights,
    ExpertWeights,
    InnerNorm,
    Kernels,
    LayerKV,
    Packed,
    RopeTable,
    Routes,
)
from pshard.runtime.kernels.kv_codec import decode_cells, encode_cells
from pshard.runtime.memory.kv_cache import KV_DTYPES
from pshard.runtime.memory.workspace import view_buffers
from pshard.units.attention import ATTENTION_PIECES
from pshard.units.kv_cells import CODED, KV_BLOCK, kv_blocks
from pshard.units.latent_attention import latent_pieces
from pshard.units.moe.routed import scratch_of
from pshard.units.operations import DeltaNet

Made = tuple[Callable[[], object], Callable[[], torch.Tensor]]  # does it once; what came of it, as float32
HEADS = ((8, 2, 64), (4, 4, 80), (4, 4, 96), (8, 2, 128), (4, 2, 192), (4, 1, 256))
CELLS = tuple(KV_DTYPES)
PLANED = [name for name, q in QUANT_TYPES.items() if q.planes]
MANY = 2 * SMALL_BATCH  # tokens of a prompt
CONTEXT = 300
ROWS, COLS = 80, 512  # of matrices: groups of 16 rows and blocks of 256 columns, and not all tiles whole


@dataclass(frozen=True)
class KernelCase:
    """One call. `make` takes the kernels that are to do it and the device where it is done."""

    kernel: str
    what: str
    make: Callable[[Kernels, torch.device], Made]


def list_cases() -> Iterator[KernelCase]:
    """Every kernel with the types, head sizes and batches that it is written for: the commonest first."""
    for qtype in (*PLANED, "F32", "F16", "BF16", "FP8"):
        for tokens in (1, 16, SMALL_BATCH, MANY):
            yield KernelCase("product", f"{qtype}, {_say(tokens)}", partial(_multiply, qtype, tokens))
    for heads in HEADS:
        for cells in CELLS:
            if cells not in CODED or heads[2] % 32 == 0:
                for tokens in (1, MANY):
                    name = f"heads of {heads[2]}, {cells}, {_say(tokens)}"
                    yield KernelCase("attention over cells", name, partial(_attend, heads, cells, tokens, 0))
    for tokens in (1, MANY):
        name = f"window and sinks, {_say(tokens)}"
        yield KernelCase("attention over cells", name, partial(_attend, (8, 2, 64), "bf16", tokens, 128))
    for tokens in (1, SMALL_BATCH, MANY):
        yield KernelCase("gate and up", f"Q4_K, {_say(tokens)}", partial(_gate_up, tokens))
    for cells in ("bf16", *CODED):
        yield KernelCase("rope and store", cells, partial(_rope_store, cells))
    for tokens in (1, MANY):
        yield KernelCase("norm", f"{_say(tokens)}", partial(_normalise, tokens))
        yield KernelCase("two norms", f"{_say(tokens)}", partial(_normalise_twice, tokens))
    yield KernelCase("look-up", "Q6_K", _look_up)
    yield from _list_expert_cases()
    for cells in ("bf16", "q8_0"):
        for tokens in (1, MANY):
            yield KernelCase("latent attention", f"{cells}, {_say(tokens)}", partial(_attend_latent, cells, tokens))
    for tokens in (1, MANY):
        yield KernelCase("products by head", f"Q8_0, {_say(tokens)}", partial(_multiply_heads, tokens))
    for tokens in (1, MANY):
        yield KernelCase("gated delta net", f"{_say(tokens)}", partial(_delta_net, tokens))
    for tokens in (1, MANY):
        yield KernelCase("convolution over time", f"{_say(tokens)}", partial(_convolve, tokens))
    for tokens in (1, MANY):
        yield KernelCase("residual streams", f"{_say(tokens)}", partial(_mix_streams, tokens))


def _list_expert_cases() -> Iterator[KernelCase]:
    silu = Experts(8, 2, 256)
    clamped = replace(silu, scores="chosen", normed=False, activation="clamped", biases=True)
    for tokens in (1, MANY):
        yield KernelCase("router", f"{_say(tokens)}", partial(_route, silu, tokens))
    for qtype, rule in (("Q4_K", silu), ("Q6_K", silu), ("Q8_0", silu), ("MXFP4", clamped), ("BF16", silu)):
        for tokens in (1, MANY, 1024):
            yield KernelCase("experts", f"{qtype}, {_say(tokens)}", partial(_experts, qtype, rule, tokens))


def _say(tokens: int) -> str:
    return "1 token" if tokens == 1 else f"{tokens} tokens"


def _random(device: torch.device, *shape: int, seed: int = 0) -> torch.Tensor:
    """Standard normal numbers that bfloat16 holds, float32."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values.bfloat16().float().to(device)


def _weight(device: torch.device, qtype: str, rows: int, cols: int, seed: int = 0) -> Packed:
    """A matrix whose groups of rows are unlike."""
    records = [torch.from_numpy(random_record(qtype, cols, seed + i)) for i in range(-(-rows // ROW_BLOCK))]
    return Packed(torch.cat(records).to(device), qtype, rows, cols)


def _tile(kernels: Kernels, weight: Packed, tokens: int) -> torch.Tensor:
    """Scratch for all of a matrix."""
    size = weight.rows * weight.cols * kernels.act_dtype.itemsize if tokens > SMALL_BATCH else 0
    return torch.empty(size, dtype=torch.uint8, device=weight.data.device)


def _empty(kernels: Kernels, device: torch.device, *shape: int) -> torch.Tensor:
    """Activations that were not written yet."""
    return torch.full(shape, float("nan"), dtype=kernels.act_dtype, device=device)


def _multiply(qtype: str, tokens: int, kernels: Kernels, device: torch.device) -> Made:
    weight, x = _weight(device, qtype, ROWS, COLS), _random(device, tokens, COLS).to(kernels.act_dtype)
    out, tile = _empty(kernels, device, tokens, ROWS), _tile(kernels, weight, tokens)
    return lambda: kernels.linear(x, weight, out, tile), out.float


def _gate_up(tokens: int, kernels: Kernels, device: torch.device) -> Made:
    gate, up = (_weight(device, "Q4_K", ROWS, COLS, seed) for seed in (0, 100))
    x, both = _random(device, tokens, COLS).to(kernels.act_dtype), _empty(kernels, device, tokens, 2 * ROWS)
    out, tile = _empty(kernels, device, tokens, ROWS), _tile(kernels, gate, tokens)
    return lambda: kernels.gate_up(x, gate, up, out, both, tile), out.float


def _cells(device: torch.device, groups: int, dim: int, kind: str, seed: int) -> torch.Tensor:
    """Cells of one sequence of CONTEXT tokens."""
    values = _random(device, kv_blocks(CONTEXT, 1) * KV_BLOCK, groups, dim, seed=seed)
    return encode_cells(values, KV_DTYPES[kind]).unflatten(0, (-1, KV_BLOCK)).contiguous()


def _attend(
    heads: tuple[int, int, int], kind: str, tokens: int, window: int, kernels: Kernels, device: torch.device
) -> Made:
    n_heads, groups, dim = heads
    kv = LayerKV(_cells(device, groups, dim, kind, 1), _cells(device, groups, dim, kind, 2))
    qkv = _random(device, tokens, (n_heads + 2 * groups) * dim).to(kernels.act_dtype)
    out, partial_sums = _empty(kernels, device, tokens, n_heads * dim), None
    if tokens <= SMALL_BATCH:
        partial_sums = torch.empty(tokens, n_heads, ATTENTION_PIECES, dim + 2, device=device)
    rows = replace(index_rows(device, tokens, CONTEXT), window=window)
    sinks = _random(device, n_heads, seed=3) if window else None
    return lambda: kernels.attention(qkv, heads, kv, rows, dim**-0.5, out, partial_sums, sinks), out.float


def _rope_store(kind: str, kernels: Kernels, device: torch.device) -> Made:
    heads, tokens = (8, 2, 128), 16
    kv = LayerKV(_cells(device, 2, 128, kind, 1), _cells(device, 2, 128, kind, 2))
    qkv = _random(device, tokens, 12 * 128).to(kernels.act_dtype)
    angles = _random(device, CONTEXT, 64, seed=4)
    rope, rows = RopeTable(angles.cos(), angles.sin(), "halves"), index_rows(device, tokens, CONTEXT)
    norm = _random(device, 128, seed=5).abs()
    call = lambda: kernels.rope_store(qkv, heads, norm, norm, NORM_EPS, rope, rows, kv)  # noqa: E731
    return call, lambda: torch.cat([qkv[:, : 8 * 128].float().flatten(), decode_cells(kv.k, 128).flatten()])


def _normalise(tokens: int, kernels: Kernels, device: torch.device) -> Made:
    hidden, weight = _random(device, tokens, 1024), _random(device, 1024, seed=1)
    out = _empty(kernels, device, tokens, 1024)
    return lambda: kernels.rms_norm(hidden, weight, NORM_EPS, out), out.float


def _normalise_twice(tokens: int, kernels: Kernels, device: torch.device) -> Made:
    made = [_random(device, tokens, 1024, seed=n) for n in range(3)]
    weights = [_random(device, 1024, seed=3 + n) for n in range(4)]
    inner = InnerNorm(made[0].clone(), weights[0], NORM_EPS, None, ((made[0], weights[1]), (made[1], weights[2])))
    hidden, out = made[2].clone(), _empty(kernels, device, tokens, 1024)

    def call() -> None:
        hidden.copy_(made[2])
        kernels.add_normed(inner, hidden, (weights[3], NORM_EPS, out))

    return call, lambda: torch.cat([hidden, out.float()], 1)


def _look_up(kernels: Kernels, device: torch.device) -> Made:
    table, ids = _weight(device, "Q6_K", ROWS, COLS), torch.tensor([0, 15, 16, 79, 7], device=device)
    out = torch.full((5, COLS), float("nan"), device=device)
    return lambda: kernels.look_up(table, ids, out), out.float


def _route(rule: Experts, tokens: int, kernels: Kernels, device: torch.device) -> Made:
    x, router = _random(device, tokens, 1024), _weight(device, "F32", rule.count, 1024)
    ids = torch.zeros(tokens, rule.used, dtype=torch.int32, device=device)
    routes = Routes(ids, torch.zeros(tokens, rule.used, device=device))
    return lambda: kernels.route(x, router, rule, routes), lambda: torch.cat([ids.float(), routes.weights], 1)


def _experts(qtype: str, rule: Experts, tokens: int, kernels: Kernels, device: torch.device) -> Made:
    gate, up, down = (
        tuple(_weight(device, qtype, 256, 256, 1000 * kind + 50 * e) for e in range(rule.count)) for kind in range(3)
    )
    addresses = torch.tensor([[m.data.data_ptr() for m in stack] for stack in (gate, up, down)], device=device)
    biases = [0.1 * _random(device, rule.count, 256, seed=kind) for kind in range(3)]
    weights = ExpertWeights(gate, up, down, addresses, (biases[0], biases[1], biases[2]) if rule.biases else None)
    choice = _random(device, tokens, rule.count, seed=6).topk(rule.used)
    routes = Routes(choice.indices.int().contiguous(), choice.values.softmax(-1).contiguous())
    x, out = _random(device, tokens, 256).to(kernels.act_dtype), torch.zeros(tokens, 256, device=device)
    buffers = scratch_of(rule, 256, tokens)
    memory = torch.empty(sum(b.nbytes(kernels.act_dtype.itemsize) for b in buffers), dtype=torch.uint8, device=device)
    scratch, _ = view_buffers(memory, buffers, kernels.act_dtype)
    return lambda: kernels.experts(x, routes, weights, rule, out, scratch, False), out.float


def _multiply_heads(tokens: int, kernels: Kernels, device: torch.device) -> Made:
    heads, cols, rows = 8, 128, 256
    stack, x = _weight(device, "Q8_0", heads * rows, cols), _random(device, tokens, heads, cols).to(kernels.act_dtype)
    out = _empty(kernels, device, tokens, heads, rows)
    return lambda: kernels.head_products(x, stack, out), out.float


def _attend_latent(kind: str, tokens: int, kernels: Kernels, device: torch.device) -> Made:
    heads, rank, width = 16, 512, 576
    cells = _cells(device, 1, width, kind, 1)
    q, out = _random(device, tokens, heads, width).to(kernels.act_dtype), _empty(kernels, device, tokens, heads, width)
    sums = None
    if tokens <= SMALL_BATCH:
        sums = torch.empty(tokens * latent_pieces(tokens, heads), heads, rank + 2, device=device)
    rows = index_rows(device, tokens, CONTEXT)
    return lambda: kernels.attend_latent(q, rank, cells, rows, width**-0.5, out, sums), out[..., :rank].float


def _convolve(tokens: int, kernels: Kernels, device: torch.device) -> Made:
    channels, taps = 2048, 3
    x = _random(device, tokens, 3 * channels, seed=1).to(kernels.act_dtype)
    own, tails = _random(device, channels, taps, seed=2), _random(device, 1, taps - 1, channels, seed=3)
    slots, offsets = (torch.tensor(values, dtype=torch.int32, device=device) for values in ([0], [0, tokens]))
    out = _empty(kernels, device, tokens, channels)

    def convolve() -> None:
        kernels.short_conv(x, own, tails.clone(), slots, offsets, out=out, longest=tokens)

    return convolve, out.float


def _mix_streams(tokens: int, kernels: Kernels, device: torch.device) -> Made:
    count, width = 4, 320
    given, streams = _random(device, tokens, width), _random(device, tokens, count * width + count, seed=1)
    weight, out = _random(device, count * width, seed=2), _empty(kernels, device, tokens, count * width)
    mixed = torch.empty(tokens, width, device=device)

    def mix() -> None:
        kernels.enter_streams(given, streams, False, weight, count, NORM_EPS, out)
        kernels.mix_streams(out, out, count, mixed)

    return mix, lambda: torch.cat([out.float().flatten(), mixed.flatten()])


def _delta_net(tokens: int, kernels: Kernels, device: torch.device) -> Made:
    net = DeltaNet((), None, None, None, 2, 4, 128)  # type: ignore[arg-type]  # whose tensors are made here
    weights = DeltaWeights(
        0.5 * _random(device, net.channels, 4, seed=1), _random(device, 4, seed=2), -0.1 * torch.ones(4, device=device),
        torch.ones(128, device=device), NORM_EPS, *net.shape,
    )  # fmt: skip
    qkv = _random(device, tokens, net.channels).to(kernels.act_dtype)
    z = _random(device, tokens, 4 * 128, seed=3).to(kernels.act_dtype)
    beta, alpha = (_random(device, tokens, 4, seed=seed).to(kernels.act_dtype) for seed in (4, 5))
    states, tails = 0.1 * _random(device, 1, 4, 128, 128, seed=6), _random(device, 1, 3, net.channels, seed=7)
    slots = torch.zeros(1, dtype=torch.int32, device=device)
    offsets = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    out = _empty(kernels, device, tokens, 4 * 128)
    scratch = torch.empty(net.scratch_nbytes(tokens, 1, out.element_size()), dtype=torch.uint8, device=device)

    def run() -> None:
        kernels.delta_net(
            qkv, z, beta, alpha, weights, states, tails=tails, slots=slots, offsets=offsets, out=out, longest=tokens,
            scratch=scratch,
        )  # fmt: skip

    return run, lambda: torch.cat([out.float().flatten(), states.flatten()])
