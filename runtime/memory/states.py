"""States of units wherever they lie: which part of them a micro-batch or a switch moves, and the copies that do it.

What is moved is the same for all units under a law: cells of the pool for a state that grows, else sequences' own
entries. So a unit's state is a few tensors whose first dimension counts those entries.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch

from pshard.runtime.kernels.api import Segment
from pshard.runtime.memory.kv_blocks import pool_spans
from pshard.runtime.memory.kv_cache import CellRun, find_cell_runs
from pshard.units.kv_cells import KV_BLOCK
from pshard.units.state import State

Copies = tuple[tuple[torch.Tensor, torch.Tensor], ...]  # (to, from)
Parts = tuple[torch.Tensor, ...]  # of one state; the first dimension counts cells or sequences


@dataclass(frozen=True)
class Reach:
    """What of every unit's state is meant: runs of cells of the pool, and of that of layers with a window, and runs of
    sequences."""

    cells: tuple[CellRun, ...]
    recent: tuple[CellRun, ...]
    sequences: tuple[CellRun, ...]

    def entries(self, law: State) -> tuple[CellRun, ...]:
        """The runs that a state of this law counts in."""
        if law.window:
            return self.recent
        return self.cells if law.grows else self.sequences


def reach_old(segments: Sequence[Segment], most: int) -> Reach:
    """What the segments' sequences have behind them, of states that do not grow also zeros at their beginning; `most`
    as in `find_cell_runs`."""
    spans = [span for s in segments if s.blocks for span in pool_spans(s.blocks, 0, s.past)]
    recent = [span for s in segments if s.recent for span in pool_spans(s.recent, s.first, s.past)]
    return Reach(find_cell_runs(spans, most), find_cell_runs(recent, most), _runs_of(s.sequence for s in segments))


def reach_new(segments: Sequence[Segment], most: int) -> Reach:
    """What the segments make or change. What lies between new cells may be copied in blocks that they have: the stage
    agrees there with the host's cache, that it was filled from, and what follows a sequence's last cell is in nobody's
    use."""
    spans = [span for s in segments for span in pool_spans(s.blocks, s.past, s.past + s.tokens)]
    ours: Collection[int] = {block for s in segments for block in s.blocks}
    recent = [span for s in segments if s.recent for span in pool_spans(s.recent, s.past, s.past + s.tokens)]
    seen: Collection[int] = {block for s in segments for block in s.recent[s.first // KV_BLOCK :]}
    runs = find_cell_runs(spans, most, ours), find_cell_runs(recent, most, seen)
    return Reach(*runs, _runs_of(s.sequence for s in segments))


def _runs_of(sequences: Iterable[int]) -> tuple[CellRun, ...]:
    return find_cell_runs([(s, s + 1) for s in sequences], 0)


def pair_runs(source: Parts, target: Parts, runs: Iterable[CellRun]) -> Copies:
    """Pairs (target, source) of tensors [rows, elements] with contiguous rows: the runs of every part."""
    if source[0].numel() == 0:  # another rank holds all of this unit's state
        return ()
    return tuple((_rows_of(b, run), _rows_of(a, run)) for run in runs for a, b in zip(source, target))


def _rows_of(part: torch.Tensor, run: CellRun) -> torch.Tensor:
    width = part.stride(0)
    at = part.storage_offset() + run.start * width
    return part.as_strided((run.rows, run.cells * width), (run.stride * width, 1), at)
