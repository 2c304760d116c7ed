"""The packed layout keeps every bit of the weights, in the sizes that pshard.quant states."""

import gguf
import numpy as np
import pytest

from pshard.quant import QUANT_TYPES, ROW_BLOCK, file_nbytes, record_nbytes
from pshard.runtime.kernels.layout import pack_reference, packed_nbytes, unpack_reference

TYPES = sorted(QUANT_TYPES)
PLANED = [name for name in TYPES if QUANT_TYPES[name].planes]


def random_rows(qtype: str, rows: int, cols: int, seed: int = 0) -> np.ndarray:
    """Random code bytes with scales of ordinary size, u8 [rows, bytes of a row] as in a GGUF file."""
    rng = np.random.default_rng(seed)
    if qtype == "F32":
        return rng.standard_normal((rows, cols), np.float32).view(np.uint8)
    if qtype == "F16":
        return rng.standard_normal((rows, cols), np.float32).astype(np.float16).view(np.uint8)
    if qtype == "BF16":
        bits = rng.standard_normal((rows, cols), np.float32).view(np.uint32) >> 16
        return bits.astype(np.uint16).view(np.uint8)
    q = QUANT_TYPES[qtype]
    blocks = rng.integers(0, 256, (rows, cols // q.block, q.nbytes), dtype=np.uint8)
    if qtype == "MXFP4":
        blocks[..., 0] = rng.integers(120, 128, blocks.shape[:2])
        return blocks.reshape(rows, -1)
    places = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q4_1": (0, 2)}
    for at in places.get(qtype, (0, 2) if qtype == "Q5_1" else (0,)):
        scale = (rng.standard_normal(blocks.shape[:2]) * 0.01).astype(np.float16)
        blocks[..., at : at + 2] = scale[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def dequantised(raw: np.ndarray, qtype: str, rows: int, cols: int) -> np.ndarray:
    return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[qtype]).reshape(rows, cols)


@pytest.mark.parametrize("qtype", TYPES)
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (16, 3), (35, 2)])
def test_unpacking_a_packed_matrix_equals_the_gguf_dequantiser(qtype: str, rows: int, blocks: int) -> None:
    cols = blocks * max(QUANT_TYPES[qtype].block, 32)
    raw = random_rows(qtype, rows, cols)
    packed = pack_reference(raw, qtype, rows, cols)
    assert packed.dtype == np.uint8 and packed.shape == (packed_nbytes(qtype, rows, cols),)
    np.testing.assert_array_equal(unpack_reference(packed, qtype, rows, cols), dequantised(raw, qtype, rows, cols))


@pytest.mark.parametrize("qtype", PLANED)
def test_a_cut_at_sixteen_rows_is_one_byte_range(qtype: str) -> None:
    cols = 2 * QUANT_TYPES[qtype].block
    raw = random_rows(qtype, 48, cols)
    packed = pack_reference(raw, qtype, 48, cols)
    part = pack_reference(raw[16:48], qtype, 32, cols)
    np.testing.assert_array_equal(packed[record_nbytes(qtype, cols) :], part)


@pytest.mark.parametrize("qtype", PLANED)
def test_padding_rows_are_zero_weights(qtype: str) -> None:
    cols = QUANT_TYPES[qtype].block
    packed = pack_reference(random_rows(qtype, 5, cols), qtype, 5, cols)
    assert not np.any(unpack_reference(packed, qtype, ROW_BLOCK, cols)[5:])


@pytest.mark.parametrize("qtype", PLANED)
def test_packing_grows_a_model_matrix_by_at_most_three_percent(qtype: str) -> None:
    assert packed_nbytes(qtype, 25600, 5120) <= 1.03 * file_nbytes(qtype, 25600, 5120)
