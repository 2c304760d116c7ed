"""Tensor-parallel cuts: which rows and columns of every tensor a rank holds, for any number of ranks and any ratios.

One cut per unit is chosen (a range of q heads, of FFN columns, of vocabulary rows) and every tensor's range follows
from it, so the two matrices of a pair cannot disagree. `cut_model` turns a rank's part into a ModelSpec of its own,
which is planned and loaded like any model. No torch.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from math import lcm

from pshard.cuts.check_cut import Range, TensorCut, UnitCut, check_cut
from pshard.errors import UserError
from pshard.model import ModelConfig, ModelSpec, TensorSpec, Unit
from pshard.quant import QUANT_TYPES, ROW_BLOCK
from pshard.workload import Limits

# How each tensor follows from its unit's cut: (axis, which ranges). "first": whole, on the first rank that works.
_RULES: dict[str, dict[str, tuple[str, str]]] = {
    "embedding": {"token_embd.weight": ("none", "all")},
    "attention": {
        "attn_norm.weight": ("none", "all"),
        "attn_q.weight": ("rows", "cut"),
        "attn_q.bias": ("rows", "cut"),
        "attn_k.weight": ("rows", "kv"),
        "attn_k.bias": ("rows", "kv"),
        "attn_v.weight": ("rows", "kv"),
        "attn_v.bias": ("rows", "kv"),
        "attn_q_norm.weight": ("none", "all"),
        "attn_k_norm.weight": ("none", "all"),
        "attn_output.weight": ("cols", "cut"),
        "attn_output.bias": ("rows", "first"),
    },
    "ffn": {
        "ffn_norm.weight": ("none", "all"),
        "ffn_gate.weight": ("rows", "cut"),
        "ffn_gate.bias": ("rows", "cut"),
        "ffn_up.weight": ("rows", "cut"),
        "ffn_up.bias": ("rows", "cut"),
        "ffn_down.weight": ("cols", "cut"),
        "ffn_down.bias": ("rows", "first"),
    },
    "output": {
        "output_norm.weight": ("none", "all"),
        "output.weight": ("rows", "cut"),
        "token_embd.weight": ("rows", "cut"),  # tied
    },
}


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
    ratios = {unit.kind: limit_shares(shares, dict(limits).get(unit.kind, len(shares))) for unit in spec.units}
    owed = {unit.kind: [0.0] * len(shares) for unit in spec.units}
    cuts = []
    for unit in spec.units:
        total = _cut_length(spec, unit)
        targets = tuple(
            round(ratio * total + debt, 6) if ratio > 0 else None
            for ratio, debt in zip(ratios[unit.kind], owed[unit.kind])
        )
        ranges = _cut_ranges(spec, unit, targets)
        owed[unit.kind] = [
            0.0 if target is None else target - (stop - start) for target, (start, stop) in zip(targets, ranges)
        ]
        cut = UnitCut(unit.name, tuple(_cut_tensor(spec, unit, t, ranges) for t in unit.tensors))
        check_cut(spec, unit, cut)
        cuts.append(cut)
    return tuple(cuts)


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
    column to the gathered logits). Heads, KV heads and d_ffn of the config are the largest of any layer (they size
    buffers); `unit_heads` gives one layer's own. `vocab` stays whole: logits are gathered.
    """
    if len(shares) == 1:
        return spec
    units = []
    for unit, cut in zip(spec.units, cut_units(spec, shares, limits)):
        pairs = zip(unit.tensors, cut.tensors) if cut.holds(rank) else ()
        tensors = tuple(replace(t, shape=_cut_shape(t, c, rank)) for t, c in pairs if _range(t, c, rank) != (0, 0))
        units.append(replace(unit, tensors=tensors))
    heads = [unit_heads(spec.config, u) for u in units if u.kind == "attention"]
    d_ffn = [t.rows for u in units for t in u.tensors if t.role == "ffn_up.weight"]
    config = replace(
        spec.config,
        n_heads=max((h for h, _ in heads), default=0),
        n_kv_heads=max((g for _, g in heads), default=0),
        d_ffn=max(d_ffn, default=0),
    )
    return replace(spec, config=config, units=tuple(units))


def source_ranges(
    spec: ModelSpec, shares: Sequence[float], rank: int, limits: Limits = ()
) -> dict[str, dict[str, tuple[int, int, int, int]]]:
    """What the loader reads: unit -> tensor name -> (row start, row stop, column start, column stop) in the file.

    Only tensors that the rank holds are listed; every unit is. A vector is one row, as in TensorSpec. By unit, because
    a tied output cuts the very tensor that the embedding holds whole.
    """
    if len(shares) == 1:
        return {u.name: {t.name: (0, t.rows, 0, t.cols) for t in u.tensors} for u in spec.units}
    table: dict[str, dict[str, tuple[int, int, int, int]]] = {unit.name: {} for unit in spec.units}
    for unit, cut in zip(spec.units, cut_units(spec, shares, limits)):
        for tensor, part in zip(unit.tensors, cut.tensors):
            start, stop = _range(tensor, part, rank)
            if cut.holds(rank) and start < stop:
                across = part.axis == "cols" or len(tensor.shape) == 1
                rows, cols = (0, tensor.rows), (0, tensor.cols)
                table[unit.name][tensor.name] = (*rows, start, stop) if across else (start, stop, *cols)
    return table


def unit_heads(config: ModelConfig, unit: Unit) -> tuple[int, int]:
    """(q heads, KV heads) that an attention unit computes, from its tensors; (0, 0) when it holds none."""
    rows = {t.role: t.rows for t in unit.tensors}
    return rows.get("attn_q.weight", 0) // config.head_dim, rows.get("attn_k.weight", 0) // config.head_dim


