"""The routed experts of a layer: one unit of equal parts, of which each token takes a few.

The first experts may lie in the VRAM arena, those after them be streamed, and the last be computed by the CPU, in the
same micro-batch: each side adds up what the experts that it has give. A rank has some rows of every expert.
"""

from pshard.model_config import ModelConfig
from pshard.units.moe.routed import expert_buffers, rule_of
from pshard.units.operands import STREAM, Rows
from pshard.units.operations import ExpertProducts, Operation, PlaceRows
from pshard.units.ports import EXPERTED, IS_ROUTED
from pshard.units.ranges import Targets, place_inner
from pshard.units.scratch import Buffer
from pshard.units.state import StateShape
from pshard.units.unit import ANYWHERE, Cut, Division, Tensors, UnitKind

GATE, UP, DOWN = (f"ffn_{part}_exps.weight" for part in ("gate", "up", "down"))
BIASES = tuple(f"ffn_{part}_exps.bias" for part in ("gate", "up", "down"))


def target(config: ModelConfig) -> Rows:
    """Where the sum of a token's experts goes: onto the residual stream, or where others take it."""
    return Rows(EXPERTED) if rule_of(config).together else STREAM


def _operations(tensors: Tensors, config: ModelConfig, first: int = 0) -> tuple[Operation, ...]:
    rule = rule_of(config)
    biases = tuple(tensors[role] for role in BIASES if role in tensors)
    out = target(config)
    return (ExpertProducts(tensors[GATE], tensors[UP], tensors[DOWN], rule.used, rule.count, biases, first, out),)


def _divide(on_acc: Tensors, on_cpu: Tensors, config: ModelConfig) -> Division:
    last = _operations(on_cpu, config, on_acc[GATE].parts)
    return Division(_operations(on_acc, config), last, (PlaceRows(config.d_model, target(config)),))


def _scratch(config: ModelConfig, tokens: int, shape: StateShape) -> tuple[Buffer, ...]:
    return expert_buffers(config, tokens)


def _bounds(config: ModelConfig, tensors: Tensors, targets: Targets) -> tuple[int, ...]:
    return place_inner(rule_of(config).d_expert, tensors.get(DOWN), targets)


def count_inner(tensors: Tensors) -> int:
    """Rows of gate and up of each expert, of which a rank's slice has some; 0 without tensors."""
    return tensors[UP].rows // tensors[UP].parts if UP in tensors else 0


EXPERTS = UnitKind(
    "experts",
    position="layer",
    places=ANYWHERE,
    operations=_operations,
    cut=Cut(
        {
            **dict.fromkeys((GATE, UP, *BIASES[:2]), ("rows", "cut")),
            DOWN: ("cols", "cut"),
            BIASES[2]: ("rows", "first"),
        },
        length=lambda config, tensors: rule_of(config).d_expert,
        bounds=_bounds,
        stacks=lambda config: rule_of(config).count,
        flag="experts",
    ),
    widths=lambda tensors, config: {"d_expert": count_inner(tensors)},
    scratch=_scratch,
    ports=IS_ROUTED,
    llama_cpp="ffn_.*_exps.*",
    strategy="bulk",
    parts=lambda config: (rule_of(config).used, rule_of(config).count),
    divide=_divide,
    joins=lambda share, config: config.d_model,
    contends="weights",
    phase=0.65,
    lock_order=0,
)
