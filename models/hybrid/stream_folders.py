"""Folders of models with several residual streams (transformers' qwen4_exp): their settings, and tensors by GGUF
name. What `many_streams` reads from a GGUF file's keys, folders leave to formulas: sizes of tables and multipliers."""

import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pshard.model_config import Grams, ModelConfig, Selection, Streams
from pshard.models.arrange_tensors import gather_numbered
from pshard.models.hybrid.made_tensors import MadeTensor, freeze, make_numbers, take_rows
from pshard.models.hybrid.many_streams import check_table, limit_grams, limit_selection, limit_streams
from pshard.models.keys import Keys
from pshard.models.stored import StoredTensor
from pshard.units.layer_rows import TABLE

_INDEXED, _FULL = "indexed_attention", "full_attention"  # one in transformers, the other in published files
_GAMMA, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # of splitmix64
_MASK = (1 << 64) - 1
_BLOCKS = {"attn_hyper_connection": "hc_attn", "mlp_hyper_connection": "hc_ffn"}
_PARTS = {
    "hc_norm": "norm", "input_mix_weight_down": "down", "input_mix_weight_up": "up", "block_inject_weight": "inject"
}  # fmt: skip
_MIX = re.compile(rf"model\.layers\.(\d+)\.({'|'.join(_BLOCKS)})\.({'|'.join(_PARTS)})\.weight")
_LAST_MIX = re.compile(rf"model\.hyper_connection_mixer\.({'|'.join(_PARTS)})\.weight")
_GRAMS = re.compile(r"model\.layers\.(\d+)\.ple\.(\w+)\.weight")
_GRAM_ROLES = {"key_proj": "ple_key", "value_proj": "ple_value", "conv1d": "ple_conv1d"} | {
    f"norm_{part}": f"ple_norm_{part}" for part in ("key", "query", "conv")
}
_INDEX = re.compile(r"model\.layers\.(\d+)\.self_attn\.indexer\.(\w+)\.weight")
_INDEX_ROLES = {"q_layernorm": "q_norm", "k_layernorm": "k_norm"}
_TABLE = re.compile(r"model\.layers\.\d+\.ple\.ple_embedding\.ngram_embedding\.weight")
_SHARD = re.compile(r"(model\.layers\.\d+\.ple\.ple_embedding\.ngram_embedding)\.shard_(0|[1-9]\d{0,5})\.weight")
_WORDS = {"layer_multipliers": "multipliers", "ngram_heads_vocab_sizes": "sizes", "ngram_heads_offsets": "offsets"}
_WORD = re.compile(rf"model\.layers\.\d+\.ple\.ple_embedding\.({'|'.join(_WORDS)})")
_PADDED = "make_ngram_vocab_size_divisible_by"


@dataclass(frozen=True, kw_only=True)
class JoinedRows(MadeTensor):
    """The rows of several matrices, one below the other; `source` is the first."""

    pieces: tuple[StoredTensor, ...]

    def read(self) -> np.ndarray:
        return freeze(np.concatenate([piece.read() for piece in self.pieces]))

    def runs(self) -> tuple[StoredTensor, ...]:
        each = [piece.runs() for piece in self.pieces]
        return tuple(run for runs in each for run in runs) if all(each) else ()

    def expect(self) -> None:
        for piece in self.pieces:
            piece.expect()

    def forget(self) -> None:
        for piece in self.pieces:
            piece.forget()


def name_layers_as_published(config: dict[str, Any]) -> dict[str, Any]:
    """The settings with layers that have attention called so, whoever saved them."""
    kinds = config.get("layer_types")
    if not isinstance(kinds, list):
        return config
    return config | {"layer_types": [_FULL if kind == _INDEXED else kind for kind in kinds]}


def hf_streams(keys: Keys, config: ModelConfig) -> ModelConfig:
    """The config with streams, index and n-grams. Raises UserError that names the key."""
    assert config.delta is not None
    gate = keys.get("output_gate_type") or "silu"
    if gate not in ("silu", "sigmoid"):
        keys.refuse("output_gate_type", f"is {gate!r}, where silu and sigmoid are supported")
    count = limit_streams(keys, "hc_count", keys.integer("hc_count", 4))
    return replace(
        config,
        delta=replace(config.delta, gate=gate),
        streams=Streams(count, keys.integer("hc_lowrank", 320)),
        selection=_hf_selection(keys, config),
        grams=_hf_grams(keys, config),
    )


