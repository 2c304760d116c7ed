"""Times several residual streams, and the choice of cells by an index, through the kernels that the runtime calls."""

from collections.abc import Sequence
from functools import partial
from math import inf

import torch

from pshard.machine import ElementwiseTiming
from pshard.profile.timed.time_kernels import NORM_EPS, KernelBench, index_rows, time_series
from pshard.units.kv_cells import KV_BLOCK, kv_blocks
from pshard.units.operations import ChooseCells

Streams = tuple[int, int]  # how many, and elements of each


def time_streams(bench: KernelBench, shape: Streams, tokens: Sequence[int]) -> list[ElementwiseTiming]:
    """What blocks have given goes into streams that are normalised, and the mix of these."""
    return [
        ElementwiseTiming(bench.side, what, count, shape[0] * shape[1], seconds)
        for what, seconds_of in (("streams", _time_entering), ("mix", _time_mix))
        for count, seconds in time_series(tokens, inf, partial(seconds_of, bench, shape))
    ]


def time_index(bench: KernelBench, index: ChooseCells, contexts: Sequence[int]) -> list[ElementwiseTiming]:
    """Scores and choice of one token among the blocks of so many cells, of which it does not see all."""
    return [
        ElementwiseTiming(bench.side, "index", 1, cells // index.each * index.heads * index.head, seconds)
        for cells, seconds in time_series(contexts, bench.slow, lambda cells: _time_choice(bench, index, cells))
    ]


def _time_entering(bench: KernelBench, shape: Streams, tokens: int) -> float:
    count, width = shape
    given = torch.ones(tokens, width, device=bench.device)
    streams = torch.ones(tokens, count * width + count, device=bench.device)
    weight, out = torch.ones(count * width, device=bench.device), bench.activations(tokens, count * width)
    return bench.seconds(
        lambda i: bench.kernels.enter_streams(given, streams, False, weight, count, NORM_EPS, out), tokens
    )


def _time_mix(bench: KernelBench, shape: Streams, tokens: int) -> float:
    count, width = shape
    normed, gates = bench.activations(tokens, count * width), bench.activations(tokens, count * width)
    out, cleared = (torch.empty(tokens, width, device=bench.device) for _ in range(2))
    return bench.seconds(lambda i: bench.kernels.mix_streams(normed, gates, count, out, cleared), tokens)


def _time_choice(bench: KernelBench, index: ChooseCells, cells: int) -> float:
    rows, blocks = index_rows(bench.device, 1, cells), kv_blocks(cells, 1)
    keys = torch.rand(blocks, KV_BLOCK, index.head, device=bench.device)
    q = bench.activations(1, index.heads * index.head)
    scores = torch.empty(1, blocks * KV_BLOCK // index.each, device=bench.device)
    seen, rule = torch.empty(1, blocks, dtype=torch.int32, device=bench.device), (index.each, index.most)
    return bench.seconds(lambda i: bench.kernels.choose_cells(q, keys, rule, rows, scores, seen), 1)
