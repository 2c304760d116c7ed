"""Attention over windows, with sinks and bent scores, in plain torch: some queries at a time, against what they see."""

import torch

from pshard.runtime.kernels.api import Scoring

SCORES = 1 << 24  # at once: 64 MiB


def attend_seen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    before: tuple[int, int],
    window: int,
    sinks: torch.Tensor | None,
    bent: Scoring,
    counts: torch.Tensor | None = None,
) -> torch.Tensor:
    """float32 [H, n, d]: query i, scaled, over the cells up to its own, at most `window` of them (0: all).

    q [H, n, d]; k, v [H, cells, d]; before: cells before the first query's own, and those of them that k and v lack;
    sinks [H]: one more score of each head, without a value. counts: bool [n, cells], those that may be seen.
    """
    out, (past, gone) = torch.empty_like(q), before
    step = max(16, min(window or 256, 256, SCORES // (q.shape[0] * k.shape[1])))
    for start in range(0, q.shape[1], step):
        row = torch.arange(start, min(start + step, q.shape[1]), device=q.device)[:, None] + past
        from_cell = sees_from(row, window, bent.chunked)
        first, last = int(from_cell[0]), int(row[-1]) + 1
        cell = torch.arange(first, last, device=q.device)
        scores = q[:, start : start + step] @ k[:, first - gone : last - gone].transpose(1, 2)
        if bent.cap:
            scores = bent.cap * torch.tanh(scores / bent.cap)
        if bent.slopes is not None:
            scores -= bent.slopes[:, None, None] * (row - cell)
        scores.masked_fill_((cell > row) | (cell < from_cell), -torch.inf)
        if counts is not None:
            scores.masked_fill_(~counts[start : start + step, first - gone : last - gone], -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(row), 1)), -1)
        out[:, start : start + step] = scores.softmax(-1)[..., : last - first] @ v[:, first - gone : last - gone]
    return out


def sees_from(row: torch.Tensor, window: int, chunked: bool) -> torch.Tensor:
    """The first cell that tokens at these places see."""
    if not window:
        return torch.zeros_like(row)
    return row // window * window if chunked else (row + 1 - window).clamp(min=0)
