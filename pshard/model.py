"""ModelSpec: what a model is made of, in units that are placed one by one. No torch.

`pshard.models` builds it from a file's header; the planner, the registry and the runtime share it.
"""

from dataclasses import dataclass
from functools import cached_property

from pshard.errors import UserError
from pshard.quant import QUANT_TYPES, TENSOR_ALIGN, align, file_nbytes, packed_nbytes


@dataclass(frozen=True)
class TensorSpec:
    """One weight tensor: GGUF name, quant type, shape as (rows, cols) = (outputs, inputs), or (n,) for a vector."""

    name: str
    qtype: str
    shape: tuple[int, ...]

    @property
    def rows(self) -> int:
        return self.shape[0] if len(self.shape) == 2 else 1

    @property
    def cols(self) -> int:
        return self.shape[-1]

    @property
    def role(self) -> str:
        """Name inside its unit: `blk.3.attn_q.weight` -> `attn_q.weight`, `output.weight` stays."""
        parts = self.name.split(".")
        return ".".join(parts[2:]) if parts[0] == "blk" else self.name

    @property
    def file_nbytes(self) -> int:
        """Bytes in the model file."""
        return file_nbytes(self.qtype, self.rows, self.cols)

    @property
    def packed_nbytes(self) -> int:
        """Bytes in the packed layout (host arena, VRAM, link). Vectors are held as float32."""
        if len(self.shape) == 1:
            return 4 * self.cols
        return packed_nbytes(self.qtype, self.rows, self.cols)


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


@dataclass(frozen=True)
class Unit:
    """The smallest thing that is placed. `kind`: "embedding", "attention", "ffn" or "output".

    attention = norm, q, k, v, rope, attention, o, residual; ffn = norm, gate, up, down, residual;
    output = final norm and head. `layer` is -1 for embedding and output.
    """

    name: str
    kind: str
    layer: int
    tensors: tuple[TensorSpec, ...]

    def __hash__(self) -> int:
        return hash(self.name)  # caches ask often; tensors tell units apart that share a name

    @cached_property
    def packed_nbytes(self) -> int:
        """Bytes of the unit's contiguous blob: one copy moves it."""
        return sum(align(t.packed_nbytes, TENSOR_ALIGN) for t in self.tensors)

    @cached_property
    def matrices(self) -> tuple[TensorSpec, ...]:
        return tuple(t for t in self.tensors if len(t.shape) == 2)

    def offsets(self) -> dict[str, tuple[int, TensorSpec]]:
        """Role -> (offset of the tensor in the unit's blob, tensor)."""
        table, at = {}, 0
        for tensor in self.tensors:
            table[tensor.role] = (at, tensor)
            at += align(tensor.packed_nbytes, TENSOR_ALIGN)
        return table

    @cached_property
    def likeness(self) -> tuple:
        """Units with equal likeness cost the same and belong to one class of the integer program."""
        return (self.kind, tuple((t.role, t.qtype, t.shape) for t in self.tensors))


@dataclass(frozen=True)
class Stage:
    """Where a run of layers stands in a pipeline over ranks: hidden states come from rank `source` and go to `target`.

    None: it begins with the embedding, it ends with the output; both where the rank has no layers at all.
    """

    source: int | None
    target: int | None


@dataclass(frozen=True)
class ModelSpec:
    """A model as the planner sees it. `units` are in execution order: embedding, (attention, ffn) per layer, output.

    `stage`: what a rank holds is a run of layers (cuts/layer_cuts.py); None: a whole model, or a slice of every unit.
    """

    name: str
    path: str
    config: ModelConfig
    units: tuple[Unit, ...]
    stage: Stage | None = None

    def unit(self, name: str) -> Unit:
        """The unit of that name. Raises KeyError."""
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[str, Unit]:
        return {u.name: u for u in self.units}

    @cached_property
    def largest_matrix(self) -> tuple[int, int]:
        """Most elements and most columns of any matrix that is multiplied; 0 where a rank holds none."""
        shapes = {t.shape for u in self.units if u.kind != "embedding" for t in u.matrices}
        return max((rows * cols for rows, cols in shapes), default=0), max((cols for _, cols in shapes), default=0)

    @cached_property
    def packed_nbytes(self) -> int:
        """Bytes of all units in the packed layout."""
        return sum(u.packed_nbytes for u in self.units)


KV_TYPES = ("f32", "bf16", "f16", "q8_0")  # names in small letters of the quant types whose sizes they have


def kv_nbytes(kind: str, n: int) -> int:
    """Bytes of n numbers of a KV type; n is a multiple of its block."""
    return file_nbytes(kind.upper(), 1, n)


def kv_token_bytes(config: ModelConfig, type_k: str, type_v: str) -> int:
    """Bytes of KV cache that one token of one sequence takes in one layer."""
    width = config.n_kv_heads * config.head_dim
    return kv_nbytes(type_k, width) + kv_nbytes(type_v, width)


def check_kv_types(config: ModelConfig, type_k: str, type_v: str) -> None:
    """Raise UserError for an unknown KV type, or one whose blocks do not divide the model's heads."""
    for flag, kind in (("-ctk", type_k), ("-ctv", type_v)):
        if kind not in KV_TYPES:
            raise UserError(f"unknown KV cache type {kind!r}; {flag} is one of {', '.join(KV_TYPES)}")
        block = QUANT_TYPES[kind.upper()].block
        if config.head_dim % block:
            raise UserError(
                f"{kind} keeps the KV cache in blocks of {block}, and this model's heads have {config.head_dim} "
                f"numbers; give {flag} bf16"
            )
