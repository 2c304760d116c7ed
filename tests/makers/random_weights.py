"""Packed matrices of random codes for the GPU's kernels, which run on a GPU when there is one, else interpreted."""

import numpy as np
import torch
from random_blocks import random_rows

from pshard.runtime.kernels.api import Packed
from pshard.runtime.kernels.layout import pack_reference, unpack_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random_tensor(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Standard normal values."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def random_weight(qtype: str, rows: int, cols: int, seed: int) -> tuple[Packed, np.ndarray]:
    """A packed matrix of random codes and ordinary scales, and its values in float64."""
    raw = random_rows(qtype, rows, cols, seed)
    data = pack_reference(raw, qtype, rows, cols)
    values = unpack_reference(data, qtype, rows, cols).astype(np.float64)
    return Packed(torch.from_numpy(data).to(DEVICE), qtype, rows, cols), values
