"""The packed layout keeps every bit of the weights, in the sizes that pshard.quant states."""

import numpy as np
import pytest
import torch
from random_blocks import dequantise_rows, random_rows

from pshard.quant import QUANT_TYPES, ROW_BLOCK, file_nbytes, record_nbytes
from pshard.runtime.kernels.api import Packed
from pshard.runtime.kernels.layout import pack_reference, packed_nbytes, unpack_reference
from pshard.runtime.kernels.unpack import unpack

TYPES = sorted(QUANT_TYPES)
PLANED = [name for name in TYPES if QUANT_TYPES[name].planes]


@pytest.mark.parametrize("qtype", TYPES)
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (16, 3), (35, 2)])
def test_unpacking_a_packed_matrix_equals_the_gguf_dequantiser(qtype: str, rows: int, blocks: int) -> None:
    cols = blocks * max(QUANT_TYPES[qtype].block, 32)
    raw = random_rows(qtype, rows, cols)
    packed = pack_reference(raw, qtype, rows, cols)
    assert packed.dtype == np.uint8 and packed.shape == (packed_nbytes(qtype, rows, cols),)
    np.testing.assert_array_equal(unpack_reference(packed, qtype, rows, cols), dequantise_rows(raw, qtype, rows, cols))


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


@pytest.mark.parametrize("qtype", PLANED)
def test_the_plain_kernels_unpack_the_same_weights(qtype: str) -> None:
    cols = 2 * QUANT_TYPES[qtype].block
    packed = torch.from_numpy(pack_reference(random_rows(qtype, 19, cols), qtype, 19, cols))
    got = unpack(Packed(packed, qtype, 19, cols)).numpy()
    np.testing.assert_array_equal(got, unpack_reference(packed.numpy(), qtype, 19, cols))
