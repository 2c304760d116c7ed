"""Rows of a second table, of which every token has one as long as all layers' parts of it (per-layer embeddings).

The table is looked up where it is, and may stay in host memory: of each token one row is read. What is made of the
residual stream at its beginning is added to the row once. Every layer then takes its part of it.
"""

from dataclasses import replace
from math import sqrt

from pshard.model_config import ModelConfig
from pshard.units.embedding import EMBEDDING
from pshard.units.enter import LAYER_SCALE, leave
from pshard.units.operands import NORMED, ROWS, STREAM, Rows
from pshard.units.operations import Bend, LookUp, Norm, Operation, Product, Take, TimesRows
from pshard.units.ports import LAYERED, LOOKS_UP_ROWS, MIXES_ROWS, TAKES_ROWS
from pshard.units.scratch import Buffer
from pshard.units.state import StateShape
from pshard.units.unit import ANYWHERE, ON_ACCELERATOR, Tensors, UnitKind, keep_whole

TABLE = "per_layer_token_embd.weight"
MATRIX, MADE_NORM = "per_layer_model_proj.weight", "per_layer_proj_norm.weight"
GATE, OUT, AFTER = "inp_gate.weight", "proj.weight", "post_norm.weight"
MADE, GATED = "made_rows", "row_gate"  # scratch: what the stream adds to rows; a layer's gate


def _look_up(tensors: Tensors, config: ModelConfig) -> tuple[Operation, ...]:
    return (LookUp(tensors[TABLE], sqrt(config.row_width / 2), ROWS),)  # halved, as both summands are


def _mix(tensors: Tensors, config: ModelConfig) -> tuple[Operation, ...]:
    """The product is not divided by the root of its columns, which a norm sees in its epsilon alone."""
    d, made = config.d_model, Rows(MADE)
    norm = Norm(
        tensors[MADE_NORM], config.row_width, adds=True, x=made, out=ROWS, count=config.n_layers, eps_by=float(d)
    )
    return Take(STREAM, d), Product(tensors[MATRIX], x=NORMED, out=made), norm


def _take(tensors: Tensors, config: ModelConfig) -> tuple[Operation, ...]:
    width, gated = config.row_width, Rows(GATED)
    own = Rows(LAYERED, tensors[GATE].layer * width, width)
    return (
        Take(STREAM, config.d_model),
        Product(tensors[GATE], x=NORMED, out=gated),
        Bend(config.activation, width, x=gated),
        TimesRows(width, gated, own),
        *leave(tensors[OUT], None, tensors[AFTER], gated, tensors.get(LAYER_SCALE)),
    )


def _mixing_scratch(config: ModelConfig, tokens: int, shape: StateShape) -> tuple[Buffer, ...]:
    return tuple(Buffer(name, (tokens, config.rows_width), "f32") for name in (LAYERED, MADE))


def _taking_scratch(config: ModelConfig, tokens: int, shape: StateShape) -> tuple[Buffer, ...]:
    return Buffer(LAYERED, (tokens, config.rows_width), "f32"), Buffer(GATED, (tokens, config.row_width), "act")


TOKEN_ROWS = replace(EMBEDDING, name="token rows", operations=_look_up, cut=keep_whole(TABLE), ports=LOOKS_UP_ROWS)
MIXED_ROWS = UnitKind(
    "mixed rows",
    position="layer",
    places=ON_ACCELERATOR,
    operations=_mix,
    cut=keep_whole(MATRIX, MADE_NORM),
    scratch=_mixing_scratch,
    ports=MIXES_ROWS,
    strategy="first",
    lock_order=1,
    listed=True,
)
LAYER_ROWS = UnitKind(
    "layer rows",
    position="layer",
    places=ANYWHERE,
    operations=_take,
    cut=keep_whole(GATE, OUT, AFTER, LAYER_SCALE),
    scratch=_taking_scratch,
    ports=TAKES_ROWS,
    llama_cpp="(inp_gate|proj|post_norm).*",
    strategy="first",
    contends="weights",
    phase=0.75,
    lock_order=1,
    listed=True,
)
