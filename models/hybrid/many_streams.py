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
    count = limit_streams(keys, "hyper_connection.count", keys.integer("hyper_connection.count"))
    return replace(
        config,
        delta=replace(config.delta, gate="sigmoid"),
        streams=Streams(count, keys.integer("hyper_connection.low_rank")),
        selection=_read_selection(keys, config, config.delta),
        grams=_read_grams(keys, config, stored),
    )


def limit_streams(keys: Keys, key: str, count: int) -> int:
    """The number of streams. Raises UserError where no model has so many."""
    if not 1 < count <= MOST_STREAMS:
        keys.refuse(key, f"is {count}, where models have 2 to {MOST_STREAMS} streams")
    return count


def _read_selection(keys: Keys, config: ModelConfig, delta: Delta) -> Selection:
    ratios = keys.values.get(f"{keys.prefix}{_RATIOS}")
    if not isinstance(ratios, list) or len(ratios) != config.n_layers or not all(type(n) is int for n in ratios):
        keys.refuse(_RATIOS, f"has no whole number for each of {config.n_layers} layers")
    assert isinstance(ratios, list)
    if wrong := [i for i, n in enumerate(ratios) if (n > 0) != (i in delta.full)]:
        what = "has attention" if wrong[0] in delta.full else "has none"
        keys.refuse(_RATIOS, f"has {ratios[wrong[0]]} for layer {wrong[0]}, which {what}")
    each = max(ratios, default=0)
    if any(n not in (0, each) for n in ratios) or each < 2:
        keys.refuse(_RATIOS, f"has blocks of {sorted(set(ratios) - {0})} tokens, not one that divides {KV_BLOCK}")
    heads, head = keys.integer("attention.indexer.head_count"), keys.integer("attention.indexer.key_length")
    names = _RATIOS, "attention.indexer.top_k", "attention.indexer.key_length"
    return limit_selection(keys, config, names, (heads, head, each, keys.integer("attention.indexer.top_k")))


def limit_selection(
    keys: Keys, config: ModelConfig, names: tuple[str, str, str], numbers: tuple[int, int, int, int]
) -> Selection:
    """The index of so many heads, of so many numbers, over blocks of so many tokens, of which so many are chosen.
    names: the keys of a block's tokens, of the tokens that are chosen, and of a head's numbers. Raises UserError."""
    (heads, head, each, tokens), (of_block, of_tokens, of_head) = numbers, names
    if KV_BLOCK % each:
        keys.refuse(of_block, f"has blocks of {each} tokens, not one that divides {KV_BLOCK}")
    if tokens % each:
        keys.refuse(of_tokens, f"is {tokens}, which are no whole blocks of {each} tokens")
    if tokens > config.context:
        keys.refuse(of_tokens, f"is {tokens}, more than the {config.context} tokens of a context")
    if head < config.rope.dims or head % 2:
        keys.refuse(of_head, f"is {head}, of which {config.rope.dims} cannot be rotated in pairs")
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
    taps, end = keys.integer("ple.conv_kernel"), keys.integer("ple.eos_token_id", least=0)
    names = "ple.ngram_size", "ple.heads_per_ngram", "ple.conv_kernel", "ple.eos_token_id"
    limit_grams(keys, config, names, (longest, heads, taps, end))
    each = (longest - 1) * heads
    multipliers = _read_words(keys, "ple.layer_multipliers", longest, _WORD // config.vocab)
    sizes, offsets = (_read_words(keys, f"ple.head_{what}", each, _WORD) for what in ("vocab_sizes", "offsets"))
    if 0 in sizes:
        keys.refuse("ple.head_vocab_sizes", "has a head without rows")
    row = keys.integer("embedding_length_per_layer_input")
    words = {"multipliers": multipliers, "sizes": sizes, "offsets": offsets}
    grams = Grams(layers[0], longest, heads, row, taps, end, **words)
    check_table(keys, grams, stored, _PADDED, ("ple.head_vocab_sizes", "and ple.head_offsets reach"))
    return grams


def limit_grams(
    keys: Keys, config: ModelConfig, names: tuple[str, str, str, str], numbers: tuple[int, int, int, int]
) -> None:
    """Raises UserError for n-grams of so many tokens, so many heads for each length, so many taps of the convolution,
    and such a last token, as no model has; names: their keys."""
    (longest, heads, taps, end), (of_longest, of_heads, of_taps, of_end) = numbers, names
    if longest > LONGEST:
        keys.refuse(of_longest, f"is {longest}, where n-grams have at most {LONGEST} tokens")
    if (longest - 1) * heads > MOST_EACH:
        keys.refuse(of_heads, f"is {heads}, which are {(longest - 1) * heads} rows a token: the file is damaged")
    if taps > MOST_EACH:
        keys.refuse(of_taps, f"is {taps}, where convolutions have a few taps")
    if end >= config.vocab:
        keys.refuse(of_end, f"is {end}, which is none of {config.vocab} tokens")


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


def check_table(keys: Keys, grams: Grams, stored: dict[str, StoredTensor], padded: int, leads: tuple[str, str]) -> None:
    """Raises UserError unless the rows of the table are those that heads reach, and as many more as make them a
    multiple. leads: the key that this follows from, and what is said of it before the rows."""
    table = stored.get(TABLE)
    if table is None:
        return  # a tensor that is missing is told of by its name
    reached = max(offset + size for offset, size in zip(grams.offsets, grams.sizes))
    if not reached <= table.shape[0] < reached + padded:
        key, said = leads
        keys.refuse(key, f"{said} {reached} rows of {TABLE}, which has {table.shape[0]}")


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
