"""How attention and FFN take the residual stream, normalised before them, as it is, or as their layer has normalised it
for both, and how they add to it. No torch."""

from pshard.model_config import ModelConfig
from pshard.tensor import TensorSpec
from pshard.units.operands import BRANCH, STREAM, TAKEN, Rows
from pshard.units.operations import Norm, Operation, Product, Take
from pshard.units.ports import ENTERED
from pshard.units.scratch import Buffer

LAYER_SCALE = "layer_output_scale.weight"  # [1], by which a layer's last unit multiplies the residual stream


def enter(weight: TensorSpec | None, config: ModelConfig, follows: bool = False) -> tuple[Operation, ...]:
    """The operations by which a unit begins, which leave `NORMED`. follows: it is not the first of its layer."""
    d = config.d_model
    if config.parallel:
        norm = () if follows else (Norm(weight, d, centred=config.centred, out=TAKEN),)
        return *norm, Take(TAKEN, d)
    return (Norm(weight, d, centred=config.centred) if config.normed_before else Take(STREAM, d),)


def leave(
    matrix: TensorSpec, bias: TensorSpec | None, after: TensorSpec | None, x: Rows, scale: TensorSpec | None = None
) -> tuple[Operation, ...]:
    """The operations by which a unit ends: its last product is added to the residual stream, normalised before where
    there is a weight for it; then the stream is multiplied by `scale`."""
    if after is None:
        return (Product(matrix, bias, adds=True, x=x, out=STREAM),)
    return Product(matrix, bias, x=x, out=BRANCH), Norm(
        after, matrix.rows, adds=True, x=BRANCH, out=STREAM, scale=scale
    )


def entered_buffers(config: ModelConfig, tokens: int) -> tuple[Buffer, ...]:
    """Scratch for what a parallel layer's units take."""
    return (Buffer(ENTERED, (tokens, config.d_model), "f32"),) if config.parallel else ()
