"""The join: how a head that drafts begins. The embedding of a token and the state of the one before it, each
normalised, are multiplied by one matrix. What comes out is the head's residual stream."""

from pshard.model_config import ModelConfig
from pshard.units.operands import STREAM, Rows
from pshard.units.operations import Norm, Operation, Product
from pshard.units.ports import HIDDEN, PRIOR, Ports
from pshard.units.scratch import Buffer
from pshard.units.state import StateShape
from pshard.units.unit import ANYWHERE, Tensors, UnitKind, keep_whole

OF_TOKEN, OF_STATE, MATRIX = "nextn.enorm.weight", "nextn.hnorm.weight", "nextn.eh_proj.weight"
JOINT = "joint"  # scratch: both, the embedding first


def _operations(tensors: Tensors, config: ModelConfig) -> tuple[Operation, ...]:
    d = config.d_model
    first, second = Rows(JOINT).beside(d, d)
    return (
        Norm(tensors[OF_TOKEN], d, x=STREAM, out=first),
        Norm(tensors[OF_STATE], d, x=Rows(PRIOR), out=second),
        Product(tensors[MATRIX], x=Rows(JOINT), out=STREAM),
    )


def _scratch(config: ModelConfig, tokens: int, shape: StateShape) -> tuple[Buffer, ...]:
    return Buffer(PRIOR, (tokens, config.d_model), "f32"), Buffer(JOINT, (tokens, 2 * config.d_model), "act")


JOIN = UnitKind(
    "join",
    position="layer",
    places=ANYWHERE,
    operations=_operations,
    cut=keep_whole(OF_TOKEN, OF_STATE, MATRIX),
    scratch=_scratch,
    ports=Ports((HIDDEN, PRIOR), (HIDDEN,)),
    contends="weights",
    lock_order=1,
)
