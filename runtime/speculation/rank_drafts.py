"""What drafts on one rank of several: the others keep nothing of texts, and take its drafts."""

from collections.abc import Callable, Iterator, Sequence

import torch

from pshard.runtime.memory.kv_file import Beside
from pshard.runtime.ranks.group import Group
from pshard.runtime.speculation.draft_program import DraftProgram
from pshard.runtime.speculation.head_program import HeadProgram
from pshard.runtime.speculation.second_program import Ask, SecondProgram, reserve_room
from pshard.runtime.texts.follower import Follower, NoFollower
from pshard.runtime.texts.text import Text
from pshard.runtime.texts.text_blocks import NewTokens, TextBlocks


class RankDrafts:
    """That of one engine, a `Follower`; all ranks make the same calls.

    Attributes:
        name: see Follower; of what this rank keeps.
    """

    def __init__(self, own: HeadProgram | DraftProgram | None, source: int, group: Group, blocks: TextBlocks) -> None:
        """own: what drafts, on rank `source`; None on the others."""
        self._own, self._source, self._group, self._blocks = own, source, group, blocks
        self._here: Follower = NoFollower() if own is None else own
        self.name = self._here.name

    def draft(self, asks: Sequence[Ask], aside: Callable[[], None] = lambda: None) -> list[tuple[int, ...]]:
        """As `SecondProgram.draft`, on every rank; blocks are taken on all of them, as they are the same. Ranks that do
        not draft have nothing to wait for before `aside`."""
        for ask in asks:
            reserve_room(self._blocks, ask)
        if self._own is None:
            aside()
        return self._group.broadcast(self._own and self._own.draft(asks, aside), self._source, soon=True)

    def can_go_on(self, text: Text, length: int) -> bool:
        """See Follower: what drafts says it, and all ranks cut a text alike."""
        return self._group.broadcast(self._here.can_go_on(text, length), self._source, soon=True)

    def keep(self, text: Text) -> tuple[Beside, Iterator[bytes]] | None:
        """See Follower: all ranks know what a file is to have, of which one writes it."""
        own = self._here.keep(text)
        beside = self._group.broadcast(own and own[0], self._source)
        return own or (beside and (beside, iter(())))

    def follow(self, batch: NewTokens) -> None:
        """See Follower."""
        self._here.follow(batch)

    def cut(self, text: Text, length: int) -> None:
        """See Follower."""
        self._here.cut(text, length)

    def forget(self, text: Text) -> None:
        """See Follower."""
        self._here.forget(text)

    def caches(self) -> Iterator[torch.Tensor]:
        """See Follower."""
        return self._here.caches()

    def take(self, text: Text, tokens: Sequence[int], beside: Beside | None, read: Callable[[int], bytearray]) -> None:
        """See Follower."""
        self._here.take(text, tokens, beside, read)

    def close(self) -> None:
        """See Follower."""
        self._here.close()


Program = SecondProgram | RankDrafts  # what drafts beside an engine's texts
