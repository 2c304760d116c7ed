"""Runs prompts of several micro-batches: in sweeps where the plan has them, so that the disk is read less often."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch

from pshard.runtime.executor import Executor, join_logits
from pshard.runtime.texts.choose_rows import RowChooser
from pshard.runtime.texts.commit_texts import Commits, DueStates
from pshard.runtime.texts.gram_rows import list_gram_rows
from pshard.runtime.texts.join_pieces import join_pieces, list_wishes
from pshard.runtime.texts.run_pieces import PieceRunner
from pshard.runtime.texts.split_pieces import cut_pieces
from pshard.runtime.texts.text import Piece, Row, Text
from pshard.runtime.texts.text_blocks import NewTokens, TextBlocks
from pshard.runtime.walks.sweep import compile_sweep, make_turn, sweep
from pshard.steps.emit import emit_steps
from pshard.steps.sweep import sweep_steps

Spans = Mapping[Text, tuple[int, int]]  # from and to which length the tokens of each text reach


@dataclass(frozen=True)
class _Batch:
    """A micro-batch that may be one of a sweep. chooser: takes what is wanted of its rows; None: whole rows are, or
    with `best_only` the best of each. places: of the pieces that it has parts of."""

    new: NewTokens
    chooser: RowChooser | None = None
    best_only: bool = False
    places: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Swept:
    """A micro-batch of a sweep, how many keys its texts had before, and the states that are kept after it."""

    batch: _Batch
    keys: dict[Text, int]
    due: list[DueStates] = field(default_factory=list)


class SweepRunner:
    """Runs those of one engine. Texts have the blocks that their new tokens need."""

    def __init__(self, executor: Executor, blocks: TextBlocks, commits: Commits, runner: PieceRunner) -> None:
        """runner: of micro-batches one after the other."""
        self._executor, self._blocks, self._commits, self._runner = executor, blocks, commits, runner

    @property
    def most(self) -> int:
        """Micro-batches that a sweep can have; 1 where each must end before the next: what routers choose of it is
        kept or played, or another program follows it."""
        picks, tier = self._executor.host.picks, self._executor.plan.tiers[-1]
        alone = (picks is not None and picks.wants(tier.tokens)) or self._commits.follower.name
        return 1 if alone else tier.most_swept

    def run_all(
        self, batches: Iterator[NewTokens], spans: Spans, best_only: bool
    ) -> Iterator[tuple[NewTokens, torch.Tensor]]:
        """As `PieceRunner.run_batch`, micro-batches in turn; each sweep has as many as it can."""
        tokens = sum(end - start for start, end in spans.values())
        if self.most < 2 or tokens <= self._executor.plan.tiers[-1].tokens:
            for new in batches:
                yield new, self._runner.run_batch(new, spans, best_only)
            return
        wanted = (_Batch(new, best_only=best_only) for new in batches)
        while taken := self._take(wanted, spans):
            logits = self._run(taken, lambda: False)
            assert logits is not None
            yield from zip([one.batch.new for one in taken], logits)

    def run_pieces(self, pieces: Sequence[Piece], given_up: Callable[[], bool]) -> list[list[Row]] | None:
        """As `PieceRunner.run_pieces`; in a sweep where they are more than a micro-batch. given_up: asked between
        layers whether nobody waits for any of them any more; then the step ends, what it has computed of them is not
        right, and None is returned."""
        if sum(len(piece.ids) for piece in pieces) <= self._executor.plan.tiers[-1].tokens:
            return self._runner.run_pieces(pieces)
        spans = {piece.text: (n := len(piece.text.ids), n + len(piece.ids)) for piece in pieces}
        rows, batches = [list[Row]() for _ in pieces], self._cut(pieces)
        while taken := self._take(batches, spans):
            if self._run(taken, given_up) is None:
                return None
            for batch in (one.batch for one in taken):
                found = iter(batch.chooser.rows if batch.chooser else ())
                for place, span in zip(batch.places, batch.new.batch.spans):
                    rows[place] += islice(found, span.rows)
        return rows

    def _cut(self, pieces: Sequence[Piece]) -> Iterator[_Batch]:
        executor, tier = self._executor, self._executor.plan.tiers[-1]
        for parts in cut_pieces(pieces, tier.tokens, executor.arena.table_room(tier)):
            own = [part for _, part in parts]
            chooser = RowChooser(list(list_wishes(own)))
            places = tuple(place for place, _ in parts)
            yield _Batch(join_pieces(self._blocks, own), chooser, chooser.is_quick, places)

    def _take(self, batches: Iterator[_Batch], spans: Spans) -> list[_Swept]:
        """The next micro-batches of a sweep; their texts have their tokens from now on, and share their blocks."""
        with self._executor.device.current():
            self._executor.enter(self._executor.plan.tiers[-1], self._blocks.used)  # which asks what texts have by now
        found, last = list[_Swept](), dict.fromkeys(spans, 0)
        for batch in islice(batches, self.most):
            texts = batch.new.texts
            found.append(_Swept(batch, {text: len(text.keys) for text in texts}))
            batch.new.append()
            for text in texts:
                self._commits.hold(text)
                if due := self._commits.find_due(text, spans[text], last[text]):
                    last[text] = due.length
                    found[-1].due.append(due)
        return found

    def _run(self, taken: list[_Swept], given_up: Callable[[], bool]) -> list[torch.Tensor] | None:
        """Compute a sweep; logits by micro-batch, of those without a chooser. None where it was given up."""
        executor, tier = self._executor, self._executor.plan.tiers[-1]

        def keep_states(number: int, units: frozenset[str]) -> None:
            for due in taken[number].due:
                self._commits.read_states(due, units)

        with executor.device.current():
            in_force = executor.enter(tier, self._blocks.used)
            executor.begin([segment for one in taken for segment in one.batch.new.segments])
            turns = []
            for one, waiting in zip(taken, in_force.carved.waiting):
                new, batch = one.batch.new, one.batch
                ready = executor.walks.prepare(in_force, new.segments, list(new.batch.wanted))
                ready.walk.logits.ask(batch.best_only, batch.chooser)
                grams = list_gram_rows(executor.spec.config.grams, new)
                turns.append(make_turn(ready, new.ids, waiting, grams))
            once = emit_steps(executor.spec, tier, executor.shape_of(tier, True))
            rounds = compile_sweep(sweep_steps(executor.spec, once, tier.tokens, len(turns)))
            executor.meanwhile.begin()
            with torch.inference_mode(), executor.device.computing():
                ended = sweep(turns, rounds, executor.device, executor.transfers, keep_states, given_up)
            executor.device.host_wait(executor.device.mark())
            if not ended:
                self._take_back(taken)
                executor.walks.refill_slots(in_force, executor.program(tier, False)[0])
                return None
            for due in (due for one in taken for due in one.due):
                self._commits.keep_due(due)
            return [self._finish(one.batch, turn.walk.logits.kept) for one, turn in zip(taken, turns)]

    def _finish(self, batch: _Batch, kept: list[torch.Tensor]) -> torch.Tensor:
        table = join_logits(kept, batch.best_only, self._executor.spec.config.vocab)
        if batch.chooser and batch.best_only:
            batch.chooser.take_best(table)
        return table

    def _take_back(self, taken: list[_Swept]) -> None:
        """A sweep was given up: nobody shares what its texts were to have."""
        first = dict[Text, int]()
        for one in taken:
            first = one.keys | first
        for text, keys in first.items():
            self._commits.take_back(text, keys)
