"""Plans against an exact search over every placement of every unit and every number of staging slots."""

import random
from dataclasses import dataclass

import pytest

from pshard.model import ModelSpec
from pshard.planner.datasheet import Rates, profile_from_datasheet
from pshard.planner.draft import draft_tier, simulate_tier
from pshard.planner.plan import RankTask, plan_variant, prepare_ranks
from pshard.planner.search import SLOT_CHOICES
from pshard.workload import Workload
from tests.planner_cases import OWN, make_model

WITHIN = 0.01
OPTIONS = {
    "attention": (("pinned", True), ("pinned", False), ("streamed", True), ("streamed", False), ("cpu", False)),
    "embedding": (("pinned", False), ("cpu", False)),
}
OTHER = (("pinned", False), ("streamed", False), ("cpu", False))


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
        costs = self.task.costs[0].units
        self.units = self.task.room.spec.units
        least = [min(costs[u.name].acc, costs[u.name].cpu) for u in self.units]
        self.rest = [sum(least[i:]) for i in range(len(least) + 1)]
        self.room = self.task.room.arena - self.task.room.scratch(self.task.costs[0].load.tokens)

    def search(self, places: tuple = (), serial: float = 0.0, link: float = 0.0, held: int = 0) -> None:
        at = len(places)
        if held > self.room or max(serial + self.rest[at], link) >= min(self.limit, self.fastest):
            return
        if at == len(self.units):
            self.simulate(places)
            return
        unit = self.units[at]
        cost = self.task.costs[0].units[unit.name]
        for where, in_vram in OPTIONS.get(unit.kind, OTHER):
            fetched = unit.kind == "attention" and where != "cpu" and not in_vram
            bytes_held = (unit.packed_nbytes if where == "pinned" else 0) + (self.task.room.kv_layer if in_vram else 0)
            self.search(
                (*places, (where, in_vram)),
                serial + (cost.cpu if where == "cpu" else cost.acc),
                link + (cost.link if where == "streamed" else 0.0) + (cost.kv_fetch if fetched else 0.0),
                held + bytes_held,
            )

    def simulate(self, places: tuple) -> None:
        room, costs = self.task.room, self.task.costs[0]
        where = {u.name: place for u, (place, _) in zip(self.units, places)}
        kv = frozenset(u.name for u, (_, in_vram) in zip(self.units, places) if in_vram)
        streamed = sum(place == "streamed" for place in where.values())
        for slots in [n for n in SLOT_CHOICES if n <= streamed] or [0]:
            tier = draft_tier(room, costs.load.tokens, where, kv, slots)
            if tier.buffers.total <= room.arena:
                self.simulated += 1
                self.fastest = min(self.fastest, simulate_tier(room, tier, costs).seconds)


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


@pytest.mark.parametrize(
    ("layers", "seed"), [(n, seed) for n, seeds in ((2, 6), (3, 8), (4, 3)) for seed in range(seeds)]
)
def test_no_placement_of_units_beats_the_plan_by_more_than_a_percent(layers, seed):
    spec, rates, workload = random_case(100 * layers + seed, layers)
    profile = profile_from_datasheet(rates)
    planned = plan_variant(spec, profile, workload).ranks[0].tiers[0].prediction.seconds
    oracle = Oracle(prepare_ranks(spec, profile, workload)[0], planned / (1 + WITHIN))
    oracle.search()
    assert oracle.fastest >= planned / (1 + WITHIN)


def test_the_oracle_finds_the_same_optimum_with_and_without_cutting():
    spec, rates, workload = random_case(7, 2)
    (task,) = prepare_ranks(spec, profile_from_datasheet(rates), workload)
    cut, whole = Oracle(task, float("inf")), Oracle(task, float("inf"))
    whole.rest = [-1e9] * len(whole.rest)
    cut.search()
    whole.search()
    assert cut.fastest == whole.fastest and cut.simulated < whole.simulated
