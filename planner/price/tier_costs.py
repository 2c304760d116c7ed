"""TierCosts: everything that simulating or solving one tier needs to know about time."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import exp

from pshard.batch import VERIFY, Batch
from pshard.batch_sizes import SMALL_BATCH
from pshard.collectives import norm_seconds, wire_type
from pshard.homes import ACC, READ, Lane
from pshard.model import ModelSpec
from pshard.on_disk import list_lookups
from pshard.planner.price.host_issue import copy_issue
from pshard.planner.price.packing import end_of_burst
from pshard.planner.price.price_operations import price_operations
from pshard.planner.price.profile_tables import Tables, list_sums
from pshard.planner.price.tier_loads import TierLoad
from pshard.planner.price.unit_costs import DividedCost, Setting, UnitCost, divided_cost, stage_cost, unit_cost
from pshard.steps.emit import StepEmitter
from pshard.steps.graph_runs import LAUNCH_BOUND
from pshard.steps.step import AllReduce, Compute, Gather, StepShape
from pshard.units.moe.expert_cache import slot_nbytes
from pshard.units.operations import Norm
from pshard.units.share import Share
from pshard.units.unit import Unit, UnitKind
from pshard.workload import Workload

# times as long as one rank's turn until the last of several begins; two GPUs, four boots: 1.4 to 2.9 (docs/log.md)
LAST_OF_RANKS = 2.0


@dataclass(frozen=True)
class TierCosts:
    """Everything that simulating or solving one tier needs to know about time.

    staged: units in host memory that is not page-locked, whose `link` is their `staged`. in_place: whether the program
    and searches have streamed parts read in place; what is simulated says so itself.
    """

    load: TierLoad
    units: dict[str, UnitCost]
    tables: Tables
    spec: ModelSpec
    workload: Workload
    ranks: int = 1
    staged: frozenset[str] = frozenset()
    in_place: bool = False
    _divided: dict[tuple[str, Share], DividedCost] = field(default_factory=dict, compare=False, repr=False)
    _divided_speeds: dict[tuple[str, Share], tuple[float, float]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )
    searched: dict[tuple[int, ...], tuple] = field(default_factory=dict, init=False, compare=False, repr=False)
    acts: dict[int, tuple] = field(default_factory=dict, init=False, compare=False, repr=False)  # of `simulate`
    emitters: dict[tuple[int, StepShape], StepEmitter] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )  # of models, by identity

    @cached_property
    def setting(self) -> Setting:
        """What its units were priced for."""
        return Setting(self.spec, self.tables, self.load, self.workload, self.ranks)

    @cached_property
    def ways(self) -> tuple["TierCosts", ...]:
        """The same with streamed parts read in place and copied, as the tier may choose; the likely way first."""
        return tuple(
            self if way == self.in_place else replace(self, in_place=way)
            for way in self.spec.ways_to_read(self.load.tokens)
        )

    def reads_in_place(self, kind: UnitKind) -> bool:
        """Whether streamed units of the kind are read in place."""
        return self.in_place and kind.parts is not None

    def likeness(self, unit: Unit) -> tuple:
        """Units for which this is equal cost the same wherever they are."""
        return unit.likeness, unit.name in self.staged, self.setting.is_unlike(unit)

    @cached_property
    def stand_ins(self) -> dict[str, str]:
        """By unit, the first that costs the same wherever it is, and after which ranks sum alike."""
        first: dict[tuple, str] = {}
        sets = set(self.spec.onto_parts.values()), self._normed, self.spec.demanded(1)
        keys = {u.name: (*self.likeness(u), *(u.name in names for names in sets)) for u in self.spec.units}
        return {name: first.setdefault(key, name) for name, key in keys.items()}

    def over_link(self, kind: UnitKind, cost: UnitCost | DividedCost) -> float:
        """Seconds of the link for a streamed unit of the kind, read in place or copied."""
        return cost.read if self.reads_in_place(kind) else cost.link

    def over_lane(self, lane: Lane, name: str, share: Share) -> float:
        """Seconds of a lane beyond the link for what is brought of a unit. Of what the disk brings, slots hold a part,
        which is copied from there meanwhile."""
        unit, setting = self.spec.unit(name), self.setting
        held = self.spec.held_share(name) if lane is READ else 0.0
        seconds = setting.copy(unit, share, direction=lane.timed, part=1 - held)
        return setting.shares[1] * max(seconds, setting.copy(unit, share, part=held) if held else 0.0)

    def on_demand(self, step: Compute) -> tuple[float, float, float]:
        """Seconds of computing a unit's experts, of reading those that slots are expected to lack, and of computing the
        one that lands last. Now and then none is lacking: then no read begins. Rows of a table are looked up when all
        of them have landed."""
        unit, cost = self.spec.unit(step.unit), self.units[step.unit]
        computing = cost.acc if step.on == ACC else cost.cpu
        if unit.kind.is_looked_up:
            return computing, self.reading_rows(unit), computing
        if not step.reads:
            return computing, 0.0, 0.0
        any_lacks = 1.0 - exp(-step.reads / slot_nbytes(unit))
        among_others = self.tables.copy(READ.timed, round(step.reads / any_lacks))
        reading = any_lacks * (among_others + end_of_burst(self.tables))
        return computing, reading, any_lacks * computing * min(1.0, slot_nbytes(unit) / max(1, cost.cpu_reads))

    def reading_rows(self, unit: Unit) -> float:
        """Seconds of reading the rows from disk that a unit looks up."""
        found = list_lookups(unit, self.spec.config)
        return sum(self.tables.scattered.seconds(o.each * self.load.tokens, o.table.row_nbytes) for o in found)

    @property
    def vector_bytes(self) -> int:
        return 4 * self.spec.config.d_model

    def divided(self, name: str, share: Share) -> DividedCost:
        """Cost of the unit of that name divided so."""
        if (name, share) not in self._divided:
            unit = self.spec.unit(name)
            key = unit.likeness, self.setting.is_unlike(unit), share
            if key not in self._worked_out:
                self._worked_out[key] = divided_cost(unit, share, self._setting_of_parts)
            cost = self._worked_out[key]
            self._divided[name, share] = stage_cost(cost) if name in self.staged else cost
        return self._divided[name, share]

    @cached_property
    def _setting_of_parts(self) -> Setting:
        """What divided units are priced for. They keep no state: nothing that they cost depends on past tokens."""
        load = self.load
        if load.verifies:
            return replace(self.setting, load=TierLoad(Batch.even(load.tokens, load.sequences, kind=VERIFY), weight=0))
        together = load.tokens if load.is_decode else 1
        return replace(self.setting, load=TierLoad(Batch.even(load.tokens, together), weight=0))

    @cached_property
    def _worked_out(self) -> dict[tuple, DividedCost]:
        """By likeness and share what like units cost in every plan by the same tables, in tiers of so many tokens."""
        spec, work, load = self.spec, self.workload, self._setting_of_parts.load
        key = spec.config, spec.popularity, spec.caches, load, work.type_k, work.split_mode, self.ranks
        return self.tables.divided.setdefault(key, {})

    def divided_speeds(self, name: str, share: Share) -> tuple[float, float]:
        """Speeds of (link, CPU) while the CPU computes what it has of that unit and a copy runs."""
        if (name, share) not in self._divided_speeds:
            cost = self.divided(name, share)
            self._divided_speeds[name, share] = self._slowdown(cost.cpu_reads, cost.cpu)
        return self._divided_speeds[name, share]

    def handoff(self, to: str, nbytes: int, copies: int = 1) -> float:
        """Seconds of handing `nbytes` of activations over in so many copies, one for each buffer."""
        return self.tables.handoff(to, nbytes, self.vector_bytes, copies)

    def all_reduce(self, nbytes: int, copies: bool = False) -> float:
        """Seconds of summing the ranks' parts, `nbytes` of float32 each, in the type in which the run will."""
        return self.tables.collective(self.ranks, nbytes, copies, self._wire)

    @cached_property
    def _wire(self) -> str:
        """The type in which ranks' parts travel."""
        return wire_type(self.workload.reduce_dtype, self.load.tokens, self.tables.kind != "cpu")

    @cached_property
    def sum_norm(self) -> float:
        """Seconds of normalising what the ranks have summed before it is added to the residual stream: with the sum,
        where that can be."""
        tokens, width = self.load.tokens, self.spec.config.d_model
        sums = list_sums(self.tables.profile, self.ranks)
        along = norm_seconds(sums, self.ranks, tokens, width, self._wire)
        if along is not None:
            return along
        return price_operations((Norm(None, self.spec.config.d_model, adds=True),), self.setting.side("acc"))

    @cached_property
    def _normed(self) -> frozenset[str]:
        """Units whose sum over the ranks is normalised."""
        return frozenset(unit for unit, _ in self.spec.sum_norms)

    def meeting(self, step: AllReduce | Gather, copies: bool = False) -> float:
        """Seconds of a step in which all ranks take part; logits are gathered in float32."""
        if isinstance(step, AllReduce):
            normed = self.sum_norm if step.unit in self._normed and not step.port else 0.0
            return self.all_reduce(step.nbytes, copies) + normed
        return self.tables.collective(self.ranks, step.nbytes, copies)

    def hand_over(self, nbytes: int, copies: bool = False) -> float:
        """Seconds of handing `nbytes` of float32 to the next rank."""
        return self.tables.hand_over(self.ranks, nbytes, copies)

    @cached_property
    def copy_issue(self) -> float:
        """Host seconds to start a copy."""
        return copy_issue(self.tables)

    @cached_property
    def run_issue(self) -> float:
        """Host seconds to begin a run of units that one graph may hold; what begins one after a hand-off is in that."""
        return 0.0 if self.tables.kind == "cpu" else self.tables.elementwise("acc", "run", 1, 1)

    @cached_property
    def turn(self) -> float:
        """Host seconds between two micro-batches, in which the accelerator has nothing to do. A rank that is handed
        hidden states has them while the ranks before it compute; those that sum wait for the last one's thread."""
        neighbours = self.spec.neighbours
        if self.tables.kind == "cpu" or (neighbours is not None and neighbours.source is not None):
            return 0.0
        sums = self.ranks > 1 and neighbours is None
        return (LAST_OF_RANKS if sums else 1.0) * self.tables.elementwise("acc", "turn", 1, 1)

    @cached_property
    def launch(self) -> float:
        """Host seconds to launch a unit's kernels one by one where the runtime captures none (prompts of several
        sequences), though their own times are those in a graph; else 0."""
        captured = self.load.sequences == 1 or not SMALL_BATCH < self.load.tokens <= LAUNCH_BOUND
        if self.tables.kind == "cpu" or captured:
            return 0.0
        return self.tables.elementwise("acc", "launch", 1, 1)

    @cached_property
    def contended(self) -> dict[str, tuple[float, float]]:
        """Unit -> speeds of (link, CPU) while the CPU computes it and a copy runs."""
        return self._slowdowns([(c.cpu_reads, c.cpu) for c in self.units.values()])

    @cached_property
    def acc_contended(self) -> dict[str, tuple[float, float]] | None:
        """The same for units on the accelerator when that is the CPU, which reads the DRAM that copies use."""
        if self.tables.kind != "cpu":
            return None
        return self._slowdowns([(c.cpu_reads, c.acc) for c in self.units.values()])

    def _slowdowns(self, work: list[tuple[int, float]]) -> dict[str, tuple[float, float]]:
        """By unit, for its bytes read and seconds; units that are alike are looked up once."""
        speeds = {w: self._slowdown(*w) for w in set(work)}
        return {name: speeds[w] for name, w in zip(self.units, work)}

    def _slowdown(self, reads: int, seconds: float) -> tuple[float, float]:
        """Speeds of (link, CPU) while this rank's CPU reads so much and all ranks of its host copy: those with layers
        take turns to compute, not to stream."""
        here = self.tables.profile.ranks_here(self.ranks)
        return self.tables.slowdown(here * reads, seconds, here)


