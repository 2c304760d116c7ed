"""A machine for tests of the scheduler: time is simulated, and the token after a text follows from all of its tokens.

So a token that is lost, doubled or of another text changes all that follow, and a test that knows the prompt knows the
answer.
"""

import zlib
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
from manual_clock import ManualClock

from pshard.errors import UserError
from pshard.planner.serving.step_times import StepTimes, TierSteps
from pshard.runtime.speculation.speculator import DraftSettings
from pshard.runtime.texts.text import GivenUp, Piece
from pshard.server.scheduling.served_machine import PlanFacts
from pshard.server.snapshot import PlanInForce, TierNow
from pshard.units.kv_cells import KV_BLOCK

VOCAB = 1000


def next_token(ids) -> int:
    """What follows these tokens."""
    return zlib.crc32(np.asarray(ids, dtype=np.int32).tobytes()) % VOCAB


def answer(prompt, count: int) -> list[int]:
    """So many tokens after a prompt."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_token(ids))
    return ids[len(prompt) :]


@dataclass(frozen=True)
class FakeRow:
    ids: np.ndarray
    logits: np.ndarray
    log_total: float
    full: np.ndarray | None
    of: np.ndarray
    bad: bool = False


@dataclass(frozen=True)
class Counts:
    total: int
    used: int
    cached: int
    free: int
    cache_bytes: int = 0
    files_problem: str = ""


@dataclass(eq=False)
class FakeText:
    ids: list[int]
    cached: int
    salt: str
    committed: int = 0
    blocks: list[object] = field(default_factory=list)


class FakePool:
    """Blocks with counts and keys as the real pool has them, and logits from `next_token`."""

    def __init__(self, machine: "FakeMachine", blocks: int) -> None:
        self.machine, self.blocks = machine, blocks
        self.open_texts: list[FakeText] = []
        self.reading: list[float | None] = []  # seconds that texts may be read from files
        self.idle: OrderedDict[tuple, int] = OrderedDict()  # key -> 1, the oldest first
        self.holders: dict[tuple, int] = {}
        self.own = 0  # blocks without a key
        self.steps: list[list[tuple[FakeText, int]]] = []

    def open(self, ids, salt="", seconds=None) -> FakeText:
        assert len(self.open_texts) < self.machine.facts.sequences
        text = FakeText([], 0, salt)
        self.reading.append(seconds)
        for at in range(0, len(ids) - 1, KV_BLOCK):
            key = (salt, *ids[: at + KV_BLOCK])
            if at + KV_BLOCK > len(ids) - 1 or (key not in self.idle and key not in self.holders):
                break
            self._hold(key)
            text.blocks.append(key)
        text.cached = text.committed = KV_BLOCK * len(text.blocks)
        text.ids = list(ids[: text.cached])
        self.open_texts.append(text)
        return text

    def _hold(self, key: tuple) -> None:
        self.idle.pop(key, None)
        self.holders[key] = self.holders.get(key, 0) + 1

    @property
    def free(self) -> int:
        return self.blocks - self.own - len(self.holders) - len(self.idle)

    def missing(self, wanted) -> int:
        more = sum(max(0, -(-cells // KV_BLOCK) - len(text.blocks)) for text, cells in wanted.items())
        return max(0, more - self.free - len(self.idle))

    def step(self, pieces: list[Piece], meanwhile=lambda: None, given_up=lambda: False):
        tokens, facts = sum(len(p.ids) for p in pieces), self.machine.facts
        assert tokens <= facts.largest_step
        assert tokens <= facts.tiers[-1] or not any(p.drafts for p in pieces)
        assert not self.missing({p.text: len(p.text.ids) + len(p.ids) for p in pieces})
        assert len({id(p.text) for p in pieces}) == len(pieces)
        if tokens > facts.tiers[-1] and given_up():
            for piece in pieces:
                self.close(piece.text)
            raise GivenUp
        if self.machine.refuse and any(self.machine.refuse(p) for p in pieces):
            raise UserError("refused")
        if self.machine.fail and self.machine.fail(pieces):
            raise RuntimeError("CUDA error: made up\nand more")
        meanwhile()
        rows = [self._compute(piece) for piece in pieces]
        self.steps.append([(p.text, len(p.ids)) for p in pieces])
        self.machine.pass_time(sum(len(p.ids) for p in pieces))
        return rows

    def _compute(self, piece: Piece) -> list[FakeRow]:
        text, rows = piece.text, []
        assert piece.ids and text in self.open_texts
        for i, token in enumerate(piece.ids):
            text.ids.append(token)
            if len(text.ids) > KV_BLOCK * len(text.blocks):
                if not self.free:
                    self.idle.popitem(last=False)
                text.blocks.append(None)
                self.own += 1
            if piece.rows == "all" or (piece.rows == "last" and i + 1 == len(piece.ids)):
                rows.append(self._row(text, piece, i if piece.rows == "all" else None))
        if not piece.drafts:
            self._keep(text)
        return rows

    def commit(self, text: FakeText, length: int, later: bool = False) -> list[int]:
        assert text.committed < length <= len(text.ids)
        del text.ids[length:]
        while len(text.blocks) > -(-len(text.ids) // KV_BLOCK):
            assert text.blocks.pop() is None
            self.own -= 1
        self._keep(text)
        return []

    def _keep(self, text: FakeText) -> None:
        for end in range(KV_BLOCK, len(text.ids) + 1, KV_BLOCK):
            if text.committed < end:
                self._share(text, end)
        text.committed = len(text.ids)

    def _share(self, text: FakeText, end: int) -> None:
        key = (text.salt, *text.ids[:end])
        at = end // KV_BLOCK - 1
        if text.blocks[at] is None:
            self.own -= 1
            self._hold(key)
            text.blocks[at] = key

    def _row(self, text: FakeText, piece: Piece, i: int | None) -> FakeRow:
        logits = np.zeros(VOCAB, dtype=np.float32)
        first = next_token(text.ids)
        logits[first] = 9.0
        logits[(first + 1) % VOCAB] = 5.0
        masked = logits.copy()
        if piece.mask is not None:
            mask = piece.mask if i is None else piece.mask[i]
            masked[np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB] == 0] = -np.inf
        order = np.argsort(-masked, kind="stable")[: piece.best]
        of = piece.of if i is None else piece.of[i : i + 1]
        total = float(np.log(np.exp(logits.astype(float)).sum()))
        bad = bool(self.machine.bad and self.machine.bad(text))
        full = logits.copy() if piece.full else None
        return FakeRow(order, masked[order], total, full, logits[list(of)], bad)

    def close(self, text: FakeText, keep=True) -> None:
        if all(text is not other for other in self.open_texts):
            return
        self.open_texts.remove(text)
        for key in reversed(text.blocks):
            if key is None:
                self.own -= 1
                continue
            self.holders[key] -= 1
            if not self.holders[key]:
                del self.holders[key]
                if keep:
                    self.idle[key] = 1

    def keep_some(self, seconds: float) -> bool:
        return False

    def counts(self) -> Counts:
        return Counts(self.blocks, self.own + len(self.holders), len(self.idle), self.free)


class FakeMachine:
    """Tiers whose steps take what the plan says times `slower`; `refuse`, `fail` and `bad` make trouble."""

    def __init__(
        self, tiers=(1, 4, 16, 128, 512), seconds=(0.05, 0.06, 0.1, 0.2, 0.5), sequences=8, longest=2048, blocks=None,
        switch=None, slower=1.0, clock=None, drafts=None, sweep=(),
    ):  # sweep: seconds of two micro-batches, of three and so on  # fmt: skip
        shown = PlanInForce(
            (100,), longest, longest, sequences, "bf16", "bf16", "none", "made up",
            tuple(TierNow(n, 1e3 * s, 1e3 * s, 0, "link") for n, s in zip(tiers, seconds)),
        )  # fmt: skip
        moves = tuple(tuple((switch or {}).get((a, b), 0.0) for b in tiers) for a in tiers)
        times = StepTimes(tuple(TierSteps(n, ((n, s),), ((0, 0.0),), ()) for n, s in zip(tiers, seconds)), moves)
        swept = tuple((n * tiers[-1], s) for n, s in enumerate((seconds[-1], *sweep), 1)) if sweep else ()
        times = replace(times, sweep=swept)
        self.facts = PlanFacts(
            tiers, seconds, sequences, longest, VOCAB, shown, times, {}, drafts or DraftSettings(), tiers[-1],
            len(sweep) + 1,
        )  # fmt: skip
        self.clock, self.slower = clock or ManualClock(), slower
        self.pool = FakePool(self, blocks or longest * 2 // KV_BLOCK)
        self.link_bytes, self.kept, self.closed = 0, 0, False
        self.drafter = None
        self.tier, self.tiers_run = 0, []
        self.refuse = self.fail = self.bad = None

    def keep_tier(self, tokens: int) -> None:
        self.kept = tokens

    def pass_time(self, tokens: int) -> None:
        tier = next((t for t in self.facts.tiers if t >= max(tokens, self.kept)), self.facts.tiers[-1])
        seconds = dict(zip(self.facts.tiers, self.facts.seconds))[tier] * self.slower
        if tokens > tier:
            seconds = self.facts.times.seconds(0, 0, tokens) * self.slower
        if self.tier and tier != self.tier:
            seconds += self.facts.times.switch_seconds(self.tier, tier)
        self.tier = tier
        self.tiers_run.append(tier)
        self.link_bytes += 1000
        self.clock.sleep(seconds)

    def close(self) -> None:
        assert not self.pool.open_texts or self.fail
        self.closed = True


class Ear:
    """A listener that keeps what it hears, and when."""

    def __init__(self, clock) -> None:
        self.clock, self.events = clock, []

    def put(self, event) -> None:
        self.events.append((self.clock.monotonic(), event))

    def wake(self) -> None:
        """Events are heard at once."""

    @property
    def tokens(self) -> list[int]:
        return [t for _, e in self.events if type(e).__name__ == "Made" for t in e.tokens]

    @property
    def ended(self):
        """The last event, which ends it, and nothing after it."""
        ends = [e for _, e in self.events if type(e).__name__ == "Ended"]
        assert len(ends) == 1 and self.events[-1][1] is ends[0]
        return ends[0]

    @property
    def gaps(self) -> list[float]:
        times = [at for at, e in self.events if type(e).__name__ == "Made"]
        return [b - a for a, b in pairwise(times)]
