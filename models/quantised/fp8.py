"""FP8 of folders: E4M3 codes under scales of blocks of 128 x 128, of rows, or of a whole matrix. No bit is lost."""

import numpy as np

from pshard.models.quantised.joined import SCALES, Arrays, JoinedMatrix, Module, check_rank, check_types
from pshard.models.stored import FETCH_AGAIN, StoredTensor

BLOCK = 128


def join_fp8(name: str, module: Module) -> StoredTensor:
    """weight E4M3 [outputs, inputs] and weight_scale_inv or weight_scale, which multiplies it: one number, one for each
    row, or one for each block of 128 x 128. Raises UserError for other shapes and types."""
    codes = module["weight"]
    scales = module["weight_scale_inv"] if "weight_scale_inv" in module else module["weight_scale"]
    rows, cols = check_rank(codes)
    blocks = -(-rows // BLOCK), -(-cols // BLOCK)
    if scales.shape not in ((1,), (1, 1), (rows,), (rows, 1), blocks):
        wanted = f"one number, [{rows}, 1] or {list(blocks)}"
        scales.fail(f"has shape {list(scales.shape)}, and scales of {codes.name} are {wanted}")
    check_types(scales, *SCALES)
    parts = (("codes", codes), ("scales", scales))
    joined = JoinedMatrix(name, "FP8", (rows, cols), codes.file, codes.offset, parts=parts, make=_put_scales)
    joined.check_blocks()
    return joined


def _put_scales(tensor: JoinedMatrix, arrays: Arrays) -> np.ndarray:
    """Blocks u8 [rows, blocks of 128, a float32 scale and 128 codes]."""
    rows, cols = tensor.shape
    codes, scales = arrays["codes"], arrays["scales"].astype(np.float32)
    if (codes & 127 == 127).any() or not np.isfinite(scales).all():
        tensor.fail("has codes or scales that are no numbers", FETCH_AGAIN)
    if scales.shape[0] not in (1, rows):
        scales = np.repeat(scales, BLOCK, axis=0)[:rows]
    blocks = np.empty((rows, cols // BLOCK, 4 + BLOCK), np.uint8)
    each = np.broadcast_to(scales.reshape(len(scales), -1, 1), (rows, cols // BLOCK, 1))
    blocks[..., :4] = np.ascontiguousarray(each).view(np.uint8)
    blocks[..., 4:] = codes.reshape(rows, -1, BLOCK)
    return blocks


def decode_fp8(raw: np.ndarray, rows: int) -> np.ndarray:
    """float32 [rows, cols] of blocks as `join_fp8` makes them."""
    byte = np.arange(256)
    exponent, fraction = byte >> 3 & 15, byte & 7
    value = np.where(exponent == 0, fraction * 2.0**-9, (1 + fraction / 8) * 2.0 ** (exponent - 7))
    table = np.where(byte < 128, value, -value).astype(np.float32)
    blocks = raw.reshape(rows, -1, 4 + BLOCK)
    return (table[blocks[..., 4:]] * np.ascontiguousarray(blocks[..., :4]).view(np.float32)).reshape(rows, -1)
