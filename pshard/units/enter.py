"""How attention and FFN take the residual stream: normalised before them, as it is, or as their layer has normalised it
for both. No torch."""

from pshard.model_config import ModelConfig
from pshard.tensor import TensorSpec
from pshard.units.operations import Norm, Operation, Take
from pshard.units.ports import ENTERED, HIDDEN
from pshard.units.scratch import Buffer


def enter(weight: TensorSpec | None, config: ModelConfig, follows: bool = False) -> Operation:
    """The operation by which a unit begins. follows: it is not the first of its layer."""
    if config.parallel and follows:
        return Take(ENTERED, config.d_model)
    if config.normed_before:
        return Norm(weight, config.d_model, centred=config.centred)
    return Take(HIDDEN, config.d_model)


def entered_buffers(config: ModelConfig, tokens: int) -> tuple[Buffer, ...]:
    """Scratch for what a parallel layer's units take."""
    return (Buffer(ENTERED, (tokens, config.d_model), "f32"),) if config.parallel else ()
