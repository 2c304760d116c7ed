"""Plans against an exact search over every placement of every unit and every number of staging slots."""

import random
from dataclasses import dataclass

import pytest
from planner_cases import OWN, make_model, simulate_tier
from random_steps import UnitSearch

from pshard.model import ModelSpec
from pshard.planner.make_plan import plan_variant
from pshard.planner.prepare_ranks import prepare_ranks
from pshard.planner.price.datasheet import Rates, profile_from_datasheet
from pshard.planner.price.draft import draft_tier, simulated_seconds
from pshard.planner.rank_task import RankTask
from pshard.planner.search.climb import SLOT_CHOICES
from pshard.units.attention import ATTENTION
from pshard.units.unit import Unit
from pshard.workload import Workload

pytestmark = pytest.mark.usefixtures("whole_search")
WITHIN = 0.01
OPTIONS = {
    "attention": (("pinned", True), ("pinned", False), ("streamed", True), ("streamed", False), ("cpu", False)),
    "embedding": (("pinned", False), ("cpu", False)),
}
OTHER = (("pinned", False), ("streamed", False), ("cpu", False))
Place = tuple[str, bool, int]  # where, KV in VRAM, rows on the CPU
MOST_SPLIT = 3  # layers of the models whose FFNs the oracle also splits


@dataclass
class Oracle:
    """Depth-first search over units in order for a decode tier that is faster than `limit` seconds.

    What is cut off cannot be faster: its units on the accelerator and on the CPU take turns, its copies share one
    link, and its pins alone are over the arena. Everything else is simulated.
    """

    task: RankTask
    limit: float
    fastest: float = float("inf")
    simulated: int = 0

    def __post_init__(self) -> None:
        self.costs = self.task.costs[0]
        self.units = self.task.room.spec.units
        self.options = [self.list_options(u) for u in self.units]
        least = [min(seconds for _, seconds, _, _ in options) for options in self.options]
        self.rest = [sum(least[i:]) for i in range(len(least) + 1)]
        self.room = self.task.room.arena - self.task.room.scratch(self.costs.load.tokens)

    def list_options(self, unit: Unit) -> list[tuple[Place, float, float, int]]:
        """Ways to place a unit: the place, its least seconds in turn with other units, on the link, bytes it holds."""
        cost, room, options = self.costs.units[unit.name], self.task.room, []
        for where, in_vram in OPTIONS.get(unit.kind.name, OTHER):
            fetched = unit.kind is ATTENTION and where != "cpu" and not in_vram
            link = (cost.link if where == "streamed" else 0.0) + (cost.kv_fetch if fetched else 0.0)
            held = (unit.packed_nbytes if where == "pinned" else 0) + (room.states[unit.name] if in_vram else 0)
            options.append(((where, in_vram, 0), cost.cpu if where == "cpu" else cost.acc, link, held))
        split = self.task.room.spec.config.n_layers <= MOST_SPLIT
        for share in next(c.shares for c in self.task.classes if unit in c.units) if split else ():
            cut = self.costs.divided(unit.name, share)
            seconds = max(cut.acc, cut.cpu) + cut.join + cut.rest
            options.append((("pinned", False, share), seconds, 0.0, cut.nbytes))
            options.append((("streamed", False, share), seconds, cut.link, 0))
        return options

    def search(self, places: tuple[Place, ...] = (), serial: float = 0.0, link: float = 0.0, held: int = 0) -> None:
        at = len(places)
        if held > self.room or max(serial + self.rest[at], link) >= min(self.limit, self.fastest):
            return
        if at == len(self.units):
            self.simulate(places)
            return
        for place, seconds, copied, nbytes in self.options[at]:
            self.search((*places, place), serial + seconds, link + copied, held + nbytes)

    def simulate(self, places: tuple[Place, ...]) -> None:
        room, costs = self.task.room, self.costs
        named = [(u.name, *place) for u, place in zip(self.units, places)]
        where = {name: place for name, place, _, _ in named}
        kv = frozenset(name for name, _, in_vram, _ in named if in_vram)
        cut = {name: rows for name, _, _, rows in named if rows}
        streamed = sum(place == "streamed" for place in where.values())
        for slots in [n for n in SLOT_CHOICES if n <= streamed] or [0]:
            tier = draft_tier(room, costs.load.tokens, where, kv, slots, cut)
            if tier.buffers.total <= room.arena:
                self.simulated += 1
                self.fastest = min(self.fastest, simulated_seconds(room, tier, costs))


