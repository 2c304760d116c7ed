"""The texts that are open, the blocks of the KV cache that each holds, and what is new of them cut into micro-batches.
No torch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pshard.batch import DECODE, PROMPT, Batch, Span
from pshard.errors import UserError
from pshard.runtime.kernels.api import Segment
from pshard.runtime.memory.kv_blocks import BlockPool, RecentBlocks, blocks_of
from pshard.runtime.texts.text import Text
from pshard.units.kv_cells import KV_BLOCK

New = Sequence[tuple[Text, Sequence[int]]]  # texts, each with ids of new tokens, at least one


@dataclass(frozen=True)
class NewTokens:
    """Those of one micro-batch: its texts, each with its span of the batch and its segment, and all ids in a row."""

    texts: tuple[Text, ...]
    ids: list[int]
    segments: tuple[Segment, ...]
    batch: Batch

    def append(self) -> None:
        """Let the texts have their tokens, which are computed now."""
        for text, segment in zip(self.texts, self.segments):
            text.ids[segment.past :] = self.ids[segment.start : segment.start + segment.tokens]


class TextBlocks:
    """So many places for texts, each of at most `longest` tokens, over one pool of blocks.

    Attributes:
        longest: tokens that one can have; pool: blocks of all layers without a window; recent: of those with one.
    """

    def __init__(self, places: int, longest: int, blocks: int, recent: RecentBlocks | None = None) -> None:
        self._open: list[Text | None] = [None] * places
        self.longest = longest
        self.pool, self.recent = BlockPool(blocks), recent

    def open(self, salt: str | None, number: int | None = None) -> Text:
        """An empty text, at a place or at the first that is free. Raises UserError when there is none."""
        if number is None:
            number = next((i for i, text in enumerate(self._open) if text is None), None)
            if number is None:
                raise UserError(
                    f"all {len(self._open)} sequences of the plan are in use; close a text, or plan with -np"
                )
        elif not 0 <= number < len(self._open):
            raise UserError(f"there is no sequence {number}; the engine's are 0 to {len(self._open) - 1}")
        elif self._open[number] is not None:
            raise UserError(f"sequence {number} belongs to a text that is open; close the text first")
        text = self._open[number] = Text([], 0, salt, number)
        return text

    def close(self, text: Text) -> None:
        """A text's place and blocks are free; its handle keeps the tokens."""
        self.pool.resize(text.blocks, 0)
        if self.recent:
            self.recent.cut_back(text.number, 0)
        self._open[text.number], text.is_open = None, False

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens at each place."""
        return tuple(len(text.ids) if text else 0 for text in self._open)

    @property
    def committed(self) -> tuple[int, ...]:
        """Tokens at each place that are no drafts: what the next of these sees of a window must stay."""
        return tuple(text.committed if text else 0 for text in self._open)

    # --- room ---------------------------------------------------------------------------------------------------

    def missing(self, wanted: Mapping[Text, int]) -> int:
        """How many blocks are lacking for texts to have so many tokens each."""
        lacking = self.pool.missing((text.blocks, cells) for text, cells in wanted.items())
        if self.recent:
            cells = {text.number: n for text, n in wanted.items()}
            lacking = max(lacking, self.recent.missing(self.committed, cells))
        return lacking

    def is_full(self, text: Text) -> bool:
        """Whether a text can have no further token."""
        cells = len(text.ids) + 1
        return cells > self.longest or self.pool.missing([(text.blocks, cells)]) > 0

    def admit(self, new: New, vocab: int) -> None:
        """Take blocks for new tokens. Raises UserError, before anything changes, when an id is not in the vocabulary,
        or the context or the pool is full."""
        for text, ids in new:
            if not 0 <= min(ids) <= max(ids) < vocab:
                raise UserError(
                    f"token ids must be in 0..{vocab - 1}; sequence {text.number} has {min(ids)}..{max(ids)}"
                )
            if len(text.ids) + len(ids) > self.longest:
                raise UserError(
                    f"{len(text.ids)} + {len(ids)} tokens exceed the context of {self.longest}; "
                    f"plan a larger -c, where the model has it"
                )
        self._reserve({text: len(text.ids) + len(ids) for text, ids in new})

    def _reserve(self, wanted: Mapping[Text, int]) -> None:
        if self.pool.missing((text.blocks, cells) for text, cells in wanted.items()):
            cells = sum(wanted.get(text, len(text.ids)) for text in self._open if text)
            raise UserError(
                f"sequences of {cells} cells in all do not fit the KV cache of {self.pool.blocks} blocks of "
                f"{KV_BLOCK} cells; reset one, or plan a larger -c"
            )
        for text, cells in wanted.items():
            self.pool.resize(text.blocks, cells)

    # --- cutting back -------------------------------------------------------------------------------------------

    def can_own(self, text: Text, length: int) -> bool:
        """Whether `own_last` has room."""
        return all(pool.room > 0 or not pool.is_shared(block) for pool, block in self._list_cut(text, length))

    def own_last(self, text: Text, length: int) -> list[tuple[int, int, bool]]:
        """Let a text that is cut within a shared block hold that block alone; returns which blocks are to be copied:
        (from, to, whether of layers with a window)."""
        at, copies = length // KV_BLOCK, list[tuple[int, int, bool]]()
        for pool, old in self._list_cut(text, length):
            if self.recent and pool is self.recent.pool:
                new = self.recent.own(text.number, at)
            else:
                new = text.blocks[at] = pool.own(old)
            if new != old:
                copies.append((old, new, pool is not self.pool))
        return copies

    def _list_cut(self, text: Text, length: int) -> Iterator[tuple[BlockPool, int]]:
        """The blocks that a cut at this length goes through and that may be shared, each with its pool."""
        at = length // KV_BLOCK
        if not length % KV_BLOCK or at >= len(text.keys):
            return
        yield self.pool, text.blocks[at]
        if self.recent and self.recent.first(text.number) <= length:
            yield self.recent.pool, self.recent.block(text.number, at)

    def keeps_window(self, text: Text, length: int) -> bool:
        """Cut a text's blocks of layers with a window; whether what the next token sees is still there. Where it is
        not, none are left."""
        return not self.recent or self.recent.cut_back(text.number, length)

    def shorten(self, text: Text, length: int) -> None:
        """Let a text have its first tokens only, and the blocks of these."""
        del text.ids[length:]
        del text.keys[length // KV_BLOCK :]
        self.pool.resize(text.blocks, length)
        text.committed, text.cached = min(text.committed, length), min(text.cached, length)

    def forget_keys(self, text: Text, first: int) -> list[bytes]:
        """Let nobody share a text's blocks from that number on, whose cells were not computed; returns their keys."""
        keys = text.keys[first:]
        for key in keys:
            self.pool.forget(key)
            if self.recent:
                self.recent.pool.forget(key)
        del text.keys[first:]
        return keys

    # --- segments -----------------------------------------------------------------------------------------------

    def begin(self, text: Text, cells: int) -> Segment:
        """Let an empty text hold the blocks for so many cells that it has already; returns where they lie. Raises
        UserError when the pool has too few."""
        self._reserve({text: cells})
        if self.recent:
            self.recent.begin(text.number, cells, self.committed)
        return self._segment(text, 0, 0, cells)

    def whole(self, text: Text) -> Segment:
        """All that a text has, as a segment without new tokens."""
        return self._segment(text, 0, 0, len(text.ids))

    def reserve(self, text: Text, cells: int) -> None:
        """Take blocks for so many cells of a text, beside those that it has. Raises UserError when the pool is full."""
        self._reserve({text: max(cells, len(text.blocks) * KV_BLOCK)})

    def segment_at(self, text: Text, start: int, tokens: int, past: int) -> Segment:
        """Tokens at `past` of a text, which has their blocks, as rows of another program's micro-batch from `start`
        on."""
        return self._segment(text, start, tokens, past)

    def _segment(self, text: Text, start: int, tokens: int, past: int) -> Segment:
        """A segment in the blocks that its text has."""
        blocks = tuple(text.blocks[: blocks_of(past + tokens)])
        if self.recent is None:
            return Segment(text.number, start, tokens, past, blocks)
        return Segment(
            text.number, start, tokens, past, blocks, self.recent.table(text.number), self.recent.first(text.number)
        )

    def new_segment(self, text: Text, start: int, tokens: int, past: int) -> Segment:
        """New tokens of a text, which takes the blocks that it lacks of layers with a window. Of these the segment
        means what its tokens see."""
        if self.recent is None:
            return self._segment(text, start, tokens, past)
        self.recent.extend(text.number, past + tokens, self.committed)
        return replace(self._segment(text, start, tokens, past), first=self.recent.seen_from(past))

    def used(self) -> list[Segment]:
        """What every text has, as segments without new tokens; and what none has any more, but another may take up."""
        left = [Segment(0, 0, 0, len(idle) * KV_BLOCK, idle) for idle in (self.pool.idle,) if idle]
        if self.recent and self.recent.idle:
            left.append(Segment(0, 0, 0, len(self.recent.idle) * KV_BLOCK, (), self.recent.idle))
        return [*(self.whole(text) for text in self._open if text and text.ids), *left]

    def foresee(self, segments: Sequence[Segment]) -> tuple[Segment, ...] | None:
        """The segments of one more token of each of these, whose tokens are new now; None where that needs a further
        block, or for prompts, which are followed by anything."""
        if any(s.tokens != 1 or blocks_of(s.past + 2) > len(s.blocks) for s in segments):
            return None
        seen_from = self.recent.seen_from if self.recent else lambda past: 0
        return tuple(
            Segment(s.sequence, s.start, 1, s.past + 1, s.blocks, s.recent, seen_from(s.past + 1)) for s in segments
        )

    def cut(self, new: New, most: int, all_logits: bool) -> Iterator[NewTokens]:
        """New tokens in micro-batches of at most so many; logits are wanted of all of them, or of each text's last.
        What one holds is to be appended before the next is asked for."""
        texts, ids, segments, spans = list[Text](), list[int](), list[Segment](), list[Span]()
        for text, own in new:
            done, past = 0, len(text.ids)
            while done < len(own):
                take = min(len(own) - done, most - len(ids))
                texts.append(text)
                segments.append(self.new_segment(text, len(ids), take, past + done))
                last = len(own) - done - take == 0
                rows = take if all_logits else int(last)
                spans.append(Span(take, past + done, rows, DECODE if rows == len(own) == 1 else PROMPT))
                ids += own[done : done + take]
                done += take
                if len(ids) == most:
                    yield NewTokens(tuple(texts), ids, tuple(segments), Batch(tuple(spans)))
                    texts, ids, segments, spans = [], [], [], []
        if ids:
            yield NewTokens(tuple(texts), ids, tuple(segments), Batch(tuple(spans)))
