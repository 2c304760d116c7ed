"""A rank's part of a model in either split mode, and which bytes of the file it is made of. No torch."""

from collections.abc import Sequence

from pshard.model import ModelSpec
from pshard.parallel import cut_model, source_ranges
from pshard.pipeline import cut_layers

Ranges = dict[str, dict[str, tuple[int, int, int, int]]]


def split_model(spec: ModelSpec, mode: str, shares: Sequence[float], rank: int) -> ModelSpec:
    """What `rank` holds: whole layers with mode "layer", a slice of every unit with "tensor", everything with "none".

    shares: the ratio of the ranks; may be empty for one rank.
    """
    if mode == "none" or len(shares) < 2:
        return spec
    return cut_layers(spec, shares, rank) if mode == "layer" else cut_model(spec, shares, rank)


def split_ranges(spec: ModelSpec, mode: str, shares: Sequence[float], rank: int) -> Ranges:
    """Unit -> tensor -> (row start, row stop, column start, column stop) in the file, of what `rank` holds.

    Every unit of the whole model is listed. A vector is one row.
    """
    if mode == "tensor" and len(shares) > 1:
        return source_ranges(spec, shares, rank)
    own = {u.name: u.tensors for u in split_model(spec, mode, shares, rank).units}
    return {u.name: {t.name: (0, t.rows, 0, t.cols) for t in own.get(u.name, ())} for u in spec.units}
