"""Plain torch kernels: dequantise, then arithmetic in float32, but for products with weights. Runs on any device; the
oracle of the fast kernels."""

import torch
import torch.nn.functional as F

from pshard.model_config import Experts
from pshard.quant import ROW_BLOCK, packed_nbytes
from pshard.runtime.kernels.api import (
    AS_THEY_ARE,
    ExpertWeights,
    LayerKV,
    Packed,
    RopeTable,
    Routes,
    RowIndex,
    Scoring,
)
from pshard.runtime.kernels.kv_codec import decode_cells, encode_cells, gather_cells
from pshard.runtime.kernels.plain_delta import PlainDelta
from pshard.runtime.kernels.plain_experts import add_experts, choose_chunks, choose_experts
from pshard.runtime.kernels.plain_index import PlainIndex, spell_seen
from pshard.runtime.kernels.plain_latent import PlainLatent
from pshard.runtime.kernels.plain_norms import PlainNorms
from pshard.runtime.kernels.plain_rows import bend_gate, gate_of, head_norm, product, resize_heads, rotate
from pshard.runtime.kernels.plain_streams import PlainStreams
from pshard.runtime.kernels.plain_windows import attend_seen
from pshard.runtime.kernels.unpack import BY_ROWS, plain_rows, unpack
from pshard.units.kv_cells import window_start

LOOKUP_IDS = 64  # looked up at once, as whole records are unpacked: bounds the temporaries


