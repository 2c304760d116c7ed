"""The router of a layer with experts: the norm before them, the scores of all experts, the choice among them.

Every rank has all of it and must choose as the others do, to the last bit: see `places_of`.

Some take what their layer began with instead, see `Experts.early`; of several streams a mix, which has no other norm.

What it finds stands in `routed`, for the layer's units that follow; the residual stream stays as it is.
"""

from pshard.model_config import ModelConfig
from pshard.units.enter import entered_buffers
from pshard.units.moe.routed import routed_buffer, rule_of
from pshard.units.operands import CHOSEN, STREAM, TAKEN
from pshard.units.operations import Norm, Operation, Route, Take, WeighRows
from pshard.units.ports import ROUTES
from pshard.units.scratch import Buffer
from pshard.units.state import StateShape
from pshard.units.unit import ANYWHERE, Tensors, UnitKind, keep_whole

NORMS = ("ffn_norm.weight", "pre_ffw_norm_2.weight", "ffn_norm_exps.weight")  # the others where an FFN has the first
FACTORS = "ffn_down_exps.scale"  # by which the weights of single experts are multiplied
WEIGHT, BIAS, CHOICE_BIAS = "ffn_gate_inp.weight", "ffn_gate_inp.bias", "exp_probs_b.bias"


def _operations(tensors: Tensors, config: ModelConfig) -> tuple[Operation, ...]:
    biases = tuple(tensors[role] for role in (BIAS, CHOICE_BIAS, FACTORS) if role in tensors)
    norm = next((tensors[role] for role in NORMS if role in tensors), None)
    rule = rule_of(config)
    x, scored = TAKEN if rule.early == "inputs" else STREAM, TAKEN if rule.early == "scores" else CHOSEN
    taken = Norm(norm, config.d_model, x=x, out=CHOSEN) if norm else Take(TAKEN, config.d_model, CHOSEN)
    weighed = (WeighRows(config.d_model, CHOSEN),) if rule.weighs_inputs else ()
    return taken, Route(tensors[WEIGHT], rule.used, biases, scored), *weighed


def _scratch(config: ModelConfig, tokens: int, shape: StateShape) -> tuple[Buffer, ...]:
    return routed_buffer(config, tokens), *entered_buffers(config, tokens)


ROUTER = UnitKind(
    "router",
    position="layer",
    places=ANYWHERE,
    operations=_operations,
    cut=keep_whole(*NORMS, WEIGHT, BIAS, CHOICE_BIAS, FACTORS),
    scratch=_scratch,
    ports=ROUTES,
    llama_cpp="(ffn_norm|ffn_norm_exps|ffn_gate_inp|exp_probs_b|pre_ffw_norm_2).*",
    strategy="first",
    contends="weights",
    phase=0.5,
    lock_order=1,
)
