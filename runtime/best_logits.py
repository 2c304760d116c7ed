"""The largest logit of each row without the whole row: what comes to the host, and what ranks exchange, when tokens are
drawn greedily."""

import numpy as np
import torch

FIELDS = 3  # of a candidate: its logit, its column, and how many columns its part has


def find_best(part: torch.Tensor) -> torch.Tensor:
    """The candidate of each row of float32 [rows, columns] (maybe none): float32 [rows, FIELDS], on the part's side,
    where a GPU may still compute it.

    Of equal logits the first. A part with a NaN has it as its candidate. Columns are exact up to 2^24.
    """
    rows, columns = part.shape
    if not columns:
        return torch.tensor([[-np.inf, 0.0, 0.0]]).repeat(rows, 1)
    return _find_on_host(part.numpy()) if part.device.type == "cpu" else _find_on_device(part)


def _find_on_host(values: np.ndarray) -> torch.Tensor:
    rows, columns = values.shape
    if rows == 1:
        at = int(values.argmax())
        return torch.tensor([[values[0, at], at, columns]], dtype=torch.float32)
    at = values.argmax(1)
    found = np.stack([values[np.arange(rows), at], at, np.full(rows, columns)], axis=1)
    return torch.from_numpy(found.astype(np.float32))


def _find_on_device(part: torch.Tensor) -> torch.Tensor:
    found = torch.full((part.shape[0], FIELDS), float(part.shape[1]), device=part.device)
    found[:, 0], found[:, 1] = torch.max(part, dim=1)
    return found


def choose_best(candidates: torch.Tensor) -> torch.Tensor:
    """The best of the candidates of neighbouring parts, float32 [rows, parts * FIELDS]: [rows, 2], logit and column of
    the whole row. As `find_best` on the whole row."""
    if candidates.shape[1] == FIELDS:  # one part has all columns
        return candidates[:, :2]
    table = candidates.unflatten(1, (-1, FIELDS)).numpy()
    values, columns, widths = table[..., 0], table[..., 1], table[..., 2]
    best = values.argmax(1)[:, None]
    starts = np.cumsum(widths, axis=1) - widths
    found = [np.take_along_axis(of, best, 1) for of in (values, starts + columns)]
    return torch.from_numpy(np.concatenate(found, axis=1).astype(np.float32))
