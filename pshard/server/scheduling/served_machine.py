"""What the scheduler asks of an engine: a pool of texts under a plan. It may be here, or in other processes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from pshard.server.snapshot import PlanInForce


class Text(Protocol):
    """A text in the pool. ids: tokens whose cells are computed; cached: those adopted when it was opened."""

    ids: list[int]
    cached: int


@dataclass(frozen=True, eq=False)
class Piece:
    """New tokens of a text in one step."""

    text: Text
    ids: tuple[int, ...]
    rows: str = "last"
    best: int = 0
    full: bool = False
    mask: np.ndarray | None = None
    of: tuple[int, ...] = ()


class Row(Protocol):
    """What came of a wanted row, float32 on the host."""

    @property
    def ids(self) -> np.ndarray: ...
    @property
    def logits(self) -> np.ndarray: ...
    @property
    def log_total(self) -> float: ...
    @property
    def full(self) -> np.ndarray | None: ...
    @property
    def of(self) -> np.ndarray: ...
    @property
    def bad(self) -> bool: ...


class BlockCounts(Protocol):
    """Blocks of the KV cache."""

    @property
    def total(self) -> int: ...
    @property
    def used(self) -> int: ...
    @property
    def cached(self) -> int: ...
    @property
    def free(self) -> int: ...


class Pool(Protocol):
    """Texts by handle over one pool of KV blocks."""

    def open(self, ids: Sequence[int], salt: str = "") -> Text: ...
    def missing(self, wanted: Mapping[Text, int]) -> int: ...
    def step(self, pieces: Sequence[Piece]) -> Sequence[Sequence[Row]]: ...
    def close(self, text: Text, keep: bool = True) -> None: ...
    def counts(self) -> BlockCounts: ...


@dataclass(frozen=True)
class PlanFacts:
    """What decisions need of a plan. tiers: tokens of each, rising; seconds: of a full micro-batch of each, predicted.

    switch: seconds from a tier to another, by their tokens; what is not there takes none. busy: predicted seconds of
    each resource in a micro-batch of each tier. shown: the plan as people are told of it.
    """

    tiers: tuple[int, ...]
    seconds: tuple[float, ...]
    sequences: int
    longest: int
    vocab: int
    shown: PlanInForce
    switch: Mapping[tuple[int, int], float] = field(default_factory=dict)
    busy: Mapping[int, tuple[tuple[str, float], ...]] = field(default_factory=dict)


class Machine(Protocol):
    """A loaded model. link_bytes: moved to the device since it was loaded."""

    facts: PlanFacts
    pool: Pool

    @property
    def link_bytes(self) -> int: ...

    def keep_tier(self, tokens: int) -> None:
        """Later steps run under a tier of at least so many tokens."""

    def close(self) -> None:
        """Give its memory back."""
