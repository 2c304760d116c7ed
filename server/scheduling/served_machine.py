"""What the scheduler asks of an engine: a pool of texts under a plan. It may be here, or in other processes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from pshard.planner.serving.step_times import StepTimes
from pshard.runtime.speculation.speculator import DraftSettings
from pshard.runtime.texts.text import BlockCounts, Piece, Row, Text
from pshard.server.snapshot import PlanInForce


class Pool(Protocol):
    """Texts by handle over one pool of KV blocks, as `pshard.runtime.texts.text_pool.TextPool` has them."""

    def open(self, ids: Sequence[int], salt: str = "", seconds: float = inf) -> Text: ...
    def missing(self, wanted: Mapping[Text, int]) -> int: ...
    def step(
        self,
        pieces: Sequence[Piece],
        meanwhile: Callable[[], None] = lambda: None,
        given_up: Callable[[], bool] = lambda: False,
    ) -> Sequence[Sequence[Row]]: ...
    def commit(self, text: Text, length: int, later: bool = False) -> list[int]: ...
    def close(self, text: Text, keep: bool = True) -> None: ...
    def counts(self) -> BlockCounts: ...
    def keep_some(self, seconds: float) -> bool: ...


@dataclass(frozen=True)
class PlanFacts:
    """What decisions need of a plan. tiers: tokens of each, rising; seconds: of the micro-batch that is expected of
    each, as they are stored with the plan.

    shown: the plan as people are told of it. times: predicted seconds of any step, and of switches, of the same tiers.
    busy: predicted seconds of each resource in a micro-batch of each tier. drafts: who drafts, and how many drafts a
    text's step has at most; open_rows: how many rows of drafts, with the token before them, all texts of a step can
    have. swept: micro-batches of the largest tier that a step without drafts can have, in a sweep.
    """

    tiers: tuple[int, ...]
    seconds: tuple[float, ...]
    sequences: int
    longest: int
    vocab: int
    shown: PlanInForce
    times: StepTimes
    busy: Mapping[int, tuple[tuple[str, float], ...]] = field(default_factory=dict)
    drafts: DraftSettings = field(default_factory=DraftSettings)
    open_rows: int = 0
    swept: int = 1

    @property
    def largest_step(self) -> int:
        """Tokens that a step can have."""
        return self.swept * self.tiers[-1]


Asked = tuple[Text, Sequence[int], int]  # a text, its tokens, those that it lacks too, and drafts at most


class TextDrafter(Protocol):
    """Who drafts for texts of a machine, several at once."""

    def draft(self, asked: Sequence[Asked]) -> list[tuple[int, ...]]:
        """Tokens that may follow each text's. A machine's own drafter is asked where texts have room for all of
        them."""


class Machine(Protocol):
    """A loaded model. link_bytes: moved to the device since it was loaded. drafter: of its own; None: it has none."""

    facts: PlanFacts
    pool: Pool
    drafter: TextDrafter | None

    @property
    def link_bytes(self) -> int: ...

    def keep_tier(self, tokens: int) -> None:
        """Later steps run under a tier of at least so many tokens."""

    def close(self) -> None:
        """Give its memory back."""
