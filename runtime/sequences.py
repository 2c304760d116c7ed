"""Sequences: the texts that an engine continues, the blocks of the KV cache that each holds, and what is new of them
cut into micro-batches. No torch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pshard.errors import UserError
from pshard.runtime.kernels.api import Segment
from pshard.runtime.memory.kv_blocks import BlockPool, RecentBlocks, blocks_of
from pshard.units.kv_cells import KV_BLOCK


@dataclass
class TokenSequence:
    """One sequence: ids of the tokens that it has, and the blocks that hold their cells, in order."""

    number: int
    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    is_lent: bool = False  # to a `Text`, by whose handle alone it is used then

    @property
    def length(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class NewTokens:
    """Those of one micro-batch: ids, which rows belong to which sequence, and rows whose logits are wanted, each with
    its sequence."""

    ids: list[int]
    segments: tuple[Segment, ...]
    wanted: list[tuple[int, int]]


class Sequences:
    """So many texts, each of at most `longest` tokens, over one pool of blocks.

    kept: where states cannot be cut back to any length, to which one at or before a length a sequence's can; None where
    all can. recent: blocks of layers with a window.

    Attributes:
        longest: tokens that one can have; pool: blocks of all layers without a window; recent: of those with one.
    """

    def __init__(
        self,
        count: int,
        longest: int,
        blocks: int,
        kept: Callable[[int, int], int] | None = None,
        recent: RecentBlocks | None = None,
    ) -> None:
        self._texts = [TokenSequence(number) for number in range(count)]
        self.longest, self._kept = longest, kept
        self.pool, self.recent = BlockPool(blocks), recent

    def __getitem__(self, number: int) -> TokenSequence:
        """Raises UserError when there is no such one, or it is lent."""
        if not 0 <= number < len(self._texts):
            raise UserError(f"there is no sequence {number}; the engine's are 0 to {len(self._texts) - 1}")
        if self._texts[number].is_lent:
            raise UserError(f"sequence {number} belongs to a text that is open; close the text first")
        return self._texts[number]

    def lend(self) -> TokenSequence:
        """An empty sequence that only `step` of a pool of texts changes from now on. Raises UserError when there is
        none."""
        for text in self._texts:
            if not text.is_lent and not text.tokens:
                text.is_lent = True
                return text
        raise UserError(f"all {len(self._texts)} sequences of the plan are in use; close a text, or plan with -np")

    def give_back(self, text: TokenSequence) -> None:
        """A lent sequence is empty again, without what it had; its tokens' list stays that of whoever had it."""
        self.pool.resize(text.blocks, 0)
        if self.recent:
            self.recent.cut_back(text.number, 0)
        text.tokens, text.is_lent = [], False

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence."""
        return tuple(text.length for text in self._texts)

    def cut_back(self, number: int | None, length: int) -> dict[int, list[int]]:
        """Forget what follows the first `length` tokens of one sequence, or of all. Those of which a window is lost are
        empty then, and those whose states cannot be cut back are shorter: returns the tokens that they are to be given
        again.

        Raises UserError, before anything changes, when there is no such one.
        """
        again = {}
        for text in [t for t in self._texts if not t.is_lent] if number is None else [self[number]]:
            wanted = text.tokens[: max(0, length)]
            at = len(wanted)
            if self._kept and at < text.length:
                at = self._kept(text.number, at)
            if self.recent and not self.recent.cut_back(text.number, at):
                at = 0
            text.tokens[:] = wanted[:at]
            if at < len(wanted):
                again[text.number] = wanted[at:]
            self.pool.resize(text.blocks, at)
        return again

    def replace(self, number: int, tokens: Sequence[int]) -> None:
        """Let a sequence, which holds the blocks for them, have these tokens."""
        self[number].tokens[:] = tokens

    def reserve(self, wanted: Mapping[int, int]) -> None:
        """Let sequences hold the blocks that so many cells need. Raises UserError, before anything changes, when the
        pool has too few."""
        self._check_room(wanted)
        for number, cells in wanted.items():
            self.pool.resize(self._texts[number].blocks, cells)

    def begin(self, number: int, cells: int) -> Segment:
        """Let an empty sequence hold the blocks for so many cells that it has already; returns where they lie. Raises
        UserError when the pool has too few."""
        self.reserve({number: cells})
        if self.recent:
            self.recent.begin(number, cells, self.lengths)
        return self._segment(self._texts[number], 0, 0, cells)

    def whole(self, number: int) -> Segment:
        """All that a sequence has, as a segment without new tokens."""
        text = self._texts[number]
        return self._segment(text, 0, 0, text.length)

    def _segment(self, text: TokenSequence, start: int, tokens: int, past: int) -> Segment:
        """A segment in the blocks that its sequence has."""
        blocks = tuple(text.blocks[: blocks_of(past + tokens)])
        if self.recent is None:
            return Segment(text.number, start, tokens, past, blocks)
        return Segment(
            text.number, start, tokens, past, blocks, self.recent.table(text.number), self.recent.first(text.number)
        )

    def extend(self, segment: Segment, ids: Sequence[int]) -> None:
        """Append a segment's tokens, which stand among those of its micro-batch, to its sequence."""
        tokens = self._texts[segment.sequence].tokens
        tokens[segment.past :] = ids[segment.start : segment.start + segment.tokens]

    def is_full(self, number: int) -> bool:
        """Whether a sequence can have no further token."""
        text = self._texts[number]
        return text.length + 1 > self.longest or self.pool.missing([(text.blocks, text.length + 1)]) > 0

    def used(self) -> list[Segment]:
        """What every sequence has, as segments without new tokens; and what none has any more, but another may take
        up."""
        left = [Segment(0, 0, 0, len(idle) * KV_BLOCK, idle) for idle in (self.pool.idle,) if idle]
        if self.recent and self.recent.idle:
            left.append(Segment(0, 0, 0, len(self.recent.idle) * KV_BLOCK, (), self.recent.idle))
        return [*(self.whole(t.number) for t in self._texts if t.tokens), *left]

    def admit(self, lists: Sequence[Sequence[int]], vocab: int) -> None:
        """Take blocks for new tokens of the first sequences.

        Raises UserError, before anything changes, when there are too many sequences, an id is not in the vocabulary,
        or the context or the pool is full.
        """
        if not any(lists):
            raise UserError("no tokens were given; a prompt needs at least one")
        if len(lists) > len(self._texts):
            raise UserError(f"{len(lists)} sequences, but the plan is for {len(self._texts)}; plan with -np")
        self.extend_blocks([(self[number], ids) for number, ids in enumerate(lists) if ids], vocab)

    def extend_blocks(self, new: Sequence[tuple[TokenSequence, Sequence[int]]], vocab: int) -> None:
        """Take blocks for new tokens, at least one, of some sequences. Raises UserError as `admit`."""
        for text, ids in new:
            if not 0 <= min(ids) <= max(ids) < vocab:
                raise UserError(
                    f"token ids must be in 0..{vocab - 1}; sequence {text.number} has {min(ids)}..{max(ids)}"
                )
            if text.length + len(ids) > self.longest:
                raise UserError(
                    f"{text.length} + {len(ids)} tokens exceed the context of {self.longest}; "
                    f"plan a larger -c, where the model has it"
                )
        self.reserve({text.number: text.length + len(ids) for text, ids in new})

    def _check_room(self, wanted: Mapping[int, int]) -> None:
        """Raise UserError when the pool has too few blocks for sequences to have so many cells."""
        if self.pool.missing((self._texts[number].blocks, cells) for number, cells in wanted.items()):
            cells = sum(wanted.get(text.number, text.length) for text in self._texts)
            raise UserError(
                f"sequences of {cells} cells in all do not fit the KV cache of {self.pool.blocks} blocks of "
                f"{KV_BLOCK} cells; reset one, or plan a larger -c"
            )

    def new_segment(self, text: TokenSequence, start: int, tokens: int, past: int) -> Segment:
        """New tokens of a sequence, which takes the blocks that it lacks of layers with a window. Of these the segment
        means what its tokens see."""
        if self.recent is None:
            return self._segment(text, start, tokens, past)
        self.recent.extend(text.number, past + tokens, self.lengths)
        return replace(self._segment(text, start, tokens, past), first=self.recent.seen_from(past))

    def foresee(self, segments: Sequence[Segment]) -> tuple[Segment, ...] | None:
        """The segments of one more token of each of these, whose tokens are new now; None where that needs a further
        block, or for prompts, which are followed by anything."""
        if any(s.tokens != 1 or blocks_of(s.past + 2) > len(s.blocks) for s in segments):
            return None
        seen_from = self.recent.seen_from if self.recent else lambda past: 0
        return tuple(
            Segment(s.sequence, s.start, 1, s.past + 1, s.blocks, s.recent, seen_from(s.past + 1)) for s in segments
        )

    def spans(self, lists: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
        """From and to which length new tokens of the first sequences reach."""
        return [(text.length, text.length + len(ids)) for text, ids in zip(self._texts, lists)]

    def cut(self, lists: Sequence[Sequence[int]], most: int, all_logits: bool) -> Iterator[NewTokens]:
        """New tokens of the first sequences in micro-batches of at most so many; logits are wanted of all of them, or
        of each sequence's last. What one holds is to be appended before the next is asked for."""
        ids: list[int] = []
        segments: list[Segment] = []
        wanted: list[tuple[int, int]] = []
        for text, new in zip(self._texts, lists):
            done, past = 0, text.length
            while done < len(new):
                take = min(len(new) - done, most - len(ids))
                segments.append(self.new_segment(text, len(ids), take, past + done))
                last = len(new) - done - take == 0
                rows = range(len(ids), len(ids) + take) if all_logits else [len(ids) + take - 1] if last else []
                wanted += [(row, text.number) for row in rows]
                ids += new[done : done + take]
                done += take
                if len(ids) == most:
                    yield NewTokens(ids, tuple(segments), wanted)
                    ids, segments, wanted = [], [], []
        if ids:
            yield NewTokens(ids, tuple(segments), wanted)
