"""Packed matrices of random codes for the GPU's kernels, which run on a GPU when there is one, else interpreted."""

import numpy as np
import torch

from pshard.quant import QUANT_TYPES
from pshard.runtime.kernels.api import Packed
from pshard.runtime.kernels.layout import pack_reference, unpack_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALES_AT = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q4_1": (0, 2),
             "Q5_1": (0, 2)}  # fmt: skip


def random_tensor(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Standard normal values."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def random_weight(qtype: str, rows: int, cols: int, seed: int) -> tuple[Packed, np.ndarray]:
    """A packed matrix of random codes and ordinary scales, and its values in float64."""
    rng = np.random.default_rng(seed)
    if qtype == "F32":
        raw = rng.standard_normal((rows, cols), np.float32).view(np.uint8)
    elif qtype == "F16":
        raw = rng.standard_normal((rows, cols), np.float32).astype(np.float16).view(np.uint8)
    elif qtype == "BF16":
        raw = (rng.standard_normal((rows, cols), np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    else:
        q = QUANT_TYPES[qtype]
        raw = rng.integers(0, 256, (rows, cols // q.block, q.nbytes), dtype=np.uint8)
        if qtype == "MXFP4":
            raw[..., 0] = rng.integers(120, 128, raw.shape[:2])
        else:
            for at in SCALES_AT.get(qtype, (0,)):
                scale = (rng.standard_normal(raw.shape[:2]) * 0.01).astype(np.float16)
                raw[..., at : at + 2] = scale[..., None].view(np.uint8)
    data = pack_reference(raw.reshape(rows, -1), qtype, rows, cols)
    values = unpack_reference(data, qtype, rows, cols).astype(np.float64)
    return Packed(torch.from_numpy(data).to(DEVICE), qtype, rows, cols), values
