"""What a second, independent local search finds on real shapes: `python benchmarks/second_search.py CPU_SECONDS SEED`.

Prints JSON. It begins with the plan and shares nothing with the planner's searches but prices: a tier is drafted and
simulated, and a switch between tiers is priced, as the planner does. All that a plan has is written down unit by
unit. A random step moves a unit, or all like it that lie alike, to another place; swaps two units; changes what the
CPU has of a unit or what is kept of it beside a slot; or changes a tier's slots, and how it reads. It is made in one
tier, or in all. What is then over the arena gives way at random; where there is room, something is brought in. Steps
that slow the round down a little are taken as well, fewer and fewer of them. `gained`: by how much its best round is
shorter than the plan's. `checked`: the planner's own check has found the result runnable.
"""

import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from golden.machines import find_machine
from golden.shapes import make_shape

from pshard.plan import RankPlan, TierPlan
from pshard.planner.check_plan import check_runnable
from pshard.planner.make_plan import plan_variant
from pshard.planner.prepare_ranks import prepare_ranks
from pshard.planner.price.draft import draft_tier, simulated_seconds
from pshard.planner.rank_task import RankTask
from pshard.planner.search.round_times import plan_seconds
from pshard.units.divide_unit import can_divide, count_shares
from pshard.units.share import WHOLE, Share
from pshard.units.unit import Unit
from pshard.workload import Workload

CASES = (
    ("qwen3-32b", "rtx4060", 7000),
    ("llama3-70b", "rtx5080", 16000),
    ("qwen3-30b-a3b", "h100", 6000),
    ("qwen3-30b-a3b", "rtx4060", 7000),
)
SLOTS = (1, 2, 3, 4)
HEAT = 0.003  # of the round: by how much slower a step may be at first
ROUNDS = 2  # micro-batches that are simulated for a step

Place = tuple[str, str | None, Share]  # where a unit is, where its state is, how it is divided


@dataclass(frozen=True)
class Tier:
    """A tier as the search has it: the places of all units, in order, and what is common to them."""

    places: tuple[Place, ...]
    slots: int
    in_place: bool


