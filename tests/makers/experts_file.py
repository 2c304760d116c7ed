"""A model of routed experts in memory: float32 weights, no tokenizer; and its logits the plain way in float64."""

from dataclasses import replace

import numpy as np
import torch
from toy_kinds import ToyFile, attention_forward, make_unit, norm

from pshard.model_config import Experts
from pshard.runtime.kernels.plain_experts import activate
from pshard.units.attention import ATTENTION
from pshard.units.ffn import FFN
from pshard.units.moe.experts import BIASES, DOWN, EXPERTS, GATE, UP
from pshard.units.moe.router import BIAS, CHOICE_BIAS, NORMS, ROUTER, WEIGHT
from pshard.units.moe.shared_experts import DOWN as SHARED_DOWN
from pshard.units.moe.shared_experts import GATE as SHARED_GATE
from pshard.units.moe.shared_experts import SCALE, SHARED_EXPERTS
from pshard.units.moe.shared_experts import UP as SHARED_UP
from pshard.units.unit import Unit

N_EXPERTS, D_EXPERT = 8, 32
RULES = {
    "softmax": Experts(N_EXPERTS, 2, D_EXPERT),
    "with shared experts": Experts(N_EXPERTS, 2, D_EXPERT, normed=False, d_shared=48, shared_gate=True),
    "sigmoid in groups": Experts(
        N_EXPERTS, 3, D_EXPERT, "sigmoid", scale=2.5, choice_bias=True, groups=4, groups_used=2, d_shared=16
    ),
    "of the chosen": Experts(N_EXPERTS, 4, D_EXPERT, "chosen", normed=False, activation="clamped", biases=True),
}

WAYS: list[tuple] = [  # how a layer of them may be placed: where, its state, the CPU's, those kept beside a slot
    ("pinned", None),
    ("streamed", None),
    ("cpu", None),
    ("pinned", None, 3),
    ("streamed", None, 3),
    ("streamed", None, 0, 2),
    ("streamed", None, 3, 2),
    ("streamed", None, 1, 6),
]


def skew_routers(file: "ExpertsFile", sigma: float, seed: int = 0) -> "ExpertsFile":
    """The file with router rows of unequal length, so that some experts are chosen far more often."""
    rng = np.random.default_rng(seed)
    for unit in file.spec.units:
        for tensor in unit.matrices if unit.kind is ROUTER else ():
            file.values[tensor.name] *= np.exp(sigma * rng.standard_normal((tensor.rows, 1))).astype(np.float32)
    return file


class ExpertsFile(ToyFile):
    """Attention, a router, perhaps shared experts, and experts in every layer; the first `dense_layers` have an FFN."""

    def __init__(self, rule: Experts = RULES["softmax"], layers: int = 3, d_model: int = 64, seed: int = 0) -> None:
        super().__init__("a" * layers, d_model, 16, seed)
        units = list[Unit]()
        for unit in self.spec.units:
            routed = unit.kind is FFN and unit.layer >= rule.dense_layers
            units += _list_units(rule, unit.layer, d_model) if routed else [unit]
        self.spec = replace(self.spec, config=replace(self.spec.config, experts=rule), units=tuple(units))
        self.drawn.append(units)

    def logits(self, ids: list[int], chosen: list[list[list[int]]] | None = None) -> torch.Tensor:
        """Of every token: float64 [n, vocabulary]. `chosen` gets the experts of every token, layer by layer."""
        w = {name: torch.from_numpy(values).double() for name, values in self.values.items()}
        x, y = w["token_embd.weight"][ids], torch.empty(0)
        config = self.spec.config
        assert config.experts is not None
        for unit in self.spec.units:
            own = {t.role: w[t.name] for t in unit.tensors}
            if unit.kind is ATTENTION:
                x = x + attention_forward(norm(x, own["attn_norm.weight"]), own, config)
            elif unit.kind is FFN:
                y = norm(x, own["ffn_norm.weight"])
                gate, up = y @ own["ffn_gate.weight"].T, y @ own["ffn_up.weight"].T
                x = x + activate(gate, up, "silu") @ own["ffn_down.weight"].T
            elif unit.kind is ROUTER:
                y = norm(x, own[NORMS[0]])
                picks = [_choose(row, own, config.experts) for row in y]
                if chosen is not None:
                    chosen.append([list(pick) for pick in picks])
            elif unit.kind is SHARED_EXPERTS:
                scale = torch.sigmoid(y @ own[SCALE])[:, None] if SCALE in own else 1.0
                gated = activate(y @ own[SHARED_GATE].T, y @ own[SHARED_UP].T, "silu")
                x = x + scale * (gated @ own[SHARED_DOWN].T)
            elif unit.kind is EXPERTS:
                x = x + _mix(y, picks, own, config.experts)
        return norm(x, w["output_norm.weight"]) @ w["output.weight"].T


