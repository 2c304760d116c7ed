"""The embedding: rows of a table by token id, looked up where the table is."""

from pshard.homes import ON_CPU, PINNED
from pshard.model_config import ModelConfig
from pshard.units.operations import LookUp, Operation
from pshard.units.ports import LOOKS_UP
from pshard.units.unit import Tensors, UnitKind, keep_whole

TABLE = "token_embd.weight"


def _operations(tensors: Tensors, config: ModelConfig) -> tuple[Operation, ...]:
    return (LookUp(tensors[TABLE], config.embedding_scale),)


EMBEDDING = UnitKind(
    "embedding",
    position="first",
    places=((ON_CPU, None), (PINNED, None)),
    operations=_operations,
    cut=keep_whole(TABLE),
    ports=LOOKS_UP,
)
