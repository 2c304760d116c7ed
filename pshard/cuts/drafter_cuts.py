"""What a rank has of the program that drafts for a model, and what of the file that is made of. No torch."""

from dataclasses import replace

from pshard.cuts.tensor_cuts import Ranges, cut_model, source_ranges
from pshard.model import ModelSpec
from pshard.units.unit import Unit
from pshard.workload import Split


def cut_drafter(spec: ModelSpec, part: ModelSpec, split: Split, rank: int) -> ModelSpec | None:
    """What `rank`, which has `part` of the model, has of what drafts for it; None: nothing.

    A draft model is whole on rank 0, whatever that has of the model. The head of a pipeline is whole where the output
    is, whose states it takes; it has a table of its own where another rank has the model's. Where every unit of the
    model is cut, the head's are too, in the same way.
    """
    head = spec.head
    if head is None or not head.takes_states:
        return head if rank == 0 else None
    if split.mode == "tensor":
        return _lend(head, cut_model(_own_all(head), split.shares, rank, split.limits))
    if not part.output.tensors:
        return None
    return head if part.embedding.tensors else _own_table(head)


def drafter_ranges(spec: ModelSpec, split: Split, rank: int) -> Ranges | None:
    """What of the file a rank reads of what drafts, as `source_ranges` says it; None: all of what it has."""
    if spec.head is None or not is_cut(spec.head, split):
        return None
    return source_ranges(_own_all(spec.head), split.shares, rank, split.limits)


def is_cut(drafter: ModelSpec, split: Split) -> bool:
    """Whether all ranks have slices of what drafts."""
    return drafter.takes_states and split.mode == "tensor" and len(split.shares) > 1


def _own_table(head: ModelSpec) -> ModelSpec:
    """The head without a table that is lent."""
    return replace(head, units=tuple(_own(unit) if unit.kind.is_looked_up else unit for unit in head.units))


def _own_all(head: ModelSpec) -> ModelSpec:
    """The head with nothing lent."""
    return replace(head, units=tuple(map(_own, head.units)))


def _own(unit: Unit) -> Unit:
    return replace(unit, tensors=(*unit.tensors, *unit.lent), lent=())


def _lend(head: ModelSpec, cut: ModelSpec) -> ModelSpec:
    """A slice of the head that is lent slices of what the head is."""
    return replace(cut, units=tuple(map(_lend_unit, head.units, cut.units)))


def _lend_unit(unit: Unit, cut: Unit) -> Unit:
    lent = {tensor.name for tensor in unit.lent}
    own, theirs = (tuple(t for t in cut.tensors if (t.name in lent) == is_lent) for is_lent in (False, True))
    return replace(cut, tensors=own, lent=theirs)
