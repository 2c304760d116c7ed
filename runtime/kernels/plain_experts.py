"""Routing and experts in plain torch: the oracle of the fast kernels, on any device."""

import torch

from pshard.model_config import LEAST_SUM, Experts
from pshard.runtime.kernels.api import ExpertWeights, Routes
from pshard.runtime.kernels.plain_rows import bend_gate, product

CLAMP, SLOPE = 7.0, 1.702  # gpt-oss: modeling_gpt_oss.py of transformers 5


def choose_experts(logits: torch.Tensor, rule: Experts, choice_bias: torch.Tensor | None) -> Routes:
    """Which experts take tokens with these router logits (float32 [M, E]), and their weights; ties to the lower number.

    Softmax: arXiv 2101.03961; sigmoid with a bias for the choice and groups: arXiv 2412.19437, section 2.1.2.
    """
    scores = logits if rule.scores == "chosen" else logits.sigmoid() if rule.scores == "sigmoid" else logits.softmax(-1)
    choice = scores if choice_bias is None else scores + choice_bias
    if rule.groups_used < rule.groups:
        each = choice.unflatten(1, (rule.groups, -1))
        best = _first_best(each.sort(dim=2, descending=True).values[..., :2].sum(-1), rule.groups_used)
        allowed = torch.zeros(each.shape[:2], dtype=torch.bool, device=choice.device).scatter_(1, best, True)
        choice = choice.masked_fill(~allowed.repeat_interleave(each.shape[2], 1), -torch.inf)
    ids = _first_best(choice, rule.used)
    weights = scores.gather(1, ids)
    if rule.scores == "chosen":
        weights = weights.softmax(-1)
    elif rule.normed:
        weights = weights / weights.sum(-1, keepdim=True)
    return Routes(ids.int(), weights * rule.scale)


def choose_chunks(scored: Routes, rule: Experts) -> Routes:
    """Which experts of chunks rows take, see `Chunks`; scored: all experts, by falling score."""
    assert rule.chunks is not None
    ids, used = scored.ids.clamp(min=0).long(), rule.of_chunks().used
    chunks, by_number = ids[:, :used] // rule.chunks.each, torch.empty_like(scored.weights)
    weights = by_number.scatter_(1, ids, scored.weights).gather(1, chunks)
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=LEAST_SUM) * (rule.scale * rule.chunks.scale)
    return Routes(chunks.where(scored.ids[:, :used] >= 0, -1).int(), weights)


def _first_best(values: torch.Tensor, count: int) -> torch.Tensor:
    """Columns of the `count` largest values of each row, the largest first; ties to the lower column."""
    return values.sort(dim=1, descending=True, stable=True).indices[:, :count]


def activate(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """What an expert's down product takes: silu(gate) * up, a gelu's, or gpt-oss' clamped form."""
    if activation != "clamped":
        return bend_gate(gate, up, activation)
    gate, up = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP)
    return gate * torch.sigmoid(SLOPE * gate) * (up + 1)


def add_experts(x: torch.Tensor, routes: Routes, weights: ExpertWeights, rule: Experts, out: torch.Tensor) -> None:
    """out[M, D] += what the experts of each token that `weights` has give, expert after expert."""
    for number in range(len(weights.gate)):
        rows, place = (routes.ids == number).nonzero(as_tuple=True)
        if (found := weights.matrices(number)) is None or not rows.numel():
            continue
        gate, up, down = found
        own = [None if bias is None else bias[number] for bias in weights.biases or (None, None, None)]
        taken = x[rows].float()
        inner = activate(product(taken, gate, own[0]), product(taken, up, own[1]), rule.activation)
        result = product(inner, down, own[2])
        out.index_add_(0, rows, routes.weights[rows, place][:, None] * result)  # a row may take one twice
