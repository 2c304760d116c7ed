"""A rank's part of a model in either split mode, and which bytes of the file it is made of. No torch."""

from dataclasses import replace
from functools import lru_cache

from pshard.cuts.drafter_cuts import cut_drafter
from pshard.cuts.layer_cuts import cut_layers
from pshard.cuts.tensor_cuts import Ranges, cut_model, source_ranges, whole_range
from pshard.model import ModelSpec
from pshard.workload import Split


def split_model(spec: ModelSpec, split: Split, rank: int) -> ModelSpec:
    """What `rank` holds, with its slots for experts: whole layers with "layer", a slice of every unit with "tensor",
    everything with "none". Its head is what the rank has of what drafts."""
    if split.mode == "none" or len(split.shares) < 2:
        return spec
    if spec.rank_caches:  # cuts are remembered by model, and do not depend on slots
        return replace(split_model(replace(spec, rank_caches=()), split, rank), caches=spec.rank_caches[rank])
    layers = split.mode == "layer"
    part = cut_layers(spec, split.shares, rank) if layers else cut_model(spec, split.shares, rank, split.limits)
    return replace(part, head=cut_drafter(spec, part, split, rank)) if spec.head else part


@lru_cache(maxsize=4)  # whoever asks if a cut fits prices it next
def cut_ranks(spec: ModelSpec, split: Split) -> tuple[ModelSpec, ...]:
    """The ranks' parts of the model: slices of every unit, or whole layers with mode "layer"."""
    return tuple(split_model(spec, split, rank) for rank in range(len(split.shares)))


def split_ranges(spec: ModelSpec, split: Split, rank: int) -> Ranges:
    """Unit -> tensor -> (row start, row stop, column start, column stop) in the file, of what `rank` holds.

    Every unit of the whole model is listed. A vector is one row. Of a stack, and of the vector of its biases where that
    is cut, the ranges are those in each of its parts.
    """
    if split.mode == "tensor" and len(split.shares) > 1:
        return source_ranges(spec, split.shares, rank, split.limits)
    own = {u.name: u.tensors for u in split_model(spec, split, rank).units}
    return {u.name: {t.name: whole_range(t) for t in own.get(u.name, ())} for u in spec.units}
