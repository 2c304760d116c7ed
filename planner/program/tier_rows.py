"""One tier in the program: its columns, its memory, what its units need, and the lines of its time."""

from collections.abc import Sequence
from dataclasses import dataclass

from pshard.planner.program.counts import ClassUnits, CountColumns, Counts, copied_units, place_units
from pshard.planner.program.tier_lines import (
    Handoffs,
    TierLines,
    TierSums,
    TimeLine,
    draw_lines,
    handoff_floors,
    sum_work,
)
from pshard.planner.program.tier_problems import ClassCost, TierProblem, contending_groups
from pshard.planner.solver.linear import Amount, Column, Linear, Program, sum_of
from pshard.workload import MIB

MS = 1e3  # seconds in the objective's unit
TIDY = 1e-4  # price of link traffic that nothing waits for: prefer pinned where the time is the same
UNTIDY = 0.02  # price of one more streamed unit, of the largest copy: small units waste the slots' lookahead


@dataclass(frozen=True)
class TierColumns:
    """A tier's columns beside its counts. `overlaps`: ms in which host work of each group and copies overlap."""

    total: Column  # ms
    slot: Column  # MiB of a staging slot
    row_stage: Column  # MiB of the CPU's rows of divided units
    kv_stage: Column  # 1: there is a stage of KV on the host
    hands: Handoffs
    overlaps: tuple[Column, ...]


