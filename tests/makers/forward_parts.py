"""What the float64 forwards of several makers have in common, in NumPy: norms, curves, YaRN's frequencies.

Nothing of the package is used. Formulas: RMS norm arXiv 1910.07467, SwiGLU 2002.05202, YaRN 2309.00071.
"""

import numpy as np


def rms(x: np.ndarray, weight: np.ndarray | float, eps: float) -> np.ndarray:
    """RMS norm over the last axis."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


def softmax(x: np.ndarray) -> np.ndarray:
    """Over the last axis."""
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def swiglu(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T


def stretch(
    base: float, dims: int, factor: float, original: int, turns: tuple[float, float] = (32, 1), rounded: bool = True
) -> np.ndarray:
    """YaRN's frequencies of pairs: those that turn turns[0] times and more over the original context stay, those that
    turn turns[1] times and less slow down. rounded: whole pairs bound the blend."""
    plain = base ** (-np.arange(0, dims, 2) / dims)
    first, last = (dims / 2 * np.log(original / (often * 2 * np.pi)) / np.log(base) for often in turns)
    if rounded:
        first, last = np.floor(first), np.ceil(last)
    first, last = max(first, 0), min(last, dims - 1)
    slow = np.clip((np.arange(dims // 2) - first) / max(last - first, 0.001), 0, 1)
    return plain * (1 - slow) + plain / factor * slow
