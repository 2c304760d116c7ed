"""How the ranks of a model are driven: a parent gives orders, and every rank carries out the same ones in their order.

The parent of a command is rank 0 itself, and its orders go through the group, so ranks that torchrun started follow
too. A server's parent is a process of its own, which outlives a dead rank; its orders go through pipes
(`server/life/rank_machine.py`). One order may stand for a whole text or test, whose tokens ranks compute in step; where
rank 0 decides token by token (`LedEngine`), each order carries what it drew. No torch until a rank runs.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from pshard.errors import UserError
from pshard.plan import Variant

if TYPE_CHECKING:
    from pshard.runtime.engine import Engine
    from pshard.runtime.memory.host.fresh_memory import FilledMemory
    from pshard.runtime.ranks.group import Group
    from pshard.session.open_plan import Opened


@dataclass(frozen=True)
class Order:
    """A call on what a rank holds, an engine or a server's texts: one of its methods, by name, or a function that takes
    it first."""

    call: str | Callable[..., Any]
    words: tuple[Any, ...] = ()
    named: dict[str, Any] = field(default_factory=dict)

    def carry_out(self, held: Any) -> Any:
        """What the call returns. Raises what it raises."""
        call = getattr(held, self.call) if isinstance(self.call, str) else partial(self.call, held)
        return call(*self.words, **self.named)


@dataclass(frozen=True)
class Refused:
    """The answer to an order that raised UserError, on all ranks alike."""

    why: str


def follow(held: Any, hear: Callable[[], Order | None], answer: Callable[[Any], None] = lambda _: None) -> None:
    """Carry out orders until there are no more, to the end what they yield one by one. answer: gets what comes of each
    but None. Raises StepFailed and RankLost."""
    from pshard.runtime.ranks.group import RankLost

    while order := hear():
        try:
            found = order.carry_out(held)
            if isinstance(found, Iterator):
                found = deque(found, 0) or None  # it keeps nothing
        except RankLost:
            raise
        except UserError as error:
            found = Refused(str(error))
        if found is not None:
            answer(found)


def follow_rank_0(opened: "Opened", group: "Group") -> int:
    """What another rank of a command does: load what rank 0 loads, and carry out its orders; the exit code."""
    from pshard.session.start_engine import start_engine

    while how := group.broadcast(None):
        with start_engine(opened, group=group, **how) as engine:
            _tell_own_notes(engine)
            follow(engine, partial(group.broadcast, None))
    group.close()
    return 0


@contextmanager
def lead_ranks(group: "Group") -> Iterator[None]:
    """While rank 0 leads the others with `load_on_ranks`; at the end they are told that it is over."""
    yield
    group.broadcast(None)
    group.close()


@contextmanager
def load_on_ranks(
    opened: "Opened", group: "Group", variant: Variant, filled: "FilledMemory | None" = None, **how: Any
) -> "Iterator[Engine]":
    """Rank 0's engine while all ranks hold the model under a variant; what all must do to theirs it does with `lead`.
    how, filled: see `start_engine`."""
    from pshard.runtime.ranks.group import RankLost
    from pshard.session.start_engine import start_engine

    group.broadcast({"variant": variant, **how})
    with start_engine(opened, variant, group=group, filled=filled, **how) as engine:
        _tell_own_notes(engine)
        try:
            yield engine
        except RankLost:
            raise
        except UserError:  # between two orders, so the others listen: there are no more, and nothing else to load
            group.broadcast(None)
            group.broadcast(None)
            raise
        group.broadcast(None)


def lead(engine: "Engine", call: str | Callable[..., Any], *words: Any, **named: Any) -> Any:
    """On rank 0: have the other ranks make a call on their engines, and make it on this one; what this one returns."""
    order = Order(call, words, named)
    engine.agree(order)
    return order.carry_out(engine)


class LedEngine:
    """Rank 0's engine for a conversation, each of whose steps is an order to the others; all else is the engine's own.

    Rank 0 alone draws tokens, so that what its clock or its user decides (an answer is stopped) needs no agreement.
    """

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def forward(self, *words: Any, **named: Any) -> Any:
        """As the engine's."""
        return lead(self._engine, "forward", *words, **named)

    def reset(self, *words: Any) -> int:
        """As the engine's."""
        return lead(self._engine, "reset", *words)

    def save(self, *words: Any) -> None:
        """As the engine's."""
        lead(self._engine, "save", *words)

    def generate(self, *words: Any, **named: Any) -> Iterator[Any]:
        """As the engine's, over these steps."""
        from pshard.runtime.engine import Engine

        leader: Any = self
        return Engine.generate(leader, *words, **named)


def _tell_own_notes(engine: "Engine") -> None:
    """Say on another rank what rank 0 does not say of its own engine."""
    known = engine.agree(engine.notes)
    for note in engine.notes:
        if note not in known:
            print(f"note: {note}", file=sys.stderr)
