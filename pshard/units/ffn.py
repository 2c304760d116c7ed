"""A SwiGLU FFN (arXiv 2002.05202): norm, gate and up, their gated product, down, residual. Or one without a gate: up,
which is bent by an activation, and down.

The CPU may compute the last rows of gate and up, which are byte ranges of the packed layout, while the accelerator
computes the others and then the whole `down`, whose columns are no byte range. Or the last rows are streamed while all
else lies in the arena.
"""

from pshard.model_config import ModelConfig, limit_of
from pshard.units.enter import LAYER_SCALE, bias_of, enter, leave, order
from pshard.units.operands import Rows
from pshard.units.operations import Bend, GatedProduct, Operation, PlaceRows, Product
from pshard.units.ports import DENSE
from pshard.units.ranges import Targets, place_inner
from pshard.units.scratch import Buffer
from pshard.units.state import StateShape
from pshard.units.unit import ANYWHERE, Cut, Division, Tensors, UnitKind

NORM, GATE, UP, DOWN = (f"ffn_{part}.weight" for part in ("norm", "gate", "up", "down"))
GATE_BIAS, UP_BIAS, DOWN_BIAS = (f"ffn_{part}.bias" for part in ("gate", "up", "down"))
ORDER = "ffn_order.weight"  # of the columns of gate and up
BENT = "ffn_act.weight"  # numbers of the activation, of a model that has some for each layer
GATED = "gate_up"  # scratch: gate's and up's products side by side, of which the gated one takes the first half
AFTER = "post_ffw_norm.weight"  # of what is added to the residual stream


def _begin(tensors: Tensors, config: ModelConfig) -> tuple[Operation, ...]:
    entered = enter(tensors, NORM, config, follows=True)
    return *entered, *order(tensors, ORDER), *_inner(tensors, config)


def _inner(tensors: Tensors, config: ModelConfig, first: int = 0) -> tuple[Operation, ...]:
    """Of the rows of gate and up that are here, which are number `first` and those after it."""
    up, out = tensors[UP], Rows(GATED, first, tensors[UP].rows)
    if GATE in tensors:
        biases, limited = (tensors.get(GATE_BIAS), tensors.get(UP_BIAS)), limit_of(config.ffn_activation(up.layer)) > 0
        return (GatedProduct(tensors[GATE], up, biases=biases, out=out, limited=limited),)
    return Product(up, tensors.get(UP_BIAS), out=out), Bend(config.activation, up.rows, tensors.get(BENT), x=out)


def _end(tensors: Tensors, config: ModelConfig) -> tuple[Operation, ...]:
    x = Rows(GATED, 0, tensors[DOWN].cols)
    rule = config.experts
    if rule is not None and rule.apart and rule.are_in(tensors[DOWN].layer):  # see BLEND
        return (Product(tensors[DOWN], x=x, out=Rows(DENSE)),)
    return leave(tensors[DOWN], tensors.get(DOWN_BIAS), tensors.get(AFTER), x, tensors.get(LAYER_SCALE))


def _operations(tensors: Tensors, config: ModelConfig) -> tuple[Operation, ...]:
    return *_begin(tensors, config), *_end(tensors, config)


def _divide(on_acc: Tensors, on_cpu: Tensors, config: ModelConfig) -> Division:
    own = on_acc[UP].rows
    joined = PlaceRows(on_cpu[UP].rows, Rows(GATED, own, on_cpu[UP].rows))
    return Division(_begin(on_acc, config), _begin(on_cpu, config), (joined, *_end(on_acc, config)))


def _keep(in_arena: Tensors, in_slot: Tensors, config: ModelConfig) -> tuple[Operation, ...]:
    last = _inner({**in_arena, **in_slot}, config, in_arena[UP].rows)
    return *_begin(in_arena, config), *last, *_end(in_arena, config)


def _scratch(config: ModelConfig, tokens: int, shape: StateShape) -> tuple[Buffer, ...]:
    return (Buffer(GATED, (tokens, config.d_ffn if config.ungated else 2 * config.d_ffn), "act"),)


def _bounds(config: ModelConfig, tensors: Tensors, targets: Targets) -> tuple[int, ...]:
    return place_inner(tensors[UP].rows, tensors[DOWN], targets)


FFN = UnitKind(
    "ffn",
    position="layer",
    places=ANYWHERE,
    operations=_operations,
    cut=Cut(
        {
            **dict.fromkeys((NORM, bias_of(NORM), BENT, ORDER), ("none", "all")),
            GATE: ("rows", "cut"),
            GATE_BIAS: ("rows", "cut"),
            UP: ("rows", "cut"),
            UP_BIAS: ("rows", "cut"),
            DOWN: ("cols", "cut"),
            DOWN_BIAS: ("rows", "first"),
            AFTER: ("sum", "all"),
            LAYER_SCALE: ("sum", "all"),
        },
        length=lambda config, tensors: tensors[UP].rows,
        bounds=_bounds,
        flag="ffn",
    ),
    widths=lambda tensors, config: {"d_ffn": tensors[UP].rows if UP in tensors else 0},
    scratch=_scratch,
    llama_cpp="ffn_.*",
    strategy="bulk",
    divided=(GATE, GATE_BIAS, UP, UP_BIAS),
    keep=_keep,
    divide=_divide,
    contends="weights",
    phase=0.65,
    lock_order=0,
    listed=True,
)
