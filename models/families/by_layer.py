"""Models whose layers differ by more than their weights: heads of layers with a window, rows of FFNs, by file's arrays.

Keys of GGUF metadata as llama.cpp reads them (gemma4.cpp), those of config.json as Gemma4TextConfig has them.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from pshard.model_config import ModelConfig, Rope, Temperature
from pshard.models.architectures import Architecture
from pshard.models.families.hf_positions import hf_rope, split_positions
from pshard.models.hybrid.made_tensors import PLAIN, MadeTensor, check_vector, freeze, make_numbers, read_numbers
from pshard.models.hybrid.read_delta import check_layers
from pshard.models.keys import BASES, FACTORS, Keys
from pshard.models.stored import StoredTensor
from pshard.units.layer_rows import MADE_NORM

_OF_EXPERTS = "pre_ffw_norm_2.weight"
NEARLY_NONE = 1e-30  # of a norm's weights that are 0, by which its numbers can be divided
NO_TURN = 1e30  # what a frequency is divided by of pairs that are not turned
_WINDOWED = "sliding_attention"
T = TypeVar("T", int, bool)


def list_by_layer(keys: Keys, key: str, kind: type[T], layers: int, least: int = 1) -> tuple[T, ...]:
    """A value for each layer: of a list, or one for all. Raises UserError for another number of values, and for others
    than whole numbers from `least` on, or than true and false."""
    found = keys.values.get(keys.prefix + key)
    values = found if isinstance(found, list) else [found] * layers
    if len(values) != layers:
        keys.refuse(key, f"has {len(values)} values for {layers} layers")
    known = bool if kind is bool else int
    if not all(type(v) is known and (known is bool or v >= least) for v in values):
        keys.refuse(key, f"is no list of {'true and false' if kind is bool else f'whole numbers from {least} on'}")
    return tuple(values)


def gguf_layers(keys: Keys, config: ModelConfig) -> ModelConfig:
    """The config with what metadata says of single layers. Raises UserError that names the key."""
    layers = config.n_layers
    windows = list_by_layer(keys, "attention.sliding_window_pattern", bool, layers)
    dim = keys.length("attention.key_length_swa")
    if keys.integer("attention.value_length_swa", dim) != dim:
        keys.refuse("attention.value_length_swa", f"is not {dim}, as keys are long")
    local = Rope(
        keys.integer("rope.dimension_count_swa", dim), keys.real("rope.freq_base_swa", 1e4, BASES), config.rope.pairing
    )
    kv = list_by_layer(keys, "attention.head_count_kv", int, layers)
    config = _with_rows(config, list_by_layer(keys, "feed_forward_length", int, layers))
    config = replace(
        _with_heads(keys, "attention.head_count_kv", config, windows, kv),
        window_head_dim=dim,
        window_rope=local,
        logit_cap=30.0 if keys.get("final_logit_softcapping") is None else keys.factor("final_logit_softcapping"),
        row_width=keys.integer("embedding_length_per_layer_input", 0, least=0),
    )
    return _check(keys, "attention.head_count", _with_borrowers(keys, "attention.shared_kv_layers", config))


def gguf_uneven(keys: Keys, config: ModelConfig) -> ModelConfig:
    """The config with what metadata says of each layer: how many heads it has, and rows of its FFN, or that it has
    none. Raises UserError that names the key."""
    layers = config.n_layers
    check_layers(keys, layers)
    heads = list_by_layer(keys, "attention.head_count", int, layers, least=0)
    kv = list_by_layer(keys, "attention.head_count_kv", int, layers, least=0)
    rows = list_by_layer(keys, "feed_forward_length", int, layers, least=0)
    if not any(kv) or not any(rows):
        keys.refuse("feed_forward_length" if any(kv) else "attention.head_count_kv", "is 0 in all layers")
    for own, shared in zip(heads, kv):
        if (shared and own % shared) or own < shared:
            keys.refuse("attention.head_count", f"is {own} in a layer with {shared} KV heads, which is no multiple")
    if any(own and not wide for own, wide in zip(heads, rows)):
        keys.refuse("feed_forward_length", "is 0 in a layer with attention, which is not supported yet")
    return replace(
        config,
        n_heads=max(heads),
        n_kv_heads=max(kv),
        layer_heads=tuple(zip(heads, kv)),
        d_ffn=max(rows),
        ffn_rows=rows,
    )


def hf_layers(arch: Architecture, keys: Keys, config: ModelConfig) -> ModelConfig:
    """The config with what config.json says of single layers. Raises UserError that names the key."""
    kinds, layers = keys.kinds("layer_types", _WINDOWED, "full_attention"), config.n_layers
    if kinds is None:  # as transformers has it: five of six see a window
        kinds = [_WINDOWED if (i + 1) % 6 else "full_attention" for i in range(layers)]
    if len(kinds) != layers:
        keys.refuse("layer_types", f"does not say of each of {layers} layers if it has sliding or full attention")
    windows = tuple(kind == _WINDOWED for kind in kinds)
    dims, kv = _hf_heads(keys, windows)
    full, local = split_positions(keys.values, arch.window_base, keys.where)
    rope = _hf_rope(full, dims[0], config.context, keys.where)
    windowed = hf_rope(local, arch.rotated, dims[1], config.context, keys.where)
    config = _with_borrowers(keys, "num_kv_shared_layers", replace(config, windows_in=windows))
    rows, keeping = config.d_ffn or keys.integer("intermediate_size"), layers - config.borrowers
    twice = 2 if keys.flag("use_double_wide_mlp", False) else 1
    config = _with_rows(config, tuple(rows * (1 if i < keeping else twice) for i in range(layers)))
    width = keys.integer("hidden_size_per_layer_input", 256, least=0)
    if width and keys.integer("vocab_size_per_layer_input", 262144) != config.vocab:
        keys.refuse("vocab_size_per_layer_input", f"is not {config.vocab}, as there are tokens")
    cap = keys.factor("final_logit_softcapping")
    config = replace(config, head_dim=dims[0], window_head_dim=dims[1], rope=rope, window_rope=windowed)
    config = replace(config, logit_cap=cap, row_width=width)
    return _check(keys, "num_attention_heads", _with_heads(keys, "layer_types", config, windows, kv))


def _with_borrowers(keys: Keys, key: str, config: ModelConfig) -> ModelConfig:
    """With the last so many layers reading the cells of others. Raises UserError that names the key where one of them
    has none like it before."""
    count, windows = keys.integer(key, 0, least=0), config.windows_in
    if count and (count >= len(windows) or set(windows[-count:]) - set(windows[:-count])):
        keys.refuse(key, f"is {count}, which leaves layers without one like them whose cells they could read")
    return replace(config, borrowers=count)


def hf_chunks(keys: Keys, config: ModelConfig) -> ModelConfig:
    """The config with what config.json says of layers that see a chunk, of those whose heads are not rotated, and of
    these ones' temperature: as Llama4TextConfig has them. Raises UserError that names the key."""
    check_layers(keys, config.n_layers)
    layers, turned = config.n_layers, keys.values.get("no_rope_layers")
    if not turned:
        step = keys.integer("no_rope_layer_interval", 4)
        turned = [int((i + 1) % step != 0) for i in range(layers)]
    if not isinstance(turned, list) or len(turned) < layers or not all(one in (0, 1) for one in turned):
        keys.refuse("no_rope_layers", f"does not say of each of {layers} layers if it is rotated")
    kinds = keys.kinds("layer_types", "chunked_attention", "full_attention")
    windows = [bool(one) for one in turned] if kinds is None else [kind == "chunked_attention" for kind in kinds]
    if len(windows) < layers:
        keys.refuse("layer_types", f"does not say of each of {layers} layers if it has chunked or full attention")
    still_in = tuple(not one for one in turned[:layers])
    windows_in = tuple(windows[:layers])
    if any(seen and still for seen, still in zip(windows_in, still_in)):
        keys.refuse("layer_types", "has chunks in layers that are not rotated, which is not supported yet")
    if any(windows_in) and keys.values.get("attention_chunk_size", 0) is None:
        keys.refuse("attention_chunk_size", "is missing, but layers see chunks")
    window = config.sliding_window if any(windows_in) else 0
    regular = tuple(config.has_window(i) for i in range(layers)), tuple(config.is_still(i) for i in range(layers))
    if (windows_in, still_in) != regular:
        config = replace(config, windows_in=windows_in, still_in=still_in, sliding_window=window)
    if not keys.values.get("attn_temperature_tuning", True) or not keys.values.get("attn_scale", 1):
        return config
    scale, span = keys.real("attn_scale", 0.1, FACTORS), keys.integer("floor_scale", 8192)
    return replace(config, temperature=Temperature(scale, span, counts=True, still=True))