def _hf_selection(keys: Keys, config: ModelConfig) -> Selection:
    keys.refuse_unless("indexer_kv_heads", 1)
    each, tokens = keys.integer("indexer_compress_ratio", least=2), keys.integer("indexer_budget")
    heads, head = keys.integer("indexer_n_heads"), keys.integer("indexer_head_dim")
    names = "indexer_compress_ratio", "indexer_budget", "indexer_head_dim"
    return limit_selection(keys, config, names, (heads, head, each, tokens))


def _hf_grams(keys: Keys, config: ModelConfig) -> Grams | None:
    """The first module of n-grams: heads of tables have the next primes from a number on, and multipliers come from a
    seed (transformers' Qwen4ExpTextNGramEmbedding)."""
    layers = keys.values.get("ple_layer_ids")
    if layers in (None, []):
        return None
    if not isinstance(layers, list) or len(set(layers)) != 1 or type(layers[0]) is not int:
        keys.refuse("ple_layer_ids", f"is {layers!r}, where n-grams in one layer are supported")
    assert isinstance(layers, list)
    if not 1 <= layers[0] <= config.n_layers:
        keys.refuse("ple_layer_ids", f"is {layers!r}, which is none of {config.n_layers} layers")
    longest, heads = keys.integer("ngram_size", 3, least=2), keys.integer("heads_per_ngram", 8)
    each, taps, end = (longest - 1) * heads, keys.integer("ple_conv_kernel_size", 4), _find_end(keys)
    names = "ngram_size", "heads_per_ngram", "ple_conv_kernel_size", "eos_token_id"
    limit_grams(keys, config, names, (longest, heads, taps, end))
    width = keys.integer("ple_embed_dim", config.d_model)
    if width % each:
        keys.refuse("ple_embed_dim", f"is {width}, which {each} rows a token do not divide")
    sizes = _find_primes(keys.integer("ngram_vocab_size_base", 20_000_000), each)
    offsets = tuple(sum(sizes[:number]) for number in range(each))
    words = {"multipliers": _draw_multipliers(keys, config.vocab, longest), "sizes": sizes, "offsets": offsets}
    return Grams(layers[0] - 1, longest, heads, width // each, taps, end, **words)


def _find_end(keys: Keys) -> int:
    """The token that ends a text, the first where there are several."""
    found = keys.values.get("eos_token_id")
    found = found[0] if isinstance(found, list) and found else found
    if type(found) is not int or found < 0:
        keys.refuse("eos_token_id", f"is {found!r}, not a token, where n-grams end at one")
    assert isinstance(found, int)
    return found


def _find_primes(start: int, count: int) -> tuple[int, ...]:
    """The first primes from a number on."""
    found, number = list[int](), max(2, start)
    while len(found) < count:
        odd = np.arange(3, int(number**0.5) + 2, 2)
        if number == 2 or (number % 2 and not (number % odd[odd * odd <= number] == 0).any()):
            found.append(number)
        number += 1
    return tuple(found)


def _draw_multipliers(keys: Keys, vocab: int, count: int) -> tuple[int, ...]:
    """Odd numbers by which no token leaves 63 bits: splitmix64 of the seed."""
    bound = max(1, ((1 << 63) - 1) // vocab // 2)
    seed = keys.integer("seed", 1234, least=0)
    return tuple(2 * (_mix_bits(seed + _GAMMA * (number + 1)) % bound) + 1 for number in range(count))


def _mix_bits(value: int) -> int:
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


def take_words(config: ModelConfig, stored: dict[str, StoredTensor]) -> tuple[ModelConfig, dict[str, StoredTensor]]:
    """The config with multipliers, sizes and offsets that the files hold, which count as in transformers, and the other
    tensors. Raises UserError."""
    if config.streams is None:
        return config, stored
    rest, grams = dict(stored), config.grams
    for key, tensor in stored.items():
        if (found := _WORD.fullmatch(key)) and grams:
            role, bound = _WORDS[found[1]], (1 << 63) // (config.vocab if found[1] == "layer_multipliers" else 1)
            tensor.check_shape((len(getattr(grams, role)),))
            if tensor.qtype != "I64":
                tensor.fail(f"is {tensor.qtype}, where whole numbers are I64")
            words = tuple(int(n) for n in tensor.read().view("<i8"))
            least = 1 if role == "sizes" else 0
            if not all(least <= n < bound for n in words):
                tensor.fail(f"has others than whole numbers from {least} to {bound - 1}")
            changed: dict[str, Any] = {role: words}
            grams = replace(grams, **changed)
            del rest[key]
    return replace(config, grams=grams), rest


def name_streams(config: ModelConfig, stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """A folder's tensors, those of streams, index and n-grams by GGUF name, with GGUF's numbers. Raises UserError for
    one of another shape."""
    if config.streams is None:
        return stored
    named, shards = gather_numbered(stored, _SHARD, "{}.weight")
    for key, pieces in shards.items():
        if key in named:
            named[key].fail("is there whole and in pieces")
        named[key] = _join(key, [pieces[number] for number in sorted(pieces)], max(pieces) + 1)
    found = dict[str, StoredTensor]()
    for key, tensor in named.items():
        for name, part in _name_parts(config, key, tensor):
            if name in found:
                tensor.fail("is there twice, under different names")
            found[name] = part
    return found


def check_folder_table(config: ModelConfig, stored: dict[str, StoredTensor], keys: Keys) -> None:
    """Raises UserError for a table of other rows than the settings lead to."""
    if config.grams:
        leads = "ngram_vocab_size_base", "reaches"
        check_table(keys, config.grams, stored, keys.integer(_PADDED, 128), leads)


def _name_parts(config: ModelConfig, key: str, tensor: StoredTensor) -> list[tuple[str, StoredTensor]]:
    if mix := _MIX.fullmatch(key):
        return [(f"blk.{mix[1]}.{_BLOCKS[mix[2]]}_{_PARTS[mix[3]]}.weight", tensor)]
    if mix := _LAST_MIX.fullmatch(key):
        return [(f"output_hc_{_PARTS[mix[1]]}.weight", tensor)]
    if _TABLE.fullmatch(key):
        return [(TABLE, tensor)]
    grams, index = _GRAMS.fullmatch(key), _INDEX.fullmatch(key)
    if grams and grams[2] in _GRAM_ROLES:
        if grams[2] == "conv1d" and len(tensor.shape) == 3:  # of one channel each
            tensor = replace(tensor, shape=(tensor.shape[0], tensor.shape[2]))
        made = make_numbers(tensor, lambda less: less + 1) if grams[2].startswith("norm_") else tensor
        return [(f"blk.{grams[1]}.{_GRAM_ROLES[grams[2]]}.weight", made)]
    if index and index[2] in _INDEX_ROLES:
        return [(f"blk.{index[1]}.indexer.{_INDEX_ROLES[index[2]]}.weight", tensor)]
    if index and index[2] == "index_qk_proj" and config.selection:
        rows, head = config.selection.heads * config.selection.head, config.selection.head
        tensor.check_shape((rows + head, config.d_model))
        tensor.check_type()
        names = (f"blk.{index[1]}.indexer.{part}_proj.weight" for part in "qk")
        spans = (0, rows), (rows, rows + head)
        return [(name, take_rows(name, tensor, [span])) for name, span in zip(names, spans)]
    return [(key, tensor)]


def _join(key: str, pieces: list[StoredTensor], count: int) -> StoredTensor:
    first = pieces[0]
    if len(pieces) != count:
        first.fail(f"is one of {count} pieces, of which {count - len(pieces)} are missing", "fetch the files again")
    for piece in pieces:
        if piece.qtype != first.qtype or len(piece.shape) != 2 or piece.shape[1] != first.shape[1]:
            piece.fail(f"is {piece.qtype} of shape {list(piece.shape)}, unlike {first.name}")
    shape = sum(piece.shape[0] for piece in pieces), first.shape[1]
    return JoinedRows(key, first.qtype, shape, first.file, first.offset, source=first, pieces=tuple(pieces))
