"""What a pool of texts tells a program that drafts beside it: which tokens were computed, and what was cut."""

from collections.abc import Iterator
from typing import Protocol

import torch

from pshard.runtime.texts.text import Text
from pshard.runtime.texts.text_blocks import NewTokens


class Follower(Protocol):
    """A second program over the same texts and KV blocks.

    Attributes:
        name: of what it keeps of blocks; "" for nothing.
    """

    name: str

    def follow(self, batch: NewTokens) -> None:
        """A micro-batch was computed; its texts have its tokens."""
        ...

    def cut(self, text: Text, length: int) -> None:
        """A text is cut to its first tokens, of which fewer may be computed now: the others are given to it again."""
        ...

    def can_go_on(self, text: Text, length: int) -> bool:
        """Whether it has what it needs of a text's first so many tokens; else the last of them is computed again."""
        ...

    def forget(self, text: Text) -> None:
        """A text is closed."""
        ...

    def caches(self) -> Iterator[torch.Tensor]:
        """What it keeps of every block, [blocks, ...]."""
        ...

    def close(self) -> None:
        """Give back what it has."""
        ...


class NoFollower:
    """Where nothing drafts beside the texts."""

    name = ""

    def follow(self, batch: NewTokens) -> None:
        """Nothing: see Follower."""

    def cut(self, text: Text, length: int) -> None:
        """Nothing: see Follower."""

    def can_go_on(self, text: Text, length: int) -> bool:
        """Always: see Follower."""
        return True

    def forget(self, text: Text) -> None:
        """Nothing: see Follower."""

    def caches(self) -> Iterator[torch.Tensor]:
        """None: see Follower."""
        return iter(())

    def close(self) -> None:
        """Nothing: see Follower."""
