"""Tensor-parallel cuts: which rows and columns of every tensor a rank holds, for any number of ranks and any ratios.

One cut per unit is chosen (a range of q heads, of FFN columns, of each expert's rows, of vocabulary rows) and every
tensor's range follows from it, so the two matrices of a pair cannot disagree. `cut_model` turns a rank's part into a
ModelSpec of its own, which is planned and loaded like any model. No torch.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

from pshard.cuts.check_cut import Range, TensorCut, UnitCut, check_cut
from pshard.errors import UserError
from pshard.model import ModelSpec
from pshard.model_config import ModelConfig
from pshard.tensor import TensorSpec
from pshard.units.enter import LAYER_SCALE
from pshard.units.kinds import kinds_by_flag
from pshard.units.ports import ENTERED, LOGITS
from pshard.units.unit import Cells, Cut, Unit, UnitKind
from pshard.workload import Limits

Ranges = dict[str, dict[str, tuple[int, int, int, int]]]  # see `source_ranges`


def cut_units(spec: ModelSpec, shares: Sequence[float], limits: Limits = ()) -> tuple[UnitCut, ...]:
    """Cut every unit over `len(shares)` ranks in the ratio of `shares` (0 or more each, not all 0).

    limits: over how many ranks units of a kind are cut at most; those with the largest shares take them, in the same
    ratio. What rounding gives a rank too much or too little in one layer is made up in the next ones of the same kind,
    so the sums follow the ratio. Every cut is checked (`pshard.cuts.check_cut`). Raises UserError for a model that
    cannot be cut, ValueError for shares that are none.
    """
    if not shares or min(shares) < 0 or sum(shares) <= 0:
        raise ValueError(f"shares {tuple(shares)} are not ratios: 0 or more each, one above 0")
    return _cut_units(spec, tuple(shares), limits)


@lru_cache(maxsize=8)  # each rank's slice is made from the cut of all
def _cut_units(spec: ModelSpec, shares: tuple[float, ...], limits: Limits) -> tuple[UnitCut, ...]:
    ratios = {unit.kind: limit_shares(shares, _most_ranks(unit.kind, limits, len(shares))) for unit in spec.units}
    owed = {unit.kind: [0.0] * len(shares) for unit in spec.units}
    cuts: list[UnitCut] = []
    held: dict[str, tuple[Range, ...]] = {}  # by unit
    by_name: dict[str, UnitCut] = {}
    alike: dict[tuple, tuple[TensorCut, ...]] = {}  # units that are alike and cut alike are checked once
    for unit in spec.units:
        rule, config = _find_cut(spec, unit), unit.sees(spec.config)
        lender = by_name[unit.borrows.unit] if unit.borrows else None
        if lender:  # heads are where the cells are that they read
            ranges = held[lender.unit]
        else:
            ranges, owed[unit.kind] = _place_ranges(rule, config, unit, ratios[unit.kind], owed[unit.kind])
        if (unit.likeness, ranges) not in alike:
            tensors = tuple(_cut_tensor(spec, unit, t, ranges) for t in unit.tensors)
            check_cut(spec, unit, UnitCut(unit.name, tensors), lender)
            alike[unit.likeness, ranges] = tensors
        enters = ENTERED in unit.ports.writes or (spec.keeps_states and LOGITS in unit.ports.writes)
        cuts.append(UnitCut(unit.name, alike[unit.likeness, ranges], enters))
        held[unit.name], by_name[unit.name] = ranges, cuts[-1]
    return tuple(cuts)


def _place_ranges(
    rule: Cut, config: ModelConfig, unit: Unit, ratios: Sequence[float], owed: Sequence[float]
) -> tuple[tuple[Range, ...], list[float]]:
    """Each rank's range of a unit, and what rounding owes the ranks after it."""
    total = rule.length(config, unit.by_role)
    targets = tuple(
        round(ratio * total + debt, 6) if ratio > 0 else None for ratio, debt in zip(ratios, owed, strict=True)
    )
    ranges = tuple(pairwise(rule.bounds(config, unit.by_role, targets)))
    return ranges, [
        0.0 if target is None else target - (stop - start) for target, (start, stop) in zip(targets, ranges)
    ]


