"""The architectures that pshard knows, as data: what differs between them stands in this table and nowhere else."""

from dataclasses import dataclass

from pshard.errors import UserError

_QKV = ("attn_q.bias", "attn_k.bias", "attn_v.bias")


@dataclass(frozen=True)
class Architecture:
    """A decoder: RMSNorm, rotary grouped-query attention, SwiGLU; and its variations.

    `name` is the model_type of Hugging Face, `gguf` what GGUF files say. `gguf_pairing`: RoPE pairs as GGUF files of
    this architecture store q and k (Hugging Face always has "halves"). `biases` must be there, `optional_biases` may.
    """

    name: str
    gguf: str
    gguf_pairing: str
    biases: tuple[str, ...] = ()
    optional_biases: tuple[str, ...] = ()
    qk_norm: bool = False


ARCHITECTURES = (
    Architecture("llama", "llama", "adjacent", optional_biases=(*_QKV, "attn_output.bias")),
    Architecture("mistral", "llama", "adjacent"),
    Architecture("qwen2", "qwen2", "halves", biases=_QKV),
    Architecture("qwen3", "qwen3", "halves", optional_biases=(*_QKV, "attn_output.bias"), qk_norm=True),
)


def find_gguf_architecture(name: object, where: str) -> Architecture:
    """The architecture that a GGUF file calls `name`. Raises UserError that lists the supported ones."""
    return _find({a.gguf: a for a in reversed(ARCHITECTURES)}, name, where)


def find_hf_architecture(name: object, where: str) -> Architecture:
    """The architecture that a config.json calls `name` (model_type). Raises UserError that lists the supported ones."""
    return _find({a.name: a for a in ARCHITECTURES}, name, where)


def _find(table: dict[str, Architecture], name: object, where: str) -> Architecture:
    if isinstance(name, str) and name in table:
        return table[name]
    supported = ", ".join(sorted(table))
    raise UserError(f"{where}: architecture {name!r} is not supported yet; supported: {supported}")
