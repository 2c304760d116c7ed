"""Turns stored tensors into the units of a ModelSpec, in execution order, and checks every shape and type."""

from collections.abc import Iterator

from pshard.errors import UserError
from pshard.model_config import ModelConfig
from pshard.models.architectures import Architecture
from pshard.models.stored import StoredTensor
from pshard.quant import QUANT_TYPES
from pshard.tensor import TensorSpec
from pshard.units.attention import ATTENTION
from pshard.units.embedding import EMBEDDING
from pshard.units.ffn import FFN
from pshard.units.output import OUTPUT
from pshard.units.unit import Unit, UnitKind

Expected = tuple[str, tuple[int, ...]]  # a tensor's name and shape
TABLE, HEAD, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"


def build_units(
    arch: Architecture, config: ModelConfig, stored: dict[str, StoredTensor], where: str
) -> tuple[Unit, ...]:
    """The units of a model from its tensors by GGUF name; without `output.weight` the head is the embedding.

    Raises UserError for a tensor that is missing, misshapen, of a type that cannot be used, or has no place in the
    architecture (computing without it would be silently wrong).
    """
    roles = {name.split(".", 2)[2] for name in stored if name.count(".") > 2}
    biases = set(arch.biases) | (set(arch.optional_biases) & roles)

    def unit(name: str, kind: UnitKind, layer: int, tensors: Iterator[Expected]) -> Unit:
        specs = [_tensor_spec(stored, tensor, shape, where) for tensor, shape in tensors]
        specs.sort(key=lambda t: -len(t.shape))  # matrices, then vectors (the sort is stable)
        return Unit(name, kind, layer, tuple(specs))

    units = [unit("embedding", EMBEDDING, -1, iter([(TABLE, (config.vocab, config.d_model))]))]
    for i in range(config.n_layers):
        units.append(unit(f"blk.{i}.attention", ATTENTION, i, _attention(arch, config, f"blk.{i}.", biases)))
        units.append(unit(f"blk.{i}.ffn", FFN, i, _ffn(config, f"blk.{i}.")))
    head = HEAD if HEAD in stored else TABLE
    output = [("output_norm.weight", (config.d_model,)), (head, (config.vocab, config.d_model))]
    units.append(unit("output", OUTPUT, -1, iter(output)))
    used = {t.name for u in units for t in u.tensors} | {ROPE_FACTORS}
    for name, tensor in stored.items():
        if name not in used:
            tensor.fail(f"has no place in architecture {arch.name}; leaving it out would give wrong results")
    return tuple(units)


def _attention(arch: Architecture, config: ModelConfig, block: str, biases: set[str]) -> Iterator[Expected]:
    d, q, kv = config.d_model, config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    yield block + "attn_norm.weight", (d,)
    for role, rows, cols in (("attn_q", q, d), ("attn_k", kv, d), ("attn_v", kv, d), ("attn_output", d, q)):
        yield f"{block}{role}.weight", (rows, cols)
        if f"{role}.bias" in biases:
            yield f"{block}{role}.bias", (rows,)
    if arch.qk_norm:
        yield block + "attn_q_norm.weight", (config.head_dim,)
        yield block + "attn_k_norm.weight", (config.head_dim,)


def _ffn(config: ModelConfig, block: str) -> Iterator[Expected]:
    yield block + "ffn_norm.weight", (config.d_model,)
    yield block + "ffn_gate.weight", (config.d_ffn, config.d_model)
    yield block + "ffn_up.weight", (config.d_ffn, config.d_model)
    yield block + "ffn_down.weight", (config.d_model, config.d_ffn)


def _tensor_spec(stored: dict[str, StoredTensor], name: str, shape: tuple[int, ...], where: str) -> TensorSpec:
    tensor = stored.get(name)
    if tensor is None:
        raise UserError(f"{where}: tensor {name} of shape {list(shape)} is missing; the file is incomplete")
    if tensor.shape != shape:
        tensor.fail(f"has shape {list(tensor.shape)}, not the {list(shape)} that the model's configuration says")
    if tensor.qtype not in QUANT_TYPES:
        tensor.fail(f"has type {tensor.qtype}, which is not supported; supported: {', '.join(QUANT_TYPES)}")
    if len(shape) == 1 and QUANT_TYPES[tensor.qtype].block > 1:
        tensor.fail(f"is a vector of type {tensor.qtype}; vectors are F32, F16 or BF16")
    return TensorSpec(name, tensor.qtype, shape)
