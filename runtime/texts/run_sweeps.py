"""Runs prompts of several micro-batches: in sweeps where the plan has them, so that the disk is read less often."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

import torch

from pshard.runtime.executor import Executor, join_logits
from pshard.runtime.texts.commit_texts import Commits, DueStates
from pshard.runtime.texts.gram_rows import list_gram_rows
from pshard.runtime.texts.run_pieces import PieceRunner
from pshard.runtime.texts.text import Text
from pshard.runtime.texts.text_blocks import NewTokens, TextBlocks
from pshard.runtime.walks.sweep import compile_sweep, make_turn, sweep
from pshard.steps.emit import emit_steps
from pshard.steps.sweep import sweep_steps

Spans = Mapping[Text, tuple[int, int]]  # from and to which length the tokens of each text reach


@dataclass(frozen=True)
class _Swept:
    """A micro-batch of a sweep, and the states that are kept after it."""

    new: NewTokens
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
        while taken := self._take(batches, spans):
            with self._executor.device.current():
                logits = self._run(taken, best_only)
            yield from zip([one.new for one in taken], logits)

    def _take(self, batches: Iterator[NewTokens], spans: Spans) -> list[_Swept]:
        """The next micro-batches of a sweep; their texts have their tokens from now on, and share their blocks."""
        with self._executor.device.current():
            self._executor.enter(self._executor.plan.tiers[-1], self._blocks.used)  # which asks what texts have by now
        found, last = list[_Swept](), dict.fromkeys(spans, 0)
        for new in islice(batches, self.most):
            found.append(_Swept(new))
            new.append()
            for text in new.texts:
                self._commits.hold(text)
                if due := self._commits.find_due(text, spans[text], last[text]):
                    last[text] = due.length
                    found[-1].due.append(due)
        return found

    def _run(self, taken: list[_Swept], best_only: bool) -> list[torch.Tensor]:
        executor, tier = self._executor, self._executor.plan.tiers[-1]
        in_force = executor.enter(tier, self._blocks.used)
        executor.begin([segment for one in taken for segment in one.new.segments])
        turns = []
        for one, waiting in zip(taken, in_force.carved.waiting):
            ready = executor.walks.prepare(in_force, one.new.segments, list(one.new.batch.wanted))
            ready.walk.logits.ask(best_only, None)
            grams = list_gram_rows(executor.spec.config.grams, one.new)
            turns.append(make_turn(ready, one.new.ids, waiting, grams))

        def keep_states(number: int, units: frozenset[str]) -> None:
            for due in taken[number].due:
                self._commits.read_states(due, units)

        once = emit_steps(executor.spec, tier, executor.shape_of(tier, True))
        rounds = compile_sweep(sweep_steps(executor.spec, once, tier.tokens, len(turns)))
        with torch.inference_mode(), executor.device.computing():
            sweep(turns, rounds, executor.device, executor.transfers, keep_states)
        executor.device.host_wait(executor.device.mark())
        for due in (due for one in taken for due in one.due):
            self._commits.keep_due(due)
        return [join_logits(turn.walk.logits.kept, best_only, executor.spec.config.vocab) for turn in turns]
