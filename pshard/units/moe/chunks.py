"""Experts of chunks, which follow a layer's routed ones: see `Chunks`.

They take the sum of all sides and ranks, and both are added to the residual stream. Every rank computes them whole.
"""

from pshard.model_config import ModelConfig
from pshard.units.moe.routed import rule_of, scratch_of
from pshard.units.moe.router import WEIGHT
from pshard.units.operands import STREAM, Rows
from pshard.units.operations import AddRows, ExpertProducts, Operation, Route
from pshard.units.ports import EXPERTED, FOLLOWS_SUM
from pshard.units.scratch import Buffer
from pshard.units.state import StateShape
from pshard.units.unit import ON_ACCELERATOR, Tensors, UnitKind, keep_whole

ROLES = GATE, UP, DOWN = "ffn_gate_chexps.weight", "ffn_up_chexps.weight", "ffn_down_chexps.weight"
# numbers and scores of all experts of tokens, by falling score; then numbers and weights of their chunks
SCORED = "scored"


def _operations(tensors: Tensors, config: ModelConfig) -> tuple[Operation, ...]:
    rule, x, scored = rule_of(config).of_chunks(), Rows(EXPERTED), Rows(SCORED)
    stacks = tensors[GATE], tensors[UP], tensors[DOWN]
    return (
        Route(tensors[WEIGHT], rule_of(config).count, out=scored),
        ExpertProducts(*stacks, rule.used, rule.count, x=x, routes=scored),
        AddRows(config.d_model, x, STREAM),
    )


def _scratch(config: ModelConfig, tokens: int, shape: StateShape) -> tuple[Buffer, ...]:
    rule = rule_of(config).of_chunks()
    return (
        Buffer(EXPERTED, (tokens, config.d_model), "f32"),
        Buffer(SCORED, (tokens, 2 * (rule_of(config).count + rule.used)), "f32"),
        *scratch_of(rule, config.d_model, tokens),
    )


CHUNKS = UnitKind(
    "experts of chunks",
    position="layer",
    places=ON_ACCELERATOR,
    operations=_operations,
    cut=keep_whole(WEIGHT, GATE, UP, DOWN),
    scratch=_scratch,
    ports=FOLLOWS_SUM,
    llama_cpp="ffn_.*_chexps.*",
    strategy="first",
    phase=0.7,
    lock_order=1,
)
