"""How attention and FFN take the residual stream, normalised before them, as it is, or as their layer has normalised it
for both, and how they add to it. No torch."""

from pshard.model_config import ModelConfig
from pshard.tensor import TensorSpec
from pshard.units.operands import BRANCH, NORMED, STREAM, TAKEN, Rows
from pshard.units.operations import Bend, Norm, Operation, Product, Take
from pshard.units.ports import ENTERED
from pshard.units.scratch import Buffer
from pshard.units.unit import Tensors

LAYER_SCALE = "layer_output_scale.weight"  # [1], by which a layer's last unit multiplies the residual stream


def enter(tensors: Tensors, role: str, config: ModelConfig, follows: bool = False) -> tuple[Operation, ...]:
    """The operations by which a unit begins, which leave `NORMED`. role: of the norm's weight; follows: the unit is not
    the first of its layer, which keeps what the layer begins with where that is used later."""
    if config.streams:  # a mix of them stands there
        return (Take(TAKEN, config.d_model),)
    if config.keeps_input and not follows:
        return Take(STREAM, config.d_model, TAKEN), *normalise(tensors, role, config)
    if config.parallel:
        norm = () if follows else normalise(tensors, role, config, TAKEN)
        return *norm, Take(TAKEN, config.d_model)
    return normalise(tensors, role, config) if config.normed_before else (Take(STREAM, config.d_model),)


def normalise(tensors: Tensors, role: str, config: ModelConfig, out: Rows = NORMED) -> tuple[Operation, ...]:
    """The norm of the residual stream, with its bias where there is one."""
    d, bias = config.d_model, tensors.get(bias_of(role))
    norm = Norm(tensors.get(role), d, centred=config.centred, out=out)
    return (norm, Bend("plus", d, bias, x=out)) if bias else (norm,)


def order(tensors: Tensors, role: str, x: Rows = NORMED) -> tuple[Operation, ...]:
    """Puts what matrices take into the order of their columns, where that is one of their own (GPTQ's `desc_act`)."""
    return (Bend("order", tensors[role].cols, tensors[role], x=x),) if role in tensors else ()


def bias_of(role: str) -> str:
    """The role of what is added to a matrix' product, or to a norm."""
    return role.replace(".weight", ".bias")


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
    """Scratch for what a parallel layer's units take, for what a layer begins with, or for a mix of streams."""
    kept = config.parallel or config.keeps_input or config.streams
    return (Buffer(ENTERED, (tokens, config.d_model), "f32"),) if kept else ()
