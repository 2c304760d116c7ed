"""Texts by handle, over the one pool of KV blocks that an engine has: equal prefixes are computed once."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import lru_cache, partial
from math import inf
from pathlib import Path

from pshard.errors import UserError
from pshard.paths import cache_dir
from pshard.runtime.checkpoints.checkpoints import EVERY, Checkpoints
from pshard.runtime.executor import Executor
from pshard.runtime.kernels.api import Segment
from pshard.runtime.memory.kv_blocks import blocks_of
from pshard.runtime.memory.kv_file import KVStore
from pshard.runtime.sequences import Sequences, TokenSequence
from pshard.runtime.texts.block_keys import next_key, root_key
from pshard.runtime.texts.choose_rows import RowChooser
from pshard.runtime.texts.prefix_cache import SHARE_OF_STEP, PrefixCache
from pshard.runtime.texts.text import BlockCounts, Piece, Row, Text, check_wish
from pshard.units.kv_cells import KV_BLOCK


class TextPool:
    """Texts of one engine, at most as many at once as its plan has sequences. Not thread-safe. Ranks make the same
    calls in the same order.

    A block is shared as soon as it is full, be it of a prompt or of an answer. Where states cannot be cut back, a
    prefix is adopted up to a block's end where a checkpoint was made; where layers have a window, up to one before
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
        self._prefix_cache = PrefixCache(executor, sequences, checkpoints)
        self._vocab, self._most = executor.spec.config.vocab, executor.plan.tiers[-1].tokens

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

    def open(self, ids: Sequence[int], salt: str = "", seconds: float = inf) -> Text:
        """A text that is to begin with these tokens, or continue so. It has those of them already whose blocks are
        shared, at most all but the last one; `ids[text.cached:]` are to be given to `step`. Computes nothing. seconds:
        that blocks may be read from files, about; what is not read then is computed.

        Raises UserError when as many texts are open as the plan has sequences, and StepFailed as `step`.
        """
        sequence = self._sequences.lend()
        try:
            with self._guard():
                keys, known = self._prefix_cache.take_up(sequence, self._root(salt), ids, seconds)
        except BaseException:
            self._sequences.give_back(sequence)
            raise
        # where states are kept for others: where another text has gone another way, and at the prompt's end
        borders = {known * KV_BLOCK, (len(ids) - 1) // KV_BLOCK * KV_BLOCK} if self._checkpoints.most else set[int]()
        return Text(sequence.tokens, sequence.length, salt, sequence, keys, frozenset(borders))

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

    def step(self, pieces: Sequence[Piece], meanwhile: Callable[[], None] = lambda: None) -> list[list[Row]]:
        """Append new tokens to texts and compute them, in one micro-batch; returns what is wanted of the logits, by
        piece and token. meanwhile: called once, when this thread leaves Python for long: others can use the time.

        Raises:
            UserError, before anything changes: no tokens, more than the largest tier's, ids out of the vocabulary, a
                text twice or closed, a wish that no row can meet, a full context, or too few blocks (see `missing`).
            StepFailed: as `Engine.forward`.
        """
        self._check(pieces)
        self._sequences.extend_blocks([(_sequence_of(piece.text), piece.ids) for piece in pieces], self._vocab)
        results: list[list[Row]] = []
        begin = time.monotonic()
        self._executor.meanwhile.expect(meanwhile)
        with self._guard():
            for batch in self._split(pieces):
                results += self._run_to_borders(batch)
            if self._prefix_cache.is_kept:
                self._prefix_cache.keep_some(SHARE_OF_STEP * (time.monotonic() - begin))
        self._executor.meanwhile.begin()
        return results

    def _run_to_borders(self, pieces: Sequence[Piece]) -> list[list[Row]]:
        """As `_run`; prompts in several micro-batches, where their states are to be kept between them."""
        firsts, rests = list(pieces), dict[int, Piece]()
        for i, piece in enumerate(pieces) if self._checkpoints.most else ():
            start = len(piece.text.ids)
            inside = [at - start for at in piece.text.borders if start < at < start + len(piece.ids)]
            if inside:
                n = min(inside)
                if piece.rows == "all":
                    firsts[i] = replace(piece, ids=piece.ids[:n], of=piece.of[:n])
                    rests[i] = replace(piece, ids=piece.ids[n:], of=piece.of[n:])
                else:
                    firsts[i] = replace(piece, ids=piece.ids[:n], rows="none")
                    rests[i] = replace(piece, ids=piece.ids[n:])
        results = self._run(firsts)
        if rests:
            for i, rows in zip(rests, self._run_to_borders(list(rests.values()))):
                results[i] += rows
        return results

    def keep_tier(self, tokens: int) -> None:
        """Let micro-batches run under tiers of at least so many tokens; all ranks call it. ValueError: none has."""
        self._executor.least = self._executor.plan.covering(tokens).tokens

    def _check(self, pieces: Sequence[Piece]) -> None:
        tokens = sum(len(piece.ids) for piece in pieces)
        if not 0 < tokens <= self._most or not all(piece.ids for piece in pieces):
            raise UserError(f"a step takes 1 to {self._most} tokens, and each piece at least one; these are {tokens}")
        for piece in pieces:
            check_wish(piece, self._vocab)
        wanted = {piece.text: len(piece.text.ids) + len(piece.ids) for piece in pieces}
        if len(wanted) < len(pieces):
            raise UserError("a text has two pieces in one step; join them")
        if lacking := self.missing(wanted):
            raise UserError(
                f"the step needs {lacking} KV blocks more than there are; close a text, or plan a larger -c"
            )

    def _split(self, pieces: Sequence[Piece]) -> Iterator[Sequence[Piece]]:
        """All of them, or as many at once as the micro-batch's tables of blocks have room for: texts that share blocks
        may have more of them, counted for each, than there are."""
        blocks = sum(blocks_of(len(piece.text.ids) + len(piece.ids)) for piece in pieces)
        if blocks <= self._sequences.pool.blocks:  # always
            yield pieces
            return
        tokens, blocks = 0, 0
        for i, piece in enumerate(pieces):
            tokens += len(piece.ids)
            blocks += blocks_of(len(piece.text.ids) + len(piece.ids))
            tier = self._executor.plan.covering(max(tokens, self._executor.least))
            if blocks > self._executor.arena.table_room(tier) and i:
                yield pieces[:i]
                yield from self._split(pieces[i:])
                return
        yield pieces

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
            follow = partial(self._sequences.foresee, segments)
            executor.run(ids, tuple(segments), rows, self._sequences.used, chooser=chooser, foresee=follow)
            for piece, segment in zip(pieces, segments):
                self._sequences.extend(segment, ids)
                self._share(piece.text)
                if self._checkpoints.most:
                    self._keep_states(piece.text)
        found = iter(chooser.rows)
        return [[next(found) for _ in range(n)] for n in counts]

    def _share(self, text: Text) -> None:
        """Give blocks that are full now their keys."""
        sequence, keys = _sequence_of(text), text.keys
        for at in range(len(keys), sequence.length // KV_BLOCK):
            parent, ids = self._parent(text, at), sequence.tokens[at * KV_BLOCK : (at + 1) * KV_BLOCK]
            keys.append(next_key(parent, ids))
            self._prefix_cache.offer(keys[-1], parent, ids)
            sequence.blocks[at] = self._sequences.pool.share(sequence.blocks[at], keys[-1])
            if self._sequences.recent:
                self._sequences.recent.share(sequence.number, at, keys[-1])

    def _parent(self, text: Text, at: int) -> bytes:
        """The key of what block number `at` of a text follows."""
        return text.keys[at - 1] if at else self._root(text.salt)

    def _keep_states(self, text: Text) -> None:
        """Make a checkpoint at a block's end: where prompts end or part, and every so many tokens."""
        sequence = _sequence_of(text)
        length = sequence.length
        if length in text.borders or length % EVERY == 0:
            key = text.keys[-1]
            if not self._checkpoints.has_shared(key):
                parent = self._parent(text, length // KV_BLOCK - 1)
                self._prefix_cache.offer(key, parent, sequence.tokens[-KV_BLOCK:])
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
                self._prefix_cache.forget(key)

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
        """Copy blocks that are to be kept, for when there is nothing to step: one, and more while there is time.
        Whether there are more."""
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
        pool, cached = self._sequences.pool, len(self._sequences.pool.idle)
        held = self._checkpoints.shared_nbytes + self._prefix_cache.nbytes
        used, free = pool.blocks - pool.room, pool.room - cached
        return BlockCounts(pool.blocks, used, cached, free, held, self.files_problem or "")


def _sequence_of(text: Text) -> TokenSequence:
    """Raises UserError for a text that is closed."""
    if text.sequence is None:
        raise UserError("the text is closed; open it again with its tokens")
    return text.sequence
