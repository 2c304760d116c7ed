"""What becomes of a sum over ranks before it is added to the residual stream."""

from typing import NamedTuple

import torch


class SumNorm(NamedTuple):
    """RMS-normalised by weight [D], the sum is added to the residual stream, which is multiplied by factor [1] then.
    float32; None: as it is."""

    weight: torch.Tensor | None
    factor: torch.Tensor | None


NO_SUM_NORM = SumNorm(None, None)
