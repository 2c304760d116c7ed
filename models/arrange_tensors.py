"""Tensors as units want them, whatever way a file stores them: stacked experts, gate and up apart."""

import re
from dataclasses import replace

from pshard.model_config import ModelConfig
from pshard.models.stored import StoredTensor

_FUSED = re.compile(r"(blk\.\d+\.)ffn_gate_up_exps\.weight")
_HF_EXPERT = re.compile(r"(.*\.experts)\.(0|[1-9]\d{0,5})\.(\w+\.weight)")
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
        else:
            arranged[name] = flatten_row(name, tensor)
    return arranged


def flatten_row(name: str, tensor: StoredTensor) -> StoredTensor:
    """The gate of a shared expert is a vector, but some files store it as a matrix of one row."""
    if name.endswith(".ffn_gate_inp_shexp.weight") and len(tensor.shape) == 2 and tensor.shape[0] == 1:
        return replace(tensor, shape=tensor.shape[1:])
    return tensor


def stack_experts(config: ModelConfig, stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Tensors by Hugging Face name, those of a layer's experts as one: `experts.7.up_proj` is in `experts.up_proj`.

    Raises UserError when one of the experts is missing or unlike the others.
    """
    if config.experts is None:
        return stored
    arranged: dict[str, StoredTensor] = {}
    stacks: dict[str, dict[int, StoredTensor]] = {}
    for name, tensor in stored.items():
        expert = _HF_EXPERT.fullmatch(name)
        if expert:
            stacks.setdefault(f"{expert[1]}.{expert[3]}", {})[int(expert[2])] = tensor
        else:
            arranged[name] = tensor
    for name, found in stacks.items():
        arranged[name] = _stack(name, [found[number] for number in sorted(found)], set(found), config.experts.count)
    return arranged


def _stack(name: str, tensors: list[StoredTensor], numbers: set[int], count: int) -> StoredTensor:
    first, last = tensors[0], tensors[-1]
    missing = next((n for n in range(count) if n not in numbers), None)
    if missing is not None:
        first.fail(f"has its like of other experts, but not of number {missing} of {count}; the files are incomplete")
    if len(tensors) > count:
        last.fail(f"is of an expert too many; the configuration says {count}")
    for tensor in tensors:
        if (tensor.qtype, tensor.shape) != (first.qtype, first.shape):
            tensor.fail(f"is {tensor.qtype} of shape {list(tensor.shape)}, unlike {first.name}")
    return replace(first, name=name, shape=(count, *first.shape), slabs=tuple(tensors))


def _split_rows(tensor: StoredTensor, shape: tuple[int, int, int]) -> list[StoredTensor]:
    """The upper and the lower half of every matrix in a stack."""
    tensor.check_shape(shape)
    tensor.check_type()
    count, rows, cols = shape[0], shape[1] // 2, shape[2]
    upper = [replace(tensor.slab(i), shape=(rows, cols)) for i in range(count)]
    lower = [replace(slab, offset=slab.offset + slab.nbytes) for slab in upper]
    return [replace(slabs[0], shape=(count, rows, cols), slabs=tuple(slabs)) for slabs in (upper, lower)]
