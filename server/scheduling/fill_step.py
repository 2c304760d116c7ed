"""How many tokens of prompts go into a step beside those that decode."""

from collections.abc import Sequence

from pshard.batch import Batch
from pshard.planner.serving.promise import widen_gap
from pshard.server.scheduling.pace import Pace

IN_PART = 2  # prompts that are computed in part at a time
SECOND = 4  # one part of so many is kept for the prompt behind one that takes a whole step and more


def room_for_prompts(pace: Pace, largest: int, decoding: Batch, past: int, gap: float, in_force: int) -> int:
    """Tokens of prompts that a step may have beside texts that decode. past: tokens that are computed of the prompt
    that is next.

    largest: tokens of a step. With nobody to wait for a token, it is filled; else the largest one that keeps the gap
    (seconds), or where none does what `widen_gap` allows. One token more than decode has a place whatever that takes: a
    prompt that is never computed would break more than a gap.
    """
    if not decoding.texts:
        return largest
    least = decoding.with_prompt(min(1, largest - decoding.tokens), past)
    widened = widen_gap(gap, pace.expect(least, pace.covering(least.tokens)))
    return pace.largest_within(widened, least, in_force) - decoding.tokens


def wants_more(remaining: Sequence[int], room: int) -> bool:
    """Whether another prompt is to be admitted beside those that have so many tokens to go."""
    return sum(remaining) < room or len(remaining) < IN_PART


def fill_prompts(remaining: Sequence[int], room: int) -> list[int]:
    """Tokens of each prompt, the oldest first, that go into a room.

    Behind a prompt that needs more than the room a short one need not wait: it gets a part.
    """
    shares, left = [], room
    behind = sum(remaining[1:])
    for i, n in enumerate(remaining):
        kept = min(behind, room // SECOND) if i == 0 and n > room else 0
        take = min(n, left - kept)
        shares.append(take)
        left -= take
    return shares
