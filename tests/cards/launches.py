"""Every launch of a kernel that the runtime and the tuner make on a card, found by calling them on CPU tensors."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from pshard.model_config import Experts
from pshard.profile.timed.operands import OperandPool
from pshard.profile.timed.time_experts import expert_calls, rotate_layers, time_experts, time_router
from pshard.profile.timed.time_kernels import (
    KernelBench,
    index_rows,
    time_attention,
    time_elementwise,
    time_embedding,
    time_matmul,
)
from pshard.profile.timed.time_latent import time_latent
from pshard.profile.timing_loop import Pace
from pshard.profile.tuning.attention_cases import calls_of_experts
from pshard.profile.tuning.compile_ahead import Request, become, requests_of
from pshard.profile.tuning.tile_cases import TileCase, calls_of
from pshard.quant import QUANT_TYPES
from pshard.runtime.kernels.api import (
    AS_THEY_ARE,
    DeltaWeights,
    InnerNorm,
    OpenNet,
    Packed,
    RopeTable,
    Scoring,
    Segment,
)
from pshard.runtime.kernels.gpu import triton_copy, triton_flags
from pshard.runtime.kernels.gpu.card_limits import CardLimits
from pshard.runtime.kernels.gpu.cuda import CudaKernels
from pshard.runtime.kernels.gpu.default_tiles import INT8_WAYS, gated_kernel
from pshard.runtime.kernels.gpu.exchange import triton_exchange, triton_many_rows
from pshard.runtime.kernels.gpu.products.many_rows import library_left_out
from pshard.runtime.kernels.gpu.tiles.pick_tiles import Key
from pshard.runtime.kernels.row_index import make_rows
from pshard.runtime.ranks.peer_memory import PeerExchange
from pshard.runtime.ranks.sum_norm import SumNorm
from pshard.times.gpu_tiles import INT8_EXPERTS, INT8_TYPES, Tile, TileChoice, pairs_together
from pshard.units.attention import ATTENTION_PIECES
from pshard.units.kv_cells import CODED, KV_BLOCK, kv_blocks
from pshard.units.operations import Attend, AttendLatent

PACKED = tuple(name for name, q in QUANT_TYPES.items() if q.planes)
PLAIN = ("F32", "F16", "BF16", "FP8")
FEW_ROWS = (1, 2, 4, 8, 16, 32, 64)
CELLS = ("bf16", "f16", "q8_0", "f32")  # of latents too, which are not kept as q4_0
BRIEF_CELLS, BRIEF_TYPES = ("bf16", "q8_0", "q4_0", "f32"), ("Q4_0", "Q6_K", "MXFP4", "IQ2_XS", "NVFP4")
HEADS = (  # of the supported models: head sizes, and heads that share one
    Attend(32, 8, 128), Attend(64, 8, 128), Attend(64, 8, 64), Attend(32, 32, 96), Attend(16, 8, 256),
    Attend(24, 2, 256), Attend(8, 1, 256), Attend(32, 4, 80), Attend(96, 8, 192), Attend(64, 1, 128),
    Attend(16, 4, 512),
)  # fmt: skip
BRIEF_HEADS = (HEADS[0], HEADS[2], HEADS[4], *HEADS[7:])
CAPPED, SLOPED, CHUNKED = Scoring(50.0), Scoring(slopes=torch.zeros(64)), Scoring(chunked=True)
CHOSEN = Scoring(seen=torch.ones(128, 32, dtype=torch.int32), each=4, most=512)
WINDOWS = ((Attend(64, 8, 64), 128, True), (Attend(64, 8, 64), 0, True), (Attend(16, 8, 256), 1024, False),
           (Attend(32, 8, 128), 512, False), (Attend(16, 8, 256), 512, False, CAPPED),
           (Attend(40, 40, 128), 0, False, SLOPED), (Attend(40, 8, 128), 512, False, CHUNKED),
           (Attend(24, 2, 256), 0, False, CHOSEN))  # fmt: skip
LATENTS = (AttendLatent(16, 512, 64), AttendLatent(128, 512, 64))
MIXED = (("IQ3_S", "IQ1_M"), ("IQ2_XS", "Q6_K"), ("NVFP4", "MXFP4"), ("Q2_K", "IQ3_XXS"))  # gate and up of experts
MANY_SMALL, VERY_MANY = Experts(128, 8, 768), Experts(512, 10, 512)
FEW_LARGE = Experts(32, 4, 2880, "chosen", normed=False, activation="clamped", biases=True)
DELTAS = ((16, 32, 128), (16, 64, 128), (16, 16, 64))  # key heads, value heads, numbers of a head
RANKS = (2, 4, 8)
DECODING = {
    "matvec_kernel", "gate_up_pairs_kernel", "down_pairs_kernel", "rows_kernel", "combine_kernel", "decode_kernel",
    "decode_combine_kernel", "decode_latent_kernel", "combine_latent_kernel", "delta_steps_kernel", "route_kernel",
    "conv_steps_kernel", "enter_streams_kernel", "mix_streams_kernel", "gate_grams_kernel", "add_grams_kernel",
    "keep_grams_kernel", "store_index_kernel", "score_cells_kernel", "choose_cells_kernel", "quantise_kernel",
    "rms_norm_kernel", "add_normed_kernel", "rope_store_kernel",
}  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """A kernel as it is launched: of what, with which tile, and whether that is the one used where none was chosen."""

    label: str
    tile: str
    default: bool
    request: Request


class Collector:
    """Gathers launches of calls, each once."""

    def __init__(self, card: CardLimits) -> None:
        become(card.capability)
        cpu = torch.device("cpu")
        self.kernels = CudaKernels(cpu, 4096, limits=card)
        pool = OperandPool(32 << 20, cpu)
        self.bench = KernelBench("acc", self.kernels, cpu, pool, Pace(0.01), 1.0, rehearses=True)
        self.found: dict[Request, Launch] = {}
        self._tried: set[tuple[Key, Tile]] = set()

    def call(self, label: str, call: Callable[[], object], candidates: bool = False) -> None:
        """Note what a call launches; with candidates also with every other tile that the card could take, each once for
        what it is kept by (a type and a size)."""
        picker = self.kernels._picker
        picker._ways.clear()
        self._note(label, call, None)
        ways: dict[Key, Any] = dict(picker._ways)
        for key, tiles in ways.items() if candidates else ():
            for tile in [t for t in tiles[1:] if (key, t) not in self._tried]:
                self._tried.add((key, tile))
                self.kernels.try_tile(TileChoice("acc", *key, tile, 1.0, 1.0))
                self._note(label, call, str(tile))
        self.kernels.use_tiles(())

    def _note(self, label: str, call: Callable[[], object], tile: str | None) -> None:
        self.kernels.forget()
        for request in requests_of(call):
            self.found.setdefault(request, Launch(label, tile or "default", tile is None, request))


def list_launches(card: CardLimits, candidates: bool, few_rows: bool, exchanges: bool, brief: bool) -> list[Launch]:
    """All launches on a card; candidates: of the tuner too; few_rows: products of few rows; exchanges: ranks' sums;
    brief: of types that are laid out alike one."""
    collector = Collector(card)
    with library_left_out():
        for label, call, cut in _calls(collector.bench, brief):
            collector.call(label, call, candidates and cut)
        if few_rows:
            for label, call in _few_rows(collector.bench):
                collector.call(label, call, candidates)
        if exchanges:
            for label, call in _exchanges(collector.bench):
                collector.call(label, call)
    return list(collector.found.values())


Named = tuple[str, Callable[[], object]]


def _calls(bench: KernelBench, brief: bool) -> Iterator[tuple[str, Callable[[], object], bool]]:
    """What is launched; whether its tiles are chosen."""
    kinds, types = (BRIEF_CELLS, BRIEF_TYPES) if brief else ((*CELLS, "q4_0"), PACKED)
    for heads in BRIEF_HEADS if brief else HEADS:
        for kind in kinds:
            if kind in CODED and heads.head_dim % 32:
                continue  # there are no such cells
            for tokens in (1, 128):
                run = partial(time_attention, bench, heads, kind, tokens, [1024])
                yield f"attention {heads.heads} {kind}, {tokens} tokens", run, True
    for heads, window, sinks, *bent in WINDOWS:
        for kind in ("bf16", "q8_0"):
            for tokens in (1, 128):
                call = partial(_attend_window, bench, heads, kind, tokens, window, sinks, *bent)
                yield f"attention {heads.heads} {kind}, {tokens} tokens, window {window}", call, False
    for latent in LATENTS:
        for kind in (kind for kind in kinds if kind in CELLS):
            for tokens in (1, 128):
                run = partial(time_latent, bench, latent, kind, tokens, [1024])
                yield f"latent {latent.heads} {kind}, {tokens} tokens", run, True
    for kind in CELLS:
        yield f"latent store {kind}", partial(_store_latent, bench, kind), False
    for qtype in (*types, "BF16", "FP8"):
        for tokens in (1, 128):
            yield f"head products {qtype}, {tokens} tokens", partial(_multiply_heads, bench, qtype, tokens), False
    yield from _expert_calls(bench, types)
    for shape in DELTAS:
        for tokens in (4, 256):
            for act in (torch.bfloat16, torch.float32):
                yield f"delta net {shape}, {tokens} tokens", partial(_run_delta, bench, shape, tokens, act), False
    yield from _int8_calls(bench, types, brief)
    for call_label, call in _other_calls(bench):
        yield call_label, call, False


def _int8_calls(
    bench: KernelBench, types: Sequence[str], brief: bool
) -> Iterator[tuple[str, Callable[[], object], bool]]:
    for qtype in [q for q in INT8_TYPES if q in types]:
        for kernel, tiles in INT8_WAYS.items():
            for tile in tiles[:1] if brief else tiles:
                yield f"{kernel} {qtype}, {tile}", partial(_multiply_in_int8, bench, kernel, qtype, tile), False


def _expert_calls(bench: KernelBench, types: Sequence[str]) -> Iterator[tuple[str, Callable[[], object], bool]]:
    for qtype in (*types, "BF16", "F16", "FP8"):
        for rule, width in ((MANY_SMALL, 2048), (FEW_LARGE, 2880)):
            if width % QUANT_TYPES[qtype].block == 0:
                run = partial(time_experts, bench, (qtype, qtype), width, rule, [1, 8, 16, 64, 128, 1024, 4096])
                yield f"experts {qtype}, {rule.used} of {rule.count}", run, True
    for gate, up in MIXED:
        yield f"experts {gate} and {up}", partial(_multiply_by_two_types, bench, gate, up), False
    for qtype in ("F32", "BF16"):
        for rule, width in ((MANY_SMALL, 2048), (FEW_LARGE, 2880), (VERY_MANY, 2048)):
            run = partial(time_router, bench, qtype, width, rule, [1, 16, 128])
            yield f"router {qtype}, {rule.used} of {rule.count}", run, False


def _multiply_by_two_types(bench: KernelBench, gate: str, up: str) -> None:
    (gates, *_), (ups, *_) = (rotate_layers(bench, (qtype, gate), 2048, MANY_SMALL) for qtype in (gate, up))
    expert_calls(bench, [replace(gates, up=ups.up)], MANY_SMALL, 2048, 1)(0)


def _other_calls(bench: KernelBench) -> Iterator[Named]:
    for qtype in (*PACKED, *PLAIN):
        tokens = [128] if qtype in PACKED else [1, 16, 32, 64, 128]
        yield f"products {qtype}", partial(time_matmul, bench, qtype, 4096, 4096, tokens)
        yield f"embedding {qtype}", partial(time_embedding, bench, qtype, 4096, [1, 128])
    for width, inner in ((4096, 14336), (5120, 25600), (16384, 53248)):
        yield f"rows of {width}", partial(time_elementwise, bench, width, inner, Attend(32, 8, 128), [1, 16, 128])
    for count in (1, 256):
        yield f"short convolution, {count} tokens", partial(_convolve, bench, count)
        yield f"streams, {count} tokens", partial(_mix_streams, bench, count)
        yield f"n-grams, {count} tokens", partial(_add_grams, bench, count)
        yield f"index, {count} tokens", partial(_choose_cells, bench, count)
        for width in (2816, 8192):
            yield f"norms of two results of {width}, {count} tokens", partial(_add_normed, bench, width, count)
    flags = torch.zeros(2, dtype=torch.int32)
    yield "flags", lambda: (triton_flags.tell_kernel[(1,)](flags, num_warps=1),
                            triton_flags.await_kernel[(1,)](flags, num_warps=1))  # fmt: skip
    yield "small copies", lambda: triton_copy.copy_words(torch.zeros(4096), torch.zeros(4096))


def _few_rows(bench: KernelBench) -> Iterator[Named]:
    for qtype in PACKED:
        for tokens in FEW_ROWS:
            for gated, shape in ((False, (4096, 4096)), (True, (14336, 4096)), (True, (28672, 4096))):
                kernel = gated_kernel(qtype, tokens, shape[0]) if gated else "matvec"
                weights = bench.pool.rotate_weights(qtype, *shape)
                x = bench.activations(tokens, shape[1])
                call, _ = calls_of(bench.kernels, TileCase(kernel, qtype, tokens, (shape,)), weights, x)
                yield f"{kernel} {qtype}, {tokens} tokens", partial(call, 0)


def _multiply_in_int8(bench: KernelBench, kernel: str, qtype: str, tile: Tile) -> None:
    """A product, gate and up, or experts: those of gpt-oss, which have biases, where they have the type."""
    few = qtype == "MXFP4"
    width, rule, tokens = (2880, FEW_LARGE, 1024) if few else (2048, MANY_SMALL, 4096)
    together = pairs_together(tokens * rule.used, rule.count) if kernel == INT8_EXPERTS else 128
    bench.kernels.try_tile(TileChoice("acc", kernel, qtype, together, tile, 1.0, 1.0))
    if kernel == INT8_EXPERTS:
        call, _ = calls_of_experts(bench, qtype, qtype, width, rule, tokens)
    else:
        weights = bench.pool.rotate_weights(qtype, 4096, 4096)
        call, _ = calls_of(
            bench.kernels, TileCase(kernel, qtype, 128, ((4096, 4096),)), weights, bench.activations(128, 4096)
        )
    call(0)


def _add_normed(bench: KernelBench, width: int, tokens: int) -> None:
    rows, weight, out = torch.zeros(tokens, width), torch.ones(width), bench.activations(tokens, width)
    inner = InnerNorm(rows, weight, 1e-6, torch.ones(1), ((rows, weight), (rows, weight)))
    bench.kernels.add_normed(inner, torch.zeros(tokens, width), (weight, 1e-6, out))


def _attend_window(
    bench: KernelBench, heads: Attend, kind: str, tokens: int, window: int, sinks: bool, bent: Scoring = AS_THEY_ARE
) -> None:
    cells = bench.pool.rotate_kv(kv_blocks(1024, 1) * KV_BLOCK, heads.n_kv_heads, heads.head_dim, kind)[0]
    n, groups, dim = heads.heads
    rows = replace(index_rows(bench.device, tokens, 1024, 1), window=window)
    qkv, out = bench.activations(tokens, (n + 2 * groups) * dim), bench.activations(tokens, n * dim)
    partial_sums = torch.empty(tokens, n, ATTENTION_PIECES, dim + 2) if tokens <= 64 else None
    logits = torch.zeros(n) if sinks else None
    bench.kernels.attention(qkv, heads.heads, cells, rows, dim**-0.5, out, partial_sums, logits, bent)


def _store_latent(bench: KernelBench, kind: str) -> None:
    cells = bench.pool.rotate_latents(KV_BLOCK, 576, kind)[0]
    kv, q, out = torch.zeros(4, 576), torch.zeros(4, 16, 192), torch.zeros(4, 16, 576, dtype=torch.bfloat16)
    rope = RopeTable(torch.zeros(64, 32), torch.zeros(64, 32), "adjacent")
    rows = index_rows(bench.device, 4, 64, 1)
    kv, q, norm = kv.bfloat16(), q.bfloat16()[..., 128:], torch.ones(512)
    bench.kernels.store_latent(kv, q, out[..., 512:], norm, 1e-6, rope, rows, cells)


def _multiply_heads(bench: KernelBench, qtype: str, tokens: int) -> None:
    heads, rows, cols = 16, 512, max(128, QUANT_TYPES[qtype].block)
    stack: Packed = bench.pool.rotate_weights(qtype, rows * heads, cols)[0]
    x = torch.zeros(tokens, heads, cols, dtype=torch.bfloat16)
    bench.kernels.head_products(x, stack, torch.zeros(tokens, heads, rows, dtype=torch.bfloat16))


def _convolve(bench: KernelBench, tokens: int, channels: int = 2048, taps: int = 3) -> None:
    x, out = (torch.zeros(tokens, n * channels, dtype=torch.bfloat16) for n in (3, 1))
    places = torch.zeros(1, dtype=torch.int32), torch.tensor([0, tokens], dtype=torch.int32)
    given = torch.zeros(channels, taps), torch.zeros(1, taps - 1, channels)
    opened = torch.zeros(tokens, channels)
    bench.kernels.short_conv(x, *given, *places, out=out, longest=tokens, opened=opened)
    bench.kernels.settle_states([OpenNet(given[1], opened)], 0, slice(0, 1))


def _mix_streams(bench: KernelBench, tokens: int, count: int = 4, width: int = 2560) -> None:
    """All ways in which streams are entered, with norms and without, and their mix."""
    kernels, wide = bench.kernels, count * width
    given, streams, weight = torch.zeros(tokens, width), torch.zeros(tokens, wide + 4), torch.ones(wide)
    normed, gates = (torch.zeros(tokens, wide, dtype=torch.bfloat16) for _ in range(2))
    for spreads in (True, False):
        kernels.enter_streams(given, streams, spreads, weight, count, 1e-6, normed)
    kernels.inject_stream(given, streams, count)
    kernels.spread_stream(given, streams, count)
    kernels.norm_streams(streams, weight, count, 1e-6, normed)
    for cleared in (given, None):
        kernels.mix_streams(normed, gates, count, torch.zeros(tokens, width), cleared)


def _add_grams(bench: KernelBench, tokens: int, count: int = 4, width: int = 2560) -> None:
    """N-grams of one sequence, gated and added."""
    kernels, wide, (taps, apart) = bench.kernels, count * width, (4, 2)
    streams, weight, grams = torch.zeros(tokens, wide + 4), torch.ones(wide), torch.zeros(tokens, wide)
    half = grams.bfloat16()
    kernels.gate_grams(half, half[:, :width], streams, (weight, weight), count, 1e-6, grams)
    places = torch.zeros(1, dtype=torch.int32), torch.tensor([0, tokens], dtype=torch.int32)
    state = torch.zeros(1, (taps - 1) * apart, wide), *places, torch.zeros(tokens, wide)
    kernels.add_grams(grams, weight, torch.zeros(wide, taps), (count, apart), 1e-6, streams, *state)


def _choose_cells(bench: KernelBench, tokens: int, heads: int = 4, head: int = 128, each: int = 4) -> None:
    """What an index stores, and 512 of its blocks of cells."""
    past, kernels = 4096, bench.kernels
    rows = make_rows([Segment(0, 0, tokens, past, tuple(range(-(-(past + tokens) // KV_BLOCK))))], "cpu")
    q, weight = torch.zeros(tokens, heads * head, dtype=torch.bfloat16), torch.ones(head)
    index, angles = torch.zeros(rows.blocks.shape[0], KV_BLOCK, head), torch.zeros(past + tokens, head // 4)
    rope = RopeTable(angles, angles, "halves")
    kernels.store_index(q, q[:, :head], (weight, weight), each, 1e-6, rope, rows, index)
    seen = torch.zeros(tokens, index.shape[0], dtype=torch.int32)
    kernels.choose_cells(q, index, (each, 512), rows, torch.zeros(64, index.shape[0] * KV_BLOCK // each), seen)


def _run_delta(bench: KernelBench, shape: tuple[int, int, int], tokens: int, act: torch.dtype) -> None:
    keys, values, head = shape
    channels = (2 * keys + values) * head
    weights = DeltaWeights(
        torch.zeros(channels, 4), torch.zeros(values), torch.zeros(values), torch.zeros(head), 1e-6, keys, values, head,
        False,
    )  # fmt: skip
    qkv, z, out = (torch.zeros(tokens, n, dtype=act) for n in (channels, values * head, values * head))
    beta, alpha = (torch.zeros(tokens, values, dtype=act) for _ in range(2))
    states, tails = torch.zeros(1, values, head, head), torch.zeros(1, 3, channels)
    slots, offsets = torch.zeros(1, dtype=torch.int32), torch.tensor([0, tokens], dtype=torch.int32)
    scratch = torch.empty(256 << 20, dtype=torch.uint8)
    bench.kernels.delta_net(
        qkv, z, beta, alpha, weights, states, tails=tails, slots=slots, offsets=offsets, out=out, longest=tokens,
        scratch=scratch,
    )  # fmt: skip


def _exchanges(bench: KernelBench) -> Iterator[Named]:
    for ranks in RANKS:
        memory = torch.zeros(triton_exchange.exchange_nbytes(ranks), dtype=torch.uint8)
        exchange = PeerExchange(memory, [memory.data_ptr()] * ranks, 0, torch.zeros(1, dtype=torch.int32))
        for wire in ("f32", "bf16", "f16"):
            for rows, cols in ((1, 4096), (16, 5120), (512, 4096)):
                part, target = torch.zeros(rows, cols), torch.zeros(rows, cols)
                for way in exchange.algorithms(rows, cols, wire):
                    label = f"sum of {ranks} ranks, {wire}, {rows} rows: {way}"
                    yield label, partial(exchange.sum, part, target, way, wire, True)
            for cols in (cols for cols in (2048, 4096, 8192) if triton_many_rows.rows_at_once(cols, wire)):
                low, weight = torch.zeros(512, cols, dtype=torch.bfloat16), torch.ones(cols)
                normed = weight, 1e-6, torch.zeros(512, cols, dtype=torch.bfloat16)
                sums = partial(exchange.sum_many_rows, low, torch.zeros(512, cols), wire, True, normed)
                yield f"sum and norm of {ranks} ranks, {wire}, rows of {cols}", sums
                own = SumNorm(weight, torch.ones(1))
                yield f"sum and two norms of {ranks} ranks, {wire}, rows of {cols}", partial(sums, within=own)
            weight, own = torch.ones(4096), SumNorm(torch.ones(4096), torch.ones(1))
            few = weight, 1e-6, torch.zeros(1, 4096, dtype=torch.bfloat16)
            sums = partial(exchange.sum_rows, torch.zeros(1, 4096), torch.zeros(1, 4096), wire, True, few)
            yield f"sum and norm of {ranks} ranks, {wire}, 1 row", sums
            yield f"sum and two norms of {ranks} ranks, {wire}, 1 row", partial(sums, within=own)
        yield f"gather of {ranks} ranks", partial(exchange.gather, torch.zeros(1, 512 * ranks), (512,) * ranks)
