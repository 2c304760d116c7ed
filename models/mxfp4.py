"""The experts of gpt-oss as its checkpoints have them: MXFP4 blocks and scales apart, rows of gate and up in turns; or
numbers, inputs first.

They are read as GGUF has them: a scale and 16 bytes for 32 weights. No bit is lost: of a byte of the checkpoint the
low half is weight 2i and the high half 2i + 1; of a byte of GGUF they are weights j and j + 16.
"""

import re
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from pshard.model_config import ModelConfig
from pshard.models.families.turned_experts import NUMBERS, TurnedColumns
from pshard.models.hybrid.made_tensors import MadeTensor, freeze
from pshard.models.stored import StoredTensor

_EXPERTS = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj(_blocks|_scales|_bias|)")


@dataclass(frozen=True, kw_only=True)
class Mxfp4Stack(StoredTensor):
    """Each `step`-th row from `first` on of the matrices that `blocks` [..., rows, cols/32, 16] and `scales` spell."""

    blocks: StoredTensor
    scales: StoredTensor
    first: int
    step: int

    def slab(self, number: int) -> StoredTensor:
        blocks, scales = self.blocks.slab(number), self.scales.slab(number)
        return replace(self, shape=self.shape[1:], blocks=blocks, scales=scales)

    def read(self) -> np.ndarray:
        rows, groups, _ = self.blocks.shape[-3:]
        blocks = self.blocks.read().reshape(-1, rows, groups, 16)[:, self.first :: self.step]
        scales = self.scales.read().reshape(-1, rows, groups, 1)[:, self.first :: self.step]
        weights = np.stack((blocks & 15, blocks >> 4), -1).reshape(*blocks.shape[:-1], 32)
        halves = weights[..., :16] | weights[..., 16:] << 4
        return freeze(np.concatenate((scales, halves), -1))

    def expect(self) -> None:
        self.blocks.expect()
        self.scales.expect()

    def forget(self) -> None:
        self.blocks.forget()
        self.scales.forget()


@dataclass(frozen=True, kw_only=True)
class BiasStack(MadeTensor):
    """Each `step`-th number from `first` on of the vectors in `source` [experts, numbers]."""

    first: int
    step: int

    def read(self) -> np.ndarray:
        return freeze(self.source.read().reshape(prod(self.source.shape), -1)[self.first :: self.step])


def arrange_mxfp4(config: ModelConfig, stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Tensors by Hugging Face name, experts in MXFP4 by the names that units have.

    Raises UserError for such that have another shape or type than the configuration says.
    """
    if config.experts is None:
        return stored
    arranged: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        found = _EXPERTS.fullmatch(name)
        if not found:
            arranged[name] = tensor
        elif found[3] == "_blocks":
            scales = stored.get(name.removesuffix("blocks") + "scales")
            if scales is None:
                tensor.fail("has no scales beside it: the files are incomplete", "fetch them again")
            arranged |= _unpack_blocks(config, f"blk.{found[1]}.ffn_", found[2], tensor, scales)
        elif found[3] == "_bias":
            arranged |= _unpack_biases(config, f"blk.{found[1]}.ffn_", found[2], tensor)
        elif not found[3] and name + "_blocks" in stored:
            tensor.fail("is there twice, in MXFP4 too")
        elif not found[3]:
            arranged |= _turn_numbers(config, f"blk.{found[1]}.ffn_", found[2], tensor)
    return arranged


def _turn_numbers(config: ModelConfig, prefix: str, what: str, stack: StoredTensor) -> dict[str, StoredTensor]:
    """Of experts that are not quantised, whose inputs come first."""
    count, rows, cols = _size(config, what)
    stack.check_shape((count, cols, rows))
    stack.check_type()
    if stack.qtype not in NUMBERS:
        stack.fail(f"is {stack.qtype}, and such experts are MXFP4, F32, F16 or BF16")
    made = dict[str, StoredTensor]()
    for role, first, step in _turns(what):
        shape = rows // step, cols
        slabs = [
            TurnedColumns(one.name, one.qtype, shape, one.file, one.offset, source=one, first=first, step=step)
            for one in map(stack.slab, range(count))
        ]
        made[f"{prefix}{role}_exps.weight"] = replace(stack, shape=(count, *shape), slabs=tuple(slabs))
    return made


def _unpack_blocks(
    config: ModelConfig, prefix: str, what: str, blocks: StoredTensor, scales: StoredTensor
) -> dict[str, StoredTensor]:
    count, rows, cols = _size(config, what)
    blocks.check_shape((count, rows, cols // 32, 16))
    scales.check_shape((count, rows, cols // 32))
    for tensor in (blocks, scales):
        if tensor.qtype != "U8":
            tensor.fail(f"has type {tensor.qtype}, not U8")
    made = dict[str, StoredTensor]()
    for role, first, step in _turns(what):
        name, shape = f"{prefix}{role}_exps.weight", (count, rows // step, cols)
        made[name] = Mxfp4Stack(
            blocks.name,
            "MXFP4",
            shape,
            blocks.file,
            blocks.offset,
            blocks=blocks,
            scales=scales,
            first=first,
            step=step,
        )
        made[name].check_blocks()
    return made


def _unpack_biases(config: ModelConfig, prefix: str, what: str, bias: StoredTensor) -> dict[str, StoredTensor]:
    count, rows, _ = _size(config, what)
    bias.check_shape((count, rows))
    bias.check_type()
    made = dict[str, StoredTensor]()
    for role, first, step in _turns(what):
        name, shape = f"{prefix}{role}_exps.bias", (count, rows // step)
        made[name] = BiasStack(
            bias.name, bias.qtype, shape, bias.file, bias.offset, source=bias, first=first, step=step
        )
    return made


def _size(config: ModelConfig, what: str) -> tuple[int, int, int]:
    """Experts, rows and columns of a checkpoint's matrices."""
    experts = config.experts
    assert experts is not None
    rows_cols = (2 * experts.d_expert, config.d_model) if what == "gate_up" else (config.d_model, experts.d_expert)
    return experts.count, *rows_cols


def _turns(what: str) -> tuple[tuple[str, int, int], ...]:
    """Which of a checkpoint's rows are whose: the role, the first, and the step to the next."""
    return (("gate", 0, 2), ("up", 1, 2)) if what == "gate_up" else (("down", 0, 1),)
