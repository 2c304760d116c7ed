"""Local improvement of one tier on its simulated time: more or fewer CPU units, their order, the number of slots."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from pshard.homes import ON_CPU, PINNED, STREAMED
from pshard.plan import TierPlan
from pshard.planner.price.draft import Room, draft_tier, simulated_seconds
from pshard.planner.price.tier_costs import TierCosts
from pshard.planner.program.coefficients import balanced_parts, may_divide, may_spread, offered_shares
from pshard.planner.program.counts import Counts
from pshard.planner.program.least_times import Floor
from pshard.planner.program.unit_classes import UnitClass
from pshard.planner.search.residency_order import Residency, assign_cpu, assign_divided, spread_parts
from pshard.units.divide_unit import without_cpu
from pshard.units.share import WHOLE, Share

SLOT_CHOICES = (1, 2, 3, 4)
SEARCH_ROUNDS = 2
CLOSE = 1.002  # so near to its bound, a tier is as good as optimal
PART_STEPS = 4  # a step moves one part of every so-manieth unit of a class
PIN_REACH = 8  # pins given up or gained for a change of slots


@dataclass(frozen=True)
class TierState:
    """A tier as few numbers: prefix lengths of the residency orders, CPU units by class, runs they form, slots.

    divided: by class, divided streamed units for each of its `shares`; () without any. copies: whether what the CPU has
    of divided units in the arena is streamed instead. parts: by class, parts of its other streamed units that the CPU
    computes, all together; () without any.
    """

    pins: int
    kv: int
    cpu: tuple[int, ...]
    runs: int
    slots: int
    divided: tuple[tuple[int, ...], ...] = ()
    copies: bool = False
    parts: tuple[int, ...] = ()


Move = Callable[[TierState, int], TierState | None]  # a step so far from a state; None where there is none


@dataclass(frozen=True)
class Scored:
    """A state with its tier and simulated seconds."""

    state: TierState
    tier: TierPlan
    seconds: float


class TierSearch:
    """Builds and times states of one tier; remembers what it has timed. `divides`: its steps may divide more units."""

    def __init__(
        self,
        room: Room,
        classes: tuple[UnitClass, ...],
        residency: Residency,
        costs: TierCosts,
        divides: bool = False,
    ) -> None:
        self.room, self.classes, self.residency, self.costs = room, classes, residency, costs
        self.divides = divides and may_divide(costs)
        self.spreads = tuple(c for c, cls in enumerate(classes) if divides and may_spread(costs, cls))
        self._seen: dict[TierState, Scored | None] = {}
        self._built: dict[TierState, TierPlan | None] = {}
        self._slower: set[TierState] = set()  # than what was best when they were looked at
        self._floor = Floor(room, classes, costs)

    @cached_property
    def most_pins(self) -> int:
        """The longest prefix of the pin order that this tier may have: a large one ends before units that are divided
        by rows."""
        order = self.residency.pin_order
        if not self.residency.shares:
            return len(order)
        return next((i for i, unit in enumerate(order) if self.share_of(unit, False) is None), len(order))

    def share_of(self, unit: str, copies: bool) -> Share | None:
        """How this tier divides a unit of the pin order; None where it cannot have it there."""
        share = self.residency.shares.get(unit, WHOLE)
        if not share or (may_divide(self.costs) and not copies):
            return share
        return without_cpu(self.room.spec.unit(unit), share)

    def start(self, counts: tuple[Counts, ...], slots: int) -> Scored | None:
        """The solver's counts as a tier, with CPU units in the best of several numbers of runs."""
        state = self._merge_parts(state_of(self.classes, counts, 0, slots))
        most = max((n for c, n in zip(self.classes, state.cpu) if c.kind.position == "layer"), default=0)
        choices = {0, most, most // 2, most // 4} if most else {0}
        scored = [s for s in (self.score(replace(state, runs=runs)) for runs in sorted(choices)) if s]
        return min(scored, key=lambda s: s.seconds, default=None)

    def _merge_parts(self, state: TierState) -> TierState:
        """In a tier of many tokens all streamed units of a class have about as many parts on the CPU."""
        if may_divide(self.costs) or not state.divided:
            return state
        offered = (offered_shares(cls, self.costs) for cls in self.classes)
        parts = (sum(s.cpu * n for s, n in zip(shares, of)) for shares, of in zip(offered, state.divided))
        return replace(state, divided=(), parts=tuple(parts))

    def balance(self, state: TierState) -> TierState:
        """The state with as many parts of streamed units on the CPU as take it about as long as the link the others."""
        resident, parts = {*self.residency.pin_order[: state.pins]}, [0] * len(self.classes)
        for c in self.spreads:
            streamed = len(self.classes[c].names - resident) - state.cpu[c]
            parts[c] = max(0, streamed) * balanced_parts(self.costs, self.classes[c].units[0])
        return replace(state, parts=tuple(parts))

    def score(self, state: TierState) -> Scored | None:
        """Simulate a state; None when it is not possible or over budget."""
        if state not in self._seen:
            tier = self.build(state)
            self._seen[state] = Scored(state, tier, self.time(tier)) if tier else None
        return self._seen[state]

    def time(self, tier: TierPlan) -> float:
        """Simulated seconds. Searches in several orders come upon the same tiers: `costs.searched` remembers them by
        their placements' identities, which are no others': the placements are in it."""
        known, key = self.costs.searched, (tier.buffers.slots, *map(id, tier.placements))
        if key not in known:
            known[key] = tier.placements, simulated_seconds(self.room, tier, self.costs, SEARCH_ROUNDS)
        return known[key][1]

    def _is_over(self, state: TierState) -> bool:
        """Whether whole units alone are over budget, known before a tier is drafted."""
        if self.residency.shares or state.divided or state.parts:
            return False
        held, pinned = self._prefixes[state.pins]
        streamed = [
            (cls.size - n - cpu, cls.nbytes)
            for cls, n, cpu in zip(self.classes, pinned, state.cpu)
            if not cls.kind.is_looked_up and cls.size - n - cpu > 0 and not self.costs.reads_in_place(cls.kind)
        ]
        slots = min(state.slots, sum(n for n, _ in streamed))
        layers = sum(cls.size - cpu for cls, cpu in zip(self.classes, state.cpu) if cls.kind.state)
        held += slots * max((nbytes for _, nbytes in streamed), default=0)
        held += self._states_held[min(state.kv, len(self._states_held) - 1)]
        held += self.room.state_stage if layers > state.kv else 0
        return held + self.room.scratch(self.costs.load.tokens) > self.room.arena

    def reaches(self, state: TierState, seconds: float) -> bool:
        """Whether no order of the state's counts takes less than `seconds`; not known where units are divided, or where
        the orders are shorter than the state wants."""
        wants_more = state.pins > self.most_pins or state.kv > len(self.residency.kv_order)
        if wants_more or self.residency.shares or state.divided or state.parts:
            return False
        counts = tuple(
            Counts(pin, cls.size - pin if cls.kind.is_looked_up else cpu, kv)
            for cls, pin, cpu, kv in zip(
                self.classes, self._prefixes[state.pins][1], state.cpu, self._kv_prefixes[state.kv]
            )
        )
        return self._floor.reaches(counts, state.slots, seconds)

    @cached_property
    def _streamed(self) -> dict[str, str]:
        return {u.name: STREAMED for u in self.room.spec.units}

    @cached_property
    def _prefixes(self) -> list[tuple[int, tuple[int, ...]]]:
        """By length of the pin order's prefix: its bytes, and its units by class."""
        at = {u.name: c for c, cls in enumerate(self.classes) for u in cls.units}
        held, counts = 0, [0] * len(self.classes)
        found = [(held, tuple(counts))]
        for name in self.residency.pin_order:
            held += self.classes[at[name]].nbytes
            counts[at[name]] += 1
            found.append((held, tuple(counts)))
        return found

    @cached_property
    def _kv_prefixes(self) -> list[tuple[int, ...]]:
        """By length of the KV order's prefix: its layers by class."""
        at = {u.name: c for c, cls in enumerate(self.classes) for u in cls.units}
        counts = [0] * len(self.classes)
        found = [tuple(counts)]
        for name in self.residency.kv_order:
            counts[at[name]] += 1
            found.append(tuple(counts))
        return found

    @cached_property
    def _states_held(self) -> list[int]:
        """By length of the KV order's prefix: bytes of its states."""
        return list(accumulate((self.room.states[name] for name in self.residency.kv_order), initial=0))

    def build(self, state: TierState) -> TierPlan | None:
        """The state as a tier; None when it is not possible or over budget."""
        if state not in self._built:
            self._built[state] = self._draft(state)
        return self._built[state]

    def _draft(self, state: TierState) -> TierPlan | None:
        order = self.residency
        if state.pins < order.least_pins or state.kv < order.least_kv:
            return None
        if state.pins > self.most_pins or self._is_over(state):
            return None
        pinned = frozenset(self.residency.pin_order[: state.pins])
        kv = frozenset(self.residency.kv_order[: state.kv])
        resident = pinned | kv
        counts = []
        for cls, cpu in zip(self.classes, state.cpu):
            if cls.kind.is_looked_up:
                counts.append(len(cls.names - pinned))
                continue
            if cpu < 0 or (cpu and cpu > len(cls.names - resident)):
                return None
            counts.append(cpu)
        on_cpu = assign_cpu(self.classes, tuple(counts), resident, state.runs)
        where = self._streamed | dict.fromkeys(on_cpu, ON_CPU) | dict.fromkeys(pinned, PINNED)
        held = [name for name in self.residency.shares if name in pinned]
        shares = {name: share for name in held if (share := self.share_of(name, state.copies))}
        where |= {name: STREAMED for name, share in shares.items() if share.kept}
        if state.divided:
            if any(min(n, default=0) < 0 for n in state.divided):
                return None
            try:
                shares |= assign_divided(self.classes, state.divided, pinned | frozenset(on_cpu))
            except ValueError:
                return None
        if state.parts:
            spread_out = spread_parts(self.classes, state.parts, where, shares)
            if spread_out is None:
                return None
            shares |= spread_out
        tier = draft_tier(self.room, self.costs.load.tokens, where, kv, state.slots, shares, self.costs.in_place)
        return tier if tier.buffers.total <= self.room.arena else None

    def improve(self, start: Scored, evaluations: int, bound: float = 0.0) -> Scored:
        """Hill climbing within so many simulations: every kind of step in turn, twice as far each time it helps.

        What is as fast as `bound` (seconds that nothing can beat) allows is not improved.
        """
        best, helped = start, True
        while helped:
            helped = False
            for move in self._moves:
                far = 1
                while evaluations > 0 and best.seconds > bound * CLOSE:
                    state = move(best.state, far)
                    if state is None or state in self._seen or state in self._slower:
                        break
                    evaluations -= 1
                    goal = best.seconds * (1 - 1e-6)
                    if self.reaches(state, goal):
                        self._slower.add(state)
                        break
                    tried = self.score(state)
                    if tried is None or tried.seconds >= goal:
                        break
                    best, helped, far = tried, True, 2 * far
        return best

    @cached_property
    def _moves(self) -> tuple[Move, ...]:
        return _list_moves(self)

    def fill_most(self, state: TierState) -> TierState | None:
        """The state with as many pins as fit; None where none of the numbers that it may have does."""
        least = self.residency.least_pins
        low, over = least - 1, self.most_pins + 1  # the longest prefix known to fit, the shortest known not to
        while over - low > 1:
            middle = (low + over) // 2
            low, over = (middle, over) if self.build(replace(state, pins=middle)) else (low, middle)
        return replace(state, pins=low) if low >= least else None

    def leave_to_cpu(self, state: TierState) -> TierState:
        """The state with all on the CPU that has neither weights nor KV in VRAM."""
        resident = {*self.residency.pin_order[: state.pins], *self.residency.kv_order[: state.kv]}
        cpu = tuple(0 if c.kind.is_looked_up else len(c.names - resident) for c in self.classes)
        return replace(state, cpu=cpu)

    def fill(self, state: TierState) -> TierState | None:
        """The state with as many pins as fit, near its own number."""
        most = min(state.pins + PIN_REACH, self.most_pins)
        for pins in range(most, max(-1, state.pins - PIN_REACH), -1):
            filled = replace(state, pins=pins)
            if self.build(filled):
                return filled
        return None


def _list_moves(search: TierSearch) -> tuple[Move, ...]:
    """Kinds of steps: more or fewer runs, CPU units of a class, parts on the CPU, slots, pins, divided units."""

    def runs(sign: int):
        def move(state: TierState, far: int) -> TierState | None:
            if not any(state.cpu) or state.runs + sign * far < 0:
                return None
            return replace(state, runs=state.runs + sign * far)

        return move

    def cpu(c: int, sign: int):
        def move(state: TierState, far: int) -> TierState | None:
            return replace(state, cpu=(*state.cpu[:c], state.cpu[c] + sign * far, *state.cpu[c + 1 :]))

        return move

    def slots(sign: int):
        def move(state: TierState, far: int) -> TierState | None:
            changed = state.slots + sign * far
            return search.fill(replace(state, slots=changed)) if changed in SLOT_CHOICES else None

        return move

    def pins(sign: int):
        def move(state: TierState, far: int) -> TierState | None:
            changed = state.pins + sign * far
            return replace(state, pins=changed) if 0 <= changed <= search.most_pins else None

        return move

    def divided(c: int, i: int, sign: int):
        def move(state: TierState, far: int) -> TierState | None:
            now = state.divided or tuple((0,) * len(cls.shares) for cls in search.classes)
            of_class = (*now[c][:i], now[c][i] + sign * far, *now[c][i + 1 :])
            return replace(state, divided=(*now[:c], of_class, *now[c + 1 :]))

        return move

    def copies(state: TierState, far: int) -> TierState | None:
        return search.fill(replace(state, copies=not state.copies)) if far == 1 else None

    placed = [c for c, cls in enumerate(search.classes) if not cls.kind.is_looked_up]
    signs = (1, -1)
    return (
        *([copies] if search.residency.shares and may_divide(search.costs) else ()),
        *(_move_parts(search.classes, c, sign) for c in search.spreads for sign in signs),
        *(cpu(c, sign) for c in placed for sign in signs),
        *(runs(sign) for sign in signs),
        *(slots(sign) for sign in signs),
        *(pins(sign) for sign in signs),
        *(
            divided(c, i, sign)
            for c, cls in enumerate(search.classes if search.divides else ())
            for i, share in enumerate(cls.shares)
            if not share.kept  # those are of the residency order
            for sign in signs
        ),
    )


def _move_parts(classes: tuple[UnitClass, ...], c: int, sign: int) -> Move:
    """Steps of more or fewer parts of a class's streamed units on the CPU."""
    step = max(1, classes[c].size // PART_STEPS)

    def move(state: TierState, far: int) -> TierState | None:
        now = state.parts or (0,) * len(classes)
        changed = now[c] + sign * far * step
        if changed < 0:
            return None
        moved = (*now[:c], changed, *now[c + 1 :])
        return replace(state, parts=moved if any(moved) else ())

    return move


def state_of(classes: tuple[UnitClass, ...], counts: tuple[Counts, ...], runs: int, slots: int) -> TierState:
    """Counts as a state. The CPU looks up what of the embedding is not pinned: no number of its own."""
    cpu = tuple(0 if c.kind.is_looked_up else n.cpu for c, n in zip(classes, counts))
    divided = tuple(tuple(streamed for _, streamed in n.divided) for n in counts)
    if not any(n.n_divided for n in counts):
        divided = ()
    return TierState(sum(n.pin for n in counts), sum(n.kv for n in counts), cpu, runs, slots, divided)
