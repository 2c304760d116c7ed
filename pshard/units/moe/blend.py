"""What follows experts that have an FFN beside them: each one's result is normalised, and so is their sum, which is
added to the residual stream. Ranks sum their parts of either result before, and each of them blends the sums.
"""

from pshard.model_config import ModelConfig
from pshard.units.enter import LAYER_SCALE
from pshard.units.operands import BRANCH, STREAM, Rows
from pshard.units.operations import Norm, Operation
from pshard.units.ports import BLENDS, DENSE, EXPERTED
from pshard.units.scratch import Buffer
from pshard.units.state import StateShape
from pshard.units.unit import ON_ACCELERATOR, Tensors, UnitKind, keep_whole

OF_DENSE, OF_EXPERTS, OF_BOTH = (f"post_ffw_norm{number}.weight" for number in ("_1", "_2", ""))


def _operations(tensors: Tensors, config: ModelConfig) -> tuple[Operation, ...]:
    d, both = config.d_model, BRANCH
    return (
        Norm(tensors[OF_DENSE], d, x=Rows(DENSE), out=both),
        Norm(tensors[OF_EXPERTS], d, adds=True, x=Rows(EXPERTED), out=both),
        Norm(tensors[OF_BOTH], d, adds=True, x=both, out=STREAM, scale=tensors.get(LAYER_SCALE)),
    )


def _scratch(config: ModelConfig, tokens: int, shape: StateShape) -> tuple[Buffer, ...]:
    return tuple(Buffer(port, (tokens, config.d_model), "f32") for port in (DENSE, EXPERTED))


BLEND = UnitKind(
    "blend",
    position="layer",
    places=ON_ACCELERATOR,
    operations=_operations,
    cut=keep_whole(OF_DENSE, OF_EXPERTS, OF_BOTH, LAYER_SCALE),
    scratch=_scratch,
    ports=BLENDS,
    llama_cpp="post_ffw_norm.*",
    strategy="first",
    phase=0.7,
    lock_order=1,
    listed=True,
)
