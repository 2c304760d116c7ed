"""Several residual streams in place of one (gated hyper-connections): a mix of them stands before every block, and one
before the output.

A mix first adds to each stream what the block before it has given. Then each stream is normalised, and what the block
takes is their mean, every number times a gate. Between two mixes `hidden` is what blocks add up, from zeros on. Ranks
sum that as they sum any residual stream; each has all streams, and mixes them whole.
"""

from pshard.model_config import ModelConfig, Streams
from pshard.tensor import TensorSpec
from pshard.units.enter import entered_buffers
from pshard.units.operands import STREAM, TAKEN, Rows
from pshard.units.operations import (
    GateRows,
    InjectStream,
    MixStreams,
    NormStreams,
    Operation,
    Product,
    SpreadStream,
)
from pshard.units.ports import MIXES, STREAMS
from pshard.units.scratch import Buffer
from pshard.units.state import StateShape
from pshard.units.unit import ON_ACCELERATOR, Tensors, UnitKind, keep_whole

BLOCKS = ("hc_attn", "hc_ffn", "output_hc")  # before which a mix stands
NORM, DOWN, UP, SHARES = (f"_{part}.weight" for part in ("norm", "down", "up", "inject"))
NORMED_STREAMS, NARROW, GATES = "normed_streams", "narrow", "stream_gates"  # scratch
VECTOR = 4  # a row begins where vectors of so many numbers may


def streams_of(config: ModelConfig) -> Streams:
    """The model's streams, which it has where it has such units."""
    assert config.streams is not None
    return config.streams


def streams_width(config: ModelConfig) -> int:
    """Elements of a token: of all streams, and of their shares."""
    count = streams_of(config).count
    return count * config.d_model + -(-count // VECTOR) * VECTOR


def shares_at(config: ModelConfig) -> Rows:
    """Where the shares are."""
    count = streams_of(config).count
    return Rows(STREAMS, count * config.d_model, count)


def add_given(config: ModelConfig, layer: int, first: bool) -> tuple[Operation, ...]:
    """What a unit begins with that reads the streams: the embedding becomes them, or what blocks have given is added.
    first: it is the first such unit of its layer."""
    makes = SpreadStream if layer == 0 and first else InjectStream
    return (makes(config.d_model, streams_of(config).count),)


def _operations(tensors: Tensors, config: ModelConfig) -> tuple[Operation, ...]:
    name = next(name for name in BLOCKS if name + NORM in tensors)
    norm, down, up = (tensors[name + part] for part in (NORM, DOWN, UP))
    count, d, last = streams_of(config).count, config.d_model, name == BLOCKS[-1]
    normed, narrow, gates = Rows(NORMED_STREAMS), Rows(NARROW, 0, down.rows), Rows(GATES)
    out = STREAM if last else TAKEN
    return (
        *_begin(config, norm, name),
        NormStreams(norm, count, out=normed),
        *(() if last else (Product(tensors[name + SHARES], x=normed, out=shares_at(config)),)),
        Product(down, x=normed, out=narrow),
        GateRows(down.rows, narrow, narrow),  # silu
        Product(up, x=narrow, out=gates),
        MixStreams(d, count, normed, gates, out, clears=not last),
    )


def _begin(config: ModelConfig, norm: TensorSpec, name: str) -> tuple[Operation, ...]:
    """Nothing, where n-grams have been added to the streams right before."""
    first = name == BLOCKS[0]
    if first and config.grams and config.grams.layer == norm.layer:
        return ()
    return add_given(config, norm.layer, first)


def stream_buffers(config: ModelConfig, tokens: int) -> tuple[Buffer, ...]:
    """Scratch of whoever reads the streams."""
    return (Buffer(STREAMS, (tokens, streams_width(config)), "f32"),)


def _scratch(config: ModelConfig, tokens: int, shape: StateShape) -> tuple[Buffer, ...]:
    wide = streams_of(config).count * config.d_model
    return (
        *stream_buffers(config, tokens),
        *entered_buffers(config, tokens),
        Buffer(NORMED_STREAMS, (tokens, wide), "act"),
        Buffer(NARROW, (tokens, streams_of(config).rank), "act"),
        Buffer(GATES, (tokens, wide), "act"),
    )


MIX = UnitKind(
    "mix of streams",
    position="layer",
    places=ON_ACCELERATOR,
    operations=_operations,
    cut=keep_whole(*(name + part for name in BLOCKS for part in (NORM, DOWN, UP, SHARES))),
    scratch=_scratch,
    ports=MIXES,
    llama_cpp="hc_.*",
    strategy="first",
    contends="weights",
    phase=0.2,
    lock_order=1,
    listed=True,
)
