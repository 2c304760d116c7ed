"""A gated short convolution (LFM2): norm, three products, a convolution of each channel over time, output, residual.

Of each sequence a layer keeps the last inputs of every channel, float32, whatever its length. Ranks share channels.
"""

from math import lcm

from pshard.model_config import ModelConfig, ShortConv
from pshard.quant import QUANT_TYPES
from pshard.units.operands import Rows
from pshard.units.operations import Convolve, Norm, Operation, Product, ProductGroup
from pshard.units.ranges import Targets, place_rows
from pshard.units.scratch import Buffer
from pshard.units.state import FixedState, StateShape
from pshard.units.unit import ANYWHERE_WITH_STATE, Cut, Tensors, UnitKind

NORM, TAPS, OUT = "attn_norm.weight", "conv_taps.weight", "conv_out.weight"
PARTS = tuple(f"conv_{part}.weight" for part in ("in", "gate", "by"))  # what is gated, what gates the result, by what
OPEN = "conv_open"  # scratch, by layer with a convolution: see `Kernels.short_conv`
PIECE = 32  # channels that stay together: files of states have them apart


def conv_of(config: ModelConfig) -> ShortConv:
    """The model's short convolutions, which it has where it has such layers."""
    assert config.conv is not None
    return config.conv


def _operations(tensors: Tensors, config: ModelConfig) -> tuple[Operation, ...]:
    places = Rows("conv_rows"), Rows("conv_mixed", 0, tensors[OUT].cols)
    return (
        Norm(tensors[NORM], config.d_model),
        ProductGroup(tuple(tensors[role] for role in PARTS), (None,) * len(PARTS), out=places[0]),
        Convolve(tensors[TAPS], conv_of(config).taps, *places),
        Product(tensors[OUT], adds=True, x=places[1]),
    )


def _state(config: ModelConfig, shape: StateShape) -> FixedState:
    """Every layer's state is as large as the largest layer's of this rank."""
    return FixedState(4 * (conv_of(config).taps - 1) * conv_of(config).channels)


def _scratch(config: ModelConfig, tokens: int, shape: StateShape) -> tuple[Buffer, ...]:
    n, layers = conv_of(config).channels, config.n_layers - len(conv_of(config).full)
    return (
        Buffer("conv_rows", (tokens, 3 * n), "act"),
        Buffer("conv_mixed", (tokens, n), "act"),
        Buffer(OPEN, (layers, min(tokens, shape.open), n), "f32"),
    )


def _bounds(config: ModelConfig, tensors: Tensors, targets: Targets) -> tuple[int, ...]:
    """Ranges of channels between which the columns of the output projection may be cut."""
    block = QUANT_TYPES[tensors[OUT].qtype].block if OUT in tensors else 1
    return place_rows(conv_of(config).channels, lcm(PIECE, block), targets)


SHORT_CONV = UnitKind(
    "short convolution",
    position="layer",
    places=ANYWHERE_WITH_STATE,
    operations=_operations,
    cut=Cut(
        {NORM: ("none", "all"), **dict.fromkeys((*PARTS, TAPS), ("rows", "cut")), OUT: ("cols", "cut")},
        length=lambda config, tensors: conv_of(config).channels,
        bounds=_bounds,
        layout=lambda role, config: (1, conv_of(config).taps if role == TAPS else 1),
        flag="conv",
    ),
    widths=lambda tensors, config: {"channels": tensors[OUT].cols if OUT in tensors else 0},
    state=_state,
    scratch=_scratch,
    leads=True,
    llama_cpp="(attn_norm|shortconv).*",
    strategy="first",
    contends="state",
    phase=0.35,
    lock_order=1,
)
