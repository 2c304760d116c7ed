"""What a pool of texts tells a program that drafts beside it: which tokens were computed, and what was cut."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from pshard.runtime.memory.kv_file import Beside
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

    def keep(self, text: Text) -> tuple[Beside, Iterator[bytes]] | None:
        """What a file is to have of a text, and its parts; None where nothing is worth it."""
        ...

    def take(self, text: Text, tokens: Sequence[int], beside: Beside | None, read: Callable[[int], bytearray]) -> None:
        """A text will have these tokens, of a file with this of who drafts, maybe somebody else; None: it has nothing
        of it. read: a part's bytes. Raises WrongFile for parts of another shape."""
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

    def keep(self, text: Text) -> tuple[Beside, Iterator[bytes]] | None:
        """Nothing: see Follower."""
        return None

    def take(self, text: Text, tokens: Sequence[int], beside: Beside | None, read: Callable[[int], bytearray]) -> None:
        """Nothing: see Follower."""

    def close(self) -> None:
        """Nothing: see Follower."""
