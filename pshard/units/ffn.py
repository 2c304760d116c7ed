"""A SwiGLU FFN (arXiv 2002.05202): norm, gate and up, their gated product, down, residual.

The CPU may compute the last rows of gate and up, which are byte ranges of the packed layout, while the accelerator
computes the others and then the whole `down`, whose columns are no byte range. Or the last rows are streamed while all
else lies in the arena.
"""

from pshard.model_config import ModelConfig
from pshard.units.enter import LAYER_SCALE, enter, leave
from pshard.units.operands import BRANCH, Rows
from pshard.units.operations import GatedProduct, Norm, Operation, PlaceRows, Product
from pshard.units.ports import DENSE
from pshard.units.ranges import Targets, place_inner
from pshard.units.scratch import Buffer
from pshard.units.state import StateShape
from pshard.units.unit import ANYWHERE, Cut, Division, Tensors, UnitKind

NORM, GATE, UP, DOWN = (f"ffn_{part}.weight" for part in ("norm", "gate", "up", "down"))
GATED = "gate_up"  # scratch: gate's and up's products side by side, of which the gated one takes the first half
AFTER = "post_ffw_norm.weight"  # of what is added to the residual stream
BESIDE_EXPERTS = "post_ffw_norm_1.weight"  # of what joins that of experts: see BLEND


def _begin(tensors: Tensors, config: ModelConfig) -> tuple[Operation, ...]:
    return *enter(tensors.get(NORM), config, follows=True), _gate(tensors)


def _gate(tensors: Tensors, first: int = 0) -> GatedProduct:
    """Of the rows of gate and up that are here, which are number `first` and those after it."""
    return GatedProduct(tensors[GATE], tensors[UP], out=Rows(GATED, first, tensors[UP].rows))


def _end(tensors: Tensors, config: ModelConfig) -> tuple[Operation, ...]:
    x = Rows(GATED, 0, tensors[DOWN].cols)
    if BESIDE_EXPERTS in tensors:
        norm = Norm(tensors[BESIDE_EXPERTS], config.d_model, x=BRANCH, out=Rows(DENSE))
        return Product(tensors[DOWN], x=x, out=BRANCH), norm
    return leave(tensors[DOWN], None, tensors.get(AFTER), x, tensors.get(LAYER_SCALE))


def _operations(tensors: Tensors, config: ModelConfig) -> tuple[Operation, ...]:
    return *_begin(tensors, config), *_end(tensors, config)


def _divide(on_acc: Tensors, on_cpu: Tensors, config: ModelConfig) -> Division:
    own = on_acc[GATE].rows
    joined = PlaceRows(on_cpu[GATE].rows, Rows(GATED, own, on_cpu[GATE].rows))
    return Division(_begin(on_acc, config), _begin(on_cpu, config), (joined, *_end(on_acc, config)))


def _keep(in_arena: Tensors, in_slot: Tensors, config: ModelConfig) -> tuple[Operation, ...]:
    return *_begin(in_arena, config), _gate(in_slot, in_arena[GATE].rows), *_end(in_arena, config)


def _scratch(config: ModelConfig, tokens: int, shape: StateShape) -> tuple[Buffer, ...]:
    return (Buffer(GATED, (tokens, 2 * config.d_ffn), "act"),)


def _bounds(config: ModelConfig, tensors: Tensors, targets: Targets) -> tuple[int, ...]:
    return place_inner(config.d_ffn, tensors.get(DOWN), targets)


FFN = UnitKind(
    "ffn",
    position="layer",
    places=ANYWHERE,
    operations=_operations,
    cut=Cut(
        {
            NORM: ("none", "all"),
            GATE: ("rows", "cut"),
            "ffn_gate.bias": ("rows", "cut"),
            UP: ("rows", "cut"),
            "ffn_up.bias": ("rows", "cut"),
            DOWN: ("cols", "cut"),
            "ffn_down.bias": ("rows", "first"),
            AFTER: ("sum", "all"),
            LAYER_SCALE: ("sum", "all"),
        },
        length=lambda config: config.d_ffn,
        bounds=_bounds,
        flag="ffn",
    ),
    widths=lambda tensors, config: {"d_ffn": tensors[UP].rows if UP in tensors else 0},
    scratch=_scratch,
    llama_cpp="ffn_.*",
    strategy="bulk",
    divided=(GATE, UP),
    keep=_keep,
    divide=_divide,
    contends="weights",
    phase=0.65,
    lock_order=0,
    listed=True,
)
