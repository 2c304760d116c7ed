"""When requests come: a closed loop of clients, or arrivals that do not wait for answers."""

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Pattern:
    """clients: so many, each of which sends its next request when the last one ended; or rate: requests per second that
    come at random (Poisson), `burst` of them at the same moment. One of the two is 0."""

    clients: int = 0
    rate: float = 0.0
    burst: int = 1

    @property
    def kind(self) -> str:
        """A key of `pshard.times.server_load.PATTERNS`."""
        return "clients" if self.clients else "rate"

    @property
    def load(self) -> float:
        return self.clients or self.rate


def draw_arrivals(pattern: Pattern, requests: int, seed: str) -> list[float]:
    """Seconds from the start at which requests of a rate come, ascending: gaps between bursts are exponential."""
    rng = random.Random(f"arrivals {seed}")
    times: list[float] = []
    now = 0.0
    while len(times) < requests:
        now += rng.expovariate(pattern.rate / pattern.burst)
        times += [now] * min(pattern.burst, requests - len(times))
    return times
