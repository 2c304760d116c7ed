"""Weights that units of one program compute with where another program has them."""

from pshard.model import ModelSpec
from pshard.runtime.executor import Executor
from pshard.runtime.memory.weights import UnitWeights, view_unit


def lend_weights(lender: Executor, borrower: ModelSpec) -> dict[str, UnitWeights]:
    """The lender's units whose tensors the borrower's of the same names are lent: in VRAM where they are under every
    tier, else in host memory."""
    found = {}
    for unit in borrower.units:
        if unit.lent:
            always = unit.name in lender.plan.resident
            blob = lender.arena.pinned(unit.name) if always else lender.weights.blob(unit.name)
            found[unit.name] = view_unit(lender.spec.unit(unit.name), blob)
    return found
