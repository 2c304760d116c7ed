"""Routing records from a few numbers."""

import numpy as np

from pshard.routing.record import RoutingRecord, id_type


def make_record(
    tokens: int = 200, layers: int = 3, experts: int = 16, used: int = 2, skew: float = 1.0, seed: int = 0
) -> RoutingRecord:
    """Tokens that choose at random, some experts of each layer more often the larger `skew` is."""
    rng = np.random.default_rng(seed)
    liking = skew * rng.standard_normal((layers, experts))
    scores = liking + rng.gumbel(size=(tokens, layers, experts))
    ids = np.argsort(-scores, axis=2)[:, :, :used].astype(id_type(experts))
    first = tokens // 2
    return RoutingRecord("ab" * 32, tuple(range(1, layers + 1)), experts, ids, (first, *[1] * (tokens - first)))


def make_drifting_record(
    tokens: int, layers: int = 3, experts: int = 16, used: int = 2, stay: float = 0.97, liking: float = 4.0
) -> RoutingRecord:
    """Tokens whose likings drift, so that neighbours choose much the same experts and distant ones do not: `stay` of
    a liking is left after each token."""
    rng = np.random.default_rng(0)
    now, ids = liking * rng.standard_normal((layers, experts)), []
    for _ in range(tokens):
        now = stay * now + liking * (1 - stay**2) ** 0.5 * rng.standard_normal((layers, experts))
        scores = now + rng.gumbel(size=(layers, experts))
        ids.append(np.argsort(-scores, axis=1)[:, :used])
    chosen = np.array(ids).astype(id_type(experts))
    return RoutingRecord("ab" * 32, tuple(range(layers)), experts, chosen, (1,) * tokens)
