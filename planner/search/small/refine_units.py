"""Small models unit by unit: they have few units of a class, and which one goes where matters.

Each tier is searched as if it were alone, then the others around it; from there steps are judged by the whole round.
Last, each tier is searched again beside the others as they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf

from pshard.planner.price.draft import Room, simulated_seconds
from pshard.planner.price.host_limits import holds
from pshard.planner.price.tier_costs import TierCosts
from pshard.planner.program.unit_classes import UnitClass
from pshard.planner.search.candidates import Candidate
from pshard.planner.search.residency_order import order_nested
from pshard.planner.search.round_times import plan_seconds, steps_seconds
from pshard.planner.search.small.moves import State
from pshard.planner.search.small.space import Space
from pshard.planner.search.small.starts import list_starts
from pshard.planner.search.small.walk import Found, Walk
from pshard.planner.search.small.ways import Held

MOST_UNITS = 48  # above, one unit more or less hardly matters, and counts have said it all
EFFORT, MOST_EFFORT = 108, 6  # over units and tiers: more starts and ways where they cost little
STARTS = 3  # of a tier, of which each is improved, and so many more as the effort is
STEPS, STEPS_MORE = 20, 5  # of roaming, and so many more for each unit of effort
ROUNDS = 2  # of which roaming goes on: the fastest ones

Ways = Sequence[Sequence[int]]  # of one tier: by unit, those that it may go


def refine_units(
    room: Room, classes: tuple[UnitClass, ...], costs: tuple[TierCosts, ...], found: Candidate, divides: bool
) -> Candidate:
    """The candidate of a small model with every unit's place searched in all tiers, if better; with `divides` also of
    divided units. Larger models' stay as they are."""
    if len(room.spec.units) > MOST_UNITS:
        return found
    space = Space(room, classes, costs, divides)
    state = _Search(space, found).run()
    made = [space.time(i, row, slots) for i, (row, slots) in enumerate(zip(state.rows, state.slots))]
    tiers = tuple(one[0] for one in made if one)
    if len(tiers) < len(costs) or not holds(room, tiers):
        return found
    seconds = tuple(simulated_seconds(room, tier, cost) for tier, cost in zip(tiers, costs))
    total = plan_seconds(room, tiers, seconds, costs)
    if total >= found.total:
        return found
    return replace(found, residency=order_nested(room, tiers), tiers=tiers, seconds=seconds, total=total)


