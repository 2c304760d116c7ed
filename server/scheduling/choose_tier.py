"""Which tier a step runs under: not always the smallest that covers it, as going to another costs a switch."""

from pshard.batch import Batch
from pshard.server.scheduling.pace import Pace


class TierChoice:
    """The tier in force. It stays while that has cost less than the switch to the smallest one that would do: so no
    order of arrivals costs more than twice what knowing the future would.

    Attributes:
        in_force: tokens of the tier; 0: none yet. switches: how often it gave way to another.
    """

    def __init__(self, pace: Pace) -> None:
        self._pace, self.in_force, self.switches = pace, 0, 0
        self._paid = 0.0  # seconds that staying has cost since the last switch

    def choose(self, batch: Batch, gap: float | None) -> int:
        """The tier for a step. gap: seconds that it is to keep to, if it can; None: no promise."""
        least = self._pace.covering(batch.tokens)
        if self._stays(batch, least, gap):
            return self.in_force
        if least != self.in_force:
            self.switches += self.in_force > 0
            self.in_force, self._paid = least, 0.0
        return least

    def _stays(self, batch: Batch, least: int, gap: float | None) -> bool:
        if self.in_force <= least:
            return False
        here, there = self._pace.expect(batch, self.in_force), self._pace.expect(batch, least)
        if gap is not None and here > gap > there:
            return False
        self._paid += max(0.0, here - there)
        return self._paid <= self._pace.switch(self.in_force, least)
