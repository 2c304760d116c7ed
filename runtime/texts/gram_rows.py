"""Which rows of a table of n-grams the tokens of a micro-batch take: see `pshard.model_config.Grams`."""

from collections.abc import Sequence

import numpy as np

from pshard.model_config import Grams
from pshard.runtime.texts.text_blocks import NewTokens


def list_gram_rows(grams: Grams | None, new: NewTokens) -> np.ndarray | None:
    """Of all new tokens in a row: int64 [tokens, rows of each]; None where a model has no such table."""
    if grams is None:
        return None
    back = grams.longest - 1
    found = []
    for text, segment in zip(new.texts, new.segments):
        before = text.ids[max(0, segment.past - back) : segment.past]
        own = new.ids[segment.start : segment.start + segment.tokens]
        found.append(find_gram_rows(grams, before, own))
    return np.concatenate(found)


def find_gram_rows(grams: Grams, before: Sequence[int], ids: Sequence[int]) -> np.ndarray:
    """Of the tokens `ids` after those before them, of which as many are given as n-grams have or as there are: int64
    [tokens, rows of each]."""
    back, n = grams.longest - 1, len(ids)
    told = [grams.end] * (back - len(before)) + [*before, *ids]
    tokens = np.array(told, np.int64)
    ended, mixed, rows = np.zeros(n, bool), tokens[back:] * grams.multipliers[0], []
    for far in range(1, grams.longest):
        seen = tokens[back - far : back - far + n]
        ended |= seen == grams.end
        mixed = mixed ^ np.where(ended, grams.end, seen) * grams.multipliers[far]
        heads = slice((far - 1) * grams.heads, far * grams.heads)
        rows.append(mixed[:, None] % np.array(grams.sizes[heads]) + np.array(grams.offsets[heads]))
    return np.concatenate(rows, 1)
