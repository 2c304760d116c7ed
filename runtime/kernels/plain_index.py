"""An index by which tokens choose the cells that they attend to, in plain torch: the oracle of the fast kernels."""

import torch

from pshard.runtime.kernels.api import RopeTable, RowIndex
from pshard.runtime.kernels.kv_codec import gather_cells
from pshard.runtime.kernels.plain_rows import head_norm, rotate


class PlainIndex:
    """What `api.IndexKernels` has."""

    def store_index(
        self,
        q: torch.Tensor,
        key: torch.Tensor,
        norms: tuple[torch.Tensor, torch.Tensor],
        each: int,
        eps: float,
        rope: RopeTable,
        rows: RowIndex,
        index: torch.Tensor,
    ) -> None:
        """See `IndexKernels.store_index`. A block's keys are added up in the order of its tokens, whoever of them come
        together."""
        position, n, head = rows.position.long(), index.shape[1], key.shape[1]
        cos, sin = rope.cos[position][:, None], rope.sin[position][:, None]
        heads = q.unflatten(1, (-1, head))
        heads.copy_(rotate(head_norm(heads.float(), norms[0], eps), cos, sin, rope.pairing))
        raw, here = key.float(), torch.arange(q.shape[0], device=q.device)
        inside, begin = position % each, rows.begin.long().clamp(min=0)
        together = torch.zeros_like(position)  # rows of the block here, its own the last
        for back in range(each):
            at = (here - back).clamp(min=0)
            alike = (here >= back) & (rows.begin[at] == rows.begin) & (position[at] == position - back)
            together += (alike & (inside >= back)).long()
        before = (position - together).clamp(min=0)
        summed = index[rows.blocks[begin + before // n].long(), before % n]
        summed = summed.where((together <= inside)[:, None], 0)
        for back in reversed(range(each)):
            summed = torch.where((together > back)[:, None], summed + raw[(here - back).clamp(min=0)], summed)
        start = (position - inside).clamp(min=0)
        pooled = head_norm((summed / each)[:, None], norms[1], eps)
        pooled = rotate(pooled, rope.cos[start][:, None], rope.sin[start][:, None], rope.pairing)[:, 0]
        found = torch.where((inside == each - 1)[:, None], pooled, summed)
        block, kept = rows.blocks[begin + position // n].long(), rows.begin >= 0
        index[block[kept], (position % n)[kept]] = found[kept]

    def choose_cells(
        self,
        q: torch.Tensor,
        index: torch.Tensor,
        rule: tuple[int, int],
        rows: RowIndex,
        scores: torch.Tensor,
        seen: torch.Tensor,
    ) -> None:
        """See `IndexKernels.choose_cells`."""
        (each, most), n, head = rule, index.shape[1], index.shape[2]
        seen.zero_()
        for s in rows.segments:
            cells, own = s.past + s.tokens, slice(s.start, s.start + s.tokens)
            keys = gather_cells(index, s.blocks, cells)[each - 1 :: each]
            complete = (torch.arange(s.past, cells, device=q.device) + 1) // each
            found = torch.einsum("mhd,bd->mhb", q[own].float().unflatten(1, (-1, head)), keys).relu().sum(1)
            number = torch.arange(keys.shape[0], device=q.device)
            found = found.masked_fill(number >= complete[:, None], -torch.inf)
            best = found.sort(stable=True, dim=1, descending=True).indices[:, :most]
            blocks = -(-cells // n)
            seen[own, :blocks] = spell_words(best, complete[:, None], blocks, n // each)


def spell_words(best: torch.Tensor, complete: torch.Tensor, blocks: int, each: int) -> torch.Tensor:
    """int32 [M, blocks]: words of `each` bits, those numbered in best [M, k] and in complete [M, 1] set; that behind
    the last bit is of nobody."""
    chosen = torch.zeros(best.shape[0], blocks * each + 1, dtype=torch.bool, device=best.device)
    chosen.scatter_(1, best, True)
    chosen.scatter_(1, complete.clamp(max=blocks * each), True)
    bits = chosen[:, :-1].unflatten(1, (blocks, each)).long() << torch.arange(each, device=best.device)
    return bits.sum(2).to(torch.int32)


def spell_seen(seen: torch.Tensor, each: int, cells: int, n: int) -> torch.Tensor:
    """bool [M, cells]: of words [M, W] as `choose_cells` leaves them, of blocks of n cells."""
    bits = seen[:, : -(-cells // n), None] >> torch.arange(n // each, device=seen.device, dtype=torch.int32)
    return (bits & 1).bool().flatten(1).repeat_interleave(each, 1)[:, :cells]
