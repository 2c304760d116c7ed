"""Operands rotate over as many bytes as asked, and are valid packed weights."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from pshard.profile.timed.operands import (
    LEAST_ROTATION,
    MOST_COPIES,
    QUICK_ROTATION,
    OperandPool,
    random_record,
    rotation_bytes,
)
from pshard.quant import QUANT_TYPES, packed_nbytes
from pshard.runtime.kernels.layout import unpack_reference
from pshard.units.kv_cells import KV_BLOCK

CPU = torch.device("cpu")
MIB = 1 << 20


def test_rotation_covers_the_last_cache_many_times_within_an_eighth_of_the_memory():
    much = 1 << 40
    assert rotation_bytes(0, much, quick=False) == LEAST_ROTATION
    assert rotation_bytes(0, much, quick=True) == QUICK_ROTATION
    assert rotation_bytes(300 * MIB, much, quick=False) == rotation_bytes(300 * MIB, much, quick=True) == 9600 * MIB
    assert rotation_bytes(300 * MIB, 8192 * MIB, quick=False) == 1024 * MIB


@pytest.mark.parametrize("qtype, rows, cols", [("Q4_0", 512, 512), ("Q6_K", 48, 256), ("BF16", 33, 64)])
def test_copies_span_the_pool_without_overlap(qtype, rows, cols):
    pool = OperandPool(4 * MIB, CPU)
    copies = pool.rotate_weights(qtype, rows, cols)
    nbytes = packed_nbytes(qtype, rows, cols)
    starts = [copy.data.data_ptr() for copy in copies]
    assert all(copy.data.numel() == nbytes for copy in copies)
    assert all(b - a >= nbytes for a, b in pairwise(starts))
    page = 4096
    assert starts[-1] - starts[0] + nbytes > 4 * MIB - 2 * (nbytes + page)
    assert all(np.isfinite(unpack_reference(copy.data.numpy(), qtype, rows, cols)).all() for copy in copies)


@pytest.mark.parametrize("qtype", QUANT_TYPES)
def test_the_bytes_of_a_host_pool_are_ordinary_numbers_in_every_type(qtype):
    (weight, *_) = OperandPool(4 * MIB, CPU).rotate_weights(qtype, 16, 512)
    weights = np.abs(unpack_reference(weight.data.numpy(), qtype, 16, 512))
    smallest_normal = 2.0**-126
    assert np.isfinite(weights).all() and weights.max() > 0
    assert weights[weights > 0].min() > smallest_normal
    assert len(np.unique(weights)) > 8


def test_copies_of_a_small_matrix_are_few_and_spread_over_the_pool():
    pool = OperandPool(64 * MIB, CPU)
    copies = pool.rotate_weights("Q4_0", 16, 32)
    assert len(copies) <= MOST_COPIES
    assert copies[-1].data.data_ptr() - copies[0].data.data_ptr() > 63 * MIB


def test_a_matrix_larger_than_the_pool_gets_one_copy():
    pool = OperandPool(MIB, CPU)
    (only,) = pool.rotate_weights("F32", 1024, 512)
    assert only.data.numel() == 2 * MIB


def test_a_pool_that_was_released_takes_its_memory_again_when_it_is_asked_for_copies():
    pool = OperandPool(4 * MIB, CPU)
    spanned = len(pool.rotate_weights("Q4_0", 512, 512))
    pool.release()
    assert pool.memory.numel() == 0
    copies = pool.rotate_weights("Q4_0", 512, 512)
    assert len(copies) == spanned and pool.memory.numel() == 4 * MIB
    assert np.isfinite(unpack_reference(copies[-1].data.numpy(), "Q4_0", 512, 512)).all()


@pytest.mark.parametrize("qtype", QUANT_TYPES)
def test_random_records_are_ordinary_numbers(qtype):
    weights = unpack_reference(random_record(qtype, 512), qtype, 16, 512)
    assert np.isfinite(weights).all()
    assert 1e-5 < np.abs(weights).mean() < 10
    assert len(np.unique(weights)) > 8


def test_kv_copies_span_the_pool():
    pool = OperandPool(4 * MIB, CPU)
    caches = pool.rotate_kv(context=256, n_kv_heads=2, head_dim=64, kv_type="bf16")
    assert len(caches) == 4 * MIB // (2 * 256 * 2 * 64 * 2)
    assert caches[0].k.shape == caches[0].v.shape == (256 // KV_BLOCK, KV_BLOCK, 2, 64)
    assert torch.isfinite(caches[-1].k).all() and caches[-1].v.abs().sum() > 0