def _most_ranks(kind: UnitKind, limits: Limits, ranks: int) -> int:
    """A limit holds for all kinds that users call by one name."""
    named = kinds_by_flag().get(kind.cut.flag, kind) if kind.cut else kind
    return dict(limits).get(named.name, ranks)


def _find_cut(spec: ModelSpec, unit: Unit) -> Cut:
    if unit.kind.cut is None:
        raise UserError(
            f"{spec.config.architecture}: units of kind {unit.kind.name} cannot be cut over devices yet; "
            "use -sm layer, or one device with -sm none"
        )
    return unit.kind.cut


def limit_shares(shares: Sequence[float], most: int) -> tuple[float, ...]:
    """Shares that add up to 1, of the `most` ranks with the largest ones (the first of equal ones); 0 for the others.

    Raises ValueError for less than one rank.
    """
    if most < 1:
        raise ValueError(f"{most} ranks cannot hold a unit")
    chosen = sorted(range(len(shares)), key=lambda rank: -shares[rank])[:most]
    kept = tuple(share if rank in chosen else 0.0 for rank, share in enumerate(shares))
    return tuple(share / sum(kept) for share in kept)


def cut_model(spec: ModelSpec, shares: Sequence[float], rank: int, limits: Limits = ()) -> ModelSpec:
    """The part of the model that `rank` holds, as a model of its own.

    Names are kept; shapes are those of the slices. Every unit is there, in order, so that all ranks run the same
    steps: a unit of which the rank holds nothing has no tensors, and the rank adds zeros to its all-reduce (or no
    column to the gathered logits). No part has a weight that normalises what is summed over the ranks: `sum_norms` of
    the part names these; what the stream is multiplied by then is of the same units. Heads, KV heads, d_ffn, d_expert
    and d_shared of the config are the largest of any layer (they size buffers); its tensors tell one layer's own.
    `vocab` stays whole: logits are gathered.
    """
    if len(shares) == 1:
        return spec
    units: list[Unit] = []
    sum_norms: list[tuple[str, str]] = []
    widest: dict[str, Any] = {}
    alike: dict[int, tuple[tuple[int, ...], ...]] = {}  # shapes by cut: units that are alike and cut alike share it
    for unit, cut in zip(spec.units, cut_units(spec, shares, limits)):
        known = id(cut.tensors) in alike
        shapes = alike[id(cut.tensors)] if known else _cut_shapes(unit, cut, rank)
        units.append(_slice_unit(unit, shapes))
        if unit.borrows:
            units[-1] = replace(units[-1], borrows=_slice_cells(unit.borrows, units))
        if not known:
            alike[id(cut.tensors)] = shapes
            widths = unit.kind.widths(units[-1].by_role, spec.config) if unit.kind.widths else {}
            widest |= {name: max(widest.get(name, 0), size) for name, size in widths.items()}
        of_sums = (t for t, part in zip(unit.tensors, cut.tensors) if part.axis == "sum")
        sum_norms += [(unit.name, t.name) for t in of_sums if t.role != LAYER_SCALE]
    config = spec.config.resize(widest)
    if config.wide_qk_norm:
        config = replace(config, normed_heads=(spec.config.n_heads, spec.config.n_kv_heads))
    return replace(spec, config=config, units=tuple(units), sum_norms=tuple(sum_norms))


def source_ranges(spec: ModelSpec, shares: Sequence[float], rank: int, limits: Limits = ()) -> Ranges:
    """What the loader reads: unit -> tensor name -> (row start, row stop, column start, column stop) in the file.

    Only tensors that the rank holds are listed; every unit is. A vector is one row, as in TensorSpec. Of what is cut in
    each of several equal parts, the ranges are those in each of these. By unit, because a tied
    output cuts the very tensor that the embedding holds whole.
    """
    if len(shares) == 1:
        return {u.name: {t.name: whole_range(t) for t in u.tensors} for u in spec.units}
    table: Ranges = {unit.name: {} for unit in spec.units}
    for unit, cut in zip(spec.units, cut_units(spec, shares, limits)):
        for tensor, part in zip(unit.tensors, cut.tensors):
            start, stop = _range(tensor, part, rank)
            if cut.needs(part, rank) and start < stop:
                across = part.axis == "cols" or len(tensor.shape) == 1
                row0, row1, col0, col1 = whole_range(tensor)
                table[unit.name][tensor.name] = (row0, row1, start, stop) if across else (start, stop, col0, col1)
    return table