def tier_costs(
    spec: ModelSpec,
    tables: Tables,
    load: TierLoad,
    workload: Workload,
    ranks: int = 1,
    staged: frozenset[str] = frozenset(),
) -> TierCosts:
    """Costs of every unit of the model for one tier's load; copies of units in `staged` are not from page-locked
    memory."""
    setting = Setting(spec, tables, load, workload, ranks)
    costs: dict[str, UnitCost] = {}
    for alike in _list_equal(setting):
        cost = unit_cost(alike[0], setting)
        aside = stage_cost(cost)
        costs |= {u.name: aside if u.name in staged else cost for u in alike}
    units = {u.name: costs[u.name] for u in spec.units}
    in_place = spec.ways_to_read(load.tokens)[0]
    return TierCosts(load, units, tables, spec, workload, ranks, staged, in_place)


def _list_equal(setting: Setting) -> Iterator[list[Unit]]:
    """Units that cost the same, but for what is staged."""
    for alike in setting.spec.alike:
        for unlike in (False, True):
            if units := [u for u in alike if setting.is_unlike(u) == unlike]:
                yield units


def restage(costs: TierCosts, staged: frozenset[str]) -> TierCosts:
    """The same tier with other units in host memory that is not page-locked."""
    if costs.staged == staged:
        return costs
    return tier_costs(costs.spec, costs.tables, costs.load, costs.workload, costs.ranks, staged)
