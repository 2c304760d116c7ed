"""Fills the index by which kernels find each row's cells in the KV cache."""

from collections.abc import Sequence
from itertools import groupby

import torch

from pshard.batch_sizes import SMALL_BATCH
from pshard.runtime.kernels.api import RowIndex, Segment


def fill_rows(
    segments: Sequence[Segment],
    begin: torch.Tensor,
    position: torch.Tensor,
    blocks: torch.Tensor,
    recent: torch.Tensor | None = None,
) -> None:
    """Write what `RowIndex` says of the segments, which lie one after the other: int32 tensors on the host, begin and
    position [M], blocks at least as long as theirs together, and so are those of layers with a window. Rows behind the
    segments' only fill the micro-batch."""
    begins: list[int] = []
    positions: list[int] = []
    numbers: list[int] = []
    for s in segments:  # lists: an operator of torch takes as long as many of their items
        begins += [len(numbers)] * s.tokens
        positions += range(s.past, s.past + s.tokens)
        numbers += s.blocks
    missing = begin.shape[0] - len(begins)
    begins += [-1] * missing
    positions += [0] * missing
    for tensor, values in ((begin, begins), (position, positions), (blocks, numbers)):
        tensor.numpy()[: len(values)] = values
    if recent is not None:
        recent.numpy()[: len(numbers)] = [number for s in segments for number in s.recent]


def fill_sequences(segments: Sequence[Segment], slots: torch.Tensor, offsets: torch.Tensor) -> None:
    """Write what `SequenceRows` says of the segments, which lie one after the other: int32 tensors on the host, slots
    at least as long as there are segments, offsets one longer; see `Kernels.delta_net`. Places that are left over have
    other sequences without rows."""
    numbers = [s.sequence for s in segments]
    others = (i for i in range(slots.shape[0] + len(numbers)) if i not in numbers)
    ends = [0, *(s.start + s.tokens for s in segments)]
    missing = slots.shape[0] - len(numbers)
    places = [-1 - s.sequence if s.is_open else s.sequence for s in segments]
    slots.numpy()[:] = places + [next(others) for _ in range(missing)]
    offsets.numpy()[:] = ends + ends[-1:] * missing


def list_spans(segments: Sequence[Segment]) -> list[tuple[int, int, int, int]]:
    """Of each segment: its first row, its rows, cells before them, and where its blocks begin in `RowIndex.blocks`."""
    spans, at = [], 0
    for s in segments:
        spans.append((s.start, s.tokens, s.past, at))
        at += len(s.blocks)
    return spans


def part_rows(rows: RowIndex, in_splits: bool) -> tuple[list[tuple[slice, RowIndex]], list[tuple[slice, int]]]:
    """Rows of a large micro-batch by what attends to them: runs of texts that have one new token each, at most
    SMALL_BATCH, with an index of each run; and all other segments, with where their blocks begin in `RowIndex.blocks`.
    in_splits: whether there is room for results of splits of cells; else there are no such runs.
    """
    prompts = [(slice(start, start + n), at) for start, n, _, at in list_spans(rows.segments) if n > 1 or not in_splits]
    runs: list[tuple[slice, RowIndex]] = []
    for alone, group in groupby(rows.segments, lambda s: s.tokens == 1):
        found = tuple(group) if alone and in_splits else ()
        for first in range(0, len(found), SMALL_BATCH):
            run = found[first : first + SMALL_BATCH]
            new = slice(run[0].start, run[-1].start + 1)
            cells = max(s.past + 1 for s in run)
            index = RowIndex(rows.begin[new], rows.position[new], rows.blocks, run, cells, window=rows.window)
            runs.append((new, index))
    return runs, prompts


def make_rows(segments: Sequence[Segment], device: torch.device | str = "cpu") -> RowIndex:
    """A new index on a device."""
    tokens = sum(s.tokens for s in segments)
    begin, position = torch.empty(2, tokens, dtype=torch.int32)
    blocks = torch.empty(sum(len(s.blocks) for s in segments), dtype=torch.int32)
    fill_rows(segments, begin, position, blocks)
    cells = max(s.past + s.tokens for s in segments)
    return RowIndex(begin.to(device), position.to(device), blocks.to(device), tuple(segments), cells)
