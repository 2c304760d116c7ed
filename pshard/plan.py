"""Plans: where every unit lives and computes, per token tier, with what was predicted and how sure the solver is."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pshard.batch_sizes import SMALL_BATCH
from pshard.homes import DIVIDED, HOST, SITES, VRAM, Home, Site
from pshard.reserve import TORCH_RESERVE_MIB
from pshard.speculation import Speculation
from pshard.times.stolen_time import DISTURBED
from pshard.units.moe.expert_cache import ExpertCache
from pshard.units.moe.popularity import Popularity
from pshard.units.share import Divisible
from pshard.workload import Split, Workload, format_limits

REGISTRY_VERSION = 2


@dataclass(frozen=True)
class Placement(Divisible):
    """Where one unit lives in one tier.

    `where`: the name of the site (pshard/homes.py): PINNED (weights in the VRAM arena, computed there), STREAMED (in
    host memory, copied to a staging slot before use, computed there), ON_CPU (weights and compute on the host) or
    ON_DISK (as STREAMED, read from disk first) or ON_DEMAND (experts on disk, computed by the CPU, which brings what
    is used and what an ExpertCache lacks). `kv`: the name of the home of the state, of units that keep one. The
    embedding, and what else is looked up, is ON_CPU (rows are looked up there), PINNED or ON_DEMAND (rows are read from
    disk).
    `cpu_rows`: of a divided unit (units/divide_unit.py), the rows of an FFN's gate and up that the CPU computes from
    host memory while the accelerator computes the others, or so many parts of a unit that has parts; `where` then says
    how the accelerator comes by its own. `kept_parts`: of a streamed unit, how many of its parts, or rows of an FFN's
    gate and up, lie in the VRAM arena all the same. 0 and 0: not divided.
    """

    unit: str
    where: str
    kv: str | None = None
    cpu_rows: int = 0
    kept_parts: int = 0

    @cached_property
    def site(self) -> Site:
        """Where the weights live, and who computes."""
        return SITES[self.where]

    @cached_property
    def weights_home(self) -> Home:
        """Where the weights live, or of a divided unit what is neither in the arena beside a slot nor the CPU's."""
        return self.site.home

    @cached_property
    def is_on_acc(self) -> bool:
        """Whether the accelerator computes the unit, whole or its part."""
        return self.site.is_on_acc

    @cached_property
    def moves_each_step(self) -> bool:
        """Whether weights come to the accelerator for every micro-batch."""
        return self.site.moves_each_step

    @cached_property
    def sort(self) -> str:
        """`where`, or "divided"."""
        return DIVIDED if self.share else self.where

    @cached_property
    def in_arena(self) -> bool:
        """Whether the weights lie in the VRAM arena, all that the accelerator has or some."""
        return self.site.in_arena or self.kept_parts > 0

    @cached_property
    def is_whole_in_arena(self) -> bool:
        """Whether the arena has all of the unit."""
        return self.site.in_arena and not self.share

    @cached_property
    def has_state_in_vram(self) -> bool:
        """Whether the unit keeps a state, in VRAM."""
        return self.kv == VRAM.name

    @cached_property
    def has_state_on_host(self) -> bool:
        """Whether the unit keeps a state, in host memory."""
        return self.kv == HOST.name

    @cached_property
    def stages_state(self) -> bool:
        """Whether the state passes through the stage: the accelerator computes, and it lives elsewhere."""
        return self.is_on_acc and self.has_state_on_host


@dataclass(frozen=True)
class Prediction:
    """Predicted time of one micro-batch, at `past` cached tokens per sequence, and what it is made of.

    seconds: from simulating the steps. bound_seconds: no plan of this tier can be faster under the same costs.
    busy: seconds that each resource works ("acc", "cpu", "link", "dram"). binds: the resource that limits the time
    ("vram" when more memory would help first). measured_seconds: of the same micro-batch when it was really run; None
    when it was not. disturbed: share of that time that other programs and machines may have cost (stolen_time.py).
    profile_seconds: what the profile's own times predict, where `seconds` is by times that were fitted to trials.
    """

    seconds: float
    bound_seconds: float
    busy: tuple[tuple[str, float], ...]
    binds: str
    link_bytes: int
    past: int
    measured_seconds: float | None = None
    disturbed: float = 0.0
    profile_seconds: float | None = None

    @property
    def quiet_seconds(self) -> float | None:
        """What was measured, unless too much else ran: what times may be fitted to."""
        return self.measured_seconds if self.disturbed < DISTURBED else None


