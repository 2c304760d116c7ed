"""Latent attention in plain torch: the oracle of the fast kernels, on any device."""

import torch

from pshard.runtime.kernels.api import Packed, RopeTable, RowIndex
from pshard.runtime.kernels.kv_codec import decode_cells, encode_cells, gather_cells
from pshard.runtime.kernels.plain_rows import head_norm, rotate
from pshard.runtime.kernels.unpack import unpack

SCORES = 1 << 25  # made at once: bounds the temporaries


class PlainLatent:
    """What `api.Kernels` has for latent attention."""

    def head_products(self, x: torch.Tensor, stack: Packed, out: torch.Tensor) -> None:
        matrices = unpack(stack).unflatten(0, (x.shape[1], -1))
        out.copy_(torch.einsum("mhc,hrc->mhr", x.float(), matrices))

    def store_latent(
        self,
        kv: torch.Tensor,
        q: torch.Tensor,
        out: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        rope: RopeTable,
        rows: RowIndex,
        cells: torch.Tensor,
    ) -> None:
        rank, position, each = norm.shape[0], rows.position.long(), cells.shape[1]
        kept = rows.begin >= 0
        at = rows.blocks[rows.begin + position // each].long()[kept], (position % each)[kept]
        cos, sin = rope.cos[position][:, None], rope.sin[position][:, None]
        out.copy_(rotate(q.float(), cos, sin, rope.pairing))
        latent = head_norm(kv[:, None, :rank].float(), norm, eps)
        key = rotate(kv[:, None, rank:].float(), cos, sin, rope.pairing)
        cells[at] = encode_cells(torch.cat((latent, key), -1)[kept], cells.dtype)

    def attend_latent(
        self,
        q: torch.Tensor,
        rank: int,
        cells: torch.Tensor,
        rows: RowIndex,
        scale: float,
        out: torch.Tensor,
        partial: torch.Tensor | None,
    ) -> None:
        heads, width = q.shape[1:]
        for s in rows.segments:
            length = s.past + s.tokens
            keys = decode_cells(gather_cells(cells, s.blocks, length), width)[:, 0]
            each = max(1, SCORES // (heads * length))
            for first in range(0, s.tokens, each):
                new = slice(s.start + first, s.start + min(first + each, s.tokens))
                seen = torch.arange(length, device=q.device) <= rows.position[new, None]
                scores = (q[new].float() @ keys.T * scale).masked_fill(~seen[:, None], -torch.inf)
                out[new, :, :rank] = (scores.softmax(-1) @ keys[:, :rank]).to(out.dtype)
