"""From a state of a small model to faster ones: descents, and roaming on from where these end. Nothing is random."""

from collections.abc import Iterator, Sequence
from functools import partial
from math import inf

from pshard.planner.price.host_limits import holds
from pshard.planner.search.climb import SLOT_CHOICES
from pshard.planner.search.round_times import plan_seconds, steps_seconds
from pshard.planner.search.small.moves import Allowed, Moves, State, Step
from pshard.planner.search.small.space import Space

SAME = 1 - 1e-9  # of a time: what takes no less is not faster
TRIES = 40  # tiers simulated without a gain, after which a kind of steps is given up
WIDTH = 20  # of those that promise most, how many are tried before the best one is taken
REORDERED = 10  # likewise, of those that exchange like units...
TURNS = 3  # ...every third one, in turn
RESTS = 10  # steps in which a unit does not go back to what it was
OVER = 1.3  # of the least time: slower states are not gone through

Found = tuple[float, State]  # seconds, infinite of what does not fit


class Walk:
    """Steps over some tiers of a space, in which each unit goes only the ways that are `allowed`. most: seconds that
    micro-batches of a round may take."""

    def __init__(self, space: Space, tiers: Sequence[int], allowed: Allowed, most: float = inf) -> None:
        self.space, self.tiers, self.most = space, tuple(tiers), most
        self.costs = [space.costs[i] for i in tiers]
        self._moves = Moves(space, self.tiers, allowed)
        self._in_turn = sorted(range(len(self.tiers)), key=lambda n: -self.costs[n].load.weight)

    def score(self, state: State, below: float = inf) -> float:
        """Seconds of a round in these tiers; infinite where one does not fit, or where it takes `below` or more."""
        least = [
            cost.load.weight * self.space.tiers[i].least_seconds(row, slots)
            for cost, i, row, slots in zip(self.costs, self.tiers, state.rows, state.slots)
        ]
        total, made = sum(least), {}
        for n in self._in_turn:
            if total >= below:
                return inf
            one = self.space.time(self.tiers[n], state.rows[n], state.slots[n])
            if one is None:
                return inf
            made[n] = one
            total += self.costs[n].load.weight * one[1] - least[n]
        if len(made) > 1:
            tiers, seconds = zip(*(made[n] for n in range(len(made))))
            if steps_seconds(seconds, self.costs) > self.most or not holds(self.space.room, tiers):
                return inf
            total = plan_seconds(self.space.room, tiers, seconds, self.costs)
        return total if total < below else inf

    def descend(self, state: State) -> Found:
        """The first faster state of those that promise most, again and again, until too many are not."""
        now, goes_on = self.score(state), True
        while goes_on:
            goes_on = False
            for steps in (self._change_slots, partial(self._change, below=now), self._reorder):
                if found := self._first_faster(steps(state), now * SAME):
                    (now, state), goes_on = found, True
                    break
        return now, state

    def _first_faster(self, states: Iterator[State], below: float) -> Found | None:
        most = self.space.simulated + TRIES
        for tried in states:
            took = self.score(tried, below)
            if took < inf:
                return took, tried
            if self.space.simulated > most:
                break
        return None

    def _change(self, state: State, below: float) -> Iterator[State]:
        return (state.put(step) for step in self._moves.rank(state, below))

    def _reorder(self, state: State) -> Iterator[State]:
        return (state.put(step) for step in self._moves.reorder(state))

    def _change_slots(self, state: State) -> Iterator[State]:
        for n, now in enumerate(state.slots):
            for slots in (now - 1, now + 1):
                if slots in SLOT_CHOICES:
                    yield State(state.columns, (*state.slots[:n], slots, *state.slots[n + 1 :]))

    def roam(self, start: Found, steps: int) -> Found:
        """The fastest state on a way that takes the best step each time, faster or not. For some steps no unit goes
        back to what it was, so that the way leads out of where a descent ends."""
        best, state = start, start[1]
        rests: dict[tuple[int, tuple[int, ...]], int] = {}
        for n in range(steps):
            taken, limit = None, best[0] * OVER
            for step, other in self._list_options(state, n, limit, rests):
                took = self.score(other, limit)
                if took < limit:
                    taken, limit = (step, other), took
            if taken is None:
                break
            rests |= {(at, state.columns[at]): n + 1 + RESTS for at, _ in taken[0]}
            state = taken[1]
            best = (limit, state) if limit < best[0] * SAME else best
        return best

    def _list_options(
        self, state: State, n: int, limit: float, rests: dict[tuple[int, tuple[int, ...]], int]
    ) -> list[tuple[Step, State]]:
        """What roaming tries in its step number `n`."""

        def may(step: Step) -> bool:
            return all(rests.get(change, 0) <= n for change in step)

        options: list[tuple[Step, State]] = [((), other) for other in self._change_slots(state)] if n % 3 == 0 else []
        steps = [step for step in self._moves.reorder(state)[n % TURNS :: TURNS][:REORDERED] if may(step)]
        for step in self._moves.rank(state, limit):
            if len(steps) >= WIDTH + REORDERED:
                break
            if may(step):
                steps.append(step)
        return options + [(step, state.put(step)) for step in steps]