def with_rows_beside(arch: Architecture, keys: Keys, config: ModelConfig, dense: int) -> ModelConfig:
    """With the rows of each layer's FFN, of which some stand beside experts; dense: of those that do not. Raises
    UserError."""
    check_layers(keys, config.n_layers)
    assert arch.routing and config.experts
    beside = config.experts.d_expert if arch.routing.beside == "expert" else config.d_model
    rows = tuple(beside if config.experts.are_in(i) else dense for i in range(config.n_layers))
    return replace(config, d_ffn=max(rows), ffn_rows=rows if len(set(rows)) > 1 else ())


def _with_rows(config: ModelConfig, rows: tuple[int, ...]) -> ModelConfig:
    """With so many rows of each layer's FFN; experts are beside it."""
    experts = config.experts and replace(config.experts, apart=True, activation=config.activation)
    own = rows if len(set(rows)) > 1 else ()
    return replace(config, d_ffn=max(rows), ffn_rows=own, experts=experts)


def _hf_heads(keys: Keys, windows: tuple[bool, ...]) -> tuple[tuple[int, int], tuple[int, ...]]:
    """Numbers of a head of layers with full attention and of those with a window; KV heads of each layer."""
    dim, kv = keys.length("head_dim"), keys.integer("num_key_value_heads")
    full_dim, full_kv = keys.length("global_head_dim", 512), kv
    if keys.values.get("attention_k_eq_v") is True and keys.get("num_global_key_value_heads") is not None:
        full_kv = keys.integer("num_global_key_value_heads")
    saved = keys.values.get("per_layer_config")  # as transformers 5.23 saves it, also where all heads are alike
    given = {} if saved is None else saved
    heads = [(dim, kv) if seen or saved is not None else (full_dim, full_kv) for seen in windows]
    if not isinstance(given, dict):
        keys.refuse("per_layer_config", "does not say what is of which layer")
    for number, own in given.items():
        known = isinstance(own, dict) and not own.keys() - {"head_dim", "num_key_value_heads"}
        if not known or not number.isdecimal() or int(number) >= len(windows):
            keys.refuse("per_layer_config", f"has settings of layer {number} that are not supported")
        of_layer = Keys(own, f"{keys.where}: per_layer_config of layer {number}")
        heads[int(number)] = of_layer.length("head_dim", dim), of_layer.integer("num_key_value_heads", kv)
    found = tuple({dim for (dim, _), seen in zip(heads, windows) if seen == kind} for kind in (False, True))
    if any(len(each) != 1 for each in found):
        keys.refuse("layer_types", "leaves no layer with a window, or without one, or heads of one sort differ")
    return (found[0].pop(), found[1].pop()), tuple(heads for _, heads in heads)


