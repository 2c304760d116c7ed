"""Shared experts: an FFN that every token takes beside its chosen ones, from the same normed hidden states."""

from pshard.model_config import ModelConfig, limit_of
from pshard.units.moe.routed import rule_of
from pshard.units.operands import CHOSEN, Rows
from pshard.units.operations import GatedProduct, Operation, Product, Take
from pshard.units.ports import IS_ROUTED
from pshard.units.ranges import Targets, place_inner
from pshard.units.scratch import Buffer
from pshard.units.state import StateShape
from pshard.units.unit import ANYWHERE, Cut, Tensors, UnitKind

GATE, UP, DOWN = (f"ffn_{part}_shexp.weight" for part in ("gate", "up", "down"))
SCALE = "ffn_gate_inp_shexp.weight"  # [d_model]: the sigmoid of its product with a token multiplies the result


def _operations(tensors: Tensors, config: ModelConfig) -> tuple[Operation, ...]:
    gated, limited = Rows("shared", 0, tensors[UP].rows), limit_of(config.ffn_activation(tensors[UP].layer)) > 0
    gate = GatedProduct(tensors[GATE], tensors[UP], tensors.get(SCALE), out=gated, limited=limited)
    return Take(CHOSEN, config.d_model), gate, Product(tensors[DOWN], adds=True, x=gated)


def _scratch(config: ModelConfig, tokens: int, shape: StateShape) -> tuple[Buffer, ...]:
    return (Buffer("shared", (tokens, 2 * rule_of(config).d_shared), "act"),)


def _bounds(config: ModelConfig, tensors: Tensors, targets: Targets) -> tuple[int, ...]:
    return place_inner(rule_of(config).d_shared, tensors.get(DOWN), targets)


SHARED_EXPERTS = UnitKind(
    "shared",
    position="layer",
    places=ANYWHERE,
    operations=_operations,
    cut=Cut(
        {GATE: ("rows", "cut"), UP: ("rows", "cut"), DOWN: ("cols", "cut"), SCALE: ("none", "all")},
        length=lambda config, tensors: rule_of(config).d_shared,
        bounds=_bounds,
        flag="shared",
    ),
    widths=lambda tensors, config: {"d_shared": tensors[UP].rows if UP in tensors else 0},
    scratch=_scratch,
    ports=IS_ROUTED,
    llama_cpp="ffn_.*_shexp.*",
    strategy="first",
    contends="weights",
    phase=0.5,
    lock_order=1,
)