def vocab_sizes(spec: ModelSpec, shares: Sequence[float], limits: Limits = ()) -> tuple[int, ...]:
    """Vocabulary rows that each rank's output head computes: the sizes of a gather of logits."""
    cut = cut_units(spec, shares, limits)[-1]
    (head,) = (t for t in cut.tensors if t.axis == "rows")
    return tuple(stop - start for start, stop in head.ranges)


def _range(tensor: TensorSpec, cut: TensorCut, rank: int) -> Range:
    """The rank's range along the cut axis; along rows (a vector's elements) when it is not cut."""
    if cut.axis == "none":
        return (0, tensor.shape[0])
    start, stop = cut.ranges[rank]
    return (start, stop) if start < stop else (0, 0)


def _cut_shape(tensor: TensorSpec, cut: TensorCut, rank: int) -> tuple[int, ...]:
    start, stop = _range(tensor, cut, rank)
    return (tensor.shape[0], stop - start) if cut.axis == "cols" else (stop - start, *tensor.shape[1:])


def _cut_length(spec: ModelSpec, unit: Unit) -> int:
    """What is cut: q heads of an attention, columns of an FFN, vocabulary rows of an output; 1 when nothing is."""
    return {"attention": spec.config.n_heads, "ffn": spec.config.d_ffn, "output": spec.config.vocab}.get(unit.kind, 1)


def _cut_ranges(spec: ModelSpec, unit: Unit, targets: tuple[float | None, ...]) -> tuple[Range, ...]:
    """The unit's one cut, near `targets` (None: the rank holds nothing), in the units of `_cut_length`."""
    config = spec.config
    blocks = {t.role: QUANT_TYPES[t.qtype].block for t in unit.tensors}
    if unit.kind == "attention":
        step = lcm(config.head_dim, blocks.get("attn_output.weight", 1)) // config.head_dim
        bounds = _place_heads(config.n_heads, config.n_heads // config.n_kv_heads, step, targets)
    elif unit.kind == "ffn":
        bounds = _place_rows(config.d_ffn, lcm(ROW_BLOCK, blocks.get("ffn_down.weight", 1)), targets)
    else:
        bounds = _place_rows(_cut_length(spec, unit), ROW_BLOCK, targets)
    return tuple(pairwise(bounds))


def _place_rows(total: int, granule: int, targets: tuple[float | None, ...]) -> tuple[int, ...]:
    """Bounds of consecutive ranges of whole granules (the last may be short) nearest to the targets.

    Largest remainder: everyone gets the whole granules of his target, who was cut short most gets one more.
    """
    granules = -(-total // granule)
    wanted = [max(0.0, t or 0.0) for t in targets]
    wanted = [w * granules / sum(wanted) for w in wanted]
    got = [int(w) for w in wanted]
    for i in sorted(range(len(got)), key=lambda i: got[i] - wanted[i])[: granules - sum(got)]:
        got[i] += 1
    bounds = [0]
    for n in got:
        bounds.append(bounds[-1] + n)
    return tuple(min(b * granule, total) for b in bounds)


@lru_cache(maxsize=4096)
def _place_heads(heads: int, group: int, step: int, targets: tuple[float | None, ...]) -> tuple[int, ...]:
    """Bounds of consecutive ranges of q heads nearest to the targets (least squares, then fewest copies of KV heads).

    A range is whole KV groups of `group` heads, or lies inside one group (its KV head is then on several ranks), so
    that each rank has equally many q heads per KV head. Bounds are multiples of `step` heads: the columns of the
    output projection are cut between quant blocks. Dynamic programming over (rank, bound).
    """
    best: dict[int, tuple[float, int, tuple[int, ...]]] = {0: (0.0, 0, (0,))}
    for target in targets:
        reached: dict[int, tuple[float, int, tuple[int, ...]]] = {}
        for start, (error, copies, bounds) in best.items():
            for stop in range(start, heads + 1 if target is not None else start + 1, step):
                kv_heads = -(-stop // group) - start // group if stop > start else 0
                if kv_heads > 1 and (start % group or stop % group):
                    continue
                missed = 0.0 if target is None else (stop - start - target) ** 2
                found = (round(error + missed, 6), copies + kv_heads, (*bounds, stop))
                if stop not in reached or found < reached[stop]:
                    reached[stop] = found
        best = reached
    return best[heads][2]


def _cut_tensor(spec: ModelSpec, unit: Unit, tensor: TensorSpec, ranges: tuple[Range, ...]) -> TensorCut:
    """Where the unit's cut puts one of its tensors."""
    rules = _RULES.get(unit.kind, {})
    if tensor.role not in rules:
        raise UserError(
            f"{spec.config.architecture}: {tensor.name} has no rule that says how it is cut: "
            "it cannot run tensor-parallel; use -sm none"
        )
    axis, which = rules[tensor.role]
    if axis == "none":
        return TensorCut(tensor.role, axis, ())
    if which == "first":
        first = next(i for i, (start, stop) in enumerate(ranges) if start < stop)
        return TensorCut(tensor.role, axis, tuple((0, tensor.cols if i == first else 0) for i in range(len(ranges))))
    if unit.kind == "attention":
        d, group = spec.config.head_dim, spec.config.n_heads // spec.config.n_kv_heads
        if which == "kv":
            ranges = tuple((a // group, -(-b // group)) if a < b else (a // group,) * 2 for a, b in ranges)
        ranges = tuple((a * d, b * d) for a, b in ranges)
    return TensorCut(tensor.role, axis, ranges)
