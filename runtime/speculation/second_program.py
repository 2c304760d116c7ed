"""A program that drafts beside the model, over the same texts and KV blocks: how tokens of texts become its
micro-batches, and a chain of its likeliest tokens a draft. What it keeps of texts is each program's own."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from math import exp, isnan

import torch

from pshard.batch import DECODE, PROMPT, Batch, Span
from pshard.runtime.executor import Executor
from pshard.runtime.kernels.api import Segment
from pshard.runtime.meanwhile import Meanwhile
from pshard.runtime.memory.kv_file import DAMAGED, Beside, WrongFile
from pshard.runtime.texts.block_copies import BlockCopies
from pshard.runtime.texts.choose_rows import RowChooser
from pshard.runtime.texts.text import Piece, Text
from pshard.runtime.texts.text_blocks import TextBlocks
from pshard.units.kv_cells import KV_BLOCK, kv_blocks


@dataclass(frozen=True)
class Ask:
    """Drafts that are wanted of a text: at most so many that follow `tokens`, which it does not have yet, up to the
    first that the program finds less likely than `p_min`."""

    text: Text
    tokens: tuple[int, ...]
    most: int
    p_min: float = 0.0


def reserve_room(blocks: TextBlocks, ask: Ask) -> None:
    """Let a text have blocks for the tokens that it does not have yet, and for all drafts but the last."""
    blocks.reserve(ask.text, len(ask.text.ids) + len(ask.tokens) + ask.most - 1)


@dataclass(frozen=True)
class Likeliest:
    """The token that a program finds the likeliest next one, None where there is a NaN; how likely, nan where that was
    not asked for; where it is wanted the program's state behind, see `SecondProgram._state_after`."""

    token: int | None
    chance: float
    state: torch.Tensor | None


@dataclass(frozen=True)
class Rows:
    """Tokens of a text at `past` and behind it; states: the model's before each, where the program takes them."""

    text: Text
    ids: tuple[int, ...]
    past: int
    states: torch.Tensor | None = None