@dataclass(frozen=True)
class TierRows:
    """Writes tier number `t` of the program. `relaxed`, `stalls`, `parts`: its time is only a lower bound; fetches of
    KV stall the accelerator; of units parts may be counted."""

    program: Program
    t: int
    problem: TierProblem
    relaxed: bool
    stalls: bool
    parts: bool

    def name(self, what: str, of: str = "") -> str:
        return f"{what}(t{self.problem.tokens},{of})" if of else f"{what}(t{self.problem.tokens})"

    def key(self, what: str, *numbers: int) -> str:
        """Where a column stands among a solver's: as text, by what it is, then by tier, then by class."""
        return "_".join((what, *map(str, numbers or (self.t,))))

    def column(self, what: str) -> Column:
        return self.program.column(self.name(what), key=self.key(what))

    def switch(self, what: str) -> Column:
        return self.program.switch(self.name(what), self.key(what))

    def count_columns(self, fewest: Sequence[Counts], most: Sequence[Counts]) -> tuple[CountColumns, ...]:
        """The tier's counts; pins and layers with KV in VRAM between these numbers."""
        return tuple(self._count_class(c, cost, fewest[c], most[c]) for c, cost in enumerate(self.problem.classes))

    def _count_class(self, c: int, cost: ClassCost, fewest: Counts, most: Counts) -> CountColumns:
        def count(what: str, low: int, high: int) -> Column:
            whole = not (self.parts or cost.in_parts)
            return self.program.column(self.name(what, cost.name), low, high, whole, self.key(what, self.t, c))

        def divided(i: int, place: int) -> Column:
            part = cost.divided[i]
            of = f"{cost.name},{part.share.label},{('pinned', 'streamed')[place]}"
            key = self.key("divided", i, c, self.t, place)
            most = 0 if ((part.kept or not part.streams) if place else not part.lies) else cost.size
            whole = not (self.parts or cost.in_parts)
            return self.program.column(self.name("divided", of), 0, most, whole, key)

        return CountColumns(
            count("pin", fewest.pin, most.pin),
            count("cpu", 0, cost.size),
            count("kv", fewest.kv, most.kv),
            tuple((divided(i, 0), divided(i, 1)) for i in range(len(cost.divided))),
        )

    def add(self, counts: Sequence[CountColumns]) -> Linear:
        """Add all columns and rows but the counts; returns the tier's price: its milliseconds, and what is untidy."""
        columns = self._add_columns()
        held: Amount = self.problem.slots * columns.slot
        for c, (cost, n) in enumerate(zip(self.problem.classes, counts)):
            units = place_units(cost, n)
            held = held + self._limit_divided(c, cost, n, columns)
            held = held + self._limit_class(c, cost, n, units, columns)
        held = held + self.problem.stage_nbytes / MIB * columns.kv_stage + columns.row_stage
        self.program.at_most(self.name("vram"), held, self.problem.room / MIB)
        sums = sum_work(self.problem, counts, MS, self.stalls)
        for floor in handoff_floors(self.problem, sums, columns.hands.reached):
            self.program.at_least(self.name(floor.name), columns.hands._asdict()[floor.of], floor.least)
        self._add_lines(draw_lines(self.problem, counts, sums, columns.hands, MS), columns)
        return columns.total if self.relaxed else columns.total + self._price_untidiness(sums)

    def _add_columns(self) -> TierColumns:
        groups = contending_groups(self.problem)
        return TierColumns(
            total=self.column("ms"),
            slot=self.column("slot_mib"),
            row_stage=self.column("row_stage_mib"),
            kv_stage=self.switch("stage"),
            hands=Handoffs(
                reached=self.switch("reaches_acc"),
                handed_in=self.column("handed_in"),
                trips=self.column("trips"),
                lone_divided=self.column("lone_divided"),
            ),
            overlaps=tuple(
                self.program.column(self.name("beside_copies", group.name), key=self.key("beside_copies", self.t, g))
                for g, group in enumerate(groups)
            ),
        )

    def _limit_divided(self, c: int, cost: ClassCost, n: CountColumns, columns: TierColumns) -> Amount:
        """What divided units of a class need; returns the MiB of those that are pinned."""
        held: Amount = 0
        for i, (part, (in_arena, elsewhere)) in enumerate(zip(cost.divided, n.divided)):
            held = held + (part.kept or part.nbytes) / MIB * in_arena
            if cost.in_parts and cost.kind.parts:  # a bound's: no bytes of slots or rows are counted
                continue
            for what, count, room, nbytes in (
                ("divided_slot", copied_units(part, in_arena, elsewhere), columns.slot, part.nbytes),
                ("divided_rows", in_arena + elsewhere, columns.row_stage, part.row_nbytes),
            ):
                few_bytes = what == "divided_rows"
                of = f"{cost.name},{part.share.label}"
                key = self.key(what, self.t, c, i)
                uses = self.program.column(self.name(what, of), 0, 1, not (self.parts and few_bytes), key)
                self.program.at_most(self.name(f"{what}_if", of), count, cost.size * uses)
                if few_bytes or not (cost.in_parts or cost.in_place):
                    self.program.at_least(self.name(f"{what}_holds", of), room, nbytes / MIB * uses)
        return held

    def _limit_class(self, c: int, cost: ClassCost, n: CountColumns, units: ClassUnits, columns: TierColumns) -> Amount:
        """What whole units of a class need; returns the MiB of those that are pinned, and of KV."""
        program, name = self.program, self.name
        if cost.divided:
            program.at_least(name("divided_are_pinned", cost.name), units.pinned, 0)
        held = cost.nbytes / MIB * units.pinned
        if cost.kind.is_looked_up:
            program.equal(name("never_streamed", cost.name), units.streamed, 0)
            program.equal(name("no_kv", cost.name), n.kv, 0)
            return held
        program.at_most(name("reached_by", cost.name), units.off_cpu, cost.size * columns.hands.reached)
        program.at_least(name("streamed", cost.name), units.streamed, 0)
        streams = program.switch(name("streams", cost.name), self.key("streams", self.t, c))
        program.at_most(name("streams_if", cost.name), units.streamed, cost.size * streams)
        if not (cost.in_parts or cost.in_place):
            program.at_least(name("slot_holds", cost.name), columns.slot, cost.nbytes / MIB * streams)
        if not cost.kv_nbytes:
            program.equal(name("no_kv", cost.name), n.kv, 0)
            return held
        program.at_least(name("kv_on_host", cost.name), units.kv_on_host, 0)
        program.at_most(name("kv_stage_if", cost.name), units.kv_on_host, cost.size * columns.kv_stage)
        return held + cost.kv_nbytes / MIB * n.kv

    def _add_lines(self, lines: TierLines, columns: TierColumns) -> None:
        for line in lines.in_order():
            if isinstance(line, TimeLine):
                least = line.base + _weigh(line.slopes, columns.overlaps)
                self.program.at_least(self.name(line.name), columns.total, least)
            else:
                self.program.at_most(self.name(line.name), _weigh(line.shares, columns.overlaps), line.most)

    def _price_untidiness(self, sums: TierSums) -> Amount:
        """Small prices for what the tier's time does not show: link traffic that nothing waits for, and many small
        streamed units."""
        largest = max((c.link for c in self.problem.classes if c.kind.position == "layer"), default=0.0)
        return TIDY * sums.link + UNTIDY * MS * largest * sums.streamed


def _weigh(weights: Sequence[float], overlaps: Sequence[Column]) -> Linear:
    return sum_of(weight * overlap for weight, overlap in zip(weights, overlaps))
