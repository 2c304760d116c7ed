"""Texts by handle, over the one pool of KV blocks that an engine has: equal beginnings are computed once."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import lru_cache
from itertools import takewhile

import torch

from pshard.errors import UserError
from pshard.runtime.checkpoints.checkpoints import EVERY, Checkpoints
from pshard.runtime.executor import Executor
from pshard.runtime.kernels.api import Segment
from pshard.runtime.memory.kv_blocks import blocks_of
from pshard.runtime.sequences import Sequences, TokenSequence
from pshard.runtime.texts.block_keys import list_keys, next_key, root_key
from pshard.runtime.texts.choose_rows import RowChooser
from pshard.runtime.texts.text import BlockCounts, Piece, Row, Text
from pshard.units.kv_cells import KV_BLOCK


class TextPool:
    """Texts of one engine, at most as many at once as its plan has sequences. Not thread-safe. Ranks make the same
    calls in the same order.

    A block is shared as soon as it is full, be it of a prompt or of an answer. Where states cannot be cut back, a
    beginning is adopted up to a block's end where a checkpoint was made; where layers have a window, up to one before
    which their cells are still there.
    """

    def __init__(
        self,
        executor: Executor,
        sequences: Sequences,
        checkpoints: Checkpoints,
        fingerprint: Callable[[], str],
        guard: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """fingerprint: tells the model's; guard: around what leaves the caches half-written where it fails."""
        self._executor, self._sequences, self._checkpoints, self._guard = executor, sequences, checkpoints, guard
        states = executor.states
        self._root = lru_cache(1024)(lambda salt: root_key(fingerprint(), states.type_k, states.type_v, salt))
        self._vocab, self._most = executor.spec.config.vocab, executor.plan.tiers[-1].tokens
        self._cells = sequences.pool.blocks  # blocks that the tables of one micro-batch have room for

    @property
    def vocab(self) -> int:
        """Token ids are 0..vocab-1."""
        return self._vocab

    @property
    def largest_step(self) -> int:
        """Tokens that one step can have."""
        return self._most

    @property
    def longest(self) -> int:
        """Tokens that one text can have."""
        return self._sequences.longest

    def open(self, ids: Sequence[int], salt: str = "") -> Text:
        """A text that is to begin with these tokens, or continue so. It has those of them already whose blocks are
        shared, at most all but the last one; `ids[text.cached:]` are to be given to `step`. Computes nothing.

        Raises UserError when as many texts are open as the plan has sequences.
        """
        sequence = self._sequences.lend()
        keys = self._find(ids, salt)
        sequence.blocks[:] = [self._sequences.pool.hold(block) for block, _ in keys]
        found = [key for _, key in keys]
        if self._sequences.recent and found:
            self._sequences.recent.adopt(sequence.number, found)
        sequence.tokens[:] = ids[: len(found) * KV_BLOCK]
        if self._checkpoints.each and found:
            self._checkpoints.adopt(sequence.number, sequence.length, found[-1])
        return Text(sequence.tokens, sequence.length, salt, sequence, found)

    def _find(self, ids: Sequence[int], salt: str) -> list[tuple[int, bytes]]:
        """The shared blocks, with their keys, that a text of these tokens can take up."""
        pool, recent = self._sequences.pool, self._sequences.recent
        keys = list_keys(self._root(salt), ids, len(ids) - 1)
        found = list(takewhile(lambda one: one[0] is not None, ((pool.find(key), key) for key in keys)))
        keys_found = [key for _, key in found]
        while found and recent and not recent.has_window(keys_found[: len(found)]):
            found.pop()
        while found and self._checkpoints.each and not self._checkpoints.has_shared(found[-1][1]):
            found.pop()
        return [(block, key) for block, key in found if block is not None]

    def missing(self, wanted: Mapping[Text, int]) -> int:
        """How many KV blocks are lacking for texts to have so many tokens each, beside what all others have; blocks
        without a holder count as there."""
        sequences = self._sequences
        own = [(_sequence_of(text), cells) for text, cells in wanted.items()]
        lacking = sequences.pool.missing((one.blocks, cells) for one, cells in own)
        if sequences.recent:
            cells = {one.number: n for one, n in own}
            lacking = max(lacking, sequences.recent.missing(sequences.lengths, cells))
        return lacking

    def fit(self, text: Text, tokens: int) -> int:
        """How many of a prompt's next tokens to give at once, at most so many. Where states cannot be cut back, the
        beginnings that others can adopt end where a piece did, at a block's end: up to there. A piece of a prompt's
        last tokens that ends elsewhere takes `step` two micro-batches."""
        start = len(text.ids)
        border = (start + tokens) // KV_BLOCK * KV_BLOCK - start
        return border if self._checkpoints.most and border > 0 else tokens

    def step(self, pieces: Sequence[Piece]) -> list[list[Row]]:
        """Append new tokens to texts and compute them, in one micro-batch; returns what is wanted of the logits, by
        piece and token.

        Raises:
            UserError, before anything changes: no tokens, more than the largest tier's, ids out of the vocabulary, a
                text twice or closed, a full context, or too few blocks (see `missing`).
            StepFailed: as `Engine.forward`.
        """
        self._check(pieces)
        self._sequences.extend_blocks([(_sequence_of(piece.text), piece.ids) for piece in pieces], self._vocab)
        results: list[list[Row]] = []
        with self._guard():
            for batch in self._split(pieces):
                results += self._run_to_borders(batch)
        return results

    def _run_to_borders(self, pieces: Sequence[Piece]) -> list[list[Row]]:
        """As `_run`; ends of prompts in two micro-batches, where a checkpoint is to be made between them."""
        firsts, rests = list(pieces), dict[int, Piece]()
        for i, piece in enumerate(pieces):
            n = self.fit(piece.text, len(piece.ids)) if piece.rows == "last" and len(piece.ids) > 1 else len(piece.ids)
            if n < len(piece.ids):
                firsts[i] = replace(piece, ids=piece.ids[:n], rows="none")
                rests[i] = replace(piece, ids=piece.ids[n:])
        results = self._run(firsts)
        if rests:
            for i, rows in zip(rests, self._run(list(rests.values()))):
                results[i] = rows
        return results

    def _check(self, pieces: Sequence[Piece]) -> None:
        tokens = sum(len(piece.ids) for piece in pieces)
        if not 0 < tokens <= self._most or not all(piece.ids for piece in pieces):
            raise UserError(f"a step takes 1 to {self._most} tokens, and each piece at least one; these are {tokens}")
        wanted = {piece.text: len(piece.text.ids) + len(piece.ids) for piece in pieces}
        if len(wanted) < len(pieces):
            raise UserError("a text has two pieces in one step; join them")
        if lacking := self.missing(wanted):
            raise UserError(
                f"the step needs {lacking} KV blocks more than there are; close a text, or plan a larger -c"
            )

    def _split(self, pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
        """All of them, or as many at once as the micro-batch's tables of blocks have room for: texts that share blocks
        may have more of them, counted for each, than there are."""
        batch: list[Piece] = []
        room = self._cells
        for piece in pieces:
            needed = blocks_of(len(piece.text.ids) + len(piece.ids))
            if needed > room:
                yield batch
                batch, room = [], self._cells
            batch.append(piece)
            room -= needed
        yield batch

    def _run(self, pieces: Sequence[Piece]) -> list[list[Row]]:
        """One micro-batch of pieces that have their blocks."""
        ids: list[int] = []
        segments: list[Segment] = []
        rows: list[int] = []
        wishes: list[tuple[Piece, tuple[int, ...]]] = []
        counts: list[int] = []
        for piece in pieces:
            sequence, n = _sequence_of(piece.text), len(piece.ids)
            segments.append(self._sequences.new_segment(sequence, len(ids), n, sequence.length))
            ids += piece.ids
            if piece.rows == "all":
                rows += range(len(ids) - n, len(ids))
                wishes += [(piece, piece.of[i : i + 1]) for i in range(n)]
            elif piece.rows == "last":
                rows.append(len(ids) - 1)
                wishes.append((piece, piece.of))
            counts.append(n if piece.rows == "all" else int(piece.rows == "last"))
        chooser = RowChooser(wishes)
        executor = self._executor
        with executor.device.current():
            tokens = torch.tensor(ids, dtype=torch.int64)
            executor.run(tokens, tuple(segments), rows, self._sequences.used, chooser=chooser)
        for piece, segment in zip(pieces, segments):
            self._sequences.extend(segment, ids)
            self._share(piece.text)
            if self._checkpoints.most:
                self._keep_states(piece)
        found = iter(chooser.rows)
        return [[next(found) for _ in range(n)] for n in counts]

    def _share(self, text: Text) -> None:
        """Give blocks that are full now their keys."""
        sequence, keys = _sequence_of(text), text.keys
        for at in range(len(keys), sequence.length // KV_BLOCK):
            parent = keys[-1] if keys else self._root(text.salt)
            keys.append(next_key(parent, sequence.tokens[at * KV_BLOCK : (at + 1) * KV_BLOCK]))
            sequence.blocks[at] = self._sequences.pool.share(sequence.blocks[at], keys[-1])
            if self._sequences.recent:
                self._sequences.recent.share(sequence.number, at, keys[-1])

    def _keep_states(self, piece: Piece) -> None:
        """Make a checkpoint at a block's end: of prompts, and every so many tokens."""
        sequence = _sequence_of(piece.text)
        length = sequence.length
        if length % KV_BLOCK == 0 and (len(piece.ids) > 1 or length % EVERY == 0):
            self._checkpoints.share(sequence.number, length, piece.text.keys[-1])

    def close(self, text: Text, keep: bool = True) -> None:
        """Let a text go; may be called twice. Its full blocks stay until their room is needed; keep=False: those that
        it made, and nobody else holds, do not."""
        sequence = text.sequence
        if sequence is None:
            return
        made = [] if keep else sequence.blocks[text.cached // KV_BLOCK :]
        text.sequence = None
        self._sequences.give_back(sequence)
        for block in reversed(made):
            self._sequences.pool.drop(block)

    def counts(self) -> BlockCounts:
        """How the KV blocks are used now."""
        pool = self._sequences.pool
        cached = len(pool.idle)
        held = self._checkpoints.shared_nbytes
        return BlockCounts(pool.blocks, pool.blocks - pool.room, cached, pool.room - cached, held)


def _sequence_of(text: Text) -> TokenSequence:
    """Raises UserError for a text that is closed."""
    if text.sequence is None:
        raise UserError("the text is closed; open it again with its tokens")
    return text.sequence
