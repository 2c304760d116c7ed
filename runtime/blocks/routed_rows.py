"""What a router leaves to the units of its layer, as tensors; see pshard/units/moe/routed.py."""

import torch

from pshard.runtime.blocks.block import Side, take
from pshard.runtime.kernels.api import Routes, RowIndex
from pshard.units.moe.chunks import SCORED
from pshard.units.moe.routed import ROUTED, rule_of


def view_routed(side: Side, rows: RowIndex, filled: bool = False) -> tuple[torch.Tensor, Routes]:
    """The normed hidden states of a side's n rows, float32 [n, D], and their routes; with `filled` those of all the
    accelerator's rows. Both sides lay them out alike."""
    n, most = rows.tokens, rows.filled or rows.tokens
    words, d, used = side.space.rows(ROUTED, most).flatten(), side.config.d_model, rule_of(side.config).used
    m = most if filled else n
    ids, weights = (words[most * (d + i * used) :][: m * used].view(m, used) for i in range(2))
    return words[: n * d].view(n, d), Routes(ids.view(torch.int32), weights)


def view_choices(side: Side, rows: RowIndex) -> torch.Tensor:
    """The routes of all the accelerator's rows as they lie there: [2, rows * k], the words of ids, then of weights."""
    most, d, used = rows.filled or rows.tokens, side.config.d_model, rule_of(side.config).used
    return side.space.rows(ROUTED, most).flatten()[most * d :].view(2, most * used)


def view_scored(side: Side, n: int) -> tuple[Routes, Routes]:
    """All experts of n rows by their scores, and the chunks that these take: see `Kernels.choose_chunks`."""
    rule, words, first, found = rule_of(side.config), side.space.rows(SCORED, n).flatten(), 0, list[torch.Tensor]()
    for width in 2 * (rule.count,) + 2 * (rule.of_chunks().used,):
        found.append(words[first : first + n * width].view(n, width))
        first += n * width
    return Routes(found[0].view(torch.int32), found[1]), Routes(found[2].view(torch.int32), found[3])


def take_normed(side: Side, rows: RowIndex) -> tuple[torch.Tensor, Routes]:
    """The same, the hidden states as the side's products take them."""
    x, routes = view_routed(side, rows)
    return take(side, x), routes
