"""Attention over windows and with sinks, in plain torch: some queries at a time, against the cells that they see."""

import torch

SCORES = 1 << 24  # at once: 64 MiB


def attend_seen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, past: int, window: int, sinks: torch.Tensor | None
) -> torch.Tensor:
    """float32 [H, n, d]: query i, scaled, over the cells up to past + i, at most `window` of them (0: all).

    q [H, n, d]; k, v [H, past + n, d]; sinks [H]: one more score of each head, without a value.
    """
    out = torch.empty_like(q)
    step = max(16, min(window or 256, 256, SCORES // (q.shape[0] * k.shape[1])))
    for start in range(0, q.shape[1], step):
        row = torch.arange(start, min(start + step, q.shape[1]), device=q.device)[:, None] + past
        first, last = max(0, past + start + 1 - window) if window else 0, int(row[-1]) + 1
        cell = torch.arange(first, last, device=q.device)
        scores = q[:, start : start + step] @ k[:, first:last].transpose(1, 2)
        hidden = cell > row
        if window:
            hidden |= cell <= row - window
        scores.masked_fill_(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(row), 1)), -1)
        out[:, start : start + step] = scores.softmax(-1)[..., : last - first] @ v[:, first:last]
    return out
