"""N-grams of tokens: rows of a large table, and what one layer adds of them to the residual streams.

The table is looked up where it is, and may stay in host memory: of each token a few rows are read. Which ones, a
token's last few ids say. Of each sequence the layer keeps the last inputs of its convolution, float32.
"""

from dataclasses import replace

from pshard.model_config import Grams, ModelConfig
from pshard.units.embedding import EMBEDDING
from pshard.units.layer_rows import TABLE
from pshard.units.operands import ROWS, Rows
from pshard.units.operations import AddGrams, GateGrams, LookUp, Operation, ProductGroup, Take
from pshard.units.ports import ADDS_GRAMS, LAYERED, LOOKS_UP_ROWS
from pshard.units.scratch import Buffer
from pshard.units.state import FixedState, StateShape
from pshard.units.streams import add_given, stream_buffers, streams_of
from pshard.units.unit import ON_ACCELERATOR_WITH_STATE, Tensors, UnitKind, keep_whole

KEY, VALUE, TAPS = "ple_key.weight", "ple_value.weight", "ple_conv1d.weight"
KEY_NORM, STREAM_NORM, GIVEN_NORM = (f"ple_norm_{part}.weight" for part in ("key", "query", "conv"))
OPEN = "grams_open"  # scratch: see `Kernels.add_grams`
TAKEN_ROWS, PRODUCTS, GIVEN = "gram_rows", "gram_products", "gram_given"  # scratch


def grams_of(config: ModelConfig) -> Grams:
    """The model's n-grams, which it has where it has such units."""
    assert config.grams is not None
    return config.grams


def channels_of(config: ModelConfig) -> int:
    """Elements of all streams of a token."""
    return streams_of(config).count * config.d_model


def _look_up(tensors: Tensors, config: ModelConfig) -> tuple[Operation, ...]:
    return (LookUp(tensors[TABLE], 1.0, ROWS, grams_of(config).each),)


def _add(tensors: Tensors, config: ModelConfig) -> tuple[Operation, ...]:
    grams, count = grams_of(config), streams_of(config).count
    rows, given = Rows(TAKEN_ROWS), Rows(GIVEN)
    multiply = ProductGroup((tensors[KEY], tensors[VALUE]), (None, None), rows, Rows(PRODUCTS))
    (key, value), norms = multiply.writes, (tensors[KEY_NORM], tensors[STREAM_NORM])
    return (
        *add_given(config, grams.layer, first=True),
        Take(ROWS, grams.width, rows),
        multiply,
        GateGrams(config.d_model, count, norms, key, value, given),
        AddGrams(tensors[GIVEN_NORM], tensors[TAPS], count, grams.taps, grams.longest, given),
    )


def _state(config: ModelConfig, shape: StateShape) -> FixedState:
    return FixedState(4 * grams_of(config).reach * channels_of(config))


def _scratch(config: ModelConfig, tokens: int, shape: StateShape) -> tuple[Buffer, ...]:
    grams, wide = grams_of(config), channels_of(config)
    return (
        *stream_buffers(config, tokens),
        Buffer(LAYERED, (tokens, grams.width), "f32"),
        Buffer(TAKEN_ROWS, (tokens, grams.width), "act"),
        Buffer(PRODUCTS, (tokens, wide + config.d_model), "act"),
        Buffer(GIVEN, (tokens, wide), "f32"),
        Buffer(OPEN, (min(tokens, shape.open), wide), "f32"),
    )


def _row_scratch(config: ModelConfig, tokens: int, shape: StateShape) -> tuple[Buffer, ...]:
    return (Buffer(LAYERED, (tokens, grams_of(config).width), "f32"),)


GRAM_ROWS = replace(
    EMBEDDING, name="n-gram rows", operations=_look_up, cut=keep_whole(TABLE), scratch=_row_scratch, ports=LOOKS_UP_ROWS
)
GRAMS = UnitKind(
    "n-grams",
    position="layer",
    places=ON_ACCELERATOR_WITH_STATE,
    operations=_add,
    cut=keep_whole(KEY, VALUE, TAPS, KEY_NORM, STREAM_NORM, GIVEN_NORM),
    state=_state,
    scratch=_scratch,
    ports=ADDS_GRAMS,
    llama_cpp="ple_.*",
    strategy="first",
    contends="state",
    phase=0.1,
    lock_order=1,
)