class _Search:
    """What `refine_units` does. Tiers are searched in the order of the time that a round spends in them."""

    def __init__(self, space: Space, found: Candidate) -> None:
        self.space = space
        self.ways: list[Ways] = [tier.of_unit for tier in space.tiers]
        self.start = State(*space.read(found.tiers))
        # few rounds of a tier's simulation may find it slower than many, by which the candidate was timed
        made = [space.time(i, *of) for i, of in enumerate(zip(self.start.rows, self.start.slots))]
        most = max(found.most, steps_seconds([one[1] if one else 0.0 for one in made], space.costs))
        self.walk = Walk(space, range(len(space.tiers)), self.ways, most)
        spent = [cost.load.weight * seconds for cost, seconds in zip(space.costs, found.seconds)]
        self.order = sorted(range(len(spent)), key=lambda i: -spent[i])
        size = len(space.units) * len(space.tiers) * space.room.ranks
        self.effort = min(MOST_EFFORT, round(EFFORT / size))
        self.is_rank = bool(space.room.spec.neighbours) or space.room.ranks > 1
        self.starts = 1 if self.is_rank else STARTS + self.effort
        self.roams, self.steps = max(1, self.effort - 1), STEPS + STEPS_MORE * self.effort

    def run(self) -> State:
        """The fastest state found. What one of several ranks gains by a unit is a small part of the round: there only
        the first tier is searched, and nothing roams over all of them."""
        if self.is_rank:
            first = self._lead(self.order[0])
            return min((self.walk.descend(state) for state in (self.start, first) if state), key=lambda run: run[0])[1]
        leads = [i for i in self.order if not self.space.costs[i].load.rare]
        led = [state for i in leads if (state := self._lead(i))]
        if len(self.order) == 1:
            return min([self.start, *led], key=self.walk.score)
        found = {(run := self.walk.descend(state))[0]: run for state in (self.start, *led)}
        runs = [found[seconds] for seconds in sorted(found)]
        best = min([*runs, *(self.walk.roam(run, self.steps) for run in runs[:ROUNDS])], key=lambda run: run[0])
        again = self._search_again(best)
        return best[1] if again is best else self.walk.descend(again[1])[1]

    def _lead(self, lead: int) -> State | None:
        """The fastest state found of one tier alone, and of the others as it leaves them; None where one has none."""
        first = self._search_tier(lead, [self.ways[lead]], self._take(self.start, lead), self.roams)
        placed = {lead: first[1]} if first else {}
        for i in self.order if placed else ():
            if i not in placed:
                found = self._search_beside(i, placed, None, 0)
                if found is None:
                    return None
                placed[i] = found[1]
        return self._join(placed) if placed else None

    def _search_again(self, best: Found) -> Found:
        """Each tier in turn beside the others; `best` itself where no tier is faster."""
        for i in self.order:
            placed = {j: self._take(best[1], j) for j in self.order}
            own = placed.pop(i)
            roams = 0 if self.space.costs[i].load.rare else self.roams
            if found := self._search_beside(i, placed, own, roams):
                state = self._join({**placed, i: found[1]})
                took = self.walk.score(state, best[0])
                best = (took, state) if took < inf else best
        return best

    def _search_beside(self, i: int, placed: Mapping[int, State], own: State | None, roams: int) -> Found | None:
        """A tier that has in VRAM no more than the others, or no less, and of states likewise."""
        choices: list[Ways] = []
        for less in (True, False):
            for fewer in (True, False):
                ways = self._list_beside(i, placed, less, fewer)
                if all(ways) and ways not in choices:
                    choices.append(ways)
        return self._search_tier(i, choices, own, roams)

    def _list_beside(self, i: int, placed: Mapping[int, State], less: bool, fewer: bool) -> Ways:
        """By unit, a tier's ways that have in VRAM as much as each of the others, or less (else more) of its weights,
        and fewer (else more) states."""

        def goes(mine: Held, other: Held) -> bool:
            pins = mine[0] == other[0] or not (mine if less else other)[0]
            return pins and (mine[1] == other[1] or mine[1] != fewer)

        found = []
        for at, of in enumerate(self.ways[i]):
            others = [self.space.tiers[j].all[state.columns[at][0]].held for j, state in placed.items()]
            held = self.space.tiers[i].all
            found.append([way for way in of if all(goes(held[way].held, other) for other in others)])
        return found

    def _search_tier(self, i: int, choices: Sequence[Ways], own: State | None, roams: int) -> Found | None:
        """The fastest state found of one tier under any of these choices of ways: from the fastest starts, and from its
        own state where that is one; roaming goes on from the best `roams`."""
        starts, wanted, walks = dict[float, tuple[State, Walk]](), self.starts, list[Walk]()
        for ways in choices:
            walks.append(walk := Walk(self.space, (i,), (ways,)))
            for alike in list_starts(self.space, i, ways):
                worst = sorted(starts)[wanted - 1] if len(starts) >= wanted else inf
                found = min(((walk.score(state, worst), state) for state in alike), key=lambda run: run[0])
                if found[0] < inf:
                    starts.setdefault(found[0], (found[1], walk))
        begun = [starts[seconds] for seconds in sorted(starts)[:wanted]]
        if own:
            begun += [
                (own, walk)
                for ways, walk in zip(choices, walks)
                if all(way in of for (way,), of in zip(own.columns, ways))
            ]
        ends = {(run := walk.descend(state))[0]: (run, walk) for state, walk in begun}
        best = [ends[seconds] for seconds in sorted(ends) if seconds < inf]
        runs = [run for run, _ in best[:1]] + [walk.roam(run, self.steps) for run, walk in best[:roams]]
        return min(runs, key=lambda run: run[0], default=None)

    def _take(self, state: State, i: int) -> State:
        """One tier of a state of all."""
        return State(tuple((column[i],) for column in state.columns), (state.slots[i],))

    def _join(self, placed: Mapping[int, State]) -> State:
        """The tiers as one state."""
        tiers = [placed[i] for i in range(len(placed))]
        columns = zip(*([way for (way,) in tier.columns] for tier in tiers))
        return State(tuple(columns), tuple(tier.slots[0] for tier in tiers))