class SecondProgram:
    """That of one engine, which drafts. As a `Follower` each kind keeps what it needs of texts.

    Attributes:
        name: see Follower.
    """

    def __init__(self, name: str, program: Executor, model: Executor, blocks: TextBlocks) -> None:
        group = program.group
        self.name = name if group.size == 1 else f"{name}, {group.rank} of {group.size}"
        self._program, self._model, self._blocks = program, model, blocks
        self._most, self._copies = program.plan.tiers[-1].tokens, BlockCopies(program)

    def caches(self) -> Iterator[torch.Tensor]:
        """See Follower."""
        yield from self._copies.caches(window=False)

    def close(self) -> None:
        """See Follower."""
        self._program.close()

    def keep(self, text: Text) -> tuple[Beside, Iterator[bytes]] | None:
        """See Follower."""
        beside = self._outline(text)
        return (beside, self._list_parts(text, beside)) if beside else None

    def _outline(self, text: Text) -> Beside | None:
        cells = 0 if self._program.group.size > 1 else self._settle(text)  # files have no slices of it
        return Beside(self.name, cells, self._list_sizes(cells)) if cells else None

    def _list_sizes(self, cells: int) -> tuple[int, ...]:
        """Bytes of the parts of a file that has so many cells."""
        return tuple(part[0].nbytes // KV_BLOCK * cells for part in self._copies.caches(window=False))

    def _list_parts(self, text: Text, beside: Beside) -> Iterator[bytes]:
        self._program.device.synchronize()
        for cache in self._copies.caches(window=False):
            yield as_bytes(cache[text.blocks[: kv_blocks(beside.cells, 1)]].flatten(0, 1)[: beside.cells])

    def take(self, text: Text, tokens: Sequence[int], beside: Beside | None, read: Callable[[int], bytearray]) -> None:
        """See Follower."""
        cells = beside.cells if beside and beside.name == self.name else 0
        if beside and cells and beside.sizes != self._list_sizes(cells):
            raise WrongFile(DAMAGED)
        self._program.device.synchronize()
        with self._program.device.current(), self._program.device.computing(), torch.inference_mode():
            for number, cache in enumerate(self._copies.caches(window=False) if cells else ()):
                blocks = text.blocks[: kv_blocks(cells, 1)]
                own = cache[blocks]
                part = own.flatten(0, 1)[:cells]
                part.copy_(from_bytes(read(number), part.dtype, part.shape))
                cache[blocks] = own
        self._begin_at(text, len(tokens), cells, read)

    def _settle(self, text: Text) -> int:
        """Make a text's cells as far as can be; of how many of its tokens they are right."""
        raise NotImplementedError

    def _begin_at(self, text: Text, tokens: int, cells: int, read: Callable[[int], bytearray]) -> None:
        """A text of so many tokens is there, of which the first so many cells are right. read: further parts of its
        file."""
        raise NotImplementedError

    @torch.inference_mode()
    def draft(self, asks: Sequence[Ask], aside: Callable[[], None] = lambda: None) -> list[tuple[int, ...]]:
        """Its likeliest tokens, each found behind the one before it; a draft ends before a token that the model does
        not have, or that is not likely enough. Texts have room for their tokens and all drafts but the last.
        aside: what the host does once the first drafts are under way; no text gets or loses tokens by it."""
        drafts, rows, going = [list[int]() for _ in asks], list(map(self._begin, asks)), list(range(len(asks)))
        chances = any(ask.p_min for ask in asks)
        once = Meanwhile()
        once.expect(aside)
        while going:
            goes_on = any(len(drafts[i]) + 1 < asks[i].most for i in going)
            found = self._run([rows[i] for i in going], True, chances, goes_on, once.begin)
            once.begin()  # where it had no logits to wait for
            for i, best in zip(list(going), found, strict=True):
                if best.token is None or best.token >= self._model.spec.config.vocab or best.chance < asks[i].p_min:
                    going.remove(i)
                    continue
                drafts[i].append(best.token)
                if len(drafts[i]) == asks[i].most:
                    going.remove(i)
                    continue
                rows[i] = Rows(asks[i].text, (best.token,), rows[i].past + len(rows[i].ids), best.state)
                self._note_draft(asks[i].text, best.token)
            if going and len(asks) == 1 and not chances:
                others = self._follow_on(rows[0], asks[0].most - len(drafts[0]))
                if others is not None:
                    drafts[0] += others
                    break
        for ask in asks:
            self._end(ask.text)
        return [tuple(own) for own in drafts]

    def _begin(self, ask: Ask) -> Rows:
        """What is to be computed for the first draft; the text has room for all of them then."""
        raise NotImplementedError

    def _note_draft(self, text: Text, token: int) -> None:
        """The cell of a draft is made next."""

    def _end(self, text: Text) -> None:
        """A text has its drafts."""

    def _follow_on(self, rows: Rows, count: int) -> list[int] | None:
        """So many of the likeliest tokens behind one, up to the first that the model does not have, for which the host
        waits once; None where they must come one by one."""
        program, tokens = self._program, list[int]()
        assert program.in_force is not None
        tier, in_force = program.in_force
        with program.device.current(), program.device.computing():
            run = program.walks.follow_on(in_force, program.program(tier, True), rows.past + count)
            if run is None:
                return None
            self._make_ready([rows], 1)
            segment = replace(self._blocks.segment_at(rows.text, 0, count, rows.past), tokens=1)
            found = run(rows.ids[0], segment, count)
        for logit, token in found.tolist():
            if isnan(logit) or token >= self._model.spec.config.vocab:
                break
            tokens.append(int(token))
        for token in tokens[: count - 1]:
            self._note_draft(rows.text, token)
        return tokens

    def _run(
        self,
        rows: Sequence[Rows],
        wants: bool,
        chances: bool = False,
        goes_on: bool = False,
        meanwhile: Callable[[], None] | None = None,
    ) -> list[Likeliest]:
        """Compute tokens of texts. wants: of each text the likeliest next token; chances: and how likely it is;
        goes_on: and the state behind it. meanwhile: called while the accelerator computes."""
        found, batches = list[Likeliest](), list(self._cut(rows))
        for some, ends in batches:
            best, at = iter(self._compute(some, [wants and is_end for is_end in ends], chances, meanwhile)), 0
            for own, is_end in zip(some, ends):
                at += len(own.ids)
                if wants and is_end:
                    token, chance = next(best)
                    state = self._state_after(at - 1) if goes_on else None
                    if state is not None and len(batches) > 1:
                        with self._program.device.computing():
                            state = state.clone()
                    found.append(Likeliest(token, chance, state))
        return found

    def _state_after(self, row: int) -> torch.Tensor | None:
        """The program's own state [1, d_model] after a row of the last micro-batch, where its next token takes it; it
        stands there until the next one."""
        return None

    def _cut(self, rows: Sequence[Rows]) -> Iterator[tuple[list[Rows], list[bool]]]:
        """Micro-batches, and whether each of their tokens' last is the text's."""
        some, ends, room = list[Rows](), list[bool](), self._most
        for own in rows:
            done = 0
            while done < len(own.ids):
                take = min(room, len(own.ids) - done)
                part = slice(done, done + take)
                states = None if own.states is None else own.states[part]
                some.append(replace(own, ids=own.ids[part], past=own.past + done, states=states))
                done, room = done + take, room - take
                ends.append(done == len(own.ids))
                if not room:
                    yield some, ends
                    some, ends, room = [], [], self._most
        if some:
            yield some, ends

    def _compute(
        self, rows: Sequence[Rows], wants: Sequence[bool], chances: bool, meanwhile: Callable[[], None] | None
    ) -> list[tuple[int | None, float]]:
        """One micro-batch: of those tokens' last that are wanted the likeliest next one, and how likely it is."""
        program, segments, spans, at = self._program, list[Segment](), list[Span](), 0
        for own, wanted in zip(rows, wants):
            n = len(own.ids)
            segments.append(self._blocks.segment_at(own.text, at, n, own.past))
            spans.append(Span(n, own.past, int(wanted), DECODE if n == 1 else PROMPT))
            at += n
        vocab = program.spec.config.vocab  # which may lack some of the model's
        ids = [token if token < vocab else 0 for own in rows for token in own.ids]
        # where two of a row are wanted, the sum of all comes with them
        chooser = RowChooser([(Piece(own.text, own.ids, best=1 + chances), ()) for own in compress(rows, wants)])
        with program.device.current():
            self._make_ready(rows, len(ids))
            program.run(
                ids, tuple(segments), Batch(tuple(spans)), self._blocks.used, chooser=chooser, foresee=meanwhile
            )
        return [(None if row.bad else int(row.ids[0]), exp(row.logits[0] - row.log_total)) for row in chooser.rows]

    def _make_ready(self, rows: Sequence[Rows], tokens: int) -> None:
        """Put what a micro-batch takes beside its tokens in place."""


def as_bytes(values: torch.Tensor) -> bytes:
    """Of numbers wherever they are."""
    return values.to("cpu").contiguous().flatten().view(torch.uint8).numpy().tobytes()


def from_bytes(raw: bytearray, kind: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Numbers on the host, of which `as_bytes` made these."""
    values = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    return values.view(kind).view(tuple(shape))
