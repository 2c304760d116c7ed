"""Runs micro-batches of texts: what is new of them goes in, they have it then, and what holds of it is committed."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

import torch

from pshard.runtime.executor import Executor
from pshard.runtime.texts.choose_rows import RowChooser
from pshard.runtime.texts.commit_texts import Commits
from pshard.runtime.texts.gram_rows import list_gram_rows
from pshard.runtime.texts.join_pieces import join_pieces, list_wishes
from pshard.runtime.texts.split_pieces import split_at_borders, split_by_tables
from pshard.runtime.texts.text import Piece, Row, Text
from pshard.runtime.texts.text_blocks import NewTokens, TextBlocks


class PieceRunner:
    """Runs those of one engine. Texts have the blocks that their new tokens need."""

    def __init__(self, executor: Executor, blocks: TextBlocks, commits: Commits) -> None:
        self._executor, self._blocks, self._commits = executor, blocks, commits

    def run_pieces(self, pieces: Sequence[Piece]) -> list[list[Row]]:
        """Compute pieces, in one micro-batch where that can be; what is wanted of the logits, by piece and token."""
        results: list[list[Row]] = []
        for some in split_by_tables(pieces, self._blocks.pool.blocks, self._table_room):
            results += self._run_to_borders(some)
        return results

    def make_ready(self, text: Text, tokens: int) -> None:
        """Make the walk of a step that probably comes next: it verifies so many tokens of a text, for which there is
        room, and wants all their logits. For the host's time while it waits for something else; only where the tier in
        force is the one that will run it."""
        executor, past = self._executor, len(text.ids)
        tier = executor.plan.covering(max(tokens, executor.least))
        if executor.in_force is None or executor.in_force[0] is not tier:
            return
        self._blocks.reserve(text, past + tokens)
        segment = self._blocks.new_segment(text, 0, tokens, past)
        if self._commits.open_rows.most is not None:
            segment = replace(segment, is_open=True)
        ahead = executor.program(tier, past > 0)[1]
        with executor.device.current():
            executor.walks.make_next(executor.in_force[1], lambda: (segment,), list(range(tokens)), ahead)

    def run_batch(
        self, batch: NewTokens, spans: Mapping[Text, tuple[int, int]], best_only: bool = False
    ) -> torch.Tensor:
        """Compute a micro-batch of tokens that hold; logits as `Executor.run`. spans: from and to which length the
        tokens of each text reach, in this micro-batch and others."""
        with self._executor.device.current():  # this thread need not be the one that loaded
            logits = self._compute(batch, best_only=best_only)
            for text in batch.texts:
                self._commits.commit_all(text, *spans[text])
        return logits

    def _table_room(self, tokens: int) -> int:
        """Blocks that the tables have room for in the tier for so many tokens."""
        executor = self._executor
        return executor.arena.table_room(executor.plan.covering(max(tokens, executor.least)))

    def _run_to_borders(self, pieces: Sequence[Piece]) -> list[list[Row]]:
        """As `_run`; prompts in several micro-batches, where their states are to be kept between them."""
        firsts, rests = split_at_borders(pieces)
        results = self._run(firsts)
        if rests:
            for i, rows in zip(rests, self._run_to_borders(list(rests.values()))):
                results[i] += rows
        return results

    def _run(self, pieces: Sequence[Piece]) -> list[list[Row]]:
        """One micro-batch. Drafts come first: rows that stay open have room among the first ones only."""
        order = sorted(range(len(pieces)), key=lambda i: not pieces[i].drafts)
        found = dict(zip(order, self._run_in_order([pieces[i] for i in order])))
        return [found[i] for i in range(len(pieces))]

    def _run_in_order(self, pieces: Sequence[Piece]) -> list[list[Row]]:
        batch, chooser = join_pieces(self._blocks, pieces), RowChooser(list(list_wishes(pieces)))
        if self._commits.open_rows.most is not None:
            batch = self._hold_open(batch, pieces)
        with self._executor.device.current():
            self._compute(batch, chooser)
            for piece in pieces:
                if not piece.drafts:
                    end = len(piece.text.ids)
                    self._commits.commit_all(piece.text, end - len(piece.ids), end)
        found = iter(chooser.rows)
        return [list(islice(found, span.rows)) for span in batch.batch.spans]

    def _hold_open(self, batch: NewTokens, pieces: Sequence[Piece]) -> NewTokens:
        """The micro-batch with segments of drafts that states do not take in yet."""
        segments = list(batch.segments)
        for i, piece in enumerate(pieces):
            if piece.drafts:
                self._commits.open(piece.text, segments[i].start)
                segments[i] = replace(segments[i], is_open=True)
        return replace(batch, segments=tuple(segments))

    def _compute(self, batch: NewTokens, chooser: RowChooser | None = None, best_only: bool = False) -> torch.Tensor:
        follow = partial(self._blocks.foresee, batch.segments)
        grams = list_gram_rows(self._executor.spec.config.grams, batch)
        given = batch.ids, batch.segments, batch.batch, self._blocks.used, best_only
        found = self._executor.run(*given, chooser=chooser, foresee=follow, grams=grams)
        batch.append()
        self._commits.follower.follow(batch)
        return found
