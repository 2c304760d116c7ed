"""From a routing record to the order of popularity, and how much its first places are worth. No torch."""

import numpy as np

from pshard.routing.record import RoutingRecord
from pshard.speculation import MOST_DRAFTS
from pshard.units.moe.popularity import LayerPopularity, Popularity, pack_numbers, pack_uses


def measure_popularity(record: RoutingRecord) -> Popularity:
    """The order by all tokens; ties go to the lower number.

    The probabilities are held out: experts are ordered by one half of the tokens and counted in the other, both ways.
    Counted in the same tokens, chance would promise hits that the next text does not have. Places that were used more
    than those before them share their uses with these, as none is worth more. One made-up token that takes all experts
    alike is counted too, so that no expert is said to be never used.
    """
    middle = record.tokens // 2
    first, second = record.count_uses(0, middle), record.count_uses(middle)
    orders = rank_experts(first + second)
    counted = np.take_along_axis(second, rank_experts(first), 1) + np.take_along_axis(first, rank_experts(second), 1)
    uses = (counted + record.used / record.experts) / (record.tokens + 1)
    found = (
        LayerPopularity(layer, pack_numbers(order), pack_uses(_make_falling(own)))
        for layer, order, own in zip(record.layers, orders.tolist(), uses.tolist())
    )
    overlap, *further = measure_overlaps(record) or (None,)
    return Popularity(tuple(found), record.experts, record.used, record.tokens, overlap, tuple(further))


def measure_overlaps(record: RoutingRecord, most: int = MOST_DRAFTS) -> tuple[float, ...]:
    """The shares of a token's experts that any of the 1, 2, ... tokens before it used too, up to `most` or as many as
    there are, in the mean of all layers."""
    most = min(most, record.tokens - 1)
    shared = np.zeros(most, np.int64)
    for layer in range(len(record.layers)):
        chosen = np.zeros((record.tokens, record.experts), bool)
        np.put_along_axis(chosen, record.ids[:, layer].astype(np.int64), True, 1)
        seen = np.zeros_like(chosen)
        for back in range(1, most + 1):
            seen[back:] |= chosen[:-back]
            shared[back - 1] += np.count_nonzero(chosen[back:] & seen[back:])
    choices = (record.tokens - np.arange(1, most + 1)) * len(record.layers) * record.used
    return tuple(np.maximum.accumulate(shared / choices).tolist())  # they are of fewer and fewer tokens


def _make_falling(values: list[float]) -> list[float]:
    """The nearest series, by squares, that never rises: values that do are levelled with those before them."""
    levels: list[tuple[float, int]] = []  # mean, how many
    for value in values:
        levels.append((value, 1))
        while len(levels) > 1 and levels[-1][0] > levels[-2][0]:
            (a, n), (b, m) = levels.pop(), levels.pop()
            levels.append(((a * n + b * m) / (n + m), n + m))
    return [mean for mean, many in levels for _ in range(many)]


def rank_experts(counts: np.ndarray) -> np.ndarray:
    """Numbers of each layer's experts, the most used first, by how often each was: [layers, experts] both."""
    return np.argsort(-counts, axis=1, kind="stable")
