"""A model on one device of this process, as the scheduler uses it."""

from pshard.runtime.engine import Engine
from pshard.server.scheduling.served_machine import PlanFacts, Pool


class LocalMachine:
    """An engine: a `Machine`."""

    def __init__(self, engine: Engine, facts: PlanFacts) -> None:
        self._engine, self.facts = engine, facts
        self.pool: Pool = engine.texts

    @property
    def link_bytes(self) -> int:
        """Bytes moved to the device since it was loaded."""
        return self._engine.link_bytes

    def keep_tier(self, tokens: int) -> None:
        """Later steps run under a tier of at least so many tokens."""
        self._engine.keep_tier(tokens)

    def close(self) -> None:
        """Give its memory back, to other programs too."""
        self._engine.close()
