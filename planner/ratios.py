"""`-ts auto`: the ratios by which ranks share a model, chosen by what the planner predicts for them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pshard.errors import BudgetTooSmall
from pshard.machine import MachineProfile
from pshard.model import ModelSpec
from pshard.pace import prefill_seconds, round_seconds
from pshard.pipeline import join_seconds
from pshard.plan import Considered, Variant
from pshard.planner.costs import Tables
from pshard.planner.load import tier_loads
from pshard.planner.plan import (
    cut_ranks,
    fitting_tiers,
    join_ranks,
    place_ranks,
    prepare_ranks,
    price_roughly,
    refine_ranks,
)
from pshard.workload import Workload

MOVES = (1 / 8, 1 / 16, 1 / 32)  # how much of the model goes from one rank to another at a time

Shares = tuple[float, ...]


@dataclass(frozen=True)
class Estimate:
    """What a round of the workload takes at least under these shares: in all, and each rank for itself. Seconds."""

    shares: Shares
    total: float
    by_rank: tuple[float, ...]


def plan_ratios(spec: ModelSpec, profile: MachineProfile, workload: Workload, time_limit: float = 10.0) -> Variant:
    """The variant with the shortest predicted round among ratios that were planned in full; `considered` lists them.

    Equal shares are always among them where they fit; the others are the ends of climbs from several starts (equal, by
    budget, one device left out), on which ratios are judged by rough bounds. A share may end at 0. Raises
    BudgetTooSmall when no ratio fits, UserError as `plan_variant` does. Only the chosen one is refined unit by unit.
    """
    starts = tuple(dict.fromkeys(_starts(workload)))
    climb = _Climb(spec, profile, workload, starts)
    known = sorted((e for s in starts if (e := climb.estimate(s))), key=lambda e: e.total)
    tops = [climb.improve(e).shares for e in dict.fromkeys((*known[:1], *(e for e in known if e.shares == starts[0])))]
    made, refused = [], None
    for shares in (wanted := dict.fromkeys((starts[0], *tops))):
        try:
            tasks = prepare_ranks(spec, profile, replace(workload, tensor_split=shares))
        except BudgetTooSmall as error:
            refused = error
            continue
        placed = place_ranks(tasks, time_limit / len(wanted))
        made.append((join_ranks(tasks, placed), tasks, placed))
    if refused and not made:
        raise refused
    (_, tasks, placed), *others = sorted(made, key=lambda plan: round_seconds(plan[0]))
    best = join_ranks(tasks, refine_ranks(tasks, placed))
    return replace(best, considered=tuple(describe_way(v) for v in (best, *(variant for variant, *_ in others))))


def describe_way(variant: Variant) -> Considered:
    """A variant as one of those that were considered."""
    shares = ",".join(f"{share:.4g}" for share in variant.tensor_split)
    return Considered(f"-sm {variant.split_mode} -ts {shares}", round_seconds(variant))


def _starts(workload: Workload) -> Iterator[Shares]:
    n = len(workload.vram_mib)
    yield (1 / n,) * n
    yield tuple(mib / sum(workload.vram_mib) for mib in workload.vram_mib)
    for out in range(n):
        yield tuple(0.0 if i == out else 1 / (n - 1) for i in range(n))


class _Climb:
    """Estimates of shares, and the way up from one."""

    def __init__(self, spec: ModelSpec, profile: MachineProfile, workload: Workload, starts: tuple[Shares, ...]):
        self._spec, self._tables, self._workload = spec, Tables(profile), workload
        self._seen: dict[Shares, Estimate | None] = {}
        self._tiers: tuple[int, ...] = ()
        for shares in starts:  # the first that fits says which micro-batches are compared
            if fitting := self._fitting(shares):
                self._workload = replace(workload, max_ubatch=fitting[-1])
                self._tiers = tuple(load.tokens for load in tier_loads(self._workload, fitting) if load.weight)
                return

    def _fitting(self, shares: Shares) -> tuple[int, ...]:
        try:
            workload = replace(self._workload, tensor_split=shares)
            return fitting_tiers(cut_ranks(self._spec, shares, workload.split_mode), workload, self._tables)
        except BudgetTooSmall:
            return ()

    def estimate(self, shares: Shares) -> Estimate | None:
        """None when the tiers that the round enters do not fit."""
        if shares not in self._seen:
            self._seen[shares] = self._estimate(shares)
        return self._seen[shares]

    def _estimate(self, shares: Shares) -> Estimate | None:
        if not self._tiers or not set(self._tiers) <= set(self._fitting(shares)):
            return None
        workload = replace(self._workload, tensor_split=shares)
        tasks = price_roughly(self._spec, self._tables, workload, self._tiers)
        weights = [load.weight for load in tier_loads(workload, self._tiers)]
        by_rank = tuple(sum(w * s for w, s in zip(weights, task.bounds)) for task in tasks)
        seconds = dict(zip(self._tiers, zip(*(task.bounds for task in tasks))))
        prefill = prefill_seconds(workload.split_mode, seconds, workload.prompt * workload.sequences, self._tiers[-1])
        decode = join_seconds(workload.split_mode, [seconds[min(t for t in seconds if t >= workload.sequences)]])
        return Estimate(shares, prefill + workload.generated * decode, by_rank)

    def improve(self, best: Estimate) -> Estimate:
        """Move share from the slowest rank to a faster one as long as that helps, ever smaller parts of it."""
        for part in MOVES:
            while better := self._step(best, part):
                best = better
        return best

    def _step(self, at: Estimate, part: float) -> Estimate | None:
        slowest, *_ = order = sorted(range(len(at.shares)), key=lambda r: -at.by_rank[r])
        moved = min(part, at.shares[slowest])
        for faster in reversed(order[1:]):
            change = {slowest: -moved, faster: moved}
            found = self.estimate(tuple(round(s + change.get(r, 0.0), 9) for r, s in enumerate(at.shares)))
            if found and found.total < at.total * (1 - 1e-6):
                return found
        return None
