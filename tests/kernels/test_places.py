"""Kernels find a type's codebook on their own device, wherever the weight lies."""

import pytest
import torch

pytest.importorskip("triton")

from pshard.quant import packed_nbytes
from pshard.runtime.kernels.api import Packed
from pshard.runtime.kernels.codebooks import BOOK_TYPES
from pshard.runtime.kernels.gpu.products.places import places


@pytest.mark.parametrize("qtype", sorted(BOOK_TYPES))
def test_a_weight_in_host_memory_has_its_codebook_on_the_kernels_device(qtype: str) -> None:
    weight = Packed(torch.empty(packed_nbytes(qtype, 16, 256), dtype=torch.uint8), qtype, 16, 256)
    assert places(weight, torch.device("meta"))[-1].device.type == "meta"
