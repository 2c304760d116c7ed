"""What GGUF files say about several residual streams, an index of cells, and n-grams: Qwen3.8-Flash-Next's ways."""

import re
from dataclasses import replace
from typing import Any

from pshard.model_config import Delta, Grams, ModelConfig, Selection, Streams
from pshard.models.keys import Keys
from pshard.models.stored import StoredTensor
from pshard.units.kv_cells import KV_BLOCK
from pshard.units.layer_rows import TABLE

MOST_STREAMS = 64
LONGEST = 16  # tokens of an n-gram
MOST_EACH = 4096  # rows of a token, and taps of the convolution
_RATIOS = "attention.compress_ratios"
_NORM = re.compile(r"(output_hc|blk\.\d+\.hc_(attn|ffn))_norm\.weight|blk\.\d+\.ple_norm_(key|query|conv)\.weight")
_TAPS = re.compile(r"blk\.\d+\.ple_conv1d\.weight")
_PADDED = 128  # rows of the table are a multiple of it
_WORD = 1 << 63


def read_streams(keys: Keys, config: ModelConfig, stored: dict[str, StoredTensor]) -> ModelConfig:
    """The config with them. Raises UserError that names the key."""
    assert config.delta is not None
    count, rank = keys.integer("hyper_connection.count"), keys.integer("hyper_connection.low_rank")
    if not 1 < count <= MOST_STREAMS:
        keys.refuse("hyper_connection.count", f"is {count}, where models have 2 to {MOST_STREAMS} streams")
    return replace(
        config,
        delta=replace(config.delta, gate="sigmoid"),
        streams=Streams(count, rank),
        selection=_read_selection(keys, config, config.delta),
        grams=_read_grams(keys, config, stored),
    )


def _read_selection(keys: Keys, config: ModelConfig, delta: Delta) -> Selection:
    ratios = keys.values.get(f"{keys.prefix}{_RATIOS}")
    if not isinstance(ratios, list) or len(ratios) != config.n_layers or not all(type(n) is int for n in ratios):
        keys.refuse(_RATIOS, f"has no whole number for each of {config.n_layers} layers")
    assert isinstance(ratios, list)
    if wrong := [i for i, n in enumerate(ratios) if (n > 0) != (i in delta.full)]:
        what = "has attention" if wrong[0] in delta.full else "has none"
        keys.refuse(_RATIOS, f"has {ratios[wrong[0]]} for layer {wrong[0]}, which {what}")
    each = max(ratios, default=0)
    if any(n not in (0, each) for n in ratios) or each < 2 or KV_BLOCK % each:
        keys.refuse(_RATIOS, f"has blocks of {sorted(set(ratios) - {0})} tokens, not one that divides {KV_BLOCK}")
    heads, head = keys.integer("attention.indexer.head_count"), keys.integer("attention.indexer.key_length")
    tokens = keys.integer("attention.indexer.top_k")
    if tokens % each:
        keys.refuse("attention.indexer.top_k", f"is {tokens}, which are no whole blocks of {each} tokens")
    if tokens > config.context:
        keys.refuse("attention.indexer.top_k", f"is {tokens}, more than the {config.context} tokens of a context")
    if head < config.rope.dims or head % 2:
        keys.refuse(
            "attention.indexer.key_length", f"is {head}, of which {config.rope.dims} cannot be rotated in pairs"
        )
    return Selection(heads, head, each, tokens // each)


def _read_grams(keys: Keys, config: ModelConfig, stored: dict[str, StoredTensor]) -> Grams | None:
    layers = keys.values.get(f"{keys.prefix}ple.layers")
    if layers in (None, []):
        return None
    if not isinstance(layers, list) or len(layers) != 1:
        keys.refuse("ple.layers", f"is {layers!r}, where n-grams in one layer are supported")
    assert isinstance(layers, list)
    if type(layers[0]) is not int or not 0 <= layers[0] < config.n_layers:
        keys.refuse("ple.layers", f"is {layers!r}, which is none of {config.n_layers} layers")
    longest, heads = keys.integer("ple.ngram_size", least=2), keys.integer("ple.heads_per_ngram")
    if longest > LONGEST:
        keys.refuse("ple.ngram_size", f"is {longest}, where n-grams have at most {LONGEST} tokens")
    each = (longest - 1) * heads
    if each > MOST_EACH:
        keys.refuse("ple.heads_per_ngram", f"is {heads}, which are {each} rows a token: the file is damaged")
    taps, end = keys.integer("ple.conv_kernel"), keys.integer("ple.eos_token_id", least=0)
    if taps > MOST_EACH:
        keys.refuse("ple.conv_kernel", f"is {taps}, where convolutions have a few taps")
    if end >= config.vocab:
        keys.refuse("ple.eos_token_id", f"is {end}, which is none of {config.vocab} tokens")
    multipliers = _read_words(keys, "ple.layer_multipliers", longest, _WORD // config.vocab)
    sizes, offsets = (_read_words(keys, f"ple.head_{what}", each, _WORD) for what in ("vocab_sizes", "offsets"))
    if 0 in sizes:
        keys.refuse("ple.head_vocab_sizes", "has a head without rows")
    row = keys.integer("embedding_length_per_layer_input")
    words = {"multipliers": multipliers, "sizes": sizes, "offsets": offsets}
    grams = Grams(layers[0], longest, heads, row, taps, end, **words)
    _check_table(keys, grams, stored)
    return grams


def _read_words(keys: Keys, key: str, count: int, bound: int) -> tuple[int, ...]:
    """So many whole numbers from 0 on, below a bound."""
    found: Any = keys.values.get(f"{keys.prefix}{key}")
    if not isinstance(found, list) or len(found) != count:
        there = f"has {len(found)} numbers" if isinstance(found, list) else "is no list"
        keys.refuse(key, f"{there}, not the {count} that the n-grams take")
    assert isinstance(found, list)
    if not all(type(n) is int and 0 <= n < bound for n in found):
        keys.refuse(key, f"has others than whole numbers from 0 to {bound - 1}")
    return tuple(found)


def _check_table(keys: Keys, grams: Grams, stored: dict[str, StoredTensor]) -> None:
    """The rows of the table are those that heads reach, and as many more as make them a multiple."""
    table = stored.get(TABLE)
    if table is None:
        return  # a tensor that is missing is told of by its name
    reached = max(offset + size for offset, size in zip(grams.offsets, grams.sizes))
    if not reached <= table.shape[0] < reached + _PADDED:
        what = f"and ple.head_offsets reach {reached} rows of {TABLE}, which has {table.shape[0]}"
        keys.refuse("ple.head_vocab_sizes", what)


def flatten_streams(config: ModelConfig, stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors with weights of norms of streams, and taps, as vectors. Raises UserError for one of another shape."""
    if config.streams is None:
        return stored
    found, wide = dict(stored), config.streams.count * config.d_model
    for name, tensor in stored.items():
        if _NORM.fullmatch(name):
            shape = config.streams.count, config.d_model
        elif config.grams and _TAPS.fullmatch(name):
            shape = wide, config.grams.taps
        else:
            continue
        if tensor.shape != (shape[0] * shape[1],):
            tensor.check_shape(shape)
        tensor.check_type()
        found[name] = replace(tensor, shape=(shape[0] * shape[1],))
    return found
