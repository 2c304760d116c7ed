"""What units cost in one tier: seconds and bytes of each on either side, whole or divided between both."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from pshard.batch_sizes import SMALL_BATCH, next_rung
from pshard.homes import ON_CPU
from pshard.model import ModelSpec
from pshard.planner.price.host_issue import admit_issue, follow_issue
from pshard.planner.price.price_operations import OneSide, price_operations
from pshard.planner.price.profile_tables import Tables
from pshard.planner.price.tier_loads import TierLoad
from pshard.routing.expert_uses import Uses, count_apart, read_nbytes, used_experts, used_nbytes, used_spread
from pshard.units.divide_unit import DividedUnit, count_shares, divide_operations, divide_unit, joined_width
from pshard.units.moe.expert_cache import part_sizes
from pshard.units.operands import CHOSEN
from pshard.units.operations import LookUp, Operation, halve
from pshard.units.share import WHOLE, Share
from pshard.units.unit import Unit, places_of
from pshard.workload import Workload

UNREADABLE = 1e3  # seconds: a GPU's kernels do not reach memory that is not page-locked, so no plan asks for it
FORBIDDEN = 1e3  # seconds of a unit where it may not be


@dataclass(frozen=True)
class Setting:
    """What units are priced for: the model, a machine, one tier's load, and over how many ranks it is spread."""

    spec: ModelSpec
    tables: Tables
    load: TierLoad
    workload: Workload
    ranks: int = 1

    def side(self, name: str, unit: Unit | None = None, rows: int | None = None, begins: bool = True) -> OneSide:
        """One side's view of the micro-batch; `rows`: of its tokens. A GPU computes more of them where drafts are
        verified, up to the next size that kernels are made for. unit: whose operations these are, and whether it
        begins with them."""
        rows = self.load.tokens if rows is None else rows
        if self.load.verifies and name == "acc" and not self.waits and rows <= SMALL_BATCH:
            rows = next_rung(rows)
        ready = CHOSEN if begins and unit is not None and unit.name in self.spec.behind_routers else None
        behind = begins and unit is not None and unit.likeness in self._behind_norms
        given = self.tables, self.load, rows, self.workload.type_k, self.uses, self.apart
        return OneSide(name, *given, ready=ready, unit=unit, behind_norms=behind)

    @cached_property
    def _behind_norms(self) -> frozenset[tuple]:
        """Likenesses of units that come behind norms. The first unit of a model is priced like them, and so is one
        whose neighbour is on the other side: that is a launch among hundreds."""
        return frozenset(self.spec.unit(name).likeness for name in self.spec.behind_norms)

    def is_unlike(self, unit: Unit) -> bool:
        """Whether a unit takes longer than those of equal likeness: its products stay in bfloat16, theirs do not."""
        apart = self.tables.in_bf16 is not None and self.load.tokens > SMALL_BATCH
        return apart and any(map(unit.stays_in_bf16, unit.matrices))

    @cached_property
    def apart(self) -> float:
        """How many unrelated tokens use as many experts as those of the micro-batch: drafts follow each other."""
        load, config, known = self.load, self.spec.config, self.spec.popularity
        rules = (unit.kind.parts(config) for unit in self.spec.units if unit.kind.parts) if load.verifies else ()
        chosen, of = next(iter(rules), (0, 0))
        if not of:
            return load.tokens
        each, overlaps = load.tokens // load.sequences, known.overlaps if known else ()
        return load.sequences * count_apart(each, chosen, of, self.uses, overlaps)

    @property
    def uses(self) -> Uses:
        """How likely a token uses each expert, by place."""
        return self.spec.uses

    @property
    def shares(self) -> tuple[float, float]:
        """How many times as long (CPU work, copies) of a rank take as with the whole host.

        Ranks with slices work at the same time. Those with layers take turns at a decode step, but stream at once.
        """
        at_once = not (self.workload.split_mode == "layer" and self.load.is_answer)
        share, tokens = self.tables.share, self.load.tokens
        return share("matmul", self.ranks, tokens, at_once), share("copy", self.ranks, 0, True)

    def copy(
        self, unit: Unit, share: Share = WHOLE, memory: str = "pinned", direction: str = "h2d", part: float = 1.0
    ) -> float:
        """Seconds of the copy of what is brought of a unit, or of a part of that; `memory`, `direction`: see
        `Tables.copy`."""
        brought = divide_unit(unit, share).brought
        return sum(self.tables.copy(direction, round(part * piece.nbytes), memory) for piece in brought.pieces)

    def read(self, unit: Unit, share: Share = WHOLE) -> float:
        """Seconds of reading what is used of that in place; none where the CPU as accelerator computes from there.
        Never less than a copy takes, which it is priced as by a profile that did not time it."""
        if unit.kind.parts is None or self.waits:
            return 0.0
        nbytes = read_nbytes(unit, share, self.spec.config, self.apart, self.uses, self.hits(unit))
        timed = self.tables.routed.read(unit.packed_nbytes // count_shares(unit), nbytes, self.apart)
        return max(self.tables.copy("h2d", nbytes), timed or 0.0)

    def hits(self, unit: Unit) -> Uses:
        """What share of choices of each expert of a unit finds it in a slot of the accelerator; empty without any."""
        if any(unit.name in cache.units for cache in self.spec.caches if cache.on_host):
            return ()
        return self.spec.hits_of(unit.name, self.load.tokens, self.load.tokens)

    def reads(self, unit: Unit) -> int:
        """Bytes of weights that whoever computes a unit is expected to read."""
        return used_nbytes(unit, self.spec.config, self.apart, self.uses)

    def weigh_slots(self, unit: Unit, first: int) -> tuple[float, float]:
        """What slots that follow use make of the times of a divided unit, whose parts from `first` on are the CPU's: by
        what those of the accelerator and of the CPU are to be multiplied. What is found in a slot is the
        accelerator's."""
        hits = self.hits(unit)
        if not hits or unit.kind.parts is None:
            return 1.0, 1.0
        (chosen, of), tokens = unit.kind.parts(self.spec.config), self.apart
        on_acc = used_experts(range(first), chosen, of, tokens, self.uses)
        on_cpu, left = (used_experts(range(first, of), chosen, of, tokens, self.uses, found) for found in ((), hits))
        return (on_acc + on_cpu - left) / on_acc, left / on_cpu

    @property
    def refill(self) -> tuple[float, float]:
        """Seconds of the link for the experts that are expected to be brought to slots, and of the host, which looks at
        a step's choices, changes tables and starts the copies."""
        link = host = 0.0
        for cache in self.spec.caches:
            parts, coming = part_sizes(self.spec.unit(cache.units[0])).values(), cache.refill(self.load.tokens)
            link += coming * sum(self.tables.copy("h2d", nbytes) for nbytes in parts)
            follows = not cache.is_on_demand and self.load.tokens <= cache.tokens
            host += follow_issue(self.tables) if follows else 0.0
            host += coming * admit_issue(self.tables, len(parts))
        return self.shares[1] * link, host

    def telling_choices(self, unit: Unit) -> float:
        """Seconds in which an accelerator of its own brings a router's choices to the host, where slots follow them:
        one more small kernel."""
        tokens = self.load.tokens
        following = [cache for cache in self.spec.caches if not cache.is_on_demand]
        follows = unit.kind.routes and any(tokens <= cache.tokens for cache in following)
        return self.tables.elementwise("acc", "norm", 1, 1) if follows and not self.waits else 0.0

    def may_be_on_cpu(self, unit: Unit) -> bool:
        """Whether a unit may be on the CPU beside the accelerator, also on one of several ranks."""
        sums = self.ranks > 1 and self.spec.neighbours is None and not self.waits
        return any(site == ON_CPU for site, _ in places_of(unit.kind, sums))

    def correction(self, unit: Unit) -> tuple[float, float, float]:
        """Factors that trials have taught: on the accelerator, on the host, of the link."""
        of, tokens = self.tables.correction.of, self.load.tokens
        return of("acc", unit.kind.name, tokens), of("host", unit.kind.name, tokens), of("link", "", tokens)

    @property
    def waits(self) -> bool:
        """Whether the accelerator computes where it is issued: the CPU as accelerator."""
        return self.tables.kind == "cpu"

    @property
    def step(self) -> float:
        """Host seconds that issuing a unit takes."""
        return self.tables.elementwise("acc", "step", 1, 1)


@dataclass(frozen=True)
class UnitCost:
    """One unit in one tier. Seconds, bytes. `link`: the unit's blob over the link; `staged`: the same were it not
    page-locked; `read`: what is used of it, where kernels read that in place. `kv_*`: its state. `begins`: the share of
    `acc` and of `cpu` that comes before a sum over the ranks, from which the unit goes on."""

    acc: float = 0.0
    cpu: float = 0.0
    nbytes: int = 0
    link: float = 0.0
    cpu_reads: int = 0  # bytes that the CPU reads when it computes the unit
    kv_fetch: float = 0.0
    kv_fetch_bytes: int = 0
    kv_write: float = 0.0
    issue: float = 0.0  # host seconds to issue the unit on an accelerator that works on its own
    staged: float = 0.0
    read: float = 0.0
    begins: tuple[float, float] = (0.0, 0.0)

    def halve(self, before: bool) -> "UnitCost":
        """The same of what comes before that sum, or after it. Either is issued by itself."""
        acc, cpu = (part if before else 1 - part for part in self.begins)
        return replace(self, acc=acc * self.acc, cpu=cpu * self.cpu)

    def in_waves(self, waves: int) -> "UnitCost":
        """The same of one of several waves, which bring as many parts each. Each is issued by itself."""
        return replace(self, acc=self.acc / waves, link=self.link / waves, staged=self.staged / waves)


NOTHING = UnitCost()  # another rank holds all of it


def unit_cost(unit: Unit, setting: Setting) -> UnitCost:
    """Cost of a unit on either side: the sum of its operations', and what moving it and its state takes."""
    if not unit.is_here:
        return NOTHING
    spec, tables, load = setting.spec, setting.tables, setting.load
    on_host, copying = setting.shares
    rows = load.logit_rows if unit.kind.gives_logits else load.tokens
    operations = unit.operations(spec.config)
    acc_seconds, host_seconds = (price_operations(operations, setting.side(s, unit, rows)) for s in ("acc", "host"))
    acc_seconds += setting.telling_choices(unit)
    row = sum(o.each * o.table.cols for o in operations if isinstance(o, LookUp))
    reads = load.tokens * row * 4 if unit.kind.is_looked_up else setting.reads(unit)
    fetch = write = 0
    if unit.kind.state and (law := unit.state(spec.config, setting.workload.state_shape)):
        fetch = law.fetched(load.sequences * load.past, load.sequences)
        write = law.written(load.tokens, load.sequences)
        reads += fetch
    acc, host, link = setting.correction(unit)
    cpu = host * (host_seconds * on_host + tables.elementwise("host", "step", 1, 1))
    return UnitCost(
        acc=acc * (acc_seconds * (on_host if setting.waits else 1) + (setting.step if setting.waits else 0.0)),
        cpu=cpu if setting.may_be_on_cpu(unit) else FORBIDDEN,
        nbytes=unit.packed_nbytes,
        link=copying * link * setting.copy(unit),
        cpu_reads=reads,
        kv_fetch=copying * link * tables.copy("h2d", fetch),
        kv_fetch_bytes=fetch,
        kv_write=copying * tables.copy("d2h", write),
        issue=0.0 if setting.waits else acc * setting.step,
        staged=copying * link * setting.copy(unit, memory="staged"),
        read=copying * link * setting.read(unit),
        begins=_share_begins(unit, operations, setting, (acc_seconds, host_seconds)),
    )


def _share_begins(
    unit: Unit, operations: tuple[Operation, ...], setting: Setting, seconds: tuple[float, float]
) -> tuple[float, float]:
    """See `UnitCost.begins`. seconds: of all operations on the accelerator and on the host."""
    if not unit.ports.between:
        return 0.0, 0.0
    before = halve(operations)[0]
    acc, host = (price_operations(before, setting.side(side, unit)) for side in ("acc", "host"))
    return acc / seconds[0], host / seconds[1]


@dataclass(frozen=True)
class DividedCost:
    """A divided unit in one tier. Seconds, bytes.

    `acc` and `cpu`: what either side has of it; `join`: the CPU's result to the accelerator; `rest`: what follows
    there. `link` (`staged` when not page-locked): the copy of what is streamed; `read`: the same read in place.
    `nbytes`: what is brought to the arena or to a slot; `kept`: what lies in the arena beside a slot. `issue`: host
    seconds for each of the accelerator's two launches. `spread`: the standard deviation of `read` less `cpu`, as tokens
    use now more of the one's parts, now of the other's.

    Of a unit that the CPU has nothing of there is one launch: `acc` is all of it.
    """

    acc: float
    cpu: float
    join: float
    rest: float
    link: float
    nbytes: int
    kept: int
    cpu_reads: int
    issue: float
    staged: float
    read: float
    spread: float = 0.0


AnyCost = TypeVar("AnyCost", UnitCost, DividedCost)


def stage_cost(cost: AnyCost) -> AnyCost:
    """The same of a unit in memory that is not page-locked."""
    return replace(cost, link=cost.staged, read=cost.read and UNREADABLE)


def divided_cost(unit: Unit, share: Share, setting: Setting) -> DividedCost:
    """Cost of a divided unit; see `unit_cost`. Its kind says what each side does."""
    spec, tables, tokens = setting.spec, setting.tables, setting.load.tokens
    on_host, copying = setting.shares
    parts = divide_unit(unit, share)
    slower, step = (on_host, setting.step) if setting.waits else (1, 0.0)
    acc, host, link = setting.correction(unit)
    cpu = join = rest = 0.0
    reads = 0
    work = divide_operations(unit, share, spec.config)
    if parts.on_cpu is None:
        on_acc = acc * (price_operations(work.on_acc, setting.side("acc", unit)) * slower + step)
    else:
        on_acc, rest = (
            acc * (price_operations(operations, setting.side("acc", unit, begins=begins)) * slower + step)
            for operations, begins in ((work.on_acc, True), (work.after, False))
        )
        more, less = setting.weigh_slots(unit, parts.on_cpu.first)
        on_acc *= more
        expected = setting.apart, setting.uses, parts.on_cpu.first, setting.hits(unit)
        reads = used_nbytes(parts.on_cpu.unit, spec.config, *expected)
        cpu = less * price_operations(work.on_cpu, setting.side("host", unit, begins=False))
        cpu = host * (cpu * on_host + tables.elementwise("host", "step", 1, 1))
        join = tables.handoff("acc", 4 * tokens * joined_width(unit, share, spec.config), 4 * spec.config.d_model)
    return DividedCost(
        acc=on_acc,
        cpu=cpu,
        join=join,
        rest=rest,
        link=copying * link * setting.copy(unit, share),
        nbytes=parts.brought.nbytes,
        kept=parts.kept.nbytes if parts.kept else 0,
        cpu_reads=reads,
        issue=0.0 if setting.waits else acc * setting.step,
        staged=copying * link * setting.copy(unit, share, "staged"),
        read=(read := copying * link * setting.read(unit, share)),
        spread=_spread(unit, parts, setting, (read, cpu)),
    )


def _spread(unit: Unit, parts: DividedUnit, setting: Setting, seconds: tuple[float, float]) -> float:
    """See `DividedCost.spread`. seconds: to read what is expected to be used of the streamed parts, and on the CPU."""
    if unit.kind.parts is None or parts.on_cpu is None or not seconds[0]:
        return 0.0
    (chosen, of), tokens, uses = unit.kind.parts(setting.spec.config), setting.apart, setting.uses
    hits = setting.hits(unit)
    weights, by_slots = [], 0.0
    for portion, all_of_it, sign in ((parts.brought, seconds[0], 1), (parts.on_cpu, seconds[1], -1)):
        places = portion.parts
        expected = used_experts(places, chosen, of, tokens, uses)
        weight = sign * all_of_it / expected if expected else 0.0
        weights.append((places, weight))
        if hits and expected:  # of those that are used some are found in slots, by chance
            left = used_experts(places, chosen, of, tokens, uses, hits) / expected
            by_slots += weight**2 * expected * (1 - left) / left if left else 0.0
    spread = used_spread(tuple(weights), chosen, of, tokens, uses)
    return (spread**2 + by_slots) ** 0.5 if by_slots else spread
