"""Where kernels find a packed matrix' planes, and the codebook of its type."""

from typing import Any

import torch

from pshard.runtime.kernels.api import Packed
from pshard.runtime.kernels.codebooks import BOOK_TYPES
from pshard.runtime.kernels.gpu.products.triton_books import book_on
from pshard.runtime.kernels.gpu.products.triton_decode import plane_places


def places(weight: Packed, device: torch.device) -> tuple[Any, ...]:
    """See `plane_places`. In the place of dmin a type with a codebook has that, a tensor on the kernel's `device`: the
    weight may lie in host memory and be read in place."""
    found = plane_places(weight.qtype, weight.cols)
    return (*found[:5], book_on(weight.qtype, device)) if weight.qtype in BOOK_TYPES else found
