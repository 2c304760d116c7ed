"""Scratch that is filled once: tables by position of rotary embeddings, plain or scaled (linear, yarn, llama3,
longrope), and of temperatures; and weights that normalise sums over ranks."""

import math

import torch

from pshard.buffers import SUM_NORMS
from pshard.errors import UserError
from pshard.model_config import ModelConfig, Rope, Temperature
from pshard.units.attention import ATTENTION, ROPES, STILL_ATTENTION, TEMPERATURE, WINDOWED_ATTENTION, pick_rope


def list_tables(tensors: dict[str, torch.Tensor]) -> tuple[str, ...]:
    """Which scratch tensors are filled once, and the same in every tier."""
    return tuple(name for name in (*ROPES, TEMPERATURE, SUM_NORMS) if name in tensors)


def fill_tables(config: ModelConfig, tensors: dict[str, torch.Tensor]) -> None:
    """Fill those of the scratch tensors that are tables by position; a rank of a pipeline may have none."""
    for kind in (ATTENTION, WINDOWED_ATTENTION, STILL_ATTENTION):
        name, rope = pick_rope(config, kind.name)
        if name in tensors:
            fill_rope_table(rope, tensors[name])
    if TEMPERATURE in tensors and config.temperature:
        fill_temperatures(config.temperature, tensors[TEMPERATURE])


def fill_temperatures(temperature: Temperature, table: torch.Tensor) -> None:
    """Write what queries of every position are multiplied by to `table` float32 [context] (modeling_ministral3.py of
    transformers 5)."""
    first = int(temperature.counts)
    turns = torch.arange(first, first + table.shape[0], dtype=torch.float64).div(temperature.span).floor()
    table.copy_(1 + temperature.scale * torch.log1p(turns))


def inverse_frequencies(rope: Rope, context: int = 0) -> tuple[torch.Tensor, float]:
    """Float64 angular frequencies [dims/2] and the factor on cos and sin, for sequences of up to `context` tokens.

    linear: positions divided by the factor. yarn (arXiv 2309.00071): low frequencies interpolated, high ones kept, a
    linear ramp between the dimensions that turn beta_fast and beta_slow times over the original context, and
    cos/sin scaled by 0.1 ln(factor) + 1. llama3: wavelengths above the original context are stretched, with a smooth
    blend; in GGUF files that is already in `freq_factors`. longrope (arXiv 2402.13753): divisors of their own for
    sequences beyond the original context; which ones is decided once, by the longest that there may be.
    """
    index = torch.arange(0, rope.dims, 2, dtype=torch.float64)
    freq = rope.base ** (-index / rope.dims)
    divisors = rope.long_factors if rope.long_factors and context > rope.original_context else rope.freq_factors
    if divisors and not all(divisors):
        raise UserError(
            "the file's rope_freqs.weight is all zeros: it has no weights, and can only be planned; take a whole file"
        )
    if divisors:
        freq = freq / torch.tensor(divisors, dtype=torch.float64)
    if rope.scaling == "longrope":
        return freq, rope.attention_factor or 1.0
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
    freq, scale = inverse_frequencies(rope, table.shape[1])
    # float32 products, as transformers computes them: the reference's angles, not better ones
    angle = torch.arange(table.shape[1], dtype=torch.float32)[:, None] * freq.float()
    table[0].copy_(angle.cos() * scale)
    table[1].copy_(angle.sin() * scale)
