"""Texts by handle, over the one pool of KV blocks that an engine has: equal prefixes are computed once."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache, partial
from itertools import islice
from math import inf
from pathlib import Path

import torch

from pshard.errors import UserError
from pshard.paths import cache_dir
from pshard.runtime.checkpoints.checkpoints import Checkpoints
from pshard.runtime.executor import Executor
from pshard.runtime.memory.kv_store import KVStore
from pshard.runtime.texts.block_copies import BlockCopies
from pshard.runtime.texts.block_keys import root_key
from pshard.runtime.texts.commit_texts import Commits
from pshard.runtime.texts.cut_text import cut_text
from pshard.runtime.texts.follower import Follower
from pshard.runtime.texts.open_rows import OpenRows
from pshard.runtime.texts.prefix_cache import SHARE_OF_STEP, PrefixCache
from pshard.runtime.texts.run_pieces import PieceRunner
from pshard.runtime.texts.run_sweeps import SweepRunner
from pshard.runtime.texts.text import BlockCounts, GivenUp, Piece, Row, Text, check_no_drafts, check_open, check_pieces
from pshard.runtime.texts.text_blocks import New, TextBlocks
from pshard.units.kv_cells import KV_BLOCK


class TextPool:
    """Texts of one engine, at most as many as its plan has sequences. Not thread-safe. Ranks make the same calls.

    A block is shared as soon as it is full and no draft is in it. Where states cannot be cut back, a prefix is adopted
    up to a block's end with a checkpoint; where layers have a window, up to one before which their cells are there.

    Attributes:
        open_rows: rows of drafts, with the token before them, that all texts of a step can have, where states of any
            rank cannot be cut back; None: any number. runner: computes their micro-batches.
        vocab: token ids are 0..vocab-1. largest_step: tokens that a step can have that is one micro-batch.
    """

    def __init__(
        self,
        executor: Executor,
        blocks: TextBlocks,
        checkpoints: Checkpoints,
        store: KVStore,
        guard: Callable[[], AbstractContextManager[None]],
        follower: Follower,  # drafts beside it
    ) -> None:
        """store: knows the model; guard: around what leaves the caches half-written where it fails."""
        self._executor, self._blocks, self._checkpoints, self._guard = executor, blocks, checkpoints, guard
        self._store, states = store, executor.states
        self._root = lru_cache(1024)(lambda salt: root_key(store.fingerprint, states.type_k, states.type_v, salt))
        self._own_name = lambda: root_key(store.slice_fingerprint, states.type_k, states.type_v, follower.name).hex()
        self._copies = BlockCopies(executor, follower)
        self._prefix_cache = PrefixCache(self._copies, executor, blocks, checkpoints)
        self.vocab, self.largest_step = executor.spec.config.vocab, executor.plan.tiers[-1].tokens
        open_rows = OpenRows(executor)
        self.open_rows = _agree_rows(executor, open_rows)
        known = blocks, checkpoints, self._prefix_cache, self._root
        self._commits = Commits(*known, self.largest_step, follower, open_rows)
        self.runner = PieceRunner(executor, blocks, self._commits)
        self._sweeps = SweepRunner(executor, blocks, self._commits, self.runner)

    @property
    def most_swept(self) -> int:
        """Micro-batches that one step without drafts can have, in a sweep."""
        return self._sweeps.most

    @property
    def longest(self) -> int:
        """Tokens that one text can have."""
        return self._blocks.longest

    @property
    def most_rows(self) -> int:
        """Rows that a step can verify, of all texts."""
        return self.largest_step if self.open_rows is None else min(self.largest_step, self.open_rows)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of the texts at all places."""
        return self._blocks.lengths

    def open(self, ids: Sequence[int], salt: str = "", seconds: float = inf) -> Text:
        """A text that is to begin with these tokens, or continue so. It has those of them already whose blocks are
        shared, at most all but the last one; `ids[text.cached:]` are to be given to `step`. Computes nothing. seconds:
        that blocks may be read from files, about; what is not read then is computed.

        Raises UserError when as many texts are open as the plan has sequences, and StepFailed as `step`.
        """
        text = self._blocks.open(salt)
        try:
            with self._guard():
                known = self._prefix_cache.take_up(text, self._root(salt), ids, seconds)
        except BaseException:
            self._blocks.close(text)
            raise
        if self._checkpoints.most:
            # where states are kept for others: where another text has gone another way, and at the prompt's end
            text.borders = frozenset((known * KV_BLOCK, (len(ids) - 1) // KV_BLOCK * KV_BLOCK))
        return text

    def begin(self, number: int | None = None) -> Text:
        """An empty text that shares with nobody, at a place of the plan's sequences, or any. Raises UserError when
        there is none such, or another text has it."""
        return self._blocks.open(None, number)

    def load(self, path: Path, salt: str | None = None, number: int | None = None) -> Text:
        """The text of a file of `save`. Raises UserError for one that is damaged, too long or not this model's."""
        text = self._blocks.open(salt, number)
        try:
            take = partial(self._blocks.begin, text), partial(self._commits.follower.take, text)
            tokens, states = self._store.load(path, *take)
            self._checkpoints.replace(text.number, states)
            text.ids[:], text.committed = tokens, len(tokens)
            if salt is not None:
                self._commits.commit_all(text, 0, 0)
        except BaseException:
            self.close(text)
            raise
        return text

    def save(self, text: Text, path: Path) -> None:
        """Write what is computed of a text to a file that an engine over any number of ranks can load. Raises
        UserError when it cannot be written, and leaves no new file then; or for drafts."""
        check_no_drafts(text)
        self.settle()
        kept = self._checkpoints.up_to(text.number, len(text.ids)), self._commits.follower.keep(text)
        self._store.save(path, self._blocks.whole(text), text.ids, *kept)

    def close(self, text: Text, keep: bool = True) -> None:
        """Let a text go; may be called twice. Its full blocks stay until their room is needed; keep=False: those that
        it made, and nobody else holds, do not."""
        if not text.is_open:
            return
        first = text.cached // KV_BLOCK if not keep else len(text.blocks)
        made = list(zip(text.blocks[first:], text.keys[first:]))
        self._blocks.close(text)
        self._commits.forget(text)
        for block, key in reversed(made):
            if self._blocks.pool.drop(block):
                self._prefix_cache.forget(key)

    def missing(self, wanted: Mapping[Text, int]) -> int:
        """How many KV blocks are lacking for texts to have so many tokens each, beside what all others have; blocks
        without a holder count as there."""
        for text in wanted:
            check_open(text)
        return self._blocks.missing(wanted)

    def is_full(self, text: Text) -> bool:
        """Whether a text can have no further token."""
        return self._blocks.is_full(text)

    def extend(self, new: New, all_logits: bool = False, best_only: bool = False) -> list[list[torch.Tensor]]:
        """Append any number of tokens to texts and compute them, in micro-batches of the largest tier; returns rows of
        logits of each: of its last token, or of all.

        best_only: instead of logits the largest one and its id. Raises as `step`.
        """
        for text, _ in new:
            check_no_drafts(text)
        self._commits.open_rows.check()
        self._blocks.admit(new, self.vocab)
        rows: dict[Text, list[torch.Tensor]] = {text: [] for text, _ in new}
        spans = {text: (len(text.ids), len(text.ids) + len(ids)) for text, ids in new}
        with self._guard():
            self._commits.settle()
            batches = self._blocks.cut(new, self.largest_step, all_logits)
            for batch, logits in self._sweeps.run_all(batches, spans, best_only):
                found = iter(logits)
                for text, span in zip(batch.texts, batch.batch.spans):
                    rows[text] += islice(found, span.rows)
        return list(rows.values())

    def step(
        self,
        pieces: Sequence[Piece],
        meanwhile: Callable[[], None] = lambda: None,
        given_up: Callable[[], bool] = lambda: False,
    ) -> list[list[Row]]:
        """Append new tokens to texts and compute them, in one micro-batch, or in a sweep of several; returns what is
        wanted of the logits, by piece and token. meanwhile: called once, when this thread leaves Python for long:
        others can use the time. given_up: a sweep asks between layers whether nobody waits for any of the texts any
        more.

        Raises:
            UserError, before anything changes: no tokens, more than the step can have, ids out of the vocabulary, a
                text twice or closed, or with drafts that are not committed where the new tokens are none, a wish that
                no row can meet, a full context, or too few blocks (see `missing`).
            StepFailed: as `Engine.forward`.
            GivenUp: it was given up.
        """
        _check_step(self, pieces)
        self._commits.open_rows.check()
        self._blocks.admit([(piece.text, piece.ids) for piece in pieces], self.vocab)
        begin = time.monotonic()
        self._executor.meanwhile.expect(meanwhile)
        with self._guard():
            self._commits.settle()
            results = self._sweeps.run_pieces(pieces, given_up)
            if self._prefix_cache.is_kept:
                self._prefix_cache.keep_some(SHARE_OF_STEP * (time.monotonic() - begin))
        self._executor.meanwhile.begin()
        if results is None:
            for piece in pieces:
                self.close(piece.text)
            raise GivenUp
        return results

    def commit(self, text: Text, length: int, later: bool = False) -> list[int]:
        """So many tokens of a text hold: drafts behind them are forgotten, and what is held is shared as ever; later:
        its states take it in by `settle`. Returns tokens that are to be given to it again, of which states could not
        be cut back to that length.

        Raises UserError, before anything changes, for a length that is none of its drafts'.
        """
        check_open(text)
        if not text.committed <= length <= len(text.ids):
            raise UserError(f"{text.committed} to {len(text.ids)} tokens can hold of the text; {length} were committed")
        with self._guard():
            again = cut_text(text, length, self._blocks, self._commits, self._copies, later)
            self._commits.commit_all(text, len(text.ids), len(text.ids))
        return again

    def settle(self) -> None:
        """Let states of texts take in what `commit` has left for later, as whatever asks for them does first."""
        with self._guard():
            self._commits.settle()

    def cut(self, text: Text, length: int) -> list[int]:
        """Forget what follows the first `length` tokens of a text. Where its states cannot be cut back to that length
        it is shorter: returns those of the first tokens that are to be given to it again.

        Layers with a window keep their last cells only: where those are gone that the next token sees, nothing is left
        of the text. States of a fixed size go back to the last checkpoint at or before that length.
        """
        check_open(text)
        self.settle()
        with self._guard():
            return cut_text(text, length, self._blocks, self._commits, self._copies)

    def keep_tier(self, tokens: int) -> None:
        """Let micro-batches run under tiers of at least so many tokens; all ranks call it. ValueError: none has."""
        self._executor.least = self._executor.plan.covering(tokens).tokens

    def keep_in_files(self, folder: Path | None, file_bytes: int, memory_bytes: int) -> None:
        """From now on keep full blocks in files of that folder too, one folder for all models (None: in pshard's own,
        see `pshard.paths.cache_dir`), and find those there that the KV cache lacks; a block is there whole or not at
        all. Steps copy blocks to host memory, of which at most so many bytes are taken, and a thread writes them. Where
        files are more than `file_bytes`, those used longest ago go. All ranks call it; each has files of its own.

        Raises UserError: the folder cannot be made, or a block takes more than half of the memory.
        """
        folder = folder or cache_dir() / "prefixes"
        self._prefix_cache.keep_in(folder / self._own_name()[:32], file_bytes, memory_bytes)

    def keep_some(self, seconds: float) -> bool:
        """Copy blocks to be kept while nothing is to step: one, and more in this time. Whether there are more."""
        with self._guard():
            return self._prefix_cache.keep_some(seconds)

    @property
    def files_problem(self) -> str | None:
        """Why a file could not be written, the last time; None while all is well. Texts go on without."""
        return self._prefix_cache.problem

    def finish_files(self) -> None:
        """Copy what is still to be kept, and wait until it is written. Keeps nothing afterwards."""
        self._prefix_cache.finish()

    def counts(self) -> BlockCounts:
        """How the KV blocks are used now."""
        pool, held = self._blocks.pool, self._checkpoints.shared_nbytes + self._prefix_cache.nbytes
        cached = len(pool.idle)
        counts = pool.blocks, pool.blocks - pool.room, cached, pool.room - cached
        return BlockCounts(*counts, held, self.files_problem or "")


def _check_step(pool: TextPool, pieces: Sequence[Piece]) -> None:
    """Raise UserError where pieces are no step of a pool."""
    swept = 1 if any(piece.drafts for piece in pieces) else pool.most_swept
    check_pieces(pieces, swept * pool.largest_step, pool.vocab, pool.open_rows)
    wanted = {piece.text: len(piece.text.ids) + len(piece.ids) for piece in pieces}
    if lacking := pool.missing(wanted):
        raise UserError(f"the step lacks {lacking} KV blocks; close a text, or plan a larger -c")


def _agree_rows(executor: Executor, own: OpenRows) -> int | None:
    """Rows that every rank can hold back; a rank of a pipeline may have no state that asks for it."""
    return min((most for most in executor.group.gather(own.most) if most is not None), default=None)
