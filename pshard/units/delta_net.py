"""A gated delta net (arXiv 2412.06464): norm, products, a recurrence over a state of fixed size, output, residual.

Of each sequence a layer keeps a matrix of every value head and the last inputs of its convolution, float32, whatever
the sequence's length. Ranks have whole key heads with all the value heads that use them, so that what a rank holds is a
smaller net of the same order of heads.
"""

from math import lcm

from pshard.model_config import Delta, ModelConfig
from pshard.quant import QUANT_TYPES
from pshard.tensor import TensorSpec
from pshard.units.enter import enter, entered_buffers
from pshard.units.operands import Rows
from pshard.units.operations import DeltaNet, Operation, Product, ProductGroup
from pshard.units.ranges import Targets, place_rows
from pshard.units.scratch import Buffer
from pshard.units.state import FixedState, StateShape
from pshard.units.unit import ANYWHERE_WITH_STATE, Cut, Tensors, UnitKind

NORM, OUT = "attn_norm.weight", "ssm_out.weight"
QUERY_KEY, VALUE, GATE = "delta_qk.weight", "delta_v.weight", "attn_gate.weight"
BETA, ALPHA = "ssm_beta.weight", "ssm_alpha.weight"
PRODUCTS = (QUERY_KEY, VALUE, GATE, BETA, ALPHA)  # of the hidden state, side by side
CONV = ("delta_conv_qk.weight", "delta_conv_v.weight")  # in this order, with nothing between them
STEP_BIAS, DECAY, HEAD_NORM = "ssm_dt.bias", "ssm_a", "ssm_norm.weight"
OPEN = "delta_open"  # scratch, by layer with a net: see `Kernels.delta_net`
TAIL = 3  # inputs before a token's own that the convolution sees


def delta_of(config: ModelConfig) -> Delta:
    """The model's delta net, which it has where it has such layers."""
    assert config.delta is not None
    return config.delta


def count_delta_heads(tensors: Tensors, config: ModelConfig) -> tuple[int, int]:
    """(key heads, value heads) that a unit computes, from its tensors: a rank's slice has some; (0, 0) without
    tensors."""
    head = delta_of(config).head
    qk, v = (tensors[role].rows if role in tensors else 0 for role in (QUERY_KEY, VALUE))
    return qk // (2 * head), v // head


def _scan(tensors: Tensors, config: ModelConfig) -> DeltaNet:
    conv = tuple(tensors[role] for role in CONV)
    heads = *count_delta_heads(tensors, config), delta_of(config).head
    places = Rows("delta_in"), Rows("delta_out", 0, tensors[VALUE].rows)
    net = conv, tensors[STEP_BIAS], tensors[DECAY], tensors[HEAD_NORM], *heads, delta_of(config).tiled
    return DeltaNet(*net, *places)


def _operations(tensors: Tensors, config: ModelConfig) -> tuple[Operation, ...]:
    scan = _scan(tensors, config)
    return (
        *enter(tensors, NORM, config),
        ProductGroup(tuple(tensors[role] for role in PRODUCTS), (None,) * len(PRODUCTS), out=scan.x),
        scan,
        Product(tensors[OUT], adds=True, x=scan.out),
    )


def sizes_of_state(delta: Delta) -> tuple[int, int]:
    """Numbers of one sequence's matrices, and of its last inputs."""
    return delta.value_heads * delta.head**2, TAIL * (2 * delta.key_heads + delta.value_heads) * delta.head


def _state(config: ModelConfig, shape: StateShape) -> FixedState:
    """Every layer's state is as large as the largest layer's of this rank."""
    return FixedState(4 * sum(sizes_of_state(delta_of(config))))


def _scratch(config: ModelConfig, tokens: int, shape: StateShape) -> tuple[Buffer, ...]:
    delta = delta_of(config)
    values = delta.value_heads * delta.head
    inner = 2 * delta.key_heads * delta.head + 2 * values + 2 * delta.value_heads
    vector = TensorSpec("", "F32", (1,))
    scan = DeltaNet((vector,), vector, vector, vector, delta.key_heads, delta.value_heads, delta.head, delta.tiled)
    layers = config.n_layers - len(delta.full)
    room = scan.scratch_nbytes(tokens, min(tokens, shape.sequences), 2) // 2  # of activations of two bytes or more
    return (
        Buffer("delta_in", (tokens, inner), "act"),
        Buffer("delta_out", (tokens, values), "act"),
        Buffer("delta_room", (room,), "act"),
        *entered_buffers(config, tokens),
        Buffer(OPEN, (layers, min(tokens, shape.open), scan.open_width), "f32"),
    )


def _bounds(config: ModelConfig, tensors: Tensors, targets: Targets) -> tuple[int, ...]:
    """Ranges of key heads between which the columns of the output projection may be cut."""
    delta = delta_of(config)
    block = QUANT_TYPES[tensors[OUT].qtype].block if OUT in tensors else 1
    columns = delta.head * (1 if delta.tiled else delta.group)
    return place_rows(delta.key_heads, lcm(columns, block) // columns, targets)


def _layout(role: str, config: ModelConfig) -> tuple[int, int]:
    """Tiled values stand in as many parts as a key head has of them, one of each key head in turn."""
    delta = delta_of(config)
    of_value = {BETA: 1, ALPHA: 1, STEP_BIAS: 1, DECAY: 1, CONV[1]: 4 * delta.head}
    if role in (QUERY_KEY, CONV[0]):
        return 2, delta.head * (1 if role == QUERY_KEY else 4)
    width = of_value.get(role, delta.head)
    return (delta.group, width) if delta.tiled else (1, delta.group * width)


def _widths(tensors: Tensors, config: ModelConfig) -> dict[str, int]:
    return dict(zip(("key_heads", "value_heads"), count_delta_heads(tensors, config)))


DELTA_NET = UnitKind(
    "delta net",
    position="layer",
    places=ANYWHERE_WITH_STATE,
    operations=_operations,
    cut=Cut(
        {
            **dict.fromkeys((NORM, HEAD_NORM), ("none", "all")),
            **dict.fromkeys((QUERY_KEY, VALUE, GATE, BETA, ALPHA, *CONV, STEP_BIAS, DECAY), ("rows", "cut")),
            OUT: ("cols", "cut"),
        },
        length=lambda config, tensors: delta_of(config).key_heads,
        bounds=_bounds,
        layout=_layout,
        flag="delta",
    ),
    widths=_widths,
    state=_state,
    scratch=_scratch,
    leads=True,
    llama_cpp="(attn_|ssm_).*",
    strategy="first",
    contends="state",
    phase=0.35,
    lock_order=1,
)
