"""Where kernels find a packed matrix' planes, and the codebook of its type."""

from typing import Any

from pshard.runtime.kernels.api import Packed
from pshard.runtime.kernels.codebooks import BOOK_TYPES
from pshard.runtime.kernels.gpu.products.triton_books import book_on
from pshard.runtime.kernels.gpu.products.triton_decode import plane_places


def places(weight: Packed) -> tuple[Any, ...]:
    """See `plane_places`. In the place of dmin a type with a codebook has that, a tensor on the weight's device."""
    found = plane_places(weight.qtype, weight.cols)
    return (*found[:5], book_on(weight.qtype, weight.data.device)) if weight.qtype in BOOK_TYPES else found