@dataclass(frozen=True)
class Solve:
    """What the solver said of a tier. `program_gap`: how far it stopped, relatively, from what it had proven of its own
    program. That has so many slots and prices fetches in one way, so it says nothing of all plans: `bound_seconds` of
    the prediction does."""

    status: str
    program_gap: float
    seconds: float
    solver: str
    strategy: str = "ilp"


@dataclass(frozen=True)
class Buffers:
    """Bytes of the arena in one tier: [experts that follow use | pinned | scratch and slots | KV from the right]."""

    pinned: int
    scratch: int  # with the states that stand in every tier
    slots: int  # how many staging slots
    slot_bytes: int  # bytes of each
    kv: int
    cached: int = 0  # pools of experts that follow use: the same in every tier

    @property
    def total(self) -> int:
        return self.cached + self.pinned + self.scratch + self.slots * self.slot_bytes + self.kv


@dataclass(frozen=True)
class Sweep:
    """Micro-batches of a prompt that go through the model together, so that each unit on disk is read once for all of
    them (pshard/steps/sweep.py).

    `batches`: at most so many; the rows of all wait in the arena. `seconds`: predicted for each of the expected
    prompt's, in the mean.
    """

    batches: int
    seconds: float = 0.0


@dataclass(frozen=True)
class TierPlan:
    """The plan for micro-batches of up to `tokens` tokens. Placements are in unit order. `in_place`: kernels read what
    is streamed of units with parts over the link, so that it needs no slot. `waves`: in how many of them what is
    streamed of other such units comes, each to a slot of its own. `sweep`: of the largest tier, if any."""

    tokens: int
    placements: tuple[Placement, ...]
    buffers: Buffers
    prediction: Prediction
    solve: Solve
    in_place: bool = False
    sweep: Sweep | None = None
    waves: int = 1

    @property
    def most_swept(self) -> int:
        """How many micro-batches one sweep can have."""
        return self.sweep.batches if self.sweep else 1

    def placement(self, unit: str) -> Placement:
        """Placement of the unit of that name. Raises KeyError."""
        return self._by_unit[unit]

    @cached_property
    def _by_unit(self) -> dict[str, Placement]:
        return {p.unit: p for p in self.placements}


@dataclass(frozen=True)
class RankPlan:
    """The plan of one rank (device) over its own slice of the model. `share` of 1.0 is the whole model. `caches`: slots
    for experts that follow use, in tiers of few tokens. `reserve_mib`: of a GPU's budget, what is left to torch and the
    kernels."""

    rank: int
    budget_mib: int
    share: float
    pin_order: tuple[str, ...]  # units in the arena, also in part, of every tier are a prefix of this: no pin moves
    kv_order: tuple[str, ...]  # attention units with KV in VRAM in every tier are a prefix of this
    tiers: tuple[TierPlan, ...]
    caches: tuple[ExpertCache, ...] = ()
    reserve_mib: int = TORCH_RESERVE_MIB

    def covering(self, tokens: int) -> TierPlan:
        """The smallest tier that covers `tokens`; raises ValueError when none does."""
        for tier in self.tiers:
            if tier.tokens >= tokens:
                return tier
        raise ValueError(f"no tier covers {tokens} tokens; the largest is {self.tiers[-1].tokens}")

    @property
    def staying(self) -> tuple[str, ...]:
        """Units that are in VRAM under every tier, whole or in part."""
        return self.pin_order[: min(sum(p.in_arena for p in tier.placements) for tier in self.tiers)]

    @property
    def resident(self) -> tuple[str, ...]:
        """Units that are in VRAM whole under every tier: these need no copy in host memory."""
        divided = {p.unit for tier in self.tiers for p in tier.placements if p.share}
        return tuple(unit for unit in self.staying if unit not in divided)

    def home_of(self, unit: str) -> Home:
        """Where what some tier lacks in VRAM of a unit lives; host memory where none does."""
        places = (tier.placement(unit) for tier in self.tiers)
        return next((place.weights_home for place in places if not place.site.in_arena), HOST)

    @property
    def beyond_host(self) -> dict[str, Home]:
        """Units that live beyond host memory where they are not in VRAM, with their homes."""
        places = (place for tier in self.tiers for place in tier.placements)
        return {place.unit: place.weights_home for place in places if place.site.is_beyond_host}

    @property
    def lock_order(self) -> tuple[str, ...]:
        """Units that are kept in host memory, whole or in part, in the order in which they are page-locked: what the
        smallest tiers stream first, for large ones hide copies; then what is copied when a tier is entered, then what
        never is."""
        elsewhere, last = {*self.resident, *self.beyond_host}, len(self.tiers)
        ranks = {p.unit: last + 1 for p in self.tiers[0].placements if p.unit not in elsewhere}
        for i, tier in reversed([*enumerate(self.tiers)]):
            for place in tier.placements:
                if place.unit in ranks and place.is_on_acc:
                    copied = i if place.moves_each_step else last
                    ranks[place.unit] = min(ranks[place.unit], copied)
        return tuple(sorted(ranks, key=lambda unit: ranks[unit]))

    @property
    def kv_on_host(self) -> tuple[str, ...]:
        """Attention units whose KV cache is in host memory under some tier, in order."""
        found = {p.unit for tier in self.tiers for p in tier.placements if p.has_state_on_host}
        return tuple(p.unit for p in self.tiers[0].placements if p.unit in found)


