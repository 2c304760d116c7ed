"""Experts of a folder that has gate and up in one tensor, and all matrices the other way round than they multiply.

Folders of Qwen3-VL hold [experts, inputs, outputs]; some that were saved again hold [experts, outputs, inputs], as
all of Granite and Gemma 4 do; all of Llama 4 hold the former.
"""

import re
from dataclasses import dataclass, replace

import numpy as np

from pshard.model_config import Experts, ModelConfig
from pshard.models.hybrid.made_tensors import MadeTensor, freeze
from pshard.models.stored import StoredTensor

_EXPERTS = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj")
_BESIDE = re.compile(r"model\.layers\.(\d+)\.(?:feed_forward\.)?experts\.(gate_up|down)_proj")  # of Gemma 4, LFM2
_LINEAR = re.compile(r"model\.layers\.(\d+)\.block_sparse_moe\.(input|output)_linear\.weight")
NUMBERS = {"F32": np.uint32, "F16": np.uint16, "BF16": np.uint16}  # types whose numbers move as they are


@dataclass(frozen=True, kw_only=True)
class TurnedColumns(MadeTensor):
    """Columns of the matrix `source`, from `first` on each `step`-th, as rows."""

    first: int
    step: int = 1

    def read(self) -> np.ndarray:
        matrix = self.source.read().view(NUMBERS[self.qtype]).reshape(self.source.shape)
        columns = matrix[:, self.first : self.first + self.shape[0] * self.step : self.step]
        return freeze(columns.T)


def arrange_turned(config: ModelConfig, stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Tensors by Hugging Face name, such experts by the names that units have. Raises UserError for other shapes and
    types."""
    if config.experts is None:
        return stored
    found: dict[str, StoredTensor] = {}
    by_shape = _are_turned(config, config.experts, stored)
    for name, tensor in stored.items():
        match = _EXPERTS.fullmatch(name) or _LINEAR.fullmatch(name) or _BESIDE.fullmatch(name)
        if match is None:
            found[name] = tensor
            continue
        roles = ("gate", "up") if match[2] in ("gate_up", "input") else ("down",)
        turned = by_shape if match.re is _EXPERTS else config.experts.weighs_inputs  # Llama 4's
        for place, role in enumerate(roles):
            stack = _stack(config, config.experts, tensor, roles, place, turned)
            found[f"blk.{match[1]}.ffn_{role}_exps.weight"] = stack
    return found


def _are_turned(config: ModelConfig, rule: Experts, stored: dict[str, StoredTensor]) -> bool:
    """Whether inputs come first in experts of a folder, as their shapes say. Where one kind is square, the other is
    not."""
    for name, tensor in stored.items():
        if match := _EXPERTS.fullmatch(name):
            gates = match[2] == "gate_up"
            straight = (2 * rule.d_expert, config.d_model) if gates else (config.d_model, rule.d_expert)
            if straight[0] != straight[1]:
                return tensor.shape[1:] != straight
    return True


def _stack(
    config: ModelConfig, rule: Experts, tensor: StoredTensor, roles: tuple[str, ...], place: int, turned: bool
) -> StoredTensor:
    """The matrices of one role, [experts, outputs, inputs]. turned: if inputs come first."""
    rows, cols = (config.d_model, rule.d_expert) if roles == ("down",) else (rule.d_expert, config.d_model)
    straight = rule.count, len(roles) * rows, cols
    tensor.check_shape((rule.count, cols, len(roles) * rows) if turned else straight)
    tensor.check_type()
    if tensor.qtype not in NUMBERS:
        tensor.fail(f"is {tensor.qtype}, and such experts are F32, F16 or BF16")
    slabs: list[StoredTensor] = []
    for number in range(rule.count):
        whole = tensor.slab(number)
        if not turned:
            part = replace(whole, shape=(rows, cols))
            slabs.append(replace(part, offset=whole.offset + place * part.nbytes))
        else:
            first = place * rows
            slabs.append(
                TurnedColumns(
                    whole.name, whole.qtype, (rows, cols), whole.file, whole.offset, source=whole, first=first
                )
            )
    return replace(tensor, shape=(rule.count, rows, cols), slabs=tuple(slabs))