def whole_range(tensor: TensorSpec) -> tuple[int, int, int, int]:
    """What `source_ranges` says of a tensor of which nothing is cut off."""
    return (0, tensor.rows // max(1, tensor.parts), 0, tensor.cols)


def vocab_sizes(spec: ModelSpec, shares: Sequence[float], limits: Limits = ()) -> tuple[int, ...]:
    """Vocabulary rows that each rank's output head computes: the sizes of a gather of logits."""
    cut = cut_units(spec, shares, limits)[spec.units.index(spec.output)]
    (head,) = (t for t in cut.tensors if t.axis == "rows")
    return tuple(stop - start for start, stop in head.ranges)


def _range(tensor: TensorSpec, cut: TensorCut, rank: int) -> Range:
    """The rank's range along the cut axis; along rows (a vector's elements) when it is not cut."""
    if cut.axis == "none":
        return (0, tensor.shape[0])
    if cut.axis == "sum":
        return (0, 0)
    start, stop = cut.ranges[rank]
    return (start, stop) if start < stop else (0, 0)


@lru_cache(1 << 13)  # slices of one size recur on ranks and in cuts that are compared
def _slice_unit(unit: Unit, shapes: tuple[tuple[int, ...], ...]) -> Unit:
    tensors = tuple(replace(t, shape=shape) for t, shape in zip(unit.tensors, shapes) if shape)
    return replace(unit, tensors=tensors)


def _slice_cells(cells: Cells, units: Sequence[Unit]) -> Cells:
    """The cells of which the rank's part of their unit has some heads."""
    tensors, names = next(unit.tensors for unit in units if unit.name == cells.unit), {t.name for t in cells.made_by}
    return replace(cells, made_by=tuple(t for t in tensors if t.name in names))


def _cut_shapes(unit: Unit, cut: UnitCut, rank: int) -> tuple[tuple[int, ...], ...]:
    """Shapes of the rank's parts of a unit's tensors; () of one of which it has nothing."""
    return tuple(
        _cut_shape(t, c, rank) if cut.needs(c, rank) and _range(t, c, rank) != (0, 0) else ()
        for t, c in zip(unit.tensors, cut.tensors)
    )


def _cut_shape(tensor: TensorSpec, cut: TensorCut, rank: int) -> tuple[int, ...]:
    start, stop = _range(tensor, cut, rank)
    if cut.axis == "cols":
        return tensor.shape[0], cut.stacks * (stop - start)
    return cut.stacks * (stop - start), *tensor.shape[1:]


def _cut_tensor(spec: ModelSpec, unit: Unit, tensor: TensorSpec, ranges: tuple[Range, ...]) -> TensorCut:
    """Where the unit's cut puts one of its tensors."""
    cut, config = _find_cut(spec, unit), unit.sees(spec.config)
    if tensor.role not in cut.rules:
        raise UserError(
            f"{spec.config.architecture}: {tensor.name} has no rule that says how it is cut: "
            "it cannot run tensor-parallel; use -sm none"
        )
    axis, which = cut.rules[tensor.role]
    if axis in ("none", "sum"):
        return TensorCut(tensor.role, axis, ())
    if which == "first":
        first = next(i for i, (start, stop) in enumerate(ranges) if start < stop)
        return TensorCut(tensor.role, axis, tuple((0, tensor.cols if i == first else 0) for i in range(len(ranges))))
    if which == "kv":  # the KV heads that the range of q heads needs
        group = config.n_heads // config.n_kv_heads
        ranges = tuple((a // group, -(-b // group)) if a < b else (a // group,) * 2 for a, b in ranges)
    width = 1 if which == "each" else cut.width(config)
    if cut.layout:
        stacks, width = cut.layout(tensor.role, config)
        return TensorCut(tensor.role, axis, tuple((a * width, b * width) for a, b in ranges), stacks)
    ranges = tuple((a * width, b * width) for a, b in ranges)
    return TensorCut(tensor.role, axis, ranges, cut.stacks(config) if axis == "rows" else 1)
