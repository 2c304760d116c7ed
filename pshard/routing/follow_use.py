"""Which experts lie in slots that follow use: decided by what tokens chose, never by clocks. No torch.

A decision needs three micro-batches to come true. After the one that misses an expert it is decided who goes. In the
next one nobody uses that slot, and the expert is copied there. The one after that finds it. So nothing ever waits for
a look-up, and a copy has the time of a whole micro-batch.

The runtime and the replay of a record run this same code, so they come to the same hits.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

DECAY = 0.98  # of a use's weight by each micro-batch: half is left after 34


@dataclass(frozen=True)
class Move:
    """An expert (layer by its place among the pool's layers, number) on its way into a slot."""

    slot: int
    layer: int
    expert: int


@dataclass(frozen=True)
class Turn:
    """What changes as a micro-batch begins: these have arrived and may be used; these, whose `victims` may not be used
    any more, are to be copied; victims are (layer, expert)."""

    arrived: tuple[Move, ...]
    started: tuple[Move, ...]
    victims: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class HitCounts:
    """Choices of experts in micro-batches that may use slots, of layers that have some; those that found their expert
    in a slot; experts that were brought in."""

    chosen: int = 0
    hits: int = 0
    admitted: int = 0

    @property
    def share(self) -> float:
        """Of hits among choices; 0 where there were none."""
        return self.hits / max(1, self.chosen)

    def __add__(self, other: "HitCounts") -> "HitCounts":
        return HitCounts(self.chosen + other.chosen, self.hits + other.hits, self.admitted + other.admitted)

    def __sub__(self, other: "HitCounts") -> "HitCounts":
        return HitCounts(self.chosen - other.chosen, self.hits - other.hits, self.admitted - other.admitted)


@dataclass(frozen=True)
class RankHits:
    """What one rank's slots found, and the share of its choices that the plan expects there; None where it expects
    nothing."""

    found: HitCounts
    expected: float | None

    def since(self, before: "RankHits") -> "RankHits":
        """The same without what it had found before."""
        return RankHits(self.found - before.found, self.expected)


def join_hits(ranks: Sequence[RankHits]) -> RankHits:
    """All ranks' choices together; of the expected shares the mean, by the choices of each."""
    total = sum((rank.found for rank in ranks), HitCounts())
    known = [(rank.expected, rank.found.chosen) for rank in ranks if rank.expected is not None and rank.found.chosen]
    if len({share for share, _ in known}) < 2:
        return RankHits(total, known[0][0] if known else None)
    return RankHits(total, sum(share * n for share, n in known) / sum(n for _, n in known))


class UseFollower:
    """The slots of a pool over micro-batches: `begin`, then `observe`, for each.

    A score says how much an expert is wanted: "lru" the micro-batch of its last use, "frequency" its uses, each counted
    less the longer it is past. What a micro-batch missed is admitted, the highest scores first, at most `admits` of
    them, each in a free slot or in place of the lowest score that is lower. Of equal scores the lower (layer, expert)
    comes first.

    Attributes:
        eligible: as it was given.
        slot_of: int32 [layers, experts], the slot in which this micro-batch finds an expert; -1: in none.
        counts: over all that was observed.
    """

    def __init__(
        self,
        eligible: np.ndarray,
        slots: int,
        policy: str,
        admits: int,
        first: Sequence[tuple[int, int]] = (),
        expected: np.ndarray | None = None,
    ) -> None:
        """eligible: bool [layers, experts], those that lie outside VRAM. first: (layer, expert) of what fills the slots
        at the start, as far as they go. expected: [layers, experts], how likely a token uses each, as far as is known:
        with what scores of "frequency" begin."""
        self.eligible, self._eligible = eligible, eligible.ravel()
        self._policy, self._admits = policy, admits
        self._experts = eligible.shape[1]
        self.slot_of: np.ndarray = np.full(eligible.shape, -1, np.int32)
        self._flat = self.slot_of.ravel()  # a view of the same
        self._score, self._turns = np.zeros(eligible.size), 0
        if expected is not None and policy == "frequency":
            self._score += expected.ravel() / (1 - DECAY)
        self._owner = np.full(slots, -1, np.int64)  # by slot; -1: none that may be used, or may go
        for slot, (layer, expert) in enumerate(list(first)[:slots]):
            self._owner[slot] = layer * self._experts + expert
            self.slot_of[layer, expert] = slot
        self._free = [slot for slot in range(slots) if self._owner[slot] < 0]
        self._busy = np.zeros(eligible.size, bool)  # on the way, or about to be
        self._decided: list[tuple[int, int]] = []  # slot, expert
        self._coming: list[tuple[int, int]] = []
        self.counts = HitCounts()

    def begin(self) -> Turn:
        """A micro-batch begins that may use the slots: what was on its way has come, what was decided leaves now."""
        for slot, new in self._coming:
            self._owner[slot] = new
            self._flat[new] = slot
            self._busy[new] = False
        victims = []
        for slot, _ in self._decided:
            if (old := int(self._owner[slot])) >= 0:
                self._flat[old] = -1
                self._owner[slot] = -1
                victims.append(divmod(old, self._experts))
        arrived, started = self._coming, self._decided
        self._coming, self._decided = started, []
        return Turn(self._name(arrived), self._name(started), tuple(victims))

    def settle(self) -> None:
        """What was decided has come, and nothing is on its way: before slots are filled. It counts as nothing."""
        self.begin()
        self.begin()
        self.counts = HitCounts()

    def observe(self, ids: np.ndarray) -> np.ndarray:
        """That micro-batch's choices, ints [tokens, layers, used]: counts hits, and decides what moves next. Returns
        which of them found their expert in a slot, bools of that shape."""
        flat = ids.astype(np.int64) + self._experts * np.arange(ids.shape[1])[:, None]
        found = self._flat[flat] >= 0
        self._turns += 1
        if self._policy == "lru":
            self._score[flat] = self._turns
        else:
            self._score *= DECAY
            np.add.at(self._score, flat.ravel(), 1.0)
        if self._admits:
            self._decide(np.unique(flat[~found]))
        self.counts += HitCounts(flat.size, int(found.sum()), len(self._decided))
        return found

    def _decide(self, missed: np.ndarray) -> None:
        wanted = missed[self._eligible[missed] & ~self._busy[missed]]
        wanted = wanted[_first(-self._score[wanted], wanted, self._admits)]
        free = [self._free.pop(0) for _ in range(min(len(wanted), len(self._free)))]
        owned = np.flatnonzero(self._owner >= 0)
        owners = self._owner[owned]
        leaving = _first(self._score[owners], owners, len(wanted) - len(free))
        slots = [*free, *owned[leaving].tolist()]
        worth = [-1.0] * len(free) + self._score[owners[leaving]].tolist()
        for new, slot, least in zip(wanted.tolist(), slots, worth):
            if self._score[new] <= least:
                break
            self._decided.append((slot, new))
            self._busy[new] = True

    def _name(self, moves: list[tuple[int, int]]) -> tuple[Move, ...]:
        return tuple(Move(slot, *divmod(new, self._experts)) for slot, new in moves)


class DemandFollower:
    """The slots of a pool whose layers bring what they miss before they are computed: `look_up`, then `arrive`, for
    each layer of a micro-batch. What was used longest ago leaves; what the layer at hand uses never does. Where a layer
    uses more than its part of the slots, what it misses leaves first: had all layers such a micro-batch, none of it
    would be found again, and it would push out what decoding uses.

    Attributes:
        eligible: bool [layers, experts], those that are brought.
        slot_of: int32 [layers, experts], the slot that has an expert; -1: none.
        counts: over all that was looked up.
    """

    def __init__(self, eligible: np.ndarray, slots: int, first: Sequence[tuple[int, int]] = ()) -> None:
        """first: (layer, expert) of what fills the slots at the start, as far as they go, those that shall stay longest
        first."""
        self.eligible, self.counts = eligible, HitCounts()
        self.slot_of: np.ndarray = np.full(eligible.shape, -1, np.int32)
        self._owner = [-1] * slots  # by slot: layer * experts + expert; -1: nobody
        self._ages = OrderedDict.fromkeys(reversed(range(slots)))  # the slot that was used longest ago first
        for slot, (layer, expert) in enumerate(list(first)[:slots]):
            self._own(Move(slot, layer, expert))

    def look_up(self, layer: int, ids: np.ndarray) -> Turn:
        """The experts that tokens choose in a layer, ints [tokens, used]: what starts is missed, and comes to a slot
        that victims leave now. Raises ValueError where the slots are too few for one layer."""
        chosen, slot_of = ids[ids >= 0].tolist(), self.slot_of[layer].tolist()
        wanted = [expert for expert in sorted(set(chosen)) if self.eligible[layer, expert]]
        hits = [slot_of[expert] for expert in wanted if slot_of[expert] >= 0]
        missed = [expert for expert in wanted if slot_of[expert] < 0]
        self._touch(hits)
        going = list(islice(self._ages, len(missed)))
        if len(going) < len(missed) or not set(going).isdisjoint(hits):
            raise ValueError(f"{len(self._ages)} slots are too few for the {len(wanted)} experts that one layer uses")
        if len(wanted) * len(self.slot_of) <= len(self._ages):  # else the next layer's take the same slots
            self._touch(hits + going)
        victims = [divmod(self._owner[slot], len(slot_of)) for slot in going if self._owner[slot] >= 0]
        for victim in victims:
            self.slot_of[victim] = -1
        for slot in going:
            self._owner[slot] = -1
        found = sum(slot_of[expert] >= 0 for expert in chosen)
        self.counts += HitCounts(len(chosen), found, len(missed))
        return Turn((), tuple(Move(slot, layer, new) for slot, new in zip(going, missed)), tuple(victims))

    def list_owners(self) -> np.ndarray:
        """int64 [slots], who has each: layer * experts + expert; -1: nobody."""
        return np.array(self._owner, np.int64)

    def list_ages(self) -> np.ndarray:
        """int32 [slots], the one that was used longest ago first."""
        return np.array(list(self._ages), np.int32)

    def _touch(self, slots: Sequence[int]) -> None:
        """These are used now; of those the lower number leaves first."""
        for slot in sorted(slots):
            self._ages.move_to_end(slot)

    def arrive(self, moves: Sequence[Move]) -> None:
        """These have come, and are found from now on."""
        for move in moves:
            self._own(move)

    def begin(self) -> Turn:
        """A micro-batch begins: nothing was on its way."""
        return Turn((), (), ())

    def observe(self, ids: np.ndarray) -> np.ndarray:
        """A whole micro-batch, layer by layer, where everything comes at once: as `UseFollower.observe`."""
        found = np.zeros(ids.shape, bool)
        for layer in range(ids.shape[1]):
            found[:, layer] = self.slot_of[layer, ids[:, layer].astype(np.int64)] >= 0
            self.arrive(self.look_up(layer, ids[:, layer]).started)
        return found

    def settle(self) -> None:
        """Before slots are filled: what was looked up until now counts as nothing."""
        self.counts = HitCounts()

    def _own(self, move: Move) -> None:
        self._owner[move.slot] = move.layer * self.slot_of.shape[1] + move.expert
        self.slot_of[move.layer, move.expert] = move.slot


Follower = UseFollower | DemandFollower


def _first(keys: np.ndarray, numbers: np.ndarray, count: int) -> np.ndarray:
    """Where the `count` lowest keys are, in their order; of equal ones the lower number first."""
    if count <= 0 or not len(keys):
        return np.empty(0, np.int64)
    if count < len(keys):  # sorting all of them takes ten times as long
        least = np.flatnonzero(keys <= np.partition(keys, count - 1)[count - 1])
    else:
        least = np.arange(len(keys))
    return least[np.lexsort((numbers[least], keys[least]))][:count]
