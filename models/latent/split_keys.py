"""The matrices that make keys and values of latents, as absorbed products take them: one of each head, apart.

Newer GGUF files have them so: `attn_k_b` [heads, rank, nope] and `attn_v_b` [heads, value, rank]. Older ones, and the
checkpoints, have `attn_kv_b`: of each head the rows of its key, then those of its value. Those of the key are
transposed here, which blocks of quantised weights do not allow: such weights become F16, whose rounding is a small part
of theirs.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pshard.model_config import ModelConfig
from pshard.models.hybrid.made_tensors import MadeTensor, freeze, take_rows
from pshard.models.quantised.fp8 import decode_fp8
from pshard.models.stored import StoredTensor
from pshard.quant import QUANT_TYPES

_BOTH = re.compile(r"(blk\.\d+\.)attn_kv_b\.weight")
_NUMBERS = {"F32": np.uint32, "F16": np.uint16, "BF16": np.uint16}  # types whose numbers move as they are


@dataclass(frozen=True, kw_only=True)
class Transposed(MadeTensor):
    """The matrix `source`, rows and columns exchanged."""

    def read(self) -> np.ndarray:
        rows, cols = self.source.shape
        raw = self.source.read()
        if self.source.qtype in _NUMBERS:
            matrix = raw.view(_NUMBERS[self.source.qtype]).reshape(rows, cols)
        elif self.source.qtype == "FP8":
            matrix = decode_fp8(raw, rows).astype(np.float16)
        else:
            import gguf

            kind = gguf.GGMLQuantizationType[self.source.qtype]
            numbers = gguf.quants.dequantize(raw.reshape(rows, -1), kind) * np.float32(self.source.factor())
            matrix = numbers.astype(np.float16)
        return freeze(matrix.T)


@dataclass(frozen=True, kw_only=True)
class KeptMatrix(MadeTensor):
    """The matrix `source`, of which heads are read one by one: what it is made of is joined once for all of them, until
    one is forgotten."""

    @cached_property
    def _whole(self) -> np.ndarray:
        return self.source.read()

    def read(self) -> np.ndarray:
        return self._whole

    def factor(self, number: int = 0) -> float:
        return self.source.factor(number)

    def forget(self) -> None:
        self.__dict__.pop("_whole", None)
        super().forget()


def split_keys(config: ModelConfig, stored: dict[str, StoredTensor]) -> tuple[dict[str, StoredTensor], tuple[str, ...]]:
    """Tensors by GGUF name, with keys and values apart, and a note where keys changed their type. Of a file that has
    both forms the joint one is not taken.

    Raises UserError for a tensor of another shape or type than the configuration says.
    """
    if config.latent is None:
        return stored, ()
    arranged: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        joint = _BOTH.fullmatch(name)
        if joint is None:
            arranged[name] = tensor
        elif not {f"{joint[1]}attn_{part}_b.weight" for part in "kv"} <= stored.keys():
            arranged[f"{joint[1]}attn_k_b.weight"], arranged[f"{joint[1]}attn_v_b.weight"] = _split(config, tensor)
    turned = [slab for t in arranged.values() for slab in t.slabs[:1] if isinstance(slab, Transposed)]
    rounded = any(matrix.qtype != matrix.source.qtype for matrix in turned)
    note = "attn_kv_b is quantised the other way than keys need, as in folders and old files; their half becomes F16"
    return arranged, (note,) if rounded else ()


def _split(config: ModelConfig, both: StoredTensor) -> tuple[StoredTensor, StoredTensor]:
    latent, heads = config.latent, config.n_heads
    assert latent is not None
    each = latent.nope + latent.value
    both.check_shape((heads * each, latent.rank))
    both.check_type()
    both.check_blocks()
    if both.factors:
        both.fail("has a factor beside it, which keys and values in one matrix cannot have", "convert the model again")

    source = both
    if type(both) is not StoredTensor:
        source = KeptMatrix(both.name, both.qtype, both.shape, both.file, both.offset, source=both)

    def rows(first: int, count: int) -> StoredTensor:
        return take_rows(both.name, source, [(first, first + count)])

    qtype = both.qtype if QUANT_TYPES[both.qtype].block == 1 else "F16"
    keys, values = [], []
    for head in range(heads):
        key = rows(head * each, latent.nope)
        shape = latent.rank, latent.nope
        keys.append(Transposed(both.name, qtype, shape, both.file, key.offset, source=key))
        values.append(rows(head * each + latent.nope, latent.value))

    def stack(slabs: Sequence[StoredTensor]) -> StoredTensor:
        one = slabs[0]
        return StoredTensor(both.name, one.qtype, (heads, *one.shape), both.file, both.offset, slabs=tuple(slabs))

    return stack(keys), stack(values)
