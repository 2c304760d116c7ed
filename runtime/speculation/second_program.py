"""A program that drafts beside the model, over the same texts and KV blocks: how tokens of texts become its
micro-batches, and a chain of its likeliest tokens a draft. What it keeps of texts is each program's own."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from pshard.batch import DECODE, PROMPT, Batch, Span
from pshard.runtime.executor import Executor
from pshard.runtime.kernels.api import Segment
from pshard.runtime.texts.block_copies import BlockCopies
from pshard.runtime.texts.text import Text
from pshard.runtime.texts.text_blocks import TextBlocks


@dataclass(frozen=True)
class Ask:
    """Drafts that are wanted of a text: at most so many that follow `tokens`, which it does not have yet."""

    text: Text
    tokens: tuple[int, ...]
    most: int


@dataclass(frozen=True)
class Rows:
    """Tokens of a text at `past` and behind it; states: the model's before each, where the program takes them."""

    text: Text
    ids: tuple[int, ...]
    past: int
    states: torch.Tensor | None = None


class SecondProgram:
    """That of one engine, which drafts. As a `Follower` each kind keeps what it needs of texts.

    Attributes:
        name: see Follower.
    """

    def __init__(self, name: str, program: Executor, model: Executor, blocks: TextBlocks) -> None:
        self.name, self._program, self._model, self._blocks = name, program, model, blocks
        self._most, self._copies = program.plan.tiers[-1].tokens, BlockCopies(program)

    def caches(self) -> Iterator[torch.Tensor]:
        """See Follower."""
        yield from self._copies.caches(window=False)

    def close(self) -> None:
        """See Follower."""
        self._program.close()

    @torch.inference_mode()
    def draft(self, asks: Sequence[Ask]) -> list[tuple[int, ...]]:
        """Its likeliest tokens, each found behind the one before it; a draft ends before a token that the model does
        not have. Texts have room for their tokens and all drafts but the last."""
        drafts, rows, going = [list[int]() for _ in asks], list(map(self._begin, asks)), list(range(len(asks)))
        while going:
            found = self._run([rows[i] for i in going], wants=True)
            for i, (token, state) in zip(list(going), found, strict=True):
                if token is None or token >= self._model.spec.config.vocab:
                    going.remove(i)
                    continue
                drafts[i].append(token)
                if len(drafts[i]) == asks[i].most:
                    going.remove(i)
                    continue
                rows[i] = Rows(asks[i].text, (token,), rows[i].past + len(rows[i].ids), state)
                self._note_draft(asks[i].text, token)
        for ask in asks:
            self._end(ask.text)
        return [tuple(own) for own in drafts]

    def _begin(self, ask: Ask) -> Rows:
        """What is to be computed for the first draft; the text has room for all of them then."""
        raise NotImplementedError

    def _note_draft(self, text: Text, token: int) -> None:
        """The cell of a draft is made next."""

    def _end(self, text: Text) -> None:
        """A text has its drafts."""

    def _run(self, rows: Sequence[Rows], wants: bool) -> list[tuple[int | None, torch.Tensor | None]]:
        """Compute tokens of texts. wants: of each text the likeliest next token, None where there is a NaN, and the
        program's state after the last one, see `_state_after`."""
        found = list[tuple[int | None, torch.Tensor | None]]()
        for some, ends in self._cut(rows):
            numbers, at = iter(self._compute(some, [wants and is_end for is_end in ends]).tolist()), 0
            for own, is_end in zip(some, ends):
                at += len(own.ids)
                if wants and is_end:
                    logit, token = next(numbers)
                    found.append((int(token) if logit == logit else None, self._state_after(at - 1)))
        return found

    def _state_after(self, row: int) -> torch.Tensor | None:
        """The program's own state [1, d_model] after a row of the last micro-batch, where its next token takes it."""
        return None

    def _cut(self, rows: Sequence[Rows]) -> Iterator[tuple[list[Rows], list[bool]]]:
        """Micro-batches, and whether each of their tokens' last is the text's."""
        some, ends, room = list[Rows](), list[bool](), self._most
        for own in rows:
            done = 0
            while done < len(own.ids):
                take = min(room, len(own.ids) - done)
                part = slice(done, done + take)
                states = None if own.states is None else own.states[part]
                some.append(replace(own, ids=own.ids[part], past=own.past + done, states=states))
                done, room = done + take, room - take
                ends.append(done == len(own.ids))
                if not room:
                    yield some, ends
                    some, ends, room = [], [], self._most
        if some:
            yield some, ends

    def _compute(self, rows: Sequence[Rows], wants: Sequence[bool]) -> torch.Tensor:
        """One micro-batch: of those tokens' last that are wanted the likeliest next one, [n, 2] with its logit."""
        program, segments, spans, at = self._program, list[Segment](), list[Span](), 0
        for own, wanted in zip(rows, wants):
            n = len(own.ids)
            segments.append(self._blocks.segment_at(own.text, at, n, own.past))
            spans.append(Span(n, own.past, int(wanted), DECODE if n == 1 else PROMPT))
            at += n
        vocab = program.spec.config.vocab  # which may lack some of the model's
        ids = [token if token < vocab else 0 for own in rows for token in own.ids]
        with program.device.current():
            self._make_ready(rows, len(ids))
            return program.run(ids, tuple(segments), Batch(tuple(spans)), self._blocks.used, best_only=True)

    def _make_ready(self, rows: Sequence[Rows], tokens: int) -> None:
        """Put what a micro-batch takes beside its tokens in place."""