def random_case(seed: int, layers: int) -> tuple[ModelSpec, Rates, Workload]:
    """A machine between a laptop and a server, and a budget between a few units and nearly all of them."""
    rng = random.Random(seed)

    def between(low: float, high: float) -> float:
        return low * (high / low) ** rng.random()

    spec = make_model(
        layers=layers,
        d_ffn=256 * rng.randint(4, 16),
        vocab=rng.choice((512, 4096, 16384)),
        kv_heads=rng.choice((1, 2, 8)),
        odd_qtype=rng.choice((None, "Q6_K")),
    )
    rates = Rates(
        link=between(4e9, 60e9),
        acc_memory=between(80e9, 1e12),
        acc_flops=between(1e13, 3e14),
        host_memory=between(15e9, 100e9),
        host_flops=between(2e11, 2e12),
        handoff_seconds=between(5e-6, 1e-4),
    )
    context = rng.choice((512, 4096))
    arena_mib = 3 + rng.randint(0, max(1, int(0.9 * spec.packed_nbytes) >> 20))
    workload = Workload((OWN + arena_mib,), context, max_ubatch=1, prompt=context // 2, generated=context // 4)
    return spec, rates, workload


def plan_and_oracle(layers: int, seed: int, within: float) -> tuple[float, Oracle]:
    """Planned seconds of a decode tier, and an oracle that looks for what is faster by more than that share."""
    spec, rates, workload = random_case(100 * layers + seed, layers)
    profile = profile_from_datasheet(rates)
    planned = plan_variant(spec, profile, workload).ranks[0].tiers[0].prediction.seconds
    return planned, Oracle(prepare_ranks(spec, profile, workload)[0], planned / (1 + within))


QUICK = {(1, 0), (2, 1), (2, 7), (3, 4), (3, 7)}


@pytest.mark.quick("1-0")
@pytest.mark.parametrize(
    ("layers", "seed"),
    [
        pytest.param(layers, seed, marks=[] if (layers, seed) in QUICK else [pytest.mark.slow])
        for layers, seeds in ((1, range(6)), (2, range(8)), (3, (2, 4, 7)))
        for seed in seeds
    ],
)
def test_no_placement_of_units_beats_the_plan_of_a_small_model(layers, seed):
    planned, oracle = plan_and_oracle(layers, seed, 1e-9)
    oracle.search()
    assert oracle.fastest >= planned * (1 - 1e-9)


@pytest.mark.parametrize("seed", [*(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, 1)), 2])
def test_no_placement_of_the_units_of_four_layers_beats_the_plan_by_more_than_a_percent(seed):
    planned, oracle = plan_and_oracle(4, seed, WITHIN)
    oracle.search()
    assert oracle.fastest >= planned / (1 + WITHIN)


@pytest.mark.slow
def test_divided_ffns_of_four_layers_are_all_tried():
    """The optimum is the oracle's with MOST_SPLIT = 4, which takes it 40 s."""
    planned, _ = plan_and_oracle(4, 9, WITHIN)
    assert planned == pytest.approx(0.00045980882906349204, rel=1e-9)


def test_the_oracle_finds_the_same_optimum_with_and_without_cutting():
    spec, rates, workload = random_case(7, 2)
    (task,) = prepare_ranks(spec, profile_from_datasheet(rates), workload)
    cut, whole = Oracle(task, float("inf")), Oracle(task, float("inf"))
    whole.rest = [-1e9] * len(whole.rest)
    cut.search()
    whole.search()
    assert cut.fastest == whole.fastest and cut.simulated < whole.simulated


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "seed"), [(6, 0), (12, 1)])
def test_more_search_unit_by_unit_gains_less_than_a_percent(layers, seed):
    """Too many placements to try them all: three more passes of random steps, from the plan, with other seeds."""
    spec, rates, workload = random_case(100 * layers + seed, layers)
    profile = profile_from_datasheet(rates)
    tier = plan_variant(spec, profile, workload).ranks[0].tiers[0]
    (task,) = prepare_ranks(spec, profile, workload)
    best, search = tier, UnitSearch(task.room, tier.tokens, task.costs[0])
    for heat in (0.02, 0.15, 0.4):
        best = search.anneal(best, heat, random.Random(f"{seed} {heat}"))
    gained = tier.prediction.seconds / simulate_tier(task.room, best, task.costs[0]).seconds
    assert gained <= 1 + WITHIN
    assert tier.prediction.bound_seconds <= simulate_tier(task.room, best, task.costs[0]).seconds * (1 + 1e-9)
