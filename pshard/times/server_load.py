"""What clients saw of a server under load: times of tokens as they arrived, rates, errors. No torch, no HTTP."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

PATTERNS = {"clients": "clients at once", "rate": "requests per second"}  # how load comes, and what its figure counts


@dataclass(frozen=True)
class Spread:
    """Milliseconds that 50, 95 and 99 of a hundred values do not exceed, and the largest of `count` values."""

    p50: float
    p95: float
    p99: float
    most: float
    count: int


@dataclass(frozen=True)
class LoadPoint:
    """One load, from its first request to its last answer.

    pattern: "clients" (a closed loop: each sends its next request when the last one ended) or "rate" (requests come at
    their own times, `burst` of them at once); load: how many clients, or requests per second. whole: requests that were
    answered to their end; cancelled, slow: those whose client left on purpose, or read slowly; errors: the others, by
    HTTP status or by what happened ("connect", "cut", "timeout", "error event").
    prompt_tokens, answer_tokens: of all answers, as the server counts them or, where `counted` is "events", as they
    arrived; cached_tokens: prompt tokens that the server did not compute again. answer_rate: answer tokens per second
    over all `seconds`; steady_rate: the same until the last request was sent, for closed loops of more than one round.
    first_token, gap, end: from the moment a request is sent to its first text, between two pieces of text, and to its
    end. Slow readers are in none of the three, those who left not in `end`.
    kept: of the requests that nobody cancelled or read slowly, those that kept the promise: all gaps within it;
    goodput: these per second. late_ms: how much later than planned the client itself sent a request, at most.
    """

    pattern: str
    load: float
    burst: int
    requests: int
    whole: int
    cancelled: int
    slow: int
    errors: tuple[tuple[str, int], ...]
    seconds: float
    prompt_tokens: int
    cached_tokens: int
    answer_tokens: int
    counted: str
    prompt_rate: float
    answer_rate: float
    steady_rate: float | None
    first_token: Spread | None
    gap: Spread | None
    end: Spread | None
    kept: int | None = None
    goodput: float | None = None
    late_ms: float = 0.0


@dataclass(frozen=True)
class ServerLoad:
    """Loads that one server was put under. `server`: its name for readers. prompts, answers: lengths in tokens, as they
    were asked for. promise: pairs such as ("gap", 200.0), in ms; empty without one."""

    server: str
    model: str
    api: str
    prompts: str
    answers: str
    shared_prefix: str
    promise: tuple[tuple[str, float], ...]
    seed: int
    points: tuple[LoadPoint, ...]
    date: str
    command: str
    environment: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()


def spread_of(values_ms: Sequence[float]) -> Spread | None:
    """By nearest rank: each percentile is a value that occurred. None without values."""
    if not values_ms:
        return None
    ordered = sorted(values_ms)
    p50, p95, p99 = (ordered[math.ceil(share * len(ordered)) - 1] for share in (0.50, 0.95, 0.99))
    return Spread(p50, p95, p99, ordered[-1], len(ordered))
