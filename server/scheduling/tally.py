"""Counts what a server does: counters, histograms, the last steps. Survives engines: it is the server's."""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable

from pshard.server.snapshot import Counters, Distributions, Histogram, StepSeen

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
TOKENS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
REASONS = ("stop", "length", "cancelled", "error")
STEPS = 4096  # of the timeline: 15 seconds of steps of 4 ms
RATE_SECONDS = 10.0


class Buckets:
    """A histogram that is being filled."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds, self._counts, self._total = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        """One more value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    @property
    def mean(self) -> float:
        """Of the values; 0 without any."""
        return self._total / max(1, sum(self._counts))

    def freeze(self) -> Histogram:
        """What is in it now."""
        return Histogram(self._bounds, tuple(self._counts), self._total)


class Tally:
    """What has happened since the server's start."""

    def __init__(self, start: float) -> None:
        """start: seconds on the clock whose times it is told."""
        self.start = start
        self.count: Counter[str] = Counter()
        self.ended = Counter(dict.fromkeys(REASONS, 0))  # all keys at once: other threads read it
        self.refused: Counter[int] = Counter()
        self.first_token, self.gap, self.queue, self.whole = (Buckets(SECONDS) for _ in range(4))
        self._drafted, self._accepted = Counter[int](), Counter[int]()  # by position
        self._step_tokens = Buckets(TOKENS)
        self._step_seconds: Counter[int] = Counter()
        self._steps: deque[StepSeen] = deque(maxlen=STEPS)
        self._made: deque[tuple[float, int]] = deque()

    def end(self, reason: str, seconds: float) -> None:
        """A job ended, so many seconds after it came."""
        self.ended[reason] += 1
        self.whole.add(seconds)

    def add_drafts(self, texts: Iterable[tuple[int, int]]) -> None:
        """Texts of a step with drafts: (how many, how many of them held)."""
        for drafted, accepted in texts:
            self._drafted.update(range(1, drafted + 1))
            self._accepted.update(range(1, accepted + 1))

    def add_step(self, step: StepSeen, made: int) -> None:
        """A step, in which so many tokens were made."""
        self._steps.append(step)
        self._step_tokens.add(step.decodes + step.prompts)
        self._step_seconds[step.tier] += step.seconds  # type: ignore[assignment]
        self.count["steps"] += 1
        self.count["prompt_tokens"] += step.prompts
        self.count["made_tokens"] += made
        self.count["link_bytes"] += step.link_bytes
        self.count["tier_switches"] += step.switched
        self._made.append((step.start + step.seconds, made))
        self._trim(step.start + step.seconds)

    def rate(self, now: float) -> float:
        """Tokens made per second of late; now: seconds since the start."""
        self._trim(now)
        return sum(made for _, made in self._made) / max(1.0, min(RATE_SECONDS, now))

    def _trim(self, now: float) -> None:
        while self._made and self._made[0][0] < now - RATE_SECONDS:
            self._made.popleft()

    @property
    def steps(self) -> tuple[StepSeen, ...]:
        """The last ones, the oldest first."""
        return tuple(self._steps)

    def counters(self) -> Counters:
        """All counters."""
        return Counters(
            **self.count,
            ended=tuple(sorted(self.ended.items())),
            refused=tuple(sorted(self.refused.items())),
            step_seconds=tuple(sorted(self._step_seconds.items())),
            drafted=tuple(sorted(self._drafted.items())),
            accepted=tuple(sorted(self._accepted.items())),
        )

    def distributions(self) -> Distributions:
        """All histograms."""
        parts = (self.first_token, self.gap, self.queue, self.whole, self._step_tokens)
        return Distributions(*(part.freeze() for part in parts))
