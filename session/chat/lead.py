"""A conversation over several ranks: rank 0 holds it, and the others do to their engines what it does to its own."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pshard.errors import UserError

if TYPE_CHECKING:
    from pshard.runtime.engine import Engine

LED = ("forward", "reset")  # what a conversation does to an engine that all ranks must do


class Leader:
    """Rank 0's engine, each of whose steps is told to the others first; all else is the engine's own.

    Rank 0 alone draws tokens, so that what its clock or its user decides (an answer is stopped) needs no agreement.
    """

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def forward(self, tokens: Sequence[Any], all_logits: bool = False, best_only: bool = False) -> Any:
        """As the engine's."""
        return self._lead("forward", [list(tokens), all_logits, best_only])

    def reset(self, sequence: int | None = None, length: int = 0) -> int:
        """As the engine's."""
        return self._lead("reset", [sequence, length])

    def generate(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """As the engine's, over these steps."""
        from pshard.runtime.engine import Engine

        leader: Any = self
        return Engine.generate(leader, *args, **kwargs)

    def dismiss(self) -> None:
        """The conversation is over: the other ranks' `follow` returns."""
        self._engine.agree(None)

    def _lead(self, step: str, words: list[Any]) -> Any:
        self._engine.agree([step, *words])
        return getattr(self._engine, step)(*words)


def follow(engine: "Engine") -> None:
    """Do what rank 0 does, until it dismisses this rank. Raises StepFailed and RankLost as the engine does."""
    while order := engine.agree(None):  # rank 0's value counts
        step, *words = order
        if step not in LED:
            raise ValueError(f"rank 0 says {step!r}")
        with suppress(UserError):  # rank 0 meets it too, and tells its user
            getattr(engine, step)(*words)
