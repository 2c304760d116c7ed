"""Tensors as units want them, whatever way a file stores them: stacked experts, gate and up apart."""

import re
from dataclasses import replace

from pshard.model_config import ModelConfig
from pshard.models.stored import StoredTensor

_FUSED = re.compile(r"(blk\.\d+\.)ffn_gate_up_exps\.weight")
_LONE_EXPERT = re.compile(r"blk\.\d+\.ffn_(gate|up|down)\.\d+\.weight")


def arrange_gguf(config: ModelConfig, stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors of a GGUF file by the names that units have.

    Raises UserError for experts that are stored one by one, as files had them before April 2024, and for a fused gate
    and up of another shape than the configuration says.
    """
    if config.experts is None:
        return stored
    fused_shape = (config.experts.count, 2 * config.experts.d_expert, config.d_model)
    arranged: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        if _LONE_EXPERT.fullmatch(name):
            tensor.fail("holds one expert, as old files do; convert the model again, or fetch a newer file of it")
        fused = _FUSED.fullmatch(name)
        if fused:
            for role, half in zip(("gate", "up"), _split_rows(tensor, fused_shape)):
                arranged[f"{fused[1]}ffn_{role}_exps.weight"] = half
        elif len(tensor.shape) == 2 and tensor.shape[0] == 1 and name.endswith(".ffn_gate_inp_shexp.weight"):
            arranged[name] = replace(tensor, shape=tensor.shape[1:])
        else:
            arranged[name] = tensor
    return arranged


def _split_rows(tensor: StoredTensor, shape: tuple[int, int, int]) -> list[StoredTensor]:
    """The upper and the lower half of every matrix in a stack."""
    tensor.check_shape(shape)
    tensor.check_type()
    count, rows, cols = shape[0], shape[1] // 2, shape[2]
    upper = [replace(tensor.slab(i), shape=(rows, cols)) for i in range(count)]
    lower = [replace(slab, offset=slab.offset + slab.nbytes) for slab in upper]
    return [replace(slabs[0], shape=(count, rows, cols), slabs=tuple(slabs)) for slabs in (upper, lower)]