def _with_heads(
    keys: Keys, key: str, config: ModelConfig, windows: tuple[bool, ...], kv: tuple[int, ...]
) -> ModelConfig:
    """KV heads of layers with a window and of the others, which must be alike among themselves."""
    found = [{heads for heads, seen in zip(kv, windows) if seen == kind} for kind in (False, True)]
    if any(len(each) != 1 for each in found):
        keys.refuse(key, "differs among layers with a window, or among those without one, or leaves none of either")
    return replace(config, windows_in=windows, n_kv_heads=found[0].pop(), window_kv_heads=found[1].pop())


def _check(keys: Keys, key: str, config: ModelConfig) -> ModelConfig:
    """The same config, whose heads of layers with a window fit too."""
    own = config.windowed
    assert own.window_rope
    if own.n_heads % own.n_kv_heads:
        keys.refuse(key, f"is {own.n_heads}, not a multiple of the {own.n_kv_heads} KV heads of layers with a window")
    if own.head_dim % 2 or own.window_rope.dims != own.head_dim:
        keys.refuse(key, f"belongs to heads of {own.head_dim} in layers with a window, which are not turned as a whole")
    return config


def _hf_rope(config: Mapping[str, Any], head_dim: int, context: int, where: str) -> Rope:
    """Of heads of which a share is turned, each pair by the frequency that it has in a whole head: as a GGUF file of
    the model says it by `rope_freqs`."""
    given = config.get("rope_parameters")
    if not isinstance(given, dict) or given.get("rope_type") != "proportional":
        return hf_rope(config, 1.0, head_dim, context, where)
    keys = Keys(given, f"{where}: rope_parameters")
    share, base = keys.real("partial_rotary_factor", 1.0), keys.real("rope_theta", 1e6, BASES)
    if share > 1:
        keys.refuse("partial_rotary_factor", f"is {share}, more than the whole head")
    pairs, turned = head_dim // 2, int(share * head_dim // 2)
    factors = (keys.real("factor", 1.0, FACTORS),) * turned + (NO_TURN,) * (pairs - turned)
    return Rope(head_dim, base, "halves", freq_factors=factors)