class Search:
    """One rank's plan, changed at random. seconds: of a round under it; tiers that are equal are simulated once."""

    def __init__(self, task: RankTask, tiers: tuple[TierPlan, ...], seed: int) -> None:
        self.task, self.rng = task, Random(seed)
        self.units, self.tried = task.room.spec.units, 0
        self._known: dict[tuple[int, Tier], tuple[TierPlan, float]] = {}
        self.state = tuple(read_tier(tier) for tier in tiers)
        self.seconds = self.weigh(self.state)
        assert self.seconds is not None, "the plan breaks a rule of this search"

    def weigh(self, state: tuple[Tier, ...]) -> float | None:
        """Seconds of a round; None for what does not fit, or has residents of two tiers that are not nested."""
        if not nests(self.units, state):
            return None
        found = []
        for i, tier in enumerate(state):
            if (i, tier) not in self._known:
                plan = self.draft(i, tier)
                if plan is None:
                    return None
                rare = self.task.costs[i].load.rare  # hardly counts, yet must fit
                seconds = simulated_seconds(self.task.room, plan, self.task.costs[i], ROUNDS)
                self._known[i, tier] = plan, seconds
                self.tried += not rare
            found.append(self._known[i, tier])
        plans, seconds = zip(*found)
        return plan_seconds(self.task.room, plans, seconds, self.task.costs)

    def draft(self, i: int, tier: Tier, within: bool = True) -> TierPlan | None:
        """The tier as a plan has it; None for what cannot be, or `within`: is over the arena."""
        room, tokens = self.task.room, self.task.costs[i].load.tokens
        named = list(zip(self.units, tier.places))
        where = {u.name: place for u, (place, _, _) in named}
        kv = frozenset(u.name for u, (_, state, _) in named if state == "vram")
        shares = {u.name: share for u, (_, _, share) in named if share}
        try:
            plan = draft_tier(room, tokens, where, kv, tier.slots, shares, tier.in_place)
        except ValueError:
            return None
        return plan if plan.buffers.total <= room.arena or not within else None

    def run(self, seconds: float) -> tuple[float, tuple[Tier, ...]]:
        """The shortest round found within so many seconds of CPU time, and its tiers."""
        best, began = (self.seconds, self.state), time.process_time()
        while (spent := time.process_time() - began) < seconds:
            heat = HEAT * (1 - spent / seconds) * (self.rng.random() < 0.7)
            state = self.step(self.state)
            took = self.weigh(state) if state != self.state else None
            if took is not None and took < self.seconds * (1 + heat * self.rng.random()):
                self.state, self.seconds = state, took
                best = min(best, (took, state), key=lambda b: b[0])
            elif self.rng.random() < 1e-3:
                self.seconds, self.state = best
        return best

    def step(self, state: tuple[Tier, ...]) -> tuple[Tier, ...]:
        """A random change, with room made for it."""
        rng = self.rng
        entered = [i for i in range(len(state)) if not self.task.costs[i].load.rare]
        tiers = rng.choice((entered, entered, [rng.choice(entered)], [rng.choice(entered)], list(range(len(state)))))
        pick = rng.random()
        if pick < 0.08:
            return change(state, tiers, lambda _, tier: replace(tier, slots=rng.choice(SLOTS)))
        if pick < 0.12:
            return change(state, tiers, self.read_otherwise)
        lead = state[tiers[0]].places
        at = rng.randrange(len(self.units))
        if pick < 0.4:  # swap
            other = rng.choice([j for j in self.alike(at)])
            return change(state, tiers, lambda _, tier: replace(tier, places=swap(tier.places, at, other)))
        chosen = [at]
        if pick > 0.75:
            chosen = [j for j in self.alike(at) if lead[j] == lead[at]]
            chosen = rng.sample(chosen, rng.randint(1, len(chosen)))
        wanted = self.draw_place(self.units[at], lead[at])
        return change(state, tiers, lambda i, tier: self.settle(i, put(tier, chosen, wanted), chosen))

    def read_otherwise(self, i: int, tier: Tier) -> Tier:
        """The tier reading parts in place instead of copying them, or the other way, where it may choose."""
        return replace(tier, in_place=not tier.in_place) if len(self.task.costs[i].ways) > 1 else tier

    def alike(self, at: int) -> list[int]:
        """Units like one of them."""
        return [j for j, unit in enumerate(self.units) if unit.likeness == self.units[at].likeness]

    def draw_place(self, unit: Unit, now: Place) -> Place:
        """Another place for a unit, or another division where it lies."""
        rng, parts = self.rng, count_shares(unit)
        where, state = rng.choice(list(unit.kind.places))
        if not parts or rng.random() < 0.3:
            return where, state, WHOLE
        step = rng.choice((1, 2, 4, max(1, parts // 16), max(1, parts // 4)))
        grain = 1 if unit.kind.parts else 16
        cpu, kept = (max(0, n + rng.choice((-step, 0, step)) * grain) for n in now[2])
        share = Share(cpu, kept)
        where = "streamed" if kept else now[0] if now[0] != "cpu" else "streamed"
        return (where, now[1], share) if share and can_divide(unit, share) else (where, now[1], WHOLE)

    def settle(self, i: int, tier: Tier, fixed: list[int]) -> Tier:
        """The tier within the arena: units that are not fixed leave it at random; then what fits comes in."""
        rng, order = self.rng, [j for j in range(len(self.units)) if j not in fixed]
        rng.shuffle(order)
        over, freed = self.excess(i, tier), 0
        for j in order:
            if freed >= over > 0:
                over, freed = self.excess(i, tier), 0
            if over <= 0:
                break
            where, state, share = tier.places[j]
            if state == "vram" and rng.random() < 0.3:
                tier, freed = put(tier, [j], (where, "host", share)), freed + self.task.room.states[self.units[j].name]
            elif where == "pinned" or share.kept:
                elsewhere = rng.choice([p for p in self.units[j].kind.places if p[0] != "pinned"] or [(where, state)])
                tier = put(tier, [j], (elsewhere[0], elsewhere[1] if elsewhere[1] else state, WHOLE))
                freed += self.units[j].packed_nbytes
        left = -self.excess(i, tier)
        for j in order[: rng.choice((0, 8, len(order)))]:
            where, state, share = tier.places[j]
            nbytes = self.units[j].packed_nbytes
            if (where != "pinned" or share) and nbytes <= left:
                tier, left = put(tier, [j], ("pinned", state, WHOLE)), left - nbytes
        return tier

    def excess(self, i: int, tier: Tier) -> int:
        """Bytes over the arena; below 0 where there is room."""
        plan = self.draft(i, tier, within=False)
        return plan.buffers.total - self.task.room.arena if plan else 1


def read_tier(tier: TierPlan) -> Tier:
    """A planned tier as the search has it."""
    places = tuple((p.where, p.kv, p.share) for p in tier.placements)
    return Tier(places, max(1, tier.buffers.slots), tier.in_place)


def change(state: tuple[Tier, ...], tiers: list[int], how) -> tuple[Tier, ...]:
    """The state with some tiers changed."""
    return tuple(how(i, tier) if i in tiers else tier for i, tier in enumerate(state))


def put(tier: Tier, chosen: list[int], place: Place) -> Tier:
    """The tier with these units there."""
    return replace(tier, places=tuple(place if j in chosen else p for j, p in enumerate(tier.places)))


def swap(places: tuple[Place, ...], one: int, other: int) -> tuple[Place, ...]:
    """Two units' places exchanged."""
    changed = list(places)
    changed[one], changed[other] = changed[other], changed[one]
    return tuple(changed)


def held(units: tuple[Unit, ...], tier: Tier) -> tuple[dict[str, int], set[str]]:
    """What a tier has in VRAM: units with how many of their rows or parts (-1: all), and units with their state."""
    pins = dict[str, int]()
    for unit, (where, _, share) in zip(units, tier.places):
        if where == "pinned":
            pins[unit.name] = count_shares(unit) - share.cpu if share.cpu else -1
        elif share.kept:
            pins[unit.name] = share.kept
    return pins, {u.name for u, (_, state, _) in zip(units, tier.places) if state == "vram"}


def nests(units: tuple[Unit, ...], state: tuple[Tier, ...]) -> bool:
    """Whether of any two tiers one has in VRAM what the other has, and the same of each unit."""
    found = [held(units, tier) for tier in state]
    pins = sorted((p for p, _ in found), key=len)
    cells = sorted((c for _, c in found), key=len)
    same = all(small.items() <= large.items() for small, large in pairwise(pins))
    return same and all(small <= large for small, large in pairwise(cells))


def order_by_tiers(sets: list[set[str]]) -> tuple[str, ...]:
    """An order of which all of these nested sets are prefixes."""
    order = list[str]()
    for names in sorted(sets, key=len):
        order += sorted(names - set(order))
    return tuple(order)


def measure_case(model: str, machine: str, mib: int, seconds: float, seed: int) -> Mapping[str, object]:
    """What is printed of one case."""
    spec, profile, workload = make_shape(model), find_machine(machine), Workload((mib,))
    variant = plan_variant(spec, profile, workload, 1e4)
    (task,), (rank,) = prepare_ranks(spec, profile, variant.workload), variant.ranks
    search = Search(task, rank.tiers, seed)
    began = search.seconds
    took, state = search.run(seconds)
    sets = [held(spec.units, tier) for tier in state]
    tiers = tuple(plan for i, tier in enumerate(state) if (plan := search.draft(i, tier)))
    orders = order_by_tiers([set(p) for p, _ in sets]), order_by_tiers([c for _, c in sets])
    found = replace(variant, ranks=(RankPlan(0, mib, 1.0, *orders, tiers),))
    check_runnable((spec,), found, "cuda")
    each = [
        {"tokens": c.load.tokens, "ms": [round(1e3 * search._known[i, t][1], 3) for t in (a, b)]}
        for i, (c, a, b) in enumerate(zip(task.costs, map(read_tier, rank.tiers), state))
        if not c.load.rare
    ]
    return {
        "model": model,
        "machine": machine,
        "vram_mib": mib,
        "seed": seed,
        "seconds": seconds,
        "simulated": search.tried,
        "round_s": [round(began, 4), round(took, 4)],
        "gained": round(1 - took / began, 4),
        "tiers": each,
        "checked": True,
    }


def run_all(seconds: float, seed: int) -> Iterator[Mapping[str, object]]:
    """A row for each case."""
    for case in CASES:
        yield measure_case(*case, seconds, seed)


if __name__ == "__main__":
    for row in run_all(float(sys.argv[1]), int(sys.argv[2])):
        print(json.dumps(row), flush=True)
