"""RankTask: what is planned for one rank."""

from dataclasses import dataclass
from functools import cached_property

from pshard.planner.price.draft import Room
from pshard.planner.price.page_locks import locked
from pshard.planner.price.tier_costs import TierCosts
from pshard.planner.program.bounds import bound_seconds, rough_bound
from pshard.planner.program.unit_classes import UnitClass
from pshard.planner.published.per_tier import Choice


@dataclass(frozen=True)
class RankTask:
    """What is planned for one rank: its slice of the model, its room, and the costs and bounds of its tiers.

    rough_bounds: by tier, seconds that no plan of whole units can beat, rather low. twin: a rank before it for which
    the same plan serves, so that what is worked out of it holds here.
    """

    rank: int
    share: float
    room: Room
    classes: tuple[UnitClass, ...]
    costs: tuple[TierCosts, ...]
    rough_bounds: tuple[float, ...]
    plan_needed: bool  # False: everything fits the memory of every rank, and no device is slower than its host
    twin: "RankTask | None" = None

    @property
    def budget_mib(self) -> int:
        return self.room.workload.vram_mib[self.rank]

    @cached_property
    def choices(self) -> dict[int, list[Choice]]:
        """By tier, what the published search listed of it as yet, where no copy is staged."""
        return {}

    @cached_property
    def bounds(self) -> tuple[float, ...]:
        """Seconds by tier that no plan of whole units can beat: by the integer program where the round enters it."""
        if self.twin:
            return self.twin.bounds
        return tuple(
            rough if cost.load.rare else bound_seconds(self.room, self.classes, cost)
            for cost, rough in zip(locked(self.costs), self.rough_bounds)
        )

    @cached_property
    def divided_bounds(self) -> tuple[float, ...]:
        """Seconds by tier that no plan can beat, whether or not it divides FFNs."""
        if self.twin:
            return self.twin.divided_bounds
        found = []
        for cost, bound in zip(locked(self.costs), self.bounds):
            if cost.tables.kind == "cpu":
                found.append(bound)
                continue
            quick = cost.load.rare or not self.plan_needed
            least = (rough_bound if quick else bound_seconds)(self.room, self.classes, cost, divide=True)
            found.append(min(bound, least))
        return tuple(found)

    def is_like(self, other: "RankTask") -> bool:
        """Whether the same plan serves both ranks."""
        same_device = self.costs[0].tables is other.costs[0].tables
        mine, its = self.room, other.room
        return (
            same_device
            and (mine.arena, mine.host, mine.beyond) == (its.arena, its.host, its.beyond)
            and mine.spec == its.spec
        )
