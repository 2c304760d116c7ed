"""What is wanted of rows of logits, found where they lie: only that comes to the host."""

from collections.abc import Sequence

import numpy as np
import torch

from pshard.runtime.texts.text import Piece, Row

PART = 256  # columns of which first the largest is found
ROOM_BYTES = 16 << 20  # for what is made on the way, beside the arena: a part of TORCH_RESERVE_MIB
NOTHING = np.empty(0, dtype=np.float32)


class RowChooser:
    """Takes the wanted rows of a micro-batch's logits, as they come, and keeps what is asked of each.

    Attributes:
        rows: what was found so far, in order.
    """

    def __init__(self, wishes: Sequence[tuple[Piece, tuple[int, ...]]]) -> None:
        """wishes: of each row its piece, and the ids whose logits are wanted."""
        self._wishes = wishes
        self.rows: list[Row] = []
        self.is_quick = all(piece.is_quick for piece, _ in wishes)

    @torch.inference_mode()
    def take(self, table: torch.Tensor) -> None:
        """The next rows, float32 [n, vocabulary] on either side; they are overwritten."""
        n, columns = table.shape
        wishes = self._wishes[len(self.rows) : len(self.rows) + n]
        best = max(piece.best for piece, _ in wishes)
        each = 4 * columns + 56 * min(best * PART, columns)  # exp of a row; then values and keys of candidates
        step = max(1, ROOM_BYTES // each)
        for start in range(0, n, step):
            self.rows += _choose(table[start : start + step], wishes[start : start + step])

    def take_best(self, found: torch.Tensor) -> None:
        """The next rows, when all is quick: [n, 2] on the host, the largest logit of each and its id."""
        values = found.numpy()
        ids, nan = values[:, 1].astype(np.int64), np.isnan(values[:, 0]).tolist()
        self.rows += [
            Row(ids[i : i + 1], values[i, :1], float("nan"), None, NOTHING, nan[i]) for i in range(len(values))
        ]


def _choose(table: torch.Tensor, wishes: Sequence[tuple[Piece, tuple[int, ...]]]) -> list[Row]:
    """What is wanted of a few rows; overwrites them."""
    wanted = [i for i, (piece, _) in enumerate(wishes) if piece.full]
    full = table[wanted].cpu().numpy() if wanted else NOTHING  # fresh memory: an index copies
    largest = table.amax(dim=1, keepdim=True)  # a NaN where there is one
    total = torch.full_like(largest, float("nan"))
    if any(piece.needs_total for piece, _ in wishes):
        total = torch.where(
            largest.isinf(), largest, (table - largest).exp_().sum(dim=1, keepdim=True).log_() + largest
        )
    parts = [largest, total]
    most = max(len(of) for _, of in wishes)
    if most:
        asked = torch.tensor([[*of, *[0] * (most - len(of))] for _, of in wishes]).to(table.device)
        parts.append(table.gather(1, asked))
    best = min(max(piece.best for piece, _ in wishes), table.shape[1])
    if best:
        _mask(table, [piece.mask for piece, _ in wishes])
        values, columns = find_largest(table, best)
        parts += [values, columns.to(torch.float32)]  # exact up to 2^24
    return _make_rows(torch.cat(parts, dim=1).cpu().numpy(), full, wishes, best)


def _make_rows(
    found: np.ndarray, full: np.ndarray, wishes: Sequence[tuple[Piece, tuple[int, ...]]], best: int
) -> list[Row]:
    """found: [rows, 2 + ids asked of + 2 best], as `_choose` puts it together; full: the rows that are wanted so."""
    rows, at, nan = [], found.shape[1] - 2 * best, np.isnan(found[:, 0]).tolist()
    whole = iter(full)
    ids = found[:, at + best :].astype(np.int64)
    totals = found[:, 1].tolist()
    for i, (piece, of) in enumerate(wishes):
        k = min(piece.best, best)
        rows.append(
            Row(
                ids[i, :k],
                found[i, at : at + k],
                totals[i] if piece.needs_total else float("nan"),
                next(whole) if piece.full else None,
                found[i, 2 : 2 + len(of)],
                nan[i],
            )
        )
    return rows


def _mask(table: torch.Tensor, masks: Sequence[np.ndarray | None]) -> None:
    """Make the logits of tokens that may not come -inf."""
    rows = [i for i, mask in enumerate(masks) if mask is not None]
    if not rows:
        return
    words = torch.from_numpy(np.stack([mask for mask in masks if mask is not None]).view(np.uint8)).to(table.device)
    bits = words.unsqueeze(2) >> torch.arange(8, dtype=torch.uint8, device=table.device) & 1
    barred = bits.view(len(rows), -1)[:, : table.shape[1]] == 0
    if len(rows) == len(masks):
        table.masked_fill_(barred, -torch.inf)
    else:
        for at, row in enumerate(rows):
            table[row].masked_fill_(barred[at], -torch.inf)


def find_largest(table: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of each row of float32 [rows, columns], the largest first, of equal ones the first first: values
    and columns (int64), [rows, k]."""
    rows, columns = table.shape
    everywhere = torch.arange(columns, device=table.device)
    if k * PART >= columns:
        keys = _order(table, everywhere).topk(k).values
    else:
        # whoever is among the k largest lies in one of the k parts whose largest are the largest
        whole = columns // PART * PART
        heads = table[:, :whole].unflatten(1, (-1, PART)).amax(dim=2)
        if whole < columns:
            heads = torch.cat([heads, table[:, whole:].amax(dim=1, keepdim=True)], dim=1)
        parts = _order(heads, everywhere[: heads.shape[1]]).topk(k, sorted=False).indices
        at = (parts.unsqueeze(2) * PART + everywhere[:PART]).view(rows, -1)
        keys = _order(table.gather(1, at.clamp(max=columns - 1)), at)
        keys = keys.masked_fill_(at >= columns, torch.iinfo(torch.int64).min).topk(k).values
    found = (1 << 31) - 1 - (keys & 0xFFFFFFFF)
    return table.gather(1, found), found


def _order(values: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """int64 that rise with float32 values, and fall with the column where these are equal."""
    bits = (values + 0.0).view(torch.int32)  # no negative zero
    rising = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
    return (rising << 32) + ((1 << 31) - 1 - columns)
