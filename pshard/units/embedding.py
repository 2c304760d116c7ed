"""The embedding: rows of a table by token id, looked up where the table is."""

from pshard.model_config import ModelConfig
from pshard.quant import ROW_BLOCK
from pshard.units.operations import LookUp, Operation
from pshard.units.ranges import Targets, place_rows
from pshard.units.unit import Cut, Tensors, UnitKind

TABLE = "token_embd.weight"


def _operations(tensors: Tensors, config: ModelConfig) -> tuple[Operation, ...]:
    return (LookUp(tensors[TABLE]),)


def _bounds(config: ModelConfig, tensors: Tensors, targets: Targets) -> tuple[int, ...]:
    return place_rows(1, ROW_BLOCK, targets)  # nothing is cut: every rank looks up whole rows


EMBEDDING = UnitKind(
    "embedding",
    position="first",
    places=(("cpu", None), ("pinned", None)),
    operations=_operations,
    cut=Cut({TABLE: ("none", "all")}, length=lambda config: 1, bounds=_bounds),
)
