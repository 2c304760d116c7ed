"""A draft model as a second program beside the model, over the same texts and KV blocks: its cells lie at the places of
the model's, so texts that share blocks share them too."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from pshard.batch import DECODE, PROMPT, Batch, Span
from pshard.runtime.executor import Executor
from pshard.runtime.kernels.api import Segment
from pshard.runtime.speculation.head_program import Ask
from pshard.runtime.texts.block_copies import BlockCopies
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


@dataclass(frozen=True)
class _Rows:
    """Tokens of a text at `past` and behind it."""

    text: Text
    ids: tuple[int, ...]
    past: int


class DraftProgram:
    """That of one engine: a `Follower`."""

    def __init__(self, draft: Executor, model: Executor, blocks: TextBlocks) -> None:
        self._draft, self._blocks = draft, blocks
        self._most = draft.plan.tiers[-1].tokens
        self._own_vocab, self._vocab = draft.spec.config.vocab, model.spec.config.vocab
        self._made: dict[Text, Made] = {}
        self.name = f"draft {draft.spec.name} {draft.spec.packed_nbytes}"

    # --- beside the model -----------------------------------------------------------------------------------------

    def follow(self, batch: NewTokens) -> None:
        """See Follower. Cells of prompts are made at once, others when drafts are asked for."""
        due = list[_Rows]()
        for text, segment, span in zip(batch.texts, batch.segments, batch.batch.spans, strict=True):
            made = self._made.setdefault(text, Made(segment.past))
            if span.kind == PROMPT:
                ids = text.ids[: segment.past + segment.tokens]
                begin = made.match(ids)
                due.append(_Rows(text, tuple(ids[begin:]), begin))
                made.right = len(ids)
        self._run(due, wants=False)

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

    def caches(self) -> Iterator[torch.Tensor]:
        """See Follower."""
        yield from BlockCopies(self._draft).caches(window=False)

    def close(self) -> None:
        """See Follower."""
        self._draft.close()

    # --- drafts ---------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def draft(self, asks: Sequence[Ask]) -> list[tuple[int, ...]]:
        """The draft model's likeliest tokens, each found behind the one before it; a draft ends before a token that the
        model does not have. Texts have room for their tokens and all drafts but the last."""
        drafts, rows = [list[int]() for _ in asks], list[_Rows]()
        for ask in asks:
            ids = (*ask.text.ids, *ask.tokens)
            self._blocks.reserve(ask.text, len(ids) + ask.most - 1)
            made = self._made.setdefault(ask.text, Made(0))
            begin = made.match(ids)
            rows.append(_Rows(ask.text, ids[begin:], begin))
            made.right = len(ids)
        going = list(range(len(asks)))
        while going:
            found = self._run([rows[i] for i in going], wants=True)
            for i, token in zip(list(going), found, strict=True):
                if token is None or token >= self._vocab:
                    going.remove(i)
                    continue
                drafts[i].append(token)
                if len(drafts[i]) == asks[i].most:
                    going.remove(i)
                    continue
                rows[i] = _Rows(asks[i].text, (token,), rows[i].past + len(rows[i].ids))
                self._made[asks[i].text].drafted.append(token)
        return [tuple(own) for own in drafts]

    # --- micro-batches --------------------------------------------------------------------------------------------

    def _run(self, rows: Sequence[_Rows], wants: bool) -> list[int | None]:
        """Compute tokens of texts. wants: of each text the likeliest next token, None where there is a NaN."""
        found = list[int | None]()
        for some, ends in self._cut(rows):
            best = self._compute(some, ends if wants else [False] * len(some))
            found += [int(token) if logit == logit else None for logit, token in best.tolist()] if wants else []
        return found

    def _cut(self, rows: Sequence[_Rows]) -> Iterator[tuple[list[_Rows], list[bool]]]:
        """Micro-batches, and whether each of their tokens' last is the text's."""
        some, ends, room = list[_Rows](), list[bool](), self._most
        for own in rows:
            done = 0
            while done < len(own.ids):
                take = min(room, len(own.ids) - done)
                some.append(_Rows(own.text, own.ids[done : done + take], own.past + done))
                done, room = done + take, room - take
                ends.append(done == len(own.ids))
                if not room:
                    yield some, ends
                    some, ends, room = [], [], self._most
        if some:
            yield some, ends

    def _compute(self, rows: Sequence[_Rows], wants: Sequence[bool]) -> torch.Tensor:
        draft = self._draft
        ids = [token if token < self._own_vocab else 0 for own in rows for token in own.ids]
        segments, spans, at = list[Segment](), list[Span](), 0
        for own, wanted in zip(rows, wants):
            segments.append(self._blocks.segment_at(own.text, at, len(own.ids), own.past))
            spans.append(Span(len(own.ids), own.past, int(wanted), DECODE if len(own.ids) == 1 else PROMPT))
            at += len(own.ids)
        with draft.device.current():
            return draft.run(ids, tuple(segments), Batch(tuple(spans)), self._blocks.used, best_only=True)
