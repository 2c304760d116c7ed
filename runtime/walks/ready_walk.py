"""Walks that can begin: made for a micro-batch, or for the next one while the accelerator computes this one.

A token's walk takes the host's thread some 200 us to make, of a fast CPU, and the accelerator has nothing to do
meanwhile. All but the token ids is known before: one more token of each sequence.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pshard.batch_sizes import SMALL_BATCH
from pshard.runtime.devices.relay import Relay
from pshard.runtime.kernels.api import Segment
from pshard.runtime.kernels.row_index import list_spans
from pshard.runtime.logits import Logits
from pshard.runtime.residents import Residents
from pshard.runtime.tier_in_force import IndexView, RunContext, TierInForce
from pshard.runtime.walks.beside import bring_weights
from pshard.runtime.walks.chain import Chain, make_chain
from pshard.runtime.walks.program import Program
from pshard.runtime.walks.step_sizes import fill_rows
from pshard.runtime.walks.walk import MicroBatch, PromptGraphs, Walk
from pshard.units.state import StateShape

LEAST_CELLS = 1024  # launch sizes grow with the context in powers of two from here, so that few graphs are captured

Foresee = Callable[[], tuple[Segment, ...] | None]


@dataclass(frozen=True)
class ReadyWalk:
    """A walk for these segments under this tier, of which these rows' logits are wanted. What the kernels of the walk
    before it may still read is written as it begins."""

    tier: TierInForce
    segments: tuple[Segment, ...]
    logit_rows: list[int]
    walk: Walk
    index: tuple[IndexView, IndexView]  # where it was written, and where it belongs
    spans: tuple[list[int], Any]  # likewise

    def is_for(self, tier: TierInForce, segments: tuple[Segment, ...], logit_rows: list[int]) -> bool:
        """Whether this is the walk."""
        return self.tier is tier and self.logit_rows == logit_rows and self.segments == segments

    def begin(self, ids: Sequence[int], grams: np.ndarray | None = None) -> Walk:
        """The walk, for these token ids, and rows of a table of n-grams [tokens, each]. The micro-batch before it has
        been computed."""
        (written, index), (numbers, spans) = self.index, self.spans
        index.numbers[:] = written.numbers
        spans[:] = numbers
        self.walk.batch.ids.numpy()[:] = ids
        if grams is not None and self.walk.batch.grams is not None:
            self.walk.batch.grams.numpy()[:] = grams.ravel()
        return self.walk


class WalkMaker:
    """Makes walks, one after the other.

    Attributes:
        exact: whether small micro-batches are computed so that no bit of a row depends on the other rows.
    """

    def __init__(
        self,
        context: RunContext,
        residents: Residents,
        states: StateShape,
        graphs: PromptGraphs,
        relay: Relay | None,
    ) -> None:
        """relay: by which the accelerator asks for what the CPU computes."""
        self._context, self._residents, self._states, self._graphs = context, residents, states, graphs
        self._relay = relay
        self._ids, self._grams = context.host.ids, context.host.grams
        self._next: ReadyWalk | None = None
        self._chain: tuple[TierInForce, Chain | None] | None = None
        self.exact = False

    def make(
        self,
        tier: TierInForce,
        ids: Sequence[int],
        segments: tuple[Segment, ...],
        logit_rows: list[int],
        grams: np.ndarray | None = None,
    ) -> Walk:
        """The walk of a micro-batch under a tier. grams: see `ReadyWalk.begin`."""
        ready, self._next = self._next, None
        if ready is None or not ready.is_for(tier, segments, logit_rows):
            ready = self.prepare(tier, segments, logit_rows)
        return ready.begin(ids, grams)

    def make_next(self, tier: TierInForce, foresee: Foresee, logit_rows: list[int], ahead: Program | None) -> None:
        """Make what will probably be asked for next, where it is known, while the walk before it is on its way.
        ahead: the program by which it will run, where that is one."""
        segments = foresee()
        if segments is not None:
            self._next = self.prepare(tier, segments, logit_rows)
            if ahead:
                self._next.walk.find_lists(ahead)

    def _bound(self, cells: int) -> int:
        """Cells for which launch sizes are chosen where there are so many."""
        return min(max(LEAST_CELLS, 1 << (cells - 1).bit_length()), self._states.context)

    def follow_on(
        self, tier: TierInForce, programs: tuple[Program, Program | None], cells: int
    ) -> Callable[[int, Segment, int], np.ndarray] | None:
        """`Chain.run` of the tier for texts of up to so many cells; None where tokens must be computed one by one.
        programs: see `Executor.program`."""
        if self._chain is None or self._chain[0] is not tier:
            self._chain = tier, make_chain(self._context, self._residents, tier, programs, self._relay)
        chain, bound = self._chain[1], self._bound(cells)
        lists = chain.find_lists() if chain else None
        if chain is None or lists is None:
            return None
        return lambda token, segment, count: chain.run(token, segment, count, bound, lists)

    def refill_slots(self, tier: TierInForce, program: Program) -> None:
        """Bring what the slots of a tier hold between micro-batches, after one that ended in its midst."""
        done = (self._context.device.mark(),)
        for step in program.entering:
            if step.slot is not None:
                bring_weights(self._context, tier, step, done)

    def forget(self) -> None:
        """Drop the walk that was made for the next micro-batch, and the chain of the tier."""
        self._next, self._chain = None, None

    def prepare(self, tier: TierInForce, segments: tuple[Segment, ...], logit_rows: list[int]) -> ReadyWalk:
        """A walk that can begin; its index is kept until the next one is prepared, so one that was ready is dropped."""
        self._next = None
        config, tokens = self._context.spec.config, sum(s.tokens for s in segments)
        kernels, filled = tier.side.kernels, (tokens, len(logit_rows))
        fills = tokens <= SMALL_BATCH and kernels.repeatable and kernels.fills
        exact = fills and self.exact
        if fills:
            filled = fill_rows(tokens, tier.tokens, exact), fill_rows(len(logit_rows), tier.tokens, exact)
        written, here, there = tier.index_rows(self._context.host.index, segments, logit_rows, filled)
        cells = max(s.past + s.tokens for s in segments)
        bound = self._states.context if exact else self._bound(cells)
        spans = tier.spans_of(len(segments))
        on_host = here.rows(segments, cells, config.window, spans)
        rows = on_host, there.rows(segments, bound, config.window, spans, told=not exact)
        unsent, ids = [(there.memory, here.memory)], self._ids[:tokens]
        acc_ids = ids
        if tier.looks_up:
            acc_ids = tier.ids_rows(filled[0])
            unsent.append((acc_ids, self._ids[: filled[0]]))
        grams = acc_grams = None
        if each := config.grams.each if config.grams else 0:
            grams = acc_grams = self._grams[: tokens * each]
            if tier.looks_up:
                acc_grams = tier.grams_rows(filled[0], each)
                unsent.append((acc_grams, self._grams[: filled[0] * each]))
        batch = MicroBatch(ids, acc_ids, segments, *rows, tuple(unsent), grams, acc_grams)
        logits = Logits(self._context, tier, (here.wanted, there.wanted), len(logit_rows))
        walk = Walk(self._context, self._residents, tier, batch, logits, self._graphs)
        numbers = [number for span in list_spans(segments) for number in span]
        return ReadyWalk(tier, segments, logit_rows, walk, (written, here), (numbers, spans))
