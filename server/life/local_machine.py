"""A model on one device of this process, as the scheduler uses it."""

import logging
from collections.abc import Sequence

from pshard.errors import StepFailed
from pshard.runtime.engine import Engine
from pshard.runtime.speculation.second_program import Ask, SecondProgram
from pshard.runtime.texts.text_pool import TextPool
from pshard.server.life.how_to_run import PrefixLimits
from pshard.server.life.read_facts import allow_drafts, limit_sweeps
from pshard.server.scheduling.served_machine import Asked, PlanFacts, Pool, TextDrafter
from pshard.speculation import PROGRAMS

log = logging.getLogger(__name__)


class HeadDrafter:
    """A model's own head, or a draft model: a `TextDrafter`."""

    def __init__(self, head: SecondProgram, pool: TextPool, p_min: float) -> None:
        """pool: of its texts; p_min: see Ask."""
        self._head, self._pool, self._p_min = head, pool, p_min

    def draft(self, asked: Sequence[Asked]) -> list[tuple[int, ...]]:
        """As `TextDrafter.draft`."""
        asks = [Ask(text, tuple(ids[len(text.ids) :]), most, self._p_min) for text, ids, most in asked]
        return self._head.draft(asks, self._pool.settle)


class LocalMachine:
    """An engine: a `Machine`."""

    def __init__(self, engine: Engine, facts: PlanFacts, prefixes: PrefixLimits | None = None) -> None:
        """prefixes: what files of prefixes may take; None: there are none. Raises UserError, and closes the engine,
        when they cannot be kept."""
        facts = limit_sweeps(facts, engine.texts.most_swept)
        self._engine, self.facts = engine, allow_drafts(facts, engine.texts.most_rows)
        try:
            keep_prefixes(engine, prefixes)
        except BaseException:
            engine.close()
            raise
        self.pool: Pool = engine.texts
        self.drafter: TextDrafter | None = None
        if self.facts.drafts.kind in PROGRAMS:
            assert isinstance(engine.drafter, SecondProgram), "a plan by which it drafts has it"
            self.drafter = HeadDrafter(engine.drafter, engine.texts, self.facts.drafts.p_min)

    @property
    def link_bytes(self) -> int:
        """Bytes moved to the device since it was loaded."""
        return self._engine.link_bytes

    def keep_tier(self, tokens: int) -> None:
        """Later steps run under a tier of at least so many tokens."""
        self._engine.texts.keep_tier(tokens)

    def close(self) -> None:
        """Give its memory back, to other programs too; prefixes of texts are in files then."""
        try:
            self._engine.texts.finish_files()
        except StepFailed:
            log.warning("the engine failed: prefixes of texts that were not in files yet are lost")
        finally:
            self._engine.close()


def keep_prefixes(engine: Engine, prefixes: PrefixLimits | None) -> None:
    """Let an engine keep prefixes of texts in files. Raises UserError."""
    if prefixes is not None:
        engine.texts.keep_in_files(None, prefixes.files, prefixes.memory)