@dataclass(frozen=True)
class Factor:
    """Measured time over what the profile's tables say of one thing.

    `device`: "acc", "host" or "link". `kind`: the kind of unit; "" for the link. `batch`: "small" (kernels read packed
    weights in place) or "large".
    """

    device: str
    kind: str
    batch: str
    value: float


@dataclass(frozen=True)
class Correction:
    """What running a plan taught about the profile's tables; empty when they were right or nothing was run."""

    factors: tuple[Factor, ...] = ()

    def of(self, device: str, kind: str, tokens: int) -> float:
        """The factor on seconds in micro-batches of `tokens` tokens; 1 where nothing is known."""
        batch = batch_of(tokens)
        return next((f.value for f in self.factors if (f.device, f.kind, f.batch) == (device, kind, batch)), 1.0)


NOTHING_LEARNT = Correction()


def batch_of(tokens: int) -> str:
    """Micro-batches fall into two sorts with kernels of their own: "small" and "large"."""
    return "small" if tokens <= SMALL_BATCH else "large"


@dataclass(frozen=True)
class Considered:
    """A way to use the devices, one of several that were planned before one was chosen.

    `way`: as flags ("-sm tensor -ts 0.5,0.5"). `seconds`: predicted, of a round of the workload; None when it does not
    fit the budgets. `first_token`: of them, seconds until the prompts are prefilled. `why`: what limits it.
    """

    way: str
    seconds: float | None
    first_token: float | None = None
    why: str = ""


def name_way(workload: Workload, shares: Sequence[float]) -> str:
    """How a model is spread over ranks of these shares, as the flags that ask for it; of one device, which."""
    where = " -ts " + ",".join(f"{share:.4g}" for share in shares) if len(shares) > 1 else f", device {workload.device}"
    limits = f" --max-tp {format_limits(workload.max_tp)}" if workload.max_tp else ""
    return f"-sm {workload.split_mode}{where}{limits}"