def _choose(row: torch.Tensor, own: dict[str, torch.Tensor], rule: Experts) -> dict[int, float]:
    """The experts of one token and their weights."""
    scores = own[WEIGHT] @ row + own.get(BIAS, torch.zeros(()))
    if rule.scores != "chosen":
        scores = scores.sigmoid() if rule.scores == "sigmoid" else scores.softmax(0)
    choice = (scores + own.get(CHOICE_BIAS, torch.zeros(()))).tolist()
    each = rule.count // rule.groups
    groups = [sorted(choice[g * each : (g + 1) * each])[-2:] for g in range(rule.groups)]
    best = sorted(range(rule.groups), key=lambda g: -sum(groups[g]))[: rule.groups_used]
    allowed = [e for e in range(rule.count) if rule.groups == 1 or e // each in best]
    taken = sorted(allowed, key=lambda e: -choice[e])[: rule.used]
    weights = scores[taken]
    if rule.scores == "chosen":
        weights = weights.softmax(0)
    elif rule.normed:
        weights = weights / weights.sum()
    return dict(zip(taken, (weights * rule.scale).tolist()))


def _mix(x: torch.Tensor, picks: list[dict[int, float]], own: dict[str, torch.Tensor], rule: Experts) -> torch.Tensor:
    total = torch.zeros_like(x)
    for expert in set().union(*picks):
        rows = [i for i, pick in enumerate(picks) if expert in pick]
        weights = torch.tensor([picks[i][expert] for i in rows], dtype=x.dtype)[:, None]
        gate, up, down = (own[role].unflatten(0, (rule.count, -1))[expert] for role in (GATE, UP, DOWN))
        biases = [own[role].view(rule.count, -1)[expert] if rule.biases else 0.0 for role in BIASES]
        bent = activate(x[rows] @ gate.T + biases[0], x[rows] @ up.T + biases[1], rule.activation)
        total[rows] += weights * (bent @ down.T + biases[2])
    return total


def _list_units(rule: Experts, layer: int, d: int) -> list[Unit]:
    e, f, s = rule.count, rule.d_expert, rule.d_shared
    router: dict[str, tuple[int, ...]] = {WEIGHT: (e, d), NORMS[0]: (d,)}
    router |= {BIAS: (e,)} if rule.biases else {}
    router |= {CHOICE_BIAS: (e,)} if rule.choice_bias else {}
    units = [make_unit(f"blk.{layer}.router", ROUTER, layer, router)]
    if s:
        shared: dict[str, tuple[int, ...]] = {SHARED_GATE: (s, d), SHARED_UP: (s, d), SHARED_DOWN: (d, s)}
        shared |= {SCALE: (d,)} if rule.shared_gate else {}
        units.append(make_unit(f"blk.{layer}.shared", SHARED_EXPERTS, layer, shared))
    experts = make_unit(f"blk.{layer}.experts", EXPERTS, layer, {GATE: (e * f, d), UP: (e * f, d), DOWN: (e * d, f)})
    tensors = tuple(replace(t, parts=e) for t in experts.tensors)
    if rule.biases:
        tensors += make_unit("", EXPERTS, layer, dict(zip(BIASES, ((e * f,), (e * f,), (e * d,))))).tensors
    return [*units, replace(experts, tensors=tensors)]
