"""NVFP4 of folders, of modelopt and of compressed-tensors, as GGUF's blocks: no bit is lost.

Of a byte of a folder the low half is weight 2i and the high half 2i + 1; of a byte of GGUF they are weights j and
j + 8 of 16. The factor beside each matrix multiplies (modelopt) or divides (compressed-tensors).
"""

import numpy as np

from pshard.models.quantised.joined import Arrays, JoinedMatrix, Module, check_rank, check_types
from pshard.models.stored import FETCH_AGAIN, StoredTensor

_FACTORS = {"weight_scale_2": False, "weight_global_scale": True}  # whether weights are divided by it
_WIDTH = 16  # weights under a scale


def join_nvfp4(name: str, module: Module) -> StoredTensor:
    """weight or weight_packed u8 [outputs, inputs / 2], weight_scale E4M3 [outputs, inputs / 16], and a factor. Raises
    UserError for other shapes and types."""
    codes = module["weight_packed"] if "weight_packed" in module else module["weight"]
    key = next((key for key in _FACTORS if key in module), None)
    if key is None or "weight_scale" not in module:
        codes.fail("has no scales and factor of NVFP4 beside it: the files are incomplete", FETCH_AGAIN)
    scales, factor = module["weight_scale"], module[key]
    rows, pairs = check_rank(codes)
    cols = 2 * pairs
    scales.check_shape((rows, cols // _WIDTH))
    check_types(scales, "F8_E4M3")
    factor.check_shape((1,))
    check_types(factor, "F32")
    parts = (("codes", codes), ("scales", scales))
    joined = JoinedMatrix(
        name, "NVFP4", (rows, cols), codes.file, codes.offset, parts=parts, make=_regroup, multiplier=factor,
        divides=_FACTORS[key],
    )  # fmt: skip
    joined.check_blocks()
    return joined


def _regroup(tensor: JoinedMatrix, arrays: Arrays) -> np.ndarray:
    """Blocks u8 [rows, blocks of 64, 4 scales and 32 bytes]."""
    rows, cols = tensor.shape
    scales = arrays["scales"].reshape(rows, -1, 4)
    if (scales >= 127).any():
        tensor.fail("has scales below zero, or ones that are no numbers", FETCH_AGAIN)
    pairs = arrays["codes"].reshape(rows, cols // _WIDTH, 2, 4)  # bytes of the first 8 weights and of the others
    first, later = pairs[..., 0, :], pairs[..., 1, :]
    even, odd = first & 15 | later << 4, first >> 4 | later & 0xF0
    return np.concatenate((scales, np.stack((even, odd), -1).reshape(rows, -1, 32)), -1)
