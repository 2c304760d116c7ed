"""A clock that stands still but for what is slept: timings that do not depend on how busy the machine is."""


class ManualClock:
    """Takes the place of the `time` module where something is timed."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        """Seconds that were slept so far."""
        return self.now

    monotonic = perf_counter

    def sleep(self, seconds: float) -> None:
        """Moves the clock on, at once."""
        self.now += seconds
