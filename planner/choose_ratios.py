"""`-ts auto`: the ratios by which ranks share a model, and which ranks share which kinds of units, chosen by what the
planner predicts for them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pshard.cuts.rank_parts import cut_ranks
from pshard.errors import NoPlan, Shortage
from pshard.machine import MachineProfile
from pshard.model import ModelSpec
from pshard.plan import Considered, Variant
from pshard.planner.make_plan import RoughPlan, plan_roughly
from pshard.planner.prepare_ranks import Part, bound_roughly, fitting_tiers, take_parts
from pshard.planner.price.profile_tables import find_tables
from pshard.planner.price.tier_loads import tier_loads
from pshard.planner.remedies.advise import plan_or_advise
from pshard.predicted_times import first_token_seconds, round_seconds, sum_round
from pshard.units.kinds import kinds_by_flag
from pshard.workload import Split, Workload

LIMITED = 2  # cuts of limited kinds that are planned: bounds know nothing of ranks that wait for each other in turns
MOVES = (1 / 8, 1 / 16, 1 / 32)  # how much of the model goes from one rank to another at a time


@dataclass(frozen=True)
class Estimate:
    """What a round of the workload takes at least under this split: in all, and each rank for itself. Seconds. largest:
    tokens of its micro-batches."""

    split: Split
    total: float
    by_rank: tuple[float, ...]
    largest: int


def plan_ratios(spec: ModelSpec, profile: MachineProfile, workload: Workload, time_limit: float = 10.0) -> Variant:
    """The variant with the shortest predicted round among cuts that were planned in full; `considered` lists them.

    Only the chosen one is refined unit by unit. Raises as `plan_variant` does.
    """

    def choose(spec: ModelSpec, workload: Workload) -> tuple[RoughPlan, tuple[Considered, ...]]:
        return choose_ratios(spec, profile, workload, time_limit)

    def try_equal(spec: ModelSpec, workload: Workload) -> RoughPlan:
        return plan_roughly(spec, profile, replace(workload, tensor_split=()), time_limit)

    rough, others = plan_or_advise(choose, try_equal, spec, profile, workload)
    best = rough.refine()
    return replace(best, considered=(describe_way(best), *others))


def choose_ratios(
    spec: ModelSpec, profile: MachineProfile, workload: Workload, time_limit: float = 10.0
) -> tuple[RoughPlan, tuple[Considered, ...]]:
    """The cut with the shortest predicted round, planned but not refined, and the others.

    Equal shares are always among them where they fit, and so is the best of several starts (equal, by budget, one
    device left out); the others are the ends of climbs from there, on which cuts are judged by rough bounds, each with
    its own best micro-batch. A share may end at 0. Kinds of units are
    limited to fewer ranks where that helps; to those of `workload.max_tp` when it names any. Raises Shortage when no
    split fits, UserError as `plan_variant` does.
    """
    starts = tuple(Split(workload.split_mode, shares, workload.max_tp) for shares in dict.fromkeys(_starts(workload)))
    climb = _Climb(spec, profile, workload)
    known = sorted((e for s in starts if (e := climb.estimate(s))), key=lambda e: e.total)
    promising = tuple(dict.fromkeys((*known[:1], *(e for e in known if e.split == starts[0]))))
    tops = [climb.improve(e) for e in promising]
    if workload.split_mode == "tensor" and not workload.max_tp:
        # also from where shares were not moved yet: they may have left a device out
        limited = {e.split: e for e in map(climb.limit, (*promising, *tops)) if e.split.limits}
        tops += sorted(limited.values(), key=lambda e: e.total)[:LIMITED]
    made: list[RoughPlan] = []
    refused: NoPlan | None = None
    first = (starts[0], *(e.split for e in known[:1]))
    for split in (wanted := dict.fromkeys((*first, *(top.split for top in tops)))):
        try:
            made.append(plan_roughly(spec, profile, workload.under(split), time_limit / len(wanted)))
        except NoPlan as error:
            refused = refused or error
    if refused and not made:
        raise refused
    best, *others = sorted(made, key=lambda plan: plan.round_seconds)
    return best, tuple(plan.describe() for plan in others)


def describe_way(variant: Variant) -> Considered:
    """A variant as one of those that were considered."""
    return Considered(variant.way, round_seconds(variant), first_token_seconds(variant))


def _starts(workload: Workload) -> Iterator[tuple[float, ...]]:
    n = len(workload.vram_mib)
    yield (1 / n,) * n
    if total := sum(workload.vram_mib):
        yield tuple(mib / total for mib in workload.vram_mib)
    for out in range(n):
        yield tuple(0.0 if i == out else 1 / (n - 1) for i in range(n))


class _Climb:
    """Estimates of cuts, and the way up from one."""

    def __init__(self, spec: ModelSpec, profile: MachineProfile, workload: Workload):
        self._spec, self._tables, self._workload = spec, find_tables(profile), workload
        self._seen: dict[Split, Estimate | None] = {}
        self._at_least: dict[Split, float] = {}  # seconds of cuts that were put aside before all ranks were bounded
        self._bounds: dict[tuple, tuple[float, ...]] = {}  # of ranks, most of which are the same in like cuts

    def _fitting(self, split: Split) -> tuple[int, ...]:
        try:
            return fitting_tiers(cut_ranks(self._spec, split), self._workload, self._tables)
        except Shortage:
            return ()

    def estimate(self, split: Split) -> Estimate | None:
        """With its own best micro-batch; None where decoding does not fit."""
        if split not in self._seen:
            self._seen[split] = self._estimate(split)
        return self._seen[split]

    def _estimate(self, split: Split) -> Estimate | None:
        """Micro-batches from the largest that fits down, as long as smaller ones take less time."""
        tiers, best = self._fitting(split), None
        for i, largest in reversed([*enumerate(tiers)]):
            if largest < self._workload.answer_rows:
                break
            found = self._estimate_under(split, tiers[: i + 1], best)
            if not found:
                break
            best = found
        return best

    def _estimate_under(self, split: Split, tiers: tuple[int, ...], than: Estimate | None = None) -> Estimate | None:
        """With micro-batches of the last of these tiers; None where that takes no less time than another estimate.

        One rank may tell: those come first that have more than there, then those that have most.
        """
        workload = replace(self._workload.under(split), max_ubatch=tiers[-1])
        loads = [load for load in tier_loads(workload, tiers) if load.weight]
        entered = tuple(load.tokens for load in loads)
        parts = [*take_parts(self._spec, self._tables, workload, entered)]
        by_rank = [(0.0,) * len(entered)] * len(parts)
        before = than.split.shares if than else (0.0,) * len(parts)
        for part in sorted(parts, key=lambda part: (before[part.rank] - part.share, -part.share)):
            by_rank[part.rank] = self._bound(part, entered, workload)
            total = sum_round(workload, dict(zip(entered, zip(*by_rank))))
            if than and total >= than.total * (1 - 1e-6):
                self._at_least[split] = total
                return None
        alone = tuple(sum(load.weight * s for load, s in zip(loads, seconds)) for seconds in by_rank)
        return Estimate(split, total, alone, tiers[-1])

    def _bound(self, part: Part, tiers: tuple[int, ...], workload: Workload) -> tuple[float, ...]:
        """Seconds of each of these tiers that no plan of a rank can beat."""
        key = tiers, part.priced_by
        if key not in self._bounds:
            self._bounds[key] = bound_roughly(part.price(tier_loads(workload, tiers)))
        return self._bounds[key]

    def improve(self, best: Estimate) -> Estimate:
        """Move share from the slowest rank to a faster one as long as that helps, ever smaller parts of it."""
        for part in MOVES:
            while better := self._move(best, part):
                best = better
        return best

    def _move(self, at: Estimate, part: float) -> Estimate | None:
        shares = at.split.shares
        slowest, *_ = order = sorted(range(len(shares)), key=lambda r: -at.by_rank[r])
        moved = min(part, shares[slowest])
        for faster in reversed(order[1:]):
            change = {slowest: -moved, faster: moved}
            moved_shares = tuple(round(s + change.get(r, 0.0), 9) for r, s in enumerate(shares))
            if found := self._better(replace(at.split, shares=moved_shares), at):
                return found
        return None

    def limit(self, best: Estimate) -> Estimate:
        """Cut each kind of unit over 1, 2, 4... ranks where that helps, and move shares again."""
        there = {unit.kind for unit in self._spec.units}
        for kind in (kind.name for kind in kinds_by_flag().values() if kind in there):
            most = 1
            while most < sum(share > 0 for share in best.split.shares):
                others = [limit for limit in best.split.limits if limit[0] != kind]
                split = replace(best.split, limits=tuple(sorted((*others, (kind, most)))))
                best = self._better(split, best) or best
                most *= 2
        return self.improve(best) if best.split.limits else best

    def _better(self, split: Split, than: Estimate) -> Estimate | None:
        """A cut like that one is judged by the same micro-batches, where these fit."""
        if self._at_least.get(split, 0.0) >= than.total * (1 - 1e-6):
            return None
        if split not in self._seen:
            tiers = tuple(t for t in self._fitting(split) if t <= than.largest)
            if not tiers or tiers[-1] < than.largest:
                self._seen[split] = self._estimate(split)
            elif found := self._estimate_under(split, tiers, than):
                self._seen[split] = found
        found = self._seen.get(split)
        return found if found and found.total < than.total * (1 - 1e-6) else None
