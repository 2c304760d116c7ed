"""What the integer program knows of a tier: seconds and bytes of one unit of every class, and the tier's room."""

from dataclasses import dataclass

from pshard.units.share import Share
from pshard.units.unit import UnitKind


@dataclass(frozen=True)
class DividedClassCost:
    """Seconds and bytes of one unit of a class in one tier when it is divided.

    `acc` and `cpu` add up to its time: what the other side does meanwhile is in neither. `link` and `nbytes`: what is
    brought to arena or slot; `kept`: bytes in the arena of one that needs a slot too; `alone`: what the accelerator
    computes once all is there. `row_nbytes`: where the CPU's result comes to. `on_host`: what host memory keeps of one
    that is in the arena. `read`: by how much longer it takes where the accelerator reads its part over the link in
    place. `lies`, `streams`: whether its part may lie in the arena, and be streamed.
    """

    share: Share
    acc: float
    cpu: float
    link: float
    alone: float
    issue: float
    nbytes: int
    kept: int
    row_nbytes: int
    on_host: int
    read: float = 0.0
    lies: bool = True
    streams: bool = True


@dataclass(frozen=True)
class ClassCost:
    """Seconds and bytes of one unit of a class in one tier. `kv_nbytes`: its layer's KV in VRAM; 0 if it has none.
    `in_parts`: a bound is wanted for units that are divided anywhere: parts of them count, and a slot may be small.
    `in_place`: streamed units need no slot, as kernels read them over the link, which takes `read` seconds longer than
    to compute them."""

    name: str
    kind: UnitKind
    size: int
    nbytes: int
    acc: float
    cpu: float
    link: float
    kv_nbytes: int = 0
    kv_fetch: float = 0.0
    issue: float = 0.0  # host seconds to issue it on the accelerator
    kv_stall: float = 0.0  # what the accelerator waits for the fetch where nothing but accelerator work hides it
    kv_cycle: float = 0.0  # fetch and write-back of its layer's KV, between two computations from the one stage
    link_speed: float = 1.0  # 1 = alone; while host work on the unit and a copy overlap
    cpu_speed: float = 1.0
    divided: tuple[DividedClassCost, ...] = ()  # by share
    in_parts: bool = False
    in_place: bool = False
    read: float = 0.0

    @property
    def place(self) -> str:
        """Where its units stand in the order of execution: "first", "last", or in a layer "leads" or "follows".

        The program assumes that every layer has one unit that leads and equally many that follow it, as runs of CPU
        units are counted by what leaders and the others outnumber each other (`tier_lines.handoff_floors`).
        """
        return self.kind.position if self.kind.position != "layer" else "leads" if self.kind.leads else "follows"


@dataclass(frozen=True)
class TierProblem:
    """One tier's coefficients. `room`: arena bytes left for pins, slots, KV and stage. Seconds and bytes.

    `slots` take room; `lookahead` of them can be filled while one run of CPU units lasts (more than `slots` only
    when a bound for several choices is wanted). `round_trip`: hand-offs around a run of CPU units; `enter`: the
    hand-off after an embedding on the CPU, `leave`: the last one; `fixed`: whatever the placement. `all_contend`: the
    accelerator's work is host work too (the CPU as accelerator). `copy_issue`: host seconds to start the copy of a
    unit, `kv_issue`: the copies of an attention unit's KV on the host and back. `host_room`: bytes of weights and of
    KV that all tiers together may keep in host memory, where that is limited; `host_before`: what tiers that are placed
    already keep.
    """

    tokens: int
    weight: float
    classes: tuple[ClassCost, ...]
    room: int
    slots: int
    lookahead: int
    stage_nbytes: int
    round_trip: float
    enter: float
    leave: float
    fixed: float
    all_contend: bool = False
    copy_issue: float = 0.0
    kv_issue: float = 0.0
    host_room: int | None = None
    host_before: tuple[int, int] = (0, 0)

    @property
    def followers(self) -> int:
        """Units of a layer that follow its leading one; see `ClassCost.place`."""
        leads, follows = (sum(c.size for c in self.classes if c.place == place) for place in ("leads", "follows"))
        return max(1, follows // max(1, leads))

    @property
    def firsts(self) -> int:
        """Units that take token ids."""
        return max(1, sum(c.size for c in self.classes if c.place == "first"))

    @property
    def may_divide(self) -> bool:
        return any(cost.divided for cost in self.classes)

    @property
    def divides_parts(self) -> bool:
        """Whether units that have parts may be divided."""
        return any(cost.divided and cost.kind.parts for cost in self.classes)


@dataclass(frozen=True)
class Contending:
    """Classes (their positions) whose host work and copies hold each other up about alike; the group's best speeds."""

    name: str
    classes: tuple[int, ...]
    link_speed: float
    cpu_speed: float


def contending_groups(problem: TierProblem) -> tuple[Contending, ...]:
    """By what their kinds contend with: attention may read slowly for what it computes, matrices do not; the embedding
    is only looked up and in no group."""
    members: dict[str, list[int]] = {}
    for i, cost in enumerate(problem.classes):
        if cost.kind.contends:
            members.setdefault(cost.kind.contends, []).append(i)
    groups = []
    for name, classes in members.items():
        costs = [problem.classes[i] for i in classes]
        best = max(c.link_speed for c in costs), max(c.cpu_speed for c in costs)
        groups.append(Contending(name, tuple(classes), *best))
    return tuple(groups)


def copies_beside_a_run(problem: TierProblem) -> float:
    """Most seconds of copies while one run of CPU units lasts: one into each slot, and one layer's KV."""
    return problem.lookahead * max(c.link for c in problem.classes) + max(c.kv_fetch for c in problem.classes)
