"""A head that drafts (multi-token prediction) as a second program beside the model, over the same texts and KV blocks.

Its cell of the token at position p is made of that token and of the model's state one position before, so a cell
depends on no later token, and blocks that texts share have it too. Of each text it keeps the model's states from which
cells are still to be made: few while drafts are verified, those of a whole micro-batch of a prompt, whose cells are
made at once. docs/speculation.md has the formulas.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from pshard.batch import PROMPT, VERIFY
from pshard.buffers import STATES
from pshard.runtime.executor import Executor
from pshard.runtime.kernels.api import Segment
from pshard.runtime.memory.kv_file import Beside
from pshard.runtime.speculation.second_program import Ask, Rows, SecondProgram, as_bytes, from_bytes, reserve_room
from pshard.runtime.texts.text import Text
from pshard.runtime.texts.text_blocks import NewTokens, TextBlocks
from pshard.units.kv_cells import KV_BLOCK, kv_blocks
from pshard.units.ports import PRIOR


@dataclass
class Held:
    """What is known of a text: the first `cells` cells are right, and `states` [r, d_model] are the model's after the
    tokens at `first`, `first` + 1, ...; position -1 is before the first one, and all zeros."""

    cells: int
    first: int
    states: torch.Tensor

    @property
    def known(self) -> int:
        """Tokens after which the state is known."""
        return self.first + len(self.states)

    def take(self, begin: int, end: int) -> torch.Tensor:
        """The states before the tokens from `begin` to `end`."""
        return self.states[begin - 1 - self.first : end - 1 - self.first]

    def drop(self, cells: int) -> None:
        """Cells were made up to there: states before the last one are needed no more."""
        self.states, self.first, self.cells = self.states[cells - 1 - self.first :], cells - 1, cells


class HeadProgram(SecondProgram):
    """That of one engine."""

    def __init__(self, head: Executor, model: Executor, blocks: TextBlocks) -> None:
        super().__init__("head", head, model, blocks)
        self._held: dict[Text, Held] = {}
        self._join = next(unit.name for unit in head.spec.units if PRIOR in unit.ports.reads)
        # by KV block, the model's state after its last token
        shape, width = model.states, model.spec.config.d_model
        self._ends = torch.zeros(kv_blocks(shape.context, shape.sequences), width)

    # --- beside the model -----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def follow(self, batch: NewTokens) -> None:
        """See Follower."""
        with self._model.device.computing():
            found, due = _states_of(self._model), dict[Text, int]()
            for text, segment, span in zip(batch.texts, batch.segments, batch.batch.spans, strict=True):
                held = self._hold(text, segment)
                new = max(0, held.known - segment.past)  # tokens that are computed again are those that were known
                if new < segment.tokens:
                    rows = found[segment.start + new : segment.start + segment.tokens]
                    held.states = torch.cat([held.states.to(rows.device), rows])
                    self._keep_ends(segment, new, found)
                if span.kind == PROMPT or held.known - held.cells >= self._most:
                    # states of tokens that are drafts stay: the text may be cut back to any of them
                    due[text] = segment.past if span.kind == VERIFY else held.known
        self._catch_up(due)

    def _hold(self, text: Text, segment: Segment) -> Held:
        held = self._held.get(text)
        if held is None or held.known < segment.past:  # it begins, or with blocks that others have made
            past, device = segment.past, _states_of(self._model).device
            known = past > 0 and past % KV_BLOCK == 0
            row = self._ends[segment.blocks[past // KV_BLOCK - 1]] if known else torch.zeros_like(self._ends[0])
            held = self._held[text] = Held(past, past - 1, row[None].to(device, copy=True))
        return held

    def _keep_ends(self, segment: Segment, new: int, found: torch.Tensor) -> None:
        """States after the last tokens of blocks, for texts that will begin with these blocks."""
        first, end = segment.past + new, segment.past + segment.tokens
        for length in range(-(-(first + 1) // KV_BLOCK) * KV_BLOCK, end + 1, KV_BLOCK):
            row = segment.start + length - 1 - segment.past
            self._ends[segment.blocks[length // KV_BLOCK - 1]].copy_(found[row])

    def _catch_up(self, ends: Mapping[Text, int]) -> None:
        """Make the cells of texts' tokens up to these ends, which they have, and before which states are known."""
        due = list[Rows]()
        for text, end in ends.items():
            held = self._held[text]
            end = min(end, len(text.ids))
            if end > held.cells:
                due.append(Rows(text, tuple(text.ids[held.cells : end]), held.cells, held.take(held.cells, end)))
        self._run(due, wants=False)
        for rows in due:
            self._held[rows.text].drop(rows.past + len(rows.ids))

    def cut(self, text: Text, length: int) -> None:
        """See Follower."""
        held = self._held.get(text)
        if held is None or (held.known <= length and held.cells <= length):
            return
        if length == 0:
            del self._held[text]
            return
        held.states, held.cells = held.states[: max(0, length - held.first)], min(held.cells, length)
        held.first = min(held.first, length - 1)  # where the state there is lost, the last token is computed again

    def can_go_on(self, text: Text, length: int) -> bool:
        """See Follower."""
        held = self._held.get(text)
        return held is None or length == 0 or held.first < length

    def forget(self, text: Text) -> None:
        """See Follower."""
        self._held.pop(text, None)

    def caches(self) -> Iterator[torch.Tensor]:
        """See Follower."""
        yield from super().caches()
        yield self._ends

    def _list_sizes(self, cells: int) -> tuple[int, ...]:
        """Further parts have the model's state after the last token, and after the last one of each block."""
        row = self._ends[0].nbytes
        return *super()._list_sizes(cells), row, row * (cells // KV_BLOCK)

    def _list_parts(self, text: Text, beside: Beside) -> Iterator[bytes]:
        yield from super()._list_parts(text, beside)
        yield as_bytes(self._held[text].states[-1].to(self._ends.dtype))
        yield as_bytes(self._ends[text.blocks[: beside.cells // KV_BLOCK]])

    @torch.inference_mode()
    def _settle(self, text: Text) -> int:
        held = self._held.get(text)
        if held is None or held.known != len(text.ids):
            return 0
        self._catch_up({text: held.known})
        return held.cells

    def _begin_at(self, text: Text, tokens: int, cells: int, read: Callable[[int], bytearray]) -> None:
        row = torch.zeros_like(self._ends[0])
        if cells == tokens:
            first = sum(1 for _ in self._copies.caches(window=False))
            row = from_bytes(read(first), row.dtype, row.shape)
            blocks = text.blocks[: cells // KV_BLOCK]
            self._ends[blocks] = from_bytes(read(first + 1), row.dtype, (len(blocks), *row.shape))
        # of a file without its cells it can make none: what it drafts then depends on what follows
        self._held[text] = Held(tokens, tokens - 1, row[None])

    # --- drafts ---------------------------------------------------------------------------------------------------

    def _begin(self, ask: Ask) -> Rows:
        held, ids = self._held.get(ask.text), (*ask.text.ids, *ask.tokens)
        if held is None or held.known + 1 != len(ids):
            raise ValueError(f"{len(ids)} tokens to draft behind, and the state after the one before the last lacks")
        reserve_room(self._blocks, ask)
        begin = min(held.cells, held.known)
        return Rows(ask.text, ids[begin:], begin, held.take(begin, len(ids)))

    def _end(self, text: Text) -> None:
        """Cells of drafts, and of the last token, are made anew once the model's state is known."""
        held = self._held[text]
        if held.known > held.cells:
            held.drop(held.known)

    # --- micro-batches --------------------------------------------------------------------------------------------

    def _state_after(self, row: int) -> torch.Tensor:
        return _states_of(self._program)[row : row + 1]

    def _make_ready(self, rows: Sequence[Rows], tokens: int) -> None:
        head = self._program
        tier = head.plan.covering(max(tokens, head.least))
        in_force = head.enter(tier, self._blocks.used)
        is_on_acc = tier.placement(self._join).is_on_acc
        if not is_on_acc:
            head.device.synchronize()  # the last micro-batch may still read the host's buffers
        with head.device.computing():
            at, prior = 0, (in_force.side if is_on_acc else head.host.side).space.tensors[PRIOR]
            for own in rows:
                assert own.states is not None
                prior[at : at + len(own.ids)].copy_(own.states)
                at += len(own.ids)


def _states_of(executor: Executor) -> torch.Tensor:
    """States after the tokens of the last micro-batch, where the output has left them."""
    assert executor.in_force is not None
    tier, in_force = executor.in_force
    side = in_force.side if tier.placement(executor.spec.output.name).is_on_acc else executor.host.side
    return side.space.tensors[STATES]
