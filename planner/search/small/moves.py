"""Steps from a state of a small model, the most promising first: by what sums of its units' seconds say."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import numpy as np

from pshard.planner.search.small.space import (
    BUSY,
    COPIED,
    COPY,
    FETCH,
    FIXED,
    GONE,
    KEPT,
    LESS,
    MAXIMA,
    MORE,
    OTHER,
    SIDE,
    Column,
    Numbers,
    Space,
)
from pshard.planner.search.small.ways import NOTHING

Step = tuple[tuple[int, Column], ...]  # units, and the columns that they get
Allowed = Sequence[Sequence[Sequence[int]]]  # by tier and unit


@dataclass(frozen=True)
class State:
    """Ways of all units by tier, and slots by tier."""

    columns: tuple[Column, ...]
    slots: tuple[int, ...]

    @cached_property
    def rows(self) -> tuple[tuple[int, ...], ...]:
        """The tiers' ways."""
        return tuple(zip(*self.columns))

    def put(self, changes: Sequence[tuple[int, Column]]) -> "State":
        """The state with some units' columns changed."""
        columns = list(self.columns)
        for at, column in changes:
            columns[at] = column
        return State(tuple(columns), self.slots)


class Moves:
    """Lists steps over some tiers of a space. allowed: by tier and unit, the ways that it may have."""

    def __init__(self, space: Space, tiers: Sequence[int], allowed: Allowed) -> None:
        self.space, self.tiers, self.allowed = space, tiers, allowed
        self.weights = np.array([space.costs[i].load.weight for i in tiers])
        self._handed, self._scratch = space.handed[list(tiers)], space.scratch[list(tiers)]
        self._columns: dict[tuple, list[Column]] = {}
        self._known_sides: dict[Column, tuple[int, ...]] = {}
        self._alike = [[at for at, n in enumerate(space.likeness) if n == kind] for kind in set(space.likeness)]
        self._may = [[frozenset(of) for of in of_tier] for of_tier in allowed]

    def rank(self, state: State, below: float) -> list[Step]:
        """Steps that fit and may take less than `below` seconds: one unit's column changed, or two like units'
        exchanged, in all tiers or in one."""
        singles = list(self._change_one(state))
        doubles = list(self._exchange(state))
        found: list[Step] = [(one,) for one in singles]
        units = [[(at, at) for at, _ in singles], [(a[0], b[0]) for a, b in doubles]]
        columns = [[(c, c) for _, c in singles], [(a[1], b[1]) for a, b in doubles]]
        promised = np.concatenate(
            [
                self._promise(state, np.array(of), np.array(to), both, below) if of else np.empty(0)
                for of, to, both in zip(units, columns, (False, True))
            ]
        )
        found += doubles
        order = np.argsort(promised, kind="stable")
        return [found[n] for n in order[: int(np.isfinite(promised).sum())]]

    def _change_one(self, state: State) -> Iterator[tuple[int, Column]]:
        likeness = self.space.likeness
        alike: dict[int, list[Column]] = {}
        for kind, column in zip(likeness, state.columns):
            alike.setdefault(kind, []).append(column)
        away = {kind: self._find_away(kind, of) for kind, of in alike.items()}
        kinds = {kind: frozenset(of) for kind, of in alike.items()}
        for at, (kind, column) in enumerate(zip(likeness, state.columns)):
            key = at if len(self.tiers) == 1 else kind, column, kinds[kind], away[kind]
            if key not in self._columns:
                self._columns[key] = self._list_columns(at, column, kinds[kind], away[kind])
            for other in self._columns[key]:
                yield at, other

    def _find_away(self, kind: int, alike: Sequence[Column]) -> tuple[int | None, ...]:
        """By tier, how most like units are that have nothing in VRAM; the fastest such way where none is so."""
        at, found = self.space.likeness.index(kind), []
        for n, i in enumerate(self.tiers):
            ways = self.space.tiers[i].all
            options = [w for w in self.allowed[n][at] if ways[w].held == NOTHING]
            now = [column[n] for column in alike]
            best = max(
                options, key=lambda w: (now.count(w), -ways[w].busy - ways[w].copy - ways[w].fetch), default=None
            )
            found.append(best)
        return tuple(found)

    def _list_columns(
        self, at: int, now: Column, alike: frozenset[Column], away: tuple[int | None, ...]
    ) -> list[Column]:
        """Other columns of a unit: another way in one tier, while others stay or have as much in VRAM, all of them or
        those of more or fewer tokens; and those of like units."""
        found: dict[Column, None] = {} if len(self.tiers) == 1 else dict.fromkeys(sorted(alike))
        for n, i in enumerate(self.tiers):
            for way in self.allowed[n][at]:
                held = self.space.tiers[i].all[way].held
                found[(*now[:n], way, *now[n + 1 :])] = None
                for first, last in ((0, len(now)), (n, len(now)), (0, n + 1)) if len(now) > 1 else ():
                    column = [
                        way if m == n else self._follow(m, at, now[m], held, away[m]) if first <= m < last else now[m]
                        for m in range(len(now))
                    ]
                    found[tuple(column)] = None
        found.pop(now, None)
        return list(found)

    def _follow(self, n: int, at: int, now: int, held: tuple[int, bool], away: int | None) -> int:
        """The unit's way in another tier that is to have so much of it in VRAM; as it is where it cannot."""
        ways = self.space.tiers[self.tiers[n]].all
        if ways[now].held == held:
            return now
        if held == NOTHING:
            return now if away is None else away
        same = [w for w in self.allowed[n][at] if ways[w].held == held]
        return min(same, key=lambda w: ways[w].busy + ways[w].copy + ways[w].fetch, default=now)

    def _exchange(self, state: State) -> Iterator[tuple[tuple[int, Column], tuple[int, Column]]]:
        columns, likeness, wide = state.columns, self.space.likeness, len(self.tiers) > 1
        for a, one in enumerate(columns):
            for b in range(a + 1, len(columns)):
                other = columns[b]
                if likeness[a] != likeness[b] or one == other:
                    continue
                for n in range(len(one)) if wide else ():
                    mixed = (*one[:n], other[n], *one[n + 1 :]), (*other[:n], one[n], *other[n + 1 :])
                    if mixed[0] not in (one, other):
                        yield (a, mixed[0]), (b, mixed[1])

    def reorder(self, state: State) -> list[Step]:
        """Like units exchange columns, or one's column goes before or behind others' up to there: in VRAM is as much as
        before. Those come first by which activations are handed over least often."""
        found: dict[Step, None] = {}
        for units in self._alike:
            now = [state.columns[at] for at in units]
            if len(set(now)) > 1:
                for then in _reorder(now):
                    found[tuple((at, c) for at, c, old in zip(units, then, now) if c != old)] = None
        may = [changes for changes in found if all(self._may_have(*one) for one in changes)]
        sides = [sum(self._sides(c)[n] << at for at, c in enumerate(state.columns)) for n in range(len(self.tiers))]

        def turns(changes: Step) -> int:
            then = list(sides)
            for at, c in changes:
                for n, (old, new) in enumerate(zip(self._sides(state.columns[at]), self._sides(c))):
                    then[n] ^= (old ^ new) << at
            return sum((side ^ side >> 1).bit_count() for side in then)

        return sorted(may, key=turns)

    def _sides(self, column: Column) -> tuple[int, ...]:
        """By tier 1 where the accelerator computes a unit."""
        if column not in self._known_sides:
            ways = (self.space.tiers[i].all[w] for i, w in zip(self.tiers, column))
            self._known_sides[column] = tuple(int(not way.on_cpu) for way in ways)
        return self._known_sides[column]

    def _may_have(self, at: int, column: Column) -> bool:
        return all(way in of_tier[at] for way, of_tier in zip(column, self._may))

    def _promise(self, state: State, units: Numbers, to: Numbers, both: bool, below: float) -> Numbers:
        """Seconds that each step promises; infinite where it does not fit, tiers would not be nested, or it surely
        takes `below` seconds. units: of each step two, the same twice where only one changes; to: their columns."""
        now = np.array(state.columns)
        twos = range(2 if both else 1)
        start = self._look_up(now)
        ends = [self._look_up(to[:, k]) for k in twos]
        change = sum(end - start[units[:, k]] for k, end in zip(twos, ends))
        total = start.sum(0)[None] + change
        slots = np.array(state.slots, float)
        seconds, least = self._add_up(total, slots)
        most = np.maximum.reduce([_without(start[..., MAXIMA], units), *(end[..., MAXIMA] for end in ends)])
        copied = np.minimum(slots, total[..., COPIED])
        held = self._scratch + total[..., FIXED] + most[..., 0] + most[..., 1] + copied * most[..., 2]
        fits = (held <= self.space.room.arena).all(1) & self._are_nested(now, units, to, twos) & (least < below)
        turns = self._count_turns(start[..., SIDE], units, [end[..., SIDE] for end in ends])
        promised = np.maximum(total[..., BUSY] + turns * self._handed, seconds) @ self.weights
        return np.where(fits, promised, np.inf)

    def _look_up(self, columns: Numbers) -> Numbers:
        """Numbers of columns' ways by tier."""
        return np.stack([self.space.table(i)[columns[:, n]] for n, i in enumerate(self.tiers)], 1)

    def _add_up(self, total: Numbers, slots: Numbers) -> tuple[Numbers, Numbers]:
        """Seconds of the link by tier, as units that have a slot for themselves are copied once; and least seconds of
        all tiers."""
        alone = np.clip(2 * slots - total[..., COPIED], 0, total[..., COPIED])
        each = total[..., COPY] / np.maximum(total[..., COPIED], 1)
        largest = np.array([self.space.table(i)[:, COPY].max() for i in self.tiers])
        rest = total[..., COPY] - alone * each
        surely = np.maximum(total[..., COPY] - alone * largest, 0)
        link, least = rest + total[..., FETCH], surely + total[..., FETCH]
        return link, np.maximum(total[..., BUSY], least) @ self.weights

    def _are_nested(self, now: Numbers, units: Numbers, to: Numbers, twos: range) -> Numbers:
        """Whether of every two tiers one has in VRAM what the other has, and likewise states."""
        nested = np.ones(len(units), bool)
        for a, b in combinations(range(len(self.tiers)), 2):
            table = self.space.beside(self.tiers[a], self.tiers[b])
            before = table[now[:, a], now[:, b]]
            counts = before.sum(0) + sum(table[to[:, k, a], to[:, k, b]] - before[units[:, k]] for k in twos)
            pins = (counts[:, LESS] == 0) | (counts[:, MORE] == 0)
            states = (counts[:, KEPT] == 0) | (counts[:, GONE] == 0)
            nested &= pins & states & (counts[:, OTHER] == 0)
        return nested

    def _count_turns(self, sides: Numbers, units: Numbers, ends: list[Numbers]) -> Numbers:
        """How often activations go from one side to the other; of two neighbours that change about as often."""
        edge = np.zeros((1, sides.shape[1]))
        padded = np.concatenate([edge, sides, edge])
        turns = np.abs(np.diff(padded, axis=0)).sum(0)[None]
        for k, end in enumerate(ends):
            at = units[:, k]
            before, after, here = padded[at], padded[at + 2], padded[at + 1]
            turns = turns + np.abs(end - before) + np.abs(after - end) - np.abs(here - before) - np.abs(after - here)
        return turns


def _reorder(now: list[Column]) -> Iterator[list[Column]]:
    for a, one in enumerate(now):
        left = now[:a] + now[a + 1 :]
        for b, other in enumerate(now):
            if one != other:
                if a < b:
                    yield [*now[:a], other, *now[a + 1 : b], one, *now[b + 1 :]]
                yield [*left[:b], one, *left[b:]]


def _without(values: Numbers, units: Numbers) -> Numbers:
    """By step and tier the maxima over all units but its two."""
    top = np.argsort(-values, axis=0, kind="stable")[:3]
    best = np.take_along_axis(values, top, 0)
    if len(best) < 3:
        best = np.concatenate([best, np.zeros((3 - len(best), *best.shape[1:]))])
        top = np.concatenate([top, np.full((3 - len(top), *top.shape[1:]), -1)])
    a, b = units[:, 0, None, None], units[:, 1, None, None]
    first, second = ((top[n] != a) & (top[n] != b) for n in (0, 1))
    return np.where(first, best[0], np.where(second, best[1], best[2]))
