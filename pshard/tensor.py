"""TensorSpec: one weight tensor of a model, by name, quant type and shape. No torch."""

from dataclasses import dataclass
from functools import cached_property

from pshard.quant import file_nbytes, packed_nbytes


@dataclass(frozen=True)
class TensorSpec:
    """One weight tensor: GGUF name, quant type, shape as (rows, cols) = (outputs, inputs), or (n,) for a vector.

    parts: so many matrices of equal rows stand in it, one below the other, as a layer's experts do; 0 for one matrix.
    """

    name: str
    qtype: str
    shape: tuple[int, ...]
    parts: int = 0

    @property
    def rows(self) -> int:
        return self.shape[0] if len(self.shape) == 2 else 1

    @property
    def cols(self) -> int:
        return self.shape[-1]

    @cached_property
    def role(self) -> str:
        """Name inside its unit: `blk.3.attn_q.weight` -> `attn_q.weight`, `output.weight` stays."""
        parts = self.name.split(".")
        return ".".join(parts[2:]) if parts[0] == "blk" else self.name

    @cached_property
    def layer(self) -> int:
        """The layer that it is of, by its name; -1 outside layers."""
        parts = self.name.split(".")
        return int(parts[1]) if parts[0] == "blk" else -1

    @property
    def file_nbytes(self) -> int:
        """Bytes in the model file."""
        return file_nbytes(self.qtype, self.rows, self.cols)

    @property
    def row_nbytes(self) -> int:
        """Bytes of a row in the model file."""
        return file_nbytes(self.qtype, 1, self.cols)

    @property
    def packed_nbytes(self) -> int:
        """Bytes in the packed layout (host arena, VRAM, link). Vectors are held as float32."""
        if len(self.shape) == 1:
            return 4 * self.cols
        return packed_nbytes(self.qtype, self.rows, self.cols)