_SCALES = {
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "layer_scalar": "layer_output_scale.weight",
}


def rename_scales(name: str) -> str:
    """By GGUF name, what in a folder multiplies something and has a name that the gguf package does not know."""
    found = re.fullmatch(r"model\.layers\.(\d{1,9})\.(.+)", name)
    return f"blk.{found[1]}.{_SCALES[found[2]]}" if found and found[2] in _SCALES else name


def arrange_layers(config: ModelConfig, stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors by GGUF name as units have them.

    Of layers that read others' cells, what would make cells of their own is left out: published files have it, newer
    ones do not. The rows that all layers take are normalised by a weight that is divided by the root of 2, as their sum
    with a token's own row is. Other layers without an `attn_v` have their `attn_k` under that name too: its product is
    made twice, for 0.4% of a 31B's work. A router reads the residual stream by a norm of its own, which only its matrix
    can tell from that of experts.
    """
    found = dict(stored)
    if MADE_NORM in found:
        found[MADE_NORM] = make_numbers(found[MADE_NORM], lambda values: values / np.sqrt(2))
    for i in range(config.n_layers):
        key, value = (f"blk.{i}.attn_{part}.weight" for part in "kv")
        if config.lender(i) != i:
            for name in (key, value, f"blk.{i}.attn_k_norm.weight"):
                found.pop(name, None)
        elif key in found and value not in found:
            found[value] = found[key]
        router, scale, norm = (f"blk.{i}.{role}" for role in ("ffn_gate_inp.weight", "ffn_gate_inp.scale", _OF_EXPERTS))
        if scale in found and router in found and norm in found:
            found[router] = TurnedRouter.make(found[router], found.pop(scale), found[norm])
            found[norm] = make_numbers(found[norm], lambda values: np.where(values == 0, NEARLY_NONE, values))
    return found


@dataclass(frozen=True, kw_only=True)
class TurnedRouter(MadeTensor):
    """The matrix `source` [experts, width] for what `norm` has multiplied, instead of `scale` / sqrt(width)."""

    scale: StoredTensor
    norm: StoredTensor

    @staticmethod
    def make(source: StoredTensor, scale: StoredTensor, norm: StoredTensor) -> "TurnedRouter":
        """Raises UserError for tensors of other shapes or types."""
        for vector in (scale, norm):
            vector.check_shape(source.shape[-1:])
            check_vector(vector)
        if source.qtype not in PLAIN:
            source.fail(f"is a router of type {source.qtype}, and routers are F32, F16 or BF16")
        where = source.name, "F32", source.shape, source.file, source.offset
        return TurnedRouter(*where, source=source, scale=scale, norm=norm)

    def read(self) -> np.ndarray:
        matrix, scale, norm = (read_numbers(t).astype(np.float64) for t in (self.source, self.scale, self.norm))
        tiny = np.where(norm == 0, NEARLY_NONE, norm)  # as `norm` itself then is, see arrange_layers
        made = matrix.reshape(self.shape) * (scale / (np.sqrt(self.shape[-1]) * tiny))
        return freeze(made.astype("<f4"))
