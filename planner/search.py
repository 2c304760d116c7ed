"""Local improvement of one tier on its simulated time: more or fewer CPU units, their order, the number of slots."""

from dataclasses import dataclass, replace

from pshard.plan import TierPlan
from pshard.planner.classes import UnitClass
from pshard.planner.costs import TierCosts
from pshard.planner.draft import Room, draft_tier, simulate_tier
from pshard.planner.ilp import Counts
from pshard.planner.order import Residency, assign_cpu

SLOT_CHOICES = (1, 2, 3, 4)
SEARCH_ROUNDS = 2
PIN_REACH = 8  # pins given up or gained for a change of slots


@dataclass(frozen=True)
class TierState:
    """A tier as few numbers: prefix lengths of the residency orders, CPU units by class, runs they form, slots."""

    pins: int
    kv: int
    cpu: tuple[int, ...]
    runs: int
    slots: int


@dataclass(frozen=True)
class Scored:
    """A state with its tier and simulated seconds."""

    state: TierState
    tier: TierPlan
    seconds: float


class TierSearch:
    """Builds and times states of one tier; remembers what it has timed."""

    def __init__(self, room: Room, classes: tuple[UnitClass, ...], residency: Residency, costs: TierCosts) -> None:
        self.room, self.classes, self.residency, self.costs = room, classes, residency, costs
        self._seen: dict[TierState, Scored | None] = {}

    def start(self, counts: tuple[Counts, ...], slots: int) -> Scored | None:
        """The solver's counts as a tier, with CPU units in the best of several numbers of runs."""
        pins, kv = sum(n.pin for n in counts), sum(n.kv for n in counts)
        cpu = tuple(0 if c.kind == "embedding" else n.cpu for c, n in zip(self.classes, counts))
        most = max((n for c, n in zip(self.classes, cpu) if c.kind in ("attention", "ffn")), default=0)
        choices = {0, most, most // 2, most // 4} if most else {0}
        scored = [s for s in (self.score(TierState(pins, kv, cpu, runs, slots)) for runs in sorted(choices)) if s]
        return min(scored, key=lambda s: s.seconds, default=None)

    def score(self, state: TierState) -> Scored | None:
        """Simulate a state; None when it is not possible or over budget."""
        if state not in self._seen:
            tier = self.build(state)
            self._seen[state] = (
                Scored(state, tier, simulate_tier(self.room, tier, self.costs, SEARCH_ROUNDS).seconds) if tier else None
            )
        return self._seen[state]

    def build(self, state: TierState) -> TierPlan | None:
        pinned = frozenset(self.residency.pin_order[: state.pins])
        kv = frozenset(self.residency.kv_order[: state.kv])
        resident = pinned | kv
        counts = []
        for cls, cpu in zip(self.classes, state.cpu):
            if cls.kind == "embedding":
                counts.append(sum(u.name not in pinned for u in cls.units))
                continue
            if cpu < 0 or cpu > sum(u.name not in resident for u in cls.units):
                return None
            counts.append(cpu)
        on_cpu = assign_cpu(self.classes, tuple(counts), resident, state.runs)
        where = {
            u.name: "pinned" if u.name in pinned else "cpu" if u.name in on_cpu else "streamed"
            for u in self.room.spec.units
        }
        tier = draft_tier(self.room, self.costs.load.tokens, where, kv, state.slots)
        return tier if tier.buffers.total <= self.room.arena else None

    def improve(self, start: Scored, evaluations: int) -> Scored:
        """Hill climbing: take the best neighbour while it is better, within so many simulations."""
        best = start
        while evaluations > 0:
            tried = []
            for state in self._neighbours(best.state):
                if state in self._seen:
                    continue
                evaluations -= 1
                tried.append(self.score(state))
                if evaluations <= 0:
                    break
            better = min((s for s in tried if s), key=lambda s: s.seconds, default=None)
            if better is None or better.seconds >= best.seconds * (1 - 1e-6):
                return best
            best = better
        return best

    def _neighbours(self, state: TierState):
        for slots in SLOT_CHOICES:
            if abs(slots - state.slots) == 1 and (filled := self.fill(replace(state, slots=slots))):
                yield filled
        for c, cls in enumerate(self.classes):
            if cls.kind in ("attention", "ffn", "output"):
                for delta in (-1, 1):
                    yield replace(state, cpu=(*state.cpu[:c], state.cpu[c] + delta, *state.cpu[c + 1 :]))
        if any(state.cpu):
            for runs in sorted({state.runs - 1, state.runs + 1, state.runs * 2, state.runs // 2}):
                if 0 <= runs != state.runs:
                    yield replace(state, runs=runs)
        for pins in (state.pins - 1, state.pins + 1):
            if 0 <= pins <= len(self.residency.pin_order):
                yield replace(state, pins=pins)

    def fill(self, state: TierState) -> TierState | None:
        """The state with as many pins as fit, near its own number."""
        most = min(state.pins + PIN_REACH, len(self.residency.pin_order))
        for pins in range(most, max(-1, state.pins - PIN_REACH), -1):
            filled = replace(state, pins=pins)
            if self.build(filled):
                return filled
        return None
