"""Buffer: a scratch tensor that units need beside their weights and states. No torch."""

from dataclasses import dataclass
from math import prod

from pshard.quant import BUFFER_ALIGN, align


@dataclass(frozen=True)
class Buffer:
    """A scratch buffer: shape in elements of `dtype` ("f32" or "act", the activations' type)."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def nbytes(self, act_bytes: int) -> int:
        """Bytes in the arena."""
        return align(prod(self.shape) * (4 if self.dtype == "f32" else act_bytes), BUFFER_ALIGN)
