"""Texts by handle, over the one pool of KV blocks that an engine has: equal beginnings are computed once."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch

from pshard.errors import UserError
from pshard.paths import cache_dir
from pshard.runtime.checkpoints.checkpoints import EVERY, Checkpoints
from pshard.runtime.executor import Executor
from pshard.runtime.kernels.api import Segment
from pshard.runtime.memory.kv_blocks import blocks_of
from pshard.runtime.memory.kv_file import KVStore
from pshard.runtime.sequences import Sequences, TokenSequence
from pshard.runtime.texts.beginnings import SHARE_OF_STEP, Beginnings
from pshard.runtime.texts.block_keys import next_key, root_key
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
        store: KVStore,
        guard: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """store: knows the model; guard: around what leaves the caches half-written where it fails."""
        self._executor, self._sequences, self._checkpoints, self._guard = executor, sequences, checkpoints, guard
        states = executor.states
        self._root = lru_cache(1024)(lambda salt: root_key(store.fingerprint, states.type_k, states.type_v, salt))
        self._own_name = lambda: root_key(store.slice_fingerprint, states.type_k, states.type_v, "").hex()
        self._beginnings = Beginnings(executor, sequences, checkpoints)
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
        try:
            keys = self._beginnings.take_up(sequence, self._root(salt), ids)
        except BaseException:
            self._sequences.give_back(sequence)
            raise
        return Text(sequence.tokens, sequence.length, salt, sequence, keys)

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
        begin = time.monotonic()
        with self._guard():
            for batch in self._split(pieces):
                results += self._run_to_borders(batch)
            if self._beginnings.is_kept:
                self._beginnings.keep_some(SHARE_OF_STEP * (time.monotonic() - begin))
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

    def keep_tier(self, tokens: int) -> None:
        """Let micro-batches run under tiers of at least so many tokens; all ranks call it. ValueError: none has."""
        self._executor.least = self._executor.plan.covering(tokens).tokens

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
            parent, ids = self._parent(text, at), sequence.tokens[at * KV_BLOCK : (at + 1) * KV_BLOCK]
            keys.append(next_key(parent, ids))
            self._beginnings.offer(keys[-1], parent, ids)
            sequence.blocks[at] = self._sequences.pool.share(sequence.blocks[at], keys[-1])
            if self._sequences.recent:
                self._sequences.recent.share(sequence.number, at, keys[-1])

    def _parent(self, text: Text, at: int) -> bytes:
        """The key of what block number `at` of a text follows."""
        return text.keys[at - 1] if at else self._root(text.salt)

    def _keep_states(self, piece: Piece) -> None:
        """Make a checkpoint at a block's end: of prompts, and every so many tokens."""
        sequence = _sequence_of(piece.text)
        length = sequence.length
        if length % KV_BLOCK == 0 and (len(piece.ids) > 1 or length % EVERY == 0):
            key = piece.text.keys[-1]
            if not self._checkpoints.has_shared(key):
                parent = self._parent(piece.text, length // KV_BLOCK - 1)
                self._beginnings.offer(key, parent, sequence.tokens[-KV_BLOCK:])
            self._checkpoints.share(sequence.number, length, key)

    def close(self, text: Text, keep: bool = True) -> None:
        """Let a text go; may be called twice. Its full blocks stay until their room is needed; keep=False: those that
        it made, and nobody else holds, do not."""
        sequence = text.sequence
        if sequence is None:
            return
        first = text.cached // KV_BLOCK if not keep else len(sequence.blocks)
        made = list(zip(sequence.blocks[first:], text.keys[first:]))
        text.sequence = None
        self._sequences.give_back(sequence)
        for block, key in reversed(made):
            if self._sequences.pool.drop(block):
                self._beginnings.forget(key)

    def keep_in_files(self, folder: Path | None, file_bytes: int, memory_bytes: int) -> None:
        """From now on keep full blocks in files of that folder too, one folder for all models (None: in pshard's own,
        see `pshard.paths.cache_dir`), and find those there that the KV cache lacks; a block is there whole or not at
        all. Steps copy blocks to host memory, of which at most so many bytes are taken, and a thread writes them. Where
        files are more than `file_bytes`, those used longest ago go. All ranks call it; each has files of its own.

        Raises UserError: the folder cannot be made, or a block takes more than half of the memory.
        """
        folder = folder or cache_dir() / "prefixes"
        self._beginnings.keep_in(folder / self._own_name()[:32], file_bytes, memory_bytes)

    def keep_some(self, seconds: float) -> bool:
        """Copy blocks that are to be kept, for when there is nothing to step: one, and more while there is time.
        Whether there are more."""
        with self._guard():
            return self._beginnings.keep_some(seconds)

    def finish_files(self) -> None:
        """Copy what is still to be kept, and wait until it is written. Keeps nothing afterwards."""
        self._beginnings.finish()

    def counts(self) -> BlockCounts:
        """How the KV blocks are used now."""
        pool = self._sequences.pool
        cached = len(pool.idle)
        held = self._checkpoints.shared_nbytes + self._beginnings.nbytes
        return BlockCounts(pool.blocks, pool.blocks - pool.room, cached, pool.room - cached, held)


def _sequence_of(text: Text) -> TokenSequence:
    """Raises UserError for a text that is closed."""
    if text.sequence is None:
        raise UserError("the text is closed; open it again with its tokens")
    return text.sequence
