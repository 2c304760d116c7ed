"""RoPE scaling formulas that turn a file's settings into the fields of pshard.model.Rope."""

import math

from pshard.models.keys import FACTORS, Keys

FACTOR, LOG_MULTIPLIER = "rope.scaling.factor", "rope.scaling.yarn_log_multiplier"  # of GGUF files


def scaling_factor(keys: Keys) -> float:
    """A GGUF file's, by the key or its old name; without both, and for 0, positions are not scaled, whatever the type
    says: as llama.cpp reads them."""
    name = "rope.scale_linear" if keys.get(FACTOR) is None else FACTOR
    return 1.0 if keys.get(name) == 0 else keys.real(name, 1.0, FACTORS)


def yarn_growth(factor: float, weight: float = 1.0) -> float:
    """By what cos and sin grow where positions are stretched: 0.1 ln(factor) + 1 (Peng et al. 2023, arXiv 2309.00071,
    eq. 22)."""
    return 0.1 * weight * math.log(factor) + 1.0


def yarn_attention_factor(factor: float, weight: float = 1.0) -> float:
    """Factor on cos and sin under YaRN, which does not shrink them."""
    return 1.0 if factor <= 1 else yarn_growth(factor, weight)


def llama3_freq_factors(
    dims: int, base: float, factor: float, low_freq_factor: float, high_freq_factor: float, original_context: int
) -> tuple[float, ...]:
    """Divisors of the dims/2 frequencies under the scaling of Llama 3.1.

    Wavelengths above original_context/low_freq_factor are stretched by `factor`, those below
    original_context/high_freq_factor are kept, and between the two the frequencies are blended linearly in
    original_context/wavelength (the published reference implementation of Llama 3.1, `apply_scaling`).
    """
    divisors = []
    for i in range(dims // 2):
        wavelength = 2 * math.pi * base ** (2 * i / dims)
        kept = (original_context / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)
        kept = min(1.0, max(0.0, kept))
        divisors.append(1 / ((1 - kept) / factor + kept))
    return tuple(divisors)
