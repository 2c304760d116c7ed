"""What a unit computes, written once for every device: attention, ffn, output. Placement is applied from outside."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from pshard.model_config import ModelConfig
from pshard.runtime.kernels.api import Kernels, LayerKV, Packed, RopeTable, RowIndex, SumKernels
from pshard.runtime.memory.weights import UnitWeights
from pshard.runtime.memory.workspace import Workspace

if TYPE_CHECKING:
    from pshard.runtime.ranks.peer_memory import PeerExchange


@dataclass(frozen=True)
class PendingSum:
    """Ranks' parts, float32 [M, D], whose sum the unit that follows adds to `hidden` as it normalises it."""

    exchange: "PeerExchange"
    part: torch.Tensor
    wire: str


@dataclass(frozen=True)
class Residual:
    """How a unit meets the residual stream, its side's `hidden`.

    entering: what it adds to hidden before it reads it. part: float32 [M, D], where its result goes when it is a
    rank's part of a sum; None: it is added to hidden. leaving: that sum, when the unit that follows makes it.
    """

    entering: PendingSum | None = None
    part: torch.Tensor | None = None
    leaving: PendingSum | None = None


ALONE = Residual()  # no other rank has a part


@dataclass(frozen=True)
class Side:
    """One computing side: its kernels, scratch and rotary table."""

    kernels: Kernels
    space: Workspace
    rope: RopeTable
    config: ModelConfig


def run_attention(side: Side, weights: UnitWeights, rows: RowIndex, kv: LayerKV, residual: Residual = ALONE) -> None:
    """Attention block on the side's residual stream."""
    k, space, config, m = side.kernels, side.space, side.config, weights.matrices
    n = rows.tokens
    normed = _normalise(side, weights.vectors["attn_norm.weight"], n, residual)
    # a rank's slice may hold fewer heads in this layer than in its widest one
    q_width, kv_width = m["attn_q.weight"].rows, m["attn_k.weight"].rows
    heads = (q_width // config.head_dim, kv_width // config.head_dim, config.head_dim)
    qkv, mixed = space.rows("qkv", n)[:, : q_width + 2 * kv_width], space.rows("mixed", n)[:, :q_width]
    parts = ("attn_q", "attn_k", "attn_v")
    biases = tuple(weights.vectors.get(f"{part}.bias") for part in parts)
    k.linear_group(normed, tuple(m[f"{part}.weight"] for part in parts), qkv, space.tile, biases)
    norms = weights.vectors.get("attn_q_norm.weight"), weights.vectors.get("attn_k_norm.weight")
    k.rope_store(qkv, heads, *norms, config.norm_eps, side.rope, rows, kv)
    partial = space.tensors["partial"]
    k.attention(qkv, heads, kv, rows, config.head_dim**-0.5, mixed, partial)
    _leave(side, mixed, m["attn_output.weight"], weights.vectors.get("attn_output.bias"), residual)


def run_ffn(side: Side, weights: UnitWeights, tokens: int, residual: Residual = ALONE) -> None:
    """SwiGLU block (arXiv 2002.05202) on the side's residual stream."""
    gate, up, down = (weights.matrices[f"ffn_{part}.weight"] for part in ("gate", "up", "down"))
    normed = _normalise(side, weights.vectors["ffn_norm.weight"], tokens, residual)
    out = side.space.rows("hidden", tokens) if residual.part is None else residual.part
    if residual.leaving is not None or not side.kernels.ffn(normed, gate, up, down, out, residual.part is None):
        _gate(side, weights, tokens, normed)
        project_down(side, weights, tokens, residual)


def gate_rows(
    side: Side,
    weights: UnitWeights,
    tokens: int,
    residual: Residual = ALONE,
    out: torch.Tensor | None = None,
) -> None:
    """The gated product silu(gate x) * (up x) of the rows that `weights` holds.

    out: act_dtype [M, rows]; None: the first columns of the side's `gate_up`, where `project_down` finds them.
    """
    _gate(side, weights, tokens, _normalise(side, weights.vectors["ffn_norm.weight"], tokens, residual), out)


def _gate(side: Side, weights: UnitWeights, tokens: int, normed: torch.Tensor, out: torch.Tensor | None = None) -> None:
    """`gate_rows` of activations that are normalised."""
    k, space, m = side.kernels, side.space, weights.matrices
    width = m["ffn_up.weight"].rows
    both = space.rows("gate_up", tokens)[:, : 2 * width]
    k.gate_up(
        normed,
        m["ffn_gate.weight"],
        m["ffn_up.weight"],
        both[:, :width] if out is None else out,
        both,
        space.tile,
    )


def project_down(
    side: Side,
    weights: UnitWeights,
    tokens: int,
    residual: Residual = ALONE,
    last_rows: torch.Tensor | None = None,
) -> None:
    """`down` of the gated product in `gate_up`, onto the side's residual stream.

    last_rows: float32 [M, rows], the product's last rows where another side computed them.
    """
    k, space, down = side.kernels, side.space, weights.matrices["ffn_down.weight"]
    gated = space.rows("gate_up", tokens)[:, : down.cols]
    if last_rows is not None:
        k.place(last_rows, gated[:, down.cols - last_rows.shape[1] :])
    _leave(side, gated, down, None, residual)


def _leave(side: Side, x: torch.Tensor, weight: Packed, bias: torch.Tensor | None, residual: Residual) -> None:
    """A unit's last product, added to `hidden` or left as this rank's part."""
    part, leaving = residual.part, residual.leaving
    if part is None:
        side.kernels.linear(x, weight, side.space.rows("hidden", x.shape[0]), side.space.tile, bias, True)
    elif leaving is None:
        side.kernels.linear(x, weight, part, side.space.tile, bias)
    else:
        kernels = cast(SumKernels, side.kernels)
        kernels.linear_part(leaving.exchange, leaving.wire, x, weight, part, side.space.tile, bias)


def _normalise(side: Side, weight: torch.Tensor, n: int, residual: Residual) -> torch.Tensor:
    """The side's `normed` [n, D]: RMS norm of hidden, to which what enters is added first."""
    hidden, normed, eps = side.space.rows("hidden", n), side.space.rows("normed", n), side.config.norm_eps
    if (sums := residual.entering) is None:
        side.kernels.rms_norm(hidden, weight, eps, normed)
    else:
        cast(SumKernels, side.kernels).sum_rms_norm(sums.exchange, sums.part, sums.wire, hidden, weight, eps, normed)
    return normed


def run_output(side: Side, weights: UnitWeights, rows: torch.Tensor, logits: torch.Tensor) -> None:
    """logits float32 [R, rows of the head] (row stride free) of the rows (int32 [R]) of `hidden`."""
    k, space, config = side.kernels, side.space, side.config
    n = rows.shape[0]
    picked, normed = space.rows("branch", n), space.rows("normed", n)
    torch.index_select(space.tensors["hidden"], 0, rows, out=picked)
    k.rms_norm(picked, weights.vectors["output_norm.weight"], config.norm_eps, normed)
    head = weights.matrices.get("output.weight") or weights.matrices["token_embd.weight"]
    k.linear(normed, head, logits, space.tile)
