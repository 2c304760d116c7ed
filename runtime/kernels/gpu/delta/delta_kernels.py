"""Launches of a gated delta net's kernels: what `CudaKernels` has of it."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
import triton

from pshard.batch_sizes import DELTA_CHUNK, DELTA_ROWS, DELTA_STEPS
from pshard.quant import align
from pshard.runtime.kernels.api import DeltaWeights, OpenNet
from pshard.runtime.kernels.gpu.activations import NOT_QUANTISED, Activations
from pshard.runtime.kernels.gpu.card_limits import CardLimits
from pshard.runtime.kernels.gpu.default_tiles import share_programs
from pshard.runtime.kernels.gpu.delta import triton_delta
from pshard.runtime.kernels.gpu.products.few_rows import FewRows
from pshard.runtime.kernels.gpu.tiles.pick_tiles import TilePicker

HEADS = (16, 32, 64, 128)  # elements of a head that kernels are written for
LEAST_HALF = 32  # of them in chunks of bfloat16: with 16 Triton 3.6 makes a program that leaves its shared memory
STEP_WARPS, CONV_WARPS, PREPARE_WARPS, ADVANCE_WARPS = 4, 4, 4, 4
CONV_ROWS, FULL_WARPS = 32, 8  # FULL_WARPS: PREPARE_WARPS of float32
PREPARE_REGISTERS = 168  # of bfloat16, at 4 warps: so that three programs share a processor
PROGRAMS = 96  # columns of values are cut until so many carry states along, on PROCESSORS of `default_tiles`
ROOMY, WIDE = 200 << 10, 150 << 10  # bytes of shared memory for three and for two chunks of bfloat16 on their way
GATE_ROWS, TAIL_CHANNELS = 16, 512


class Chunked(NamedTuple):
    """What one launch of chunks hands on to the next: see `prepare_chunks_kernel`."""

    keys: torch.Tensor
    w: torch.Tensor
    u: torch.Tensor
    p: torch.Tensor
    c: torch.Tensor


class DeltaOnGpu:
    """See `Kernels`. Launch sizes depend on shapes and `longest` alone."""

    _activations: Activations
    _few_rows: FewRows
    _picker: TilePicker
    _addresses: dict[tuple[int, ...], torch.Tensor]  # of nets that `settle_states` was given

    def delta_net(
        self,
        qkv: torch.Tensor,
        z: torch.Tensor,
        beta: torch.Tensor,
        alpha: torch.Tensor,
        weights: DeltaWeights,
        states: torch.Tensor,
        tails: torch.Tensor,
        slots: torch.Tensor,
        offsets: torch.Tensor,
        out: torch.Tensor,
        longest: int,
        scratch: torch.Tensor | None = None,
        opened: torch.Tensor | None = None,
    ) -> None:
        """See `Kernels.delta_net`. Up to DELTA_STEPS tokens of a sequence take one launch, which leaves up to
        SMALL_BATCH rows quantised too; more go in chunks, DELTA_ROWS rows at once, and need `scratch`, but for the
        smallest heads. Beside chunks open rows have a launch of their own."""
        _check(weights, qkv, states, tails)
        ends = {"slots": slots, "offsets": offsets, "out": out, "out_stride": out.stride(0)}
        heads = {"KEYS": weights.key_heads, "VALUES": weights.value_heads, "D": weights.head, "TILED": weights.tiled}
        rows = (qkv, qkv.stride(0), z, z.stride(0), beta, beta.stride(0), alpha, alpha.stride(0))
        vectors = (weights.conv, weights.dt_bias, weights.decay, weights.norm, weights.eps)
        place = states if opened is None else opened  # without: no row is open
        kept = {"opened": place, "opened_stride": place.stride(0), "counters": self._few_rows.scratch[1]}
        fit_chunks = weights.head >= LEAST_HALF or qkv.dtype == torch.float32
        in_chunks, ready = longest > DELTA_STEPS and fit_chunks, None
        if in_chunks:
            _run_chunks(rows, weights, heads, (states, tails), ends, longest, scratch, limits=self._picker.limits)
        else:
            most = self._few_rows.scratch[1].numel() // weights.key_heads
            if slots.shape[0] > most:
                raise ValueError(f"{slots.shape[0]} sequences at once; the kernels count {most}")
            ready = self._activations.hand_over(out) if weights.head >= 32 else None
        if ready is None:
            self._activations.ready = None
        if in_chunks and opened is None:
            return
        triton_delta.delta_steps_kernel[(weights.value_heads, slots.shape[0])](
            *rows, *vectors, states, tails, **ends, **kept,
            **dict(zip(("words", "scale", "sums"), ready or NOT_QUANTISED)), **heads,
            QUANTISE=ready is not None, ONLY_OPEN=in_chunks, SIGMOID=weights.gate == "sigmoid",
            num_warps=_step_warps(weights.head),
        )  # fmt: skip

    def settle_states(self, nets: Sequence[OpenNet], slot: int, rows: slice) -> None:
        """See `Kernels.settle_states`. All nets that are alike take one launch for states and one for tails."""
        for (heads, tiled, shape), group in groupby(nets, lambda net: (net.heads, net.tiled, net.tails.shape[1:])):
            alike = tuple(group)
            (keys, values, head), (tail, channels) = heads, shape
            given = self._point_to(alike), alike[0].opened.stride(0), slot, rows.start, rows.stop
            if values:
                triton_delta.settle_states_kernel[(values, len(alike))](
                    *given, KEYS=keys, VALUES=values, D=head, TILED=tiled, num_warps=_step_warps(head)
                )
            triton_delta.settle_tails_kernel[(triton.cdiv(channels, TAIL_CHANNELS), len(alike))](
                *given, channels, TAIL=tail, BLOCK=TAIL_CHANNELS, num_warps=4
            )

    def _point_to(self, nets: Sequence[OpenNet]) -> torch.Tensor:
        """The addresses of nets as the kernel takes them. They stay where they are while a tier is in force."""
        parts = ((net.tails if net.states is None else net.states, net.tails, net.opened) for net in nets)
        places = tuple(part.data_ptr() for three in parts for part in three)
        if places not in self._addresses:
            self._addresses[places] = torch.tensor(places, dtype=torch.int64).to(nets[0].tails.device)
        return self._addresses[places]


def _step_warps(head: int) -> int:
    """Of a program that has a head's state in registers."""
    return max(1, STEP_WARPS * head**2 // 128**2)


def _run_chunks(
    rows: tuple[Any, ...],
    weights: DeltaWeights,
    heads: dict[str, Any],
    kept: tuple[torch.Tensor, torch.Tensor],
    ends: dict[str, Any],
    longest: int,
    scratch: torch.Tensor | None,
    limits: CardLimits,
) -> None:
    """Rows of every sequence from `start` on, so many at once as the scratch is for."""
    qkv, qkv_stride, z, z_stride, *scalars = rows
    (states, tails), (slots, offsets, out, out_stride) = kept, ends.values()
    index = (slots, offsets)
    sequences, half = slots.shape[0], qkv.dtype == torch.bfloat16
    together = min(max(1, DELTA_ROWS // sequences // DELTA_CHUNK) * DELTA_CHUNK, align(longest, DELTA_CHUNK))
    between = _divide(scratch, weights, sequences * together, qkv.dtype)
    columns = _columns(sequences * weights.value_heads, weights.head, share_programs(PROGRAMS, limits))
    how = {**heads, "C": DELTA_CHUNK, "HALF": half}
    channels = {name: heads[name] for name in ("KEYS", "VALUES", "D")}
    for start in range(0, longest, together):
        chunks = triton.cdiv(min(together, longest - start), DELTA_CHUNK)
        blocks = (chunks * DELTA_CHUNK // CONV_ROWS, 2 * weights.key_heads + weights.value_heads, sequences)
        triton_delta.convolve_rows_kernel[blocks](
            qkv, qkv_stride, weights.conv, tails, *index, start, together, keys=between.keys, u=between.u, **channels,
            C=DELTA_CHUNK, ROWS=CONV_ROWS, num_warps=CONV_WARPS,
        )  # fmt: skip
        triton_delta.prepare_chunks_kernel[(chunks, weights.value_heads, sequences)](
            *scalars, weights.dt_bias, weights.decay, *index, start, together, *between, **how,
            num_warps=PREPARE_WARPS if half else FULL_WARPS, maxnreg=PREPARE_REGISTERS if half else None,
        )  # fmt: skip
        triton_delta.advance_states_kernel[(weights.head // columns, weights.value_heads, sequences)](
            *between, states, *index, start, together, out, out_stride, **how, COLUMNS=columns,
            STAGES=_stages(limits, half), num_warps=ADVANCE_WARPS,
        )  # fmt: skip
    triton_delta.gate_rows_kernel[(triton.cdiv(out.shape[0], GATE_ROWS), weights.value_heads)](
        out, out_stride, z, z_stride, weights.norm, weights.eps, offsets, sequences, D=weights.head, ROWS=GATE_ROWS,
        SIGMOID=weights.gate == "sigmoid", num_warps=4,
    )  # fmt: skip
    triton_delta.store_tails_kernel[(triton.cdiv(qkv.shape[1], TAIL_CHANNELS), sequences)](
        qkv, qkv_stride, tails, slots, offsets, qkv.shape[1], BLOCK=TAIL_CHANNELS, num_warps=4
    )


def _divide(scratch: torch.Tensor | None, weights: DeltaWeights, rows: int, kind: torch.dtype) -> Chunked:
    """The scratch as what it is used for."""
    each = (2 * weights.key_heads * weights.head, *(weights.value_heads * n for n in (weights.head,) * 2))
    sizes = [rows * n * kind.itemsize for n in (*each, weights.value_heads * DELTA_CHUNK)]
    sizes.append(rows * weights.value_heads * 2 * kind.itemsize)
    if scratch is None or scratch.numel() < sum(sizes):
        have = 0 if scratch is None else scratch.numel()
        raise ValueError(f"chunks of {rows} rows need {sum(sizes)} bytes of scratch, not {have}")
    sums = torch.float32 if kind == torch.bfloat16 else torch.float64
    keys, w, u, p, c = scratch[: sum(sizes)].split(sizes)
    return Chunked(keys.view(kind), w.view(kind), u.view(kind), p.view(kind), c.view(sums))


def _columns(states: int, head: int, programs: int) -> int:
    """Columns of values that one program carries along, of so many states."""
    columns = min(64, head)
    while columns > 16 and states * (head // columns) < programs:
        columns //= 2
    return columns


def _stages(limits: CardLimits, half: bool) -> int:
    """Chunks that are on their way at once: what the shared memory of the card holds."""
    room = limits.shared_block if half else 0
    return 3 if room >= ROOMY else 2 if room >= WIDE else 1


def _check(weights: DeltaWeights, qkv: torch.Tensor, states: torch.Tensor, tails: torch.Tensor) -> None:
    if weights.head not in HEADS:
        raise ValueError(f"heads of {weights.head} elements; the kernels take {', '.join(map(str, HEADS))}")
    if qkv.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"rows of {qkv.dtype}; the kernels take float32 and bfloat16")
    if not (states.is_contiguous() and tails.is_contiguous()):
        raise ValueError("states and tails are contiguous, all slots of each")
