"""Rotary position tables from a model's Rope data: plain, linear, yarn and llama3 scaling."""

import math

import torch

from pshard.model_config import Rope


def inverse_frequencies(rope: Rope) -> tuple[torch.Tensor, float]:
    """Float64 angular frequencies [dims/2] and the factor on cos and sin.

    linear: positions divided by the factor. yarn (arXiv 2309.00071): low frequencies interpolated, high ones kept, a
    linear ramp between the dimensions that turn beta_fast and beta_slow times over the original context, and
    cos/sin scaled by 0.1 ln(factor) + 1. llama3: wavelengths above the original context are stretched, with a smooth
    blend; in GGUF files that is already in `freq_factors`.
    """
    index = torch.arange(0, rope.dims, 2, dtype=torch.float64)
    freq = rope.base ** (-index / rope.dims)
    if rope.freq_factors:
        freq = freq / torch.tensor(rope.freq_factors, dtype=torch.float64)
    if rope.scaling == "linear":
        return freq / rope.factor, 1.0
    if rope.scaling == "yarn":
        low, high = (_yarn_dimension(rope, turns) for turns in (rope.beta_fast, rope.beta_slow))
        if rope.rounded:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rope.dims - 1)
        ramp = ((torch.arange(rope.dims // 2) - low) / max(high - low, 0.001)).clamp(0, 1).double()
        scale = rope.attention_factor
        if scale is None:
            scale = 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
        return freq / rope.factor * ramp + freq * (1 - ramp), scale
    return freq, 1.0


def _yarn_dimension(rope: Rope, turns: float) -> float:
    """The (fractional) dimension pair that turns that many times over the original context."""
    return rope.dims * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.base))


def fill_rope_table(rope: Rope, table: torch.Tensor) -> None:
    """Write cos and sin of every position to `table` float32 [2, context, dims/2], on whatever device it lies."""
    freq, scale = inverse_frequencies(rope)
    # float32 products, as transformers computes them: the reference's angles, not better ones
    angle = torch.arange(table.shape[1], dtype=torch.float32)[:, None] * freq.float()
    table[0].copy_(angle.cos() * scale)
    table[1].copy_(angle.sin() * scale)