class PlainKernels(PlainNorms, PlainLatent, PlainDelta, PlainStreams, PlainIndex):
    """Implements `api.Kernels` on float32 with torch operators; slow, and allocates while it runs."""

    act_dtype = torch.float32
    repeatable = False
    fills = True
    fuses_sums = False
    leaves_norms = False
    fuses_norms = True  # which saves nothing here: tests without a GPU take the way of one
    recordable = False

    def forget(self) -> None:
        """See `Kernels.forget`."""

    def look_up(self, table: Packed, ids: torch.Tensor, out: torch.Tensor) -> None:
        """See `Kernels.look_up`."""
        if (rows := plain_rows(table)) is not None:
            out.copy_(rows[ids])
            return
        together = 1 if table.qtype in BY_ROWS else ROW_BLOCK
        stride = packed_nbytes(table.qtype, together, table.cols)
        whole = table.data[: -(-table.rows // together) * stride].view(-1, stride)
        for part, rows_out in zip(ids.split(LOOKUP_IDS), out.split(LOOKUP_IDS)):
            records = whole[part // together].reshape(-1)
            values = unpack(Packed(records, table.qtype, together * part.numel(), table.cols))
            each = torch.arange(part.numel(), device=part.device)
            rows_out.copy_(values.view(part.numel(), together, -1)[each, part % together])

    def linear(
        self,
        x: torch.Tensor,
        weight: Packed,
        out: torch.Tensor,
        tile: torch.Tensor,
        bias: torch.Tensor | None = None,
        accumulate: bool = False,
    ) -> None:
        result = product(x, weight, bias)
        out.copy_(out + result if accumulate else result)

    def linear_group(
        self,
        x: torch.Tensor,
        weights: tuple[Packed, ...],
        out: torch.Tensor,
        tile: torch.Tensor,
        biases: tuple[torch.Tensor | None, ...],
    ) -> None:
        at = 0
        for weight, bias in zip(weights, biases, strict=True):
            self.linear(x, weight, out[:, at : at + weight.rows], tile, bias)
            at += weight.rows

    def gate_up(
        self,
        x: torch.Tensor,
        gate: Packed,
        up: Packed,
        out: torch.Tensor,
        both: torch.Tensor,
        tile: torch.Tensor,
        activation: str = "silu",
    ) -> None:
        out.copy_(bend_gate(product(x, gate), product(x, up), activation))

    def ffn(
        self,
        x: torch.Tensor,
        gate: Packed,
        up: Packed,
        down: Packed,
        out: torch.Tensor,
        accumulate: bool,
        activation: str = "silu",
    ) -> bool:
        return False

    def route(
        self,
        x: torch.Tensor,
        router: Packed,
        rule: Experts,
        routes: Routes,
        bias: torch.Tensor | None = None,
        choice_bias: torch.Tensor | None = None,
        begin: torch.Tensor | None = None,
        factors: torch.Tensor | None = None,
    ) -> None:
        found = choose_experts(product(x, router, bias), rule, choice_bias)
        n = x.shape[0]
        routes.ids[:n] = found.ids if begin is None else found.ids.where(begin[:, None] >= 0, -1)
        routes.ids[n:] = -1
        routes.weights[:n] = found.weights if factors is None else found.weights * factors[found.ids.long()]

    def choose_chunks(self, scored: Routes, rule: Experts, routes: Routes) -> None:
        found = choose_chunks(scored, rule)
        routes.ids.copy_(found.ids)
        routes.weights.copy_(found.weights)

    def experts(
        self,
        x: torch.Tensor,
        routes: Routes,
        weights: ExpertWeights,
        rule: Experts,
        out: torch.Tensor,
        scratch: dict[str, torch.Tensor],
        accumulate: bool,
    ) -> None:
        if weights.demand:
            weights.demand.bring(routes.ids)
        if not accumulate and not weights.wave.number:
            out.zero_()
        add_experts(x, routes, weights, rule, out)

    def place(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(rows)

    def gate_rows(self, x: torch.Tensor, gate: torch.Tensor, curve: str = "sigmoid") -> None:
        by = torch.nn.functional.softplus(gate.float()) if curve == "softplus" else torch.sigmoid(gate)
        x.mul_(by.repeat_interleave(x.shape[1] // gate.shape[1], 1))

    def resize_heads(self, x: torch.Tensor, out: torch.Tensor, heads: int, by: float = 1.0) -> None:
        resize_heads(x, out, heads, by)

    def times_rows(self, x: torch.Tensor, by: torch.Tensor) -> None:
        x.mul_(by)

    def weigh_rows(self, x: torch.Tensor, weights: torch.Tensor) -> None:
        x.mul_(weights)
        weights.fill_(1)

    def gate_mul(self, x: torch.Tensor, up: torch.Tensor, out: torch.Tensor, activation: str = "silu") -> None:
        out.copy_(bend_gate(x, up, activation))

    def warm_rows(self, x: torch.Tensor, table: torch.Tensor, position: torch.Tensor) -> None:
        x.mul_(table.index_select(0, position)[:, None])

    def centre_rows(self, x: torch.Tensor) -> None:
        x.sub_(x.mean(-1, keepdim=True))

    def bend_rows(self, x: torch.Tensor, how: str, numbers: torch.Tensor | None = None, limit: float = 0.0) -> None:
        x.copy_(bend(x.float(), how, numbers, limit))

    def add_rows(self, x: torch.Tensor, rows: torch.Tensor) -> None:
        x.add_(rows)

    def sum_squares(self, x: torch.Tensor, first: int, out: torch.Tensor) -> None:
        for i, part in enumerate((x[:, :first], x[:, first:])):
            out[:, i] = part.double().pow(2).sum(1)

    def norm_wide(
        self,
        x: torch.Tensor,
        q_norm: torch.Tensor,
        k_norm: torch.Tensor,
        sums: torch.Tensor,
        of: tuple[int, int],
        eps: float,
    ) -> None:
        factors = torch.rsqrt(sums / torch.tensor(of, device=x.device) + eps)
        for part, weight, factor in zip(x.split((len(q_norm), len(k_norm)), 1), (q_norm, k_norm), factors.T):
            part.copy_(part.float() * factor[:, None] * weight)

    def norm_heads(self, x: torch.Tensor, weight: torch.Tensor, head: int, eps: float, centred: bool = False) -> None:
        heads = x.float().unflatten(1, (-1, head))
        heads = heads - heads.mean(-1, keepdim=True) if centred else heads
        x.copy_((heads * torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + eps)).flatten(1) * weight)

    def scale_rows(self, x: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor) -> None:
        x.mul_(torch.sigmoid(hidden @ weight)[:, None])

    def rope_store(
        self,
        qkv: torch.Tensor,
        heads: tuple[int, int, int],
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
        rope: RopeTable,
        rows: RowIndex,
        kv: LayerKV,
        values: bool = False,
    ) -> None:
        n_heads, n_kv, dim = heads
        q, k, v = (part.unflatten(1, (part.shape[1] // dim, dim)) for part in split_qkv(qkv, heads))
        position, n = rows.position.long(), kv.k.shape[1]
        kept = rows.begin >= 0
        cell = rows.blocks[rows.begin + position // n].long()[kept], (position % n)[kept]
        cos, sin = rope.cos[position][:, None], rope.sin[position][:, None]
        q.copy_(rotate(head_norm(q, q_norm, eps), cos, sin, rope.pairing))
        if not n_kv:
            return
        k.copy_(rotate(head_norm(k, k_norm, eps), cos, sin, rope.pairing))
        kv.k[cell] = encode_cells(k[kept], kv.k.dtype)
        if values:
            v.copy_(head_norm(v, torch.ones(dim, device=v.device), eps))
        kv.v[cell] = encode_cells(v[kept], kv.v.dtype)

    def attention(
        self,
        qkv: torch.Tensor,
        heads: tuple[int, int, int],
        kv: LayerKV,
        rows: RowIndex,
        scale: float,
        out: torch.Tensor,
        partial: torch.Tensor | None,
        sinks: torch.Tensor | None = None,
        bent: Scoring = AS_THEY_ARE,
    ) -> None:
        n_heads, n_kv, dim = heads
        for s in rows.segments:
            cells = s.past + s.tokens
            q = qkv[s.start : s.start + s.tokens, : n_heads * dim].unflatten(1, (n_heads, dim)).transpose(0, 1)
            first = window_start(s.past, rows.window)
            held = s.blocks[first // kv.k.shape[1] :]
            k, v = (
                decode_cells(gather_cells(cache, held, cells - first), dim)
                .transpose(0, 1)
                .repeat_interleave(n_heads // n_kv, 0)
                for cache in (kv.k, kv.v)
            )
            if sinks is None and not rows.window and not bent.changes:
                seen = torch.arange(cells, device=q.device) <= torch.arange(s.past, cells, device=q.device)[:, None]
                mixed = F.scaled_dot_product_attention(q.float(), k, v, attn_mask=seen, scale=scale)
            else:
                chosen = None if bent.seen is None else bent.seen[s.start : s.start + s.tokens]
                counts = None if chosen is None else spell_seen(chosen, bent.each, cells, kv.k.shape[1])
                mixed = attend_seen(q.float() * scale, k, v, (s.past, first), rows.window, sinks, bent, counts)
            out[s.start : s.start + s.tokens] = mixed.transpose(0, 1).flatten(1).to(out.dtype)


def bend(x: torch.Tensor, how: str, numbers: torch.Tensor | None, limit: float) -> torch.Tensor:
    """See `Kernels.bend_rows`. Raises ValueError for a way that nobody knows."""
    match how, numbers:
        case "times", torch.Tensor():
            return x * numbers.repeat(x.shape[1] // numbers.shape[0])
        case "plus", torch.Tensor():
            return x + numbers.repeat(x.shape[1] // numbers.shape[0])
        case "clamp", None:
            return x.clamp(-limit, limit)
        case "relu2", None:
            return F.relu(x).square()
        case "gelu" | "gelu16", None:
            return gate_of(how)(x)
        case "xielu", torch.Tensor():
            above, below, slope, eps = numbers
            return torch.where(x > 0, above * x * x, below * (torch.expm1(torch.minimum(x, eps)) - x)) + slope * x
        case "order", torch.Tensor():
            return x[:, numbers.long()]
    raise ValueError(f"no kernel bends rows by {how!r}")


def split_qkv(qkv: torch.Tensor, heads: tuple[int, int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The q, k and v columns of [M, (H + 2G) d], as views."""
    n_heads, n_kv, dim = heads
    q, k, v = qkv.split((n_heads * dim, n_kv * dim, n_kv * dim), dim=1)
    return q, k, v
