"""ModelConfig: the numbers of a decoder that computing and planning need. No torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Rope:
    """Rotary embedding. `pairing`: "adjacent" rotates (2i, 2i+1), "halves" rotates (i, i + dims/2).

    `scaling`: "none", "linear", "yarn" or "llama3". `freq_factors` (dims/2 divisors of the frequencies) come from the
    file when it has them (`rope_freqs.weight`); llama3 scaling in safetensors is turned into them.
    """

    dims: int
    base: float
    pairing: str
    scaling: str = "none"
    factor: float = 1.0
    original_context: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    freq_factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class ModelConfig:
    """Numbers of a decoder-only transformer that computing and planning need. Sizes in elements."""

    architecture: str
    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ffn: int
    vocab: int
    norm_eps: float
    context: int
    rope: Rope
    qk_norm: bool = False
    sliding_window: int = 0  # 0: full attention in every layer
