"""Pipelines (`-sm layer`): which layers each rank holds, and how the ranks' times of micro-batches add up. No torch.

Rank after rank has the next layers: it takes hidden states from the one before, and hands its own to the one after
while it begins the next micro-batch. A rank's layers are a ModelSpec of their own, planned and loaded like any model.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from pshard.model import ModelSpec, Neighbours
from pshard.units.ports import HIDDEN, IDS
from pshard.units.unit import Unit


def share_layers(spec: ModelSpec, shares: Sequence[float]) -> tuple[range, ...]:
    """Which layers each rank holds; number `n_layers` stands for the output head, which follows the last layer.

    In packed bytes the runs are as near to the ratio of `shares` (0 or more each, not all 0) as whole layers allow:
    every bound is the one nearest to its place, so errors do not add up. The embedding is not counted: its rows are
    looked up on the host. A rank may get nothing. Layers that read the cells of another one are on its rank.
    """
    if not shares or min(shares) < 0 or sum(shares) <= 0:
        raise ValueError(f"shares {tuple(shares)} are not ratios: 0 or more each, one above 0")
    sizes = [0] * (spec.config.n_layers + 1)
    for unit in spec.units:
        if unit.kind.position != "first":
            sizes[_place(spec, unit)] += unit.packed_nbytes
    ends = list(accumulate(sizes, initial=0))  # bytes of the first 0, 1, 2... layers
    inside = {i for unit in spec.units if unit.borrows for i in range(spec.unit(unit.borrows.unit).layer, unit.layer)}
    bounds = [0]
    for owed in accumulate(shares):
        target = ends[-1] * owed / sum(shares)
        open_ones = (i for i in range(bounds[-1], len(ends)) if i - 1 not in inside)
        bounds.append(min(open_ones, key=lambda i: abs(ends[i] - target)))
    return tuple(range(a, b) for a, b in pairwise(bounds))


def cut_layers(spec: ModelSpec, shares: Sequence[float], rank: int) -> ModelSpec:
    """The layers that `rank` holds, as a model of its own.

    It has an embedding and an output in any case; where another rank holds them they are units without tensors. The
    first rank with layers looks up the embedding, the last one has the states that a head takes.
    """
    if len(shares) == 1:
        return spec
    runs = share_layers(spec, shares)
    working = [r for r, run in enumerate(runs) if run]
    here = working.index(rank) if runs[rank] else None
    first, last = here == 0, here == len(working) - 1
    neighbours = Neighbours(None, None)
    if here is not None:
        brought = () if first else _list_open(spec, runs[rank].start)
        handed = () if last else _list_open(spec, runs[rank].stop)
        source, target = None if first else working[here - 1], None if last else working[here + 1]
        neighbours = Neighbours(source, target, brought, handed)

    def held(unit: Unit) -> bool:
        return first if unit.kind.position == "first" else _place(spec, unit) in runs[rank]

    units = tuple(
        unit if held(unit) else replace(unit, tensors=()) for unit in spec.units if held(unit) or unit.layer < 0
    )
    return replace(spec, units=units, neighbours=neighbours, keeps_states=spec.keeps_states and last)


def join_seconds(mode: str, batches: Sequence[Sequence[float]]) -> float:
    """Seconds of micro-batches that follow each other; batches[i][r]: seconds of micro-batch i on rank r.

    mode: "layer" for a pipeline; else ranks work on the same micro-batch, and the slowest counts.
    """
    return pipeline_seconds(batches) if mode == "layer" else sum(map(max, batches))


def pipeline_seconds(batches: Sequence[Sequence[float]]) -> float:
    """Seconds until the last rank has done the last micro-batch; `batches` as in `join_seconds`.

    A rank begins a micro-batch when it has done the one before and the rank before it has done this one. So k equal
    micro-batches take the sum over the ranks, and k - 1 times the slowest one; a single one takes the sum.
    """
    done = [0.0] * (len(batches[0]) if batches else 1)
    for batch in batches:
        at = 0.0
        for rank, seconds in enumerate(batch):
            at = done[rank] = max(at, done[rank]) + seconds
    return done[-1]


def _list_open(spec: ModelSpec, layer: int) -> tuple[str, ...]:
    """Ports beside the residual stream that a layer or one after it reads as layers before have left them."""
    written, found = {HIDDEN, IDS}, list[str]()
    for unit in spec.units:
        if unit.kind.position != "first" and _place(spec, unit) >= layer:
            found += (port for port in unit.ports.reads if port not in written and port not in found)
            written.update(unit.ports.writes)
    return tuple(found)


def _place(spec: ModelSpec, unit: Unit) -> int:
    """The number of a unit's layer; that of the output is behind the last one."""
    return spec.config.n_layers if unit.kind.position == "last" else unit.layer