@dataclass(frozen=True)
class Variant:
    """All tiers for one workload and set of budgets.

    `workload`: what it was planned for, with the largest micro-batch that it has and the share of each rank, which is
    empty with one rank.
    """

    workload: Workload
    plan_needed: bool  # False: everything fits, no device is slower than the CPU, every tier keeps everything in VRAM
    ranks: tuple[RankPlan, ...]
    correction: Correction = NOTHING_LEARNT  # applied to the predictions
    considered: tuple[Considered, ...] = ()  # what it was chosen from, itself first; empty when nothing was to choose
    popularity: Popularity | None = None  # of experts: the first of a layer are the first of its order; None: no record
    speculation: Speculation | None = None  # what drafts were planned for; None: none were asked for
    # of a second program, which drafts, in a part of its rank's budget that the model lacks
    drafter: RankPlan | None = None
    drafter_parts: tuple[RankPlan, ...] = ()  # of the other ranks, where it is cut over all

    @property
    def terms(self) -> str:
        """What it was planned for beside budgets and split, in words: plans that differ there have other terms."""
        return self.workload.terms

    def drafter_on(self, rank: int) -> RankPlan | None:
        """The plan of what a rank has of the program that drafts; None: it has nothing."""
        return next((plan for plan in self.drafters if plan.rank == rank), None)

    @property
    def drafters(self) -> tuple[RankPlan, ...]:
        """Plans of the program that drafts, of each rank that has some of it."""
        return (self.drafter, *self.drafter_parts) if self.drafter else ()

    @property
    def validated(self) -> bool:
        """Whether it was run before it was written."""
        return any(t.prediction.measured_seconds is not None for rank in self.ranks for t in rank.tiers)

    @property
    def disturbed(self) -> bool:
        """Whether others may have cost a measured time so much that it says only how slow the plan is at most."""
        return any(t.prediction.disturbed >= DISTURBED for rank in self.ranks for t in rank.tiers)

    @property
    def but_for(self) -> str:
        """In words, what is not in VRAM under every tier of a plan that was not needed; empty where all is."""
        away = dict.fromkeys(
            place.unit for rank in self.ranks for place in rank.tiers[0].placements if place.unit not in rank.resident
        )
        return f" but {', '.join(away)} (the CPU looks its rows up)" if away else ""

    @property
    def way(self) -> str:
        """How the model is spread, as the flags that ask for it; of one device, which."""
        return name_way(self.workload, [rank.share for rank in self.ranks])

    @property
    def split(self) -> Split:
        """How the ranks hold the model."""
        w = self.workload
        return Split(w.split_mode, w.tensor_split or (1.0,), w.max_tp)


@dataclass(frozen=True)
class Trial:
    """A plan that was run. `variant` has what was predicted before beside what was measured; `refitted` predicts by
    the times that were then fitted to all trials (the same when they needed no fit). `seconds`: of one round of the
    workload, as measured, and `spread`, by how much the samples say that it may be less or more."""

    name: str
    variant: Variant
    refitted: Variant
    seconds: float
    spread: float = 0.0


class NewerFormat(ValueError):
    """A registry is in a format version that this program does not know."""


class OlderFormat(ValueError):
    """A registry is in a format version that this program does not read any more: its plans are stale.

    Attributes:
        plans: how many it has.
    """

    def __init__(self, message: str, plans: int) -> None:
        super().__init__(message)
        self.plans = plans


def to_newest_format(data: Any) -> Any:
    """The JSON data of a registry in this program's format version.

    Raises NewerFormat or OlderFormat for a version that is not read; what is no registry comes back as it is.
    """
    version = data.get("version") if isinstance(data, dict) else None
    if type(version) is not int:
        return data
    if version > REGISTRY_VERSION:
        raise NewerFormat(f"format version {version}, this program reads up to {REGISTRY_VERSION}")
    if 1 <= version < REGISTRY_VERSION:
        plans = data.get("variants")
        message = f"the older format version {version}, this program reads {REGISTRY_VERSION}"
        raise OlderFormat(message, len(plans) if isinstance(plans, list) else 0)
    return data


@dataclass(frozen=True)
class PlanSet:
    """Plans that were made from the same inputs: of one model, machine and profile. `fingerprint` digests `inputs`,
    which are spelled out so that a change can be named. `created`: when one was last written."""

    fingerprint: str
    inputs: tuple[tuple[str, str], ...]
    model: str
    created: str
    variants: tuple[Variant, ...]


@dataclass(frozen=True)
class Registry:
    """A plan registry file: sets of plans side by side, each with a fingerprint of its own, the last written first."""

    sets: tuple[PlanSet, ...]
    version: int = REGISTRY_VERSION

    @property
    def variants(self) -> tuple[Variant, ...]:
        """Those of all sets."""
        return tuple(variant for plans in self.sets for variant in plans.variants)
