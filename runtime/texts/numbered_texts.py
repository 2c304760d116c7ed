"""Texts by number, for callers who keep no handles: an engine's sequences, each at its place of the plan's."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from pshard.errors import UserError
from pshard.runtime.texts.text import Text
from pshard.runtime.texts.text_pool import TextPool


class NumberedTexts:
    """Those of one pool. A sequence without tokens leaves its place to whoever opens a text."""

    def __init__(self, pool: TextPool) -> None:
        self._pool = pool
        self._texts: dict[int, Text] = {}  # that have tokens

    @contextmanager
    def use(self, numbers: Sequence[int]) -> Iterator[list[Text]]:
        """Texts of sequences. Raises UserError when there is no such one, or another text has its place."""
        try:
            for number in numbers:
                if number not in self._texts:
                    self._texts[number] = self._pool.begin(number)
            yield [self._texts[number] for number in numbers]
        finally:
            for number in [number for number, text in self._texts.items() if not text.ids]:
                self._pool.close(self._texts.pop(number))

    def extend(self, lists: Sequence[Sequence[int]], all_logits: bool, best_only: bool) -> list[list[torch.Tensor]]:
        """New tokens of the first sequences, none for some; rows of logits of each, as `TextPool.extend`."""
        if not any(lists):
            raise UserError("no tokens were given; a prompt needs at least one")
        if len(lists) > (there := len(self._pool.lengths)):
            raise UserError(f"{len(lists)} sequences, but the plan is for {there}; plan with -np")
        with self.use([number for number, ids in enumerate(lists) if ids]) as texts:
            found = self._pool.extend([(text, lists[text.number]) for text in texts], all_logits, best_only)
        rows = iter(found)
        return [next(rows) if ids else [] for ids in lists]

    def cut(self, number: int | None, length: int) -> int:
        """Cut a sequence back, or all; how many tokens were computed again for that."""
        with self.use(sorted(self._texts) if number is None else [number]) as texts:
            cut = [(text, self._pool.cut(text, length)) for text in texts]
            if again := [(text, ids) for text, ids in cut if ids]:
                self._pool.extend(again, best_only=True)
        return sum(len(ids) for _, ids in again)

    def load(self, path: Path, number: int) -> tuple[int, ...]:
        """Make a saved text that of a sequence, which is empty where that fails; its tokens."""
        self.cut(number, 0)
        text = self._texts[number] = self._pool.load(path, number=number)
        with self.use([number]):
            return tuple(text.ids)

    def is_full(self, number: int) -> bool:
        """Whether a sequence can have no further token."""
        with self.use([number]) as (text,):
            return self._pool.is_full(text)
