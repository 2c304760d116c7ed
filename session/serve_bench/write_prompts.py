"""Requests as bytes, all written before the first is sent: prompts of so many tokens that no two requests share, but
for the prefixes that they are to share."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pshard.session.serve_bench.lengths import Wanted
from pshard.session.serve_bench.target import Target
from pshard.session.serve_bench.timed_exchange import POLITE, Manner
from pshard.session.serve_bench.words import WORDS

SLOW_READ = 256  # bytes that a slow reader takes at a time: an event or so
SLOW_PAUSE = 0.25  # seconds between its reads


@dataclass(frozen=True)
class SharedPrefix:
    """The first `tokens` of every prompt are one of `variants` prefixes."""

    tokens: int = 0
    variants: int = 1

    def __str__(self) -> str:
        return f"{self.tokens}x{self.variants}" if self.variants > 1 else str(self.tokens)


@dataclass(frozen=True)
class Misbehaviour:
    """Shares of the requests, 0 to 1: those whose client leaves in the middle, and those that are read slowly."""

    leave: float = 0.0
    slow: float = 0.0


@dataclass(frozen=True)
class Planned:
    """A request that is ready to be sent."""

    message: bytes
    answer: int
    manner: Manner


def write_requests(
    target: Target, wanted: Sequence[Wanted], prefix: SharedPrefix, odd: Misbehaviour, seed: int, part: str
) -> list[Planned]:
    """One for each wanted, the same for a seed and a part of its run; the shared prefixes are those of the seed."""
    rng = random.Random(f"prompts {seed} {part}")
    begun = [_draw(target, prefix.tokens, random.Random(f"prefix {seed} {i}")) for i in range(prefix.variants)]
    planned = []
    for each in wanted:
        manner = _choose_manner(odd, each.answer, rng)
        body = _write_body(target, each, rng.choice(begun), rng)
        planned.append(Planned(target.write(body), each.answer, manner))
    return planned


def _choose_manner(odd: Misbehaviour, answer: int, rng: random.Random) -> Manner:
    drawn, leave_after = rng.random(), rng.randrange(answer)
    if drawn < odd.leave:
        return Manner(leave_after=leave_after)
    if drawn < odd.leave + odd.slow:
        return Manner(bytes_per_read=SLOW_READ, pause=SLOW_PAUSE)
    return POLITE


def _write_body(target: Target, wanted: Wanted, begun: list, rng: random.Random) -> dict[str, Any]:
    if isinstance(wanted.prompt, str):
        prompt: Any = wanted.prompt
    else:
        # one token of its own at least: else a prompt is wholly shared
        shared = begun[: wanted.prompt - 1]
        prompt = [*shared, *_draw(target, wanted.prompt - len(shared), rng)]
        prompt = prompt if target.ids else " ".join(prompt)
    asked = {"messages": [{"role": "user", "content": prompt}]} if target.api == "chat" else {"prompt": prompt}
    early = {"ignore_eos": True} if target.long_answers else {}
    return {
        "model": target.model,
        **asked,
        "max_tokens": wanted.answer,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **early,
    }


def _draw(target: Target, n: int, rng: random.Random) -> list:
    return rng.choices(target.ids or WORDS, k=n)
