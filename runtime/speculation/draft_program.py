"""A draft model as a second program beside the model, over the same texts and KV blocks: its cells lie at the places of
the model's, so texts that share blocks share them too."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pshard.batch import PROMPT
from pshard.runtime.executor import Executor
from pshard.runtime.speculation.second_program import Ask, Rows, SecondProgram, reserve_room
from pshard.runtime.texts.text import Text
from pshard.runtime.texts.text_blocks import NewTokens, TextBlocks


@dataclass
class Made:
    """Cells of a text: the first `right` are of its tokens, those behind of tokens that were drafted."""

    right: int
    drafted: list[int] = field(default_factory=list)

    def match(self, ids: Sequence[int]) -> int:
        """How many cells are of these tokens; those of other ones are forgotten."""
        while self.drafted and self.right < len(ids) and self.drafted[0] == ids[self.right]:
            self.right += 1
            del self.drafted[0]
        self.drafted.clear()
        return min(self.right, len(ids) - 1)

    def cut(self, length: int) -> None:
        """The text has so many tokens only: of its drafts those hold that it has."""
        if length < self.right:
            self.right = length
            self.drafted.clear()


class DraftProgram(SecondProgram):
    """That of one engine."""

    def __init__(self, draft: Executor, model: Executor, blocks: TextBlocks) -> None:
        super().__init__(f"draft {draft.spec.name} {draft.spec.packed_nbytes}", draft, model, blocks)
        self._made: dict[Text, Made] = {}

    # --- beside the model -----------------------------------------------------------------------------------------

    def follow(self, batch: NewTokens) -> None:
        """See Follower. Cells of prompts are made at once, others when drafts are asked for."""
        due = list[Rows]()
        for text, segment, span in zip(batch.texts, batch.segments, batch.batch.spans, strict=True):
            made = self._made.setdefault(text, Made(segment.past))
            if span.kind == PROMPT:
                due.append(self._list_due(text, text.ids[: segment.past + segment.tokens], made))
        self._run(due, wants=False)

    def _list_due(self, text: Text, ids: Sequence[int], made: Made) -> Rows:
        """The tokens whose cells are to be made; they count as made from now on."""
        begin = made.match(ids)
        made.right = len(ids)
        return Rows(text, tuple(ids[begin:]), begin)

    def cut(self, text: Text, length: int) -> None:
        """See Follower."""
        if made := self._made.get(text):
            made.cut(length)

    def can_go_on(self, text: Text, length: int) -> bool:
        """See Follower."""
        return True

    def forget(self, text: Text) -> None:
        """See Follower."""
        self._made.pop(text, None)

    def _settle(self, text: Text) -> int:
        return min(self._made[text].right, len(text.ids)) if text in self._made else 0

    def _begin_at(self, text: Text, tokens: int, cells: int, read: Callable[[int], bytearray]) -> None:
        self._made[text] = Made(cells)  # it reads the rest when a draft is asked for

    # --- drafts ---------------------------------------------------------------------------------------------------

    def _begin(self, ask: Ask) -> Rows:
        ids = (*ask.text.ids, *ask.tokens)
        reserve_room(self._blocks, ask)
        return self._list_due(ask.text, ids, self._made.setdefault(ask.text, Made(0)))

    def _note_draft(self, text: Text, token: int) -> None:
        self._made[text].drafted.append(token)
