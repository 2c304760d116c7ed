"""What slots for experts that follow use may be expected to find: by replay of a record, or none worth the name."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pshard.model import ModelSpec
from pshard.plan import Variant
from pshard.predicted_times import tier_seconds
from pshard.routing.expert_uses import used_experts
from pshard.routing.followed import least_slots, make_follower, numbers_of
from pshard.routing.play_record import keep_last
from pshard.routing.record import RoutingRecord
from pshard.routing.replay_slots import replay_tokens
from pshard.units.divide_unit import count_shares
from pshard.units.moe.expert_cache import (
    DEMAND,
    FOLLOW_TOKENS,
    MOST_FOLLOW_TOKENS,
    ExpertCache,
    pack_hits,
    slot_nbytes,
)
from pshard.units.unit import Unit
from pshard.workload import Workload


@dataclass(frozen=True)
class Pool:
    """Like layers with experts, which share slots. used: experts that a token takes of a layer. record: of what they
    were used for, of texts of which `together` are decoded in a step that uses the slots, each with so many `rows`;
    None: all are used alike. tokens: of the largest tier that uses the slots."""

    units: tuple[Unit, ...]
    used: int
    record: RoutingRecord | None
    together: int
    rows: int = 1
    tokens: int = FOLLOW_TOKENS

    @property
    def width(self) -> int:
        """Tokens of such a step."""
        return self.together * self.rows

    @property
    def experts(self) -> int:
        """How many there are in all its layers."""
        return sum(map(count_shares, self.units))

    @property
    def slot_nbytes(self) -> int:
        return slot_nbytes(self.units[0])

    @property
    def nbytes(self) -> int:
        """Of all its experts."""
        return self.experts * self.slot_nbytes

    def make_cache(self, slots: int, policy: str, admits: int) -> ExpertCache:
        """Slots of which nothing is promised yet."""
        names = tuple(unit.name for unit in self.units)
        return ExpertCache(names, slots, self.slot_nbytes, policy, admits, tokens=self.tokens, width=self.width)

    def promise(self, cache: ExpertCache, eligible: np.ndarray) -> ExpertCache:
        """The cache with what is expected of it: what a replay finds in slots that begin empty. Where all are used
        alike, slots find as many choices as experts that stay there would: steps of several tokens, which bring what
        they miss, find what `ExpertCache.find_alike` says. eligible: bool [layers, experts], those outside VRAM."""
        if self.record is None:
            hits, shares = min(1.0, cache.slots / max(1, eligible.sum())), eligible.mean()
            if cache.is_on_demand and self.width > 1:
                hits = cache.find_alike(self.used, eligible.shape[1], self.width)
            each = used_experts(range(eligible.shape[1]), self.used, eligible.shape[1], self.width, ()) / self.width
            missed = float(shares * (1 - hits)) * each * len(self.units)
            packed = pack_hits([hits] * eligible.shape[1])
            admitted = missed if cache.is_on_demand else min(float(cache.admits), missed)
            return replace(cache, hits=packed, found=float(shares * hits), admitted=admitted)
        layers = tuple(unit.layer for unit in self.units)
        replay = replay_tokens(self.record, layers, make_follower(cache, eligible), self.together, self.rows)
        packed = pack_hits(replay.by_place([numbers_of(unit) for unit in self.units]))
        return replace(cache, hits=packed, found=replay.share, admitted=replay.admitted)

    def count_alone(self, cache: ExpertCache, eligible: np.ndarray) -> ExpertCache:
        """The promised cache with what a replay of one token a micro-batch brings in after each, where the plan is for
        wider ones: also a step of one token may bring in as many as the pool admits."""
        if self.record is None or not cache.admits or self.together * self.rows == 1:
            return cache
        layers = tuple(unit.layer for unit in self.units)
        return replace(cache, alone=replay_tokens(self.record, layers, make_follower(cache, eligible)).admitted)


def list_pools(spec: ModelSpec, record: RoutingRecord | None, workload: Workload, width: int = 0) -> tuple[Pool, ...]:
    """Layers with experts of one shape and type share a pool. width: of a larger tier that uses it too."""
    alike: dict[tuple, list[Unit]] = defaultdict(list)
    for unit in spec.units:
        if unit.kind.parts and unit.tensors:
            alike[unit.likeness].append(unit)
    used = spec.config.experts.used if spec.config.experts else 0
    own = None if record is None else keep_last(record)
    rows, tokens = workload.drafting.rows, max(width, _follow_tokens(workload))
    together = min(workload.sequences, max(1, tokens // rows))  # wider steps leave the slots as they are
    return tuple(Pool(tuple(units), used, own, together, rows, tokens) for units in alike.values())


def _follow_tokens(workload: Workload) -> int:
    """Of the largest tier that uses slots in any case."""
    return max(FOLLOW_TOKENS, min(workload.sequences * workload.drafting.rows, MOST_FOLLOW_TOKENS))


def list_widths(workload: Workload) -> tuple[int, ...]:
    """Tokens of larger tiers that may use slots on demand too, the largest first: of a few tokens' experts these have
    some, and the others are less to read than whole layers."""
    return tuple(n for n in reversed(workload.tiers()) if _follow_tokens(workload) < n <= MOST_FOLLOW_TOKENS)


def gains_by_width(narrow: Variant, wide: Variant) -> bool:
    """Whether tiers up to the largest that uses the slots of `wide` take less time there than in `narrow`, where short
    prompts read whole layers. They may not: whole layers are read ahead, while others are computed."""
    most = max(cache.tokens for cache in wide.ranks[0].caches)
    of_wide, of_narrow = (sum(s for n, s in tier_seconds(v).items() if n <= most) for v in (wide, narrow))
    return of_wide < of_narrow


def share_out(spec: ModelSpec, pools: Sequence[Pool], nbytes: int, on_host: bool = False) -> Iterator[ExpertCache]:
    """So many bytes as slots for experts on disk, each pool by its share of all experts; none of a pool with too
    few."""
    total = sum(pool.nbytes for pool in pools)
    for pool in pools:
        slots = min(pool.experts, int(nbytes * pool.nbytes / total / pool.slot_nbytes))
        cache = replace(pool.make_cache(slots, DEMAND, 0), on_host=on_host)
        if slots >= least_slots(spec, cache):
            yield pool.promise(cache, np.ones((len(pool.units), count_shares(pool.units[0])), bool))


def fill_pools(
    pools: tuple[Pool, ...], nbytes: float, pinned: int, policies: Iterable[str], admits: int
) -> tuple[ExpertCache, ...]:
    """So many bytes as slots, each pool by its share of all experts, under the policy that is expected to find most
    beside so many `pinned` experts of each layer. Pools too small for a slot have none."""
    total, caches = sum(pool.nbytes for pool in pools), []
    for pool in pools:
        slots = min(pool.experts, int(nbytes * pool.nbytes / total / pool.slot_nbytes))
        if slots:
            eligible = np.zeros((len(pool.units), count_shares(pool.units[0])), bool)
            for row, unit in enumerate(pool.units):
                eligible[row, list(numbers_of(unit)[pinned:])] = True
            tried = [pool.promise(pool.make_cache(slots, policy, admits), eligible) for policy in policies]
            caches.append(pool.count_alone(max(tried, key=lambda cache: cache.found), eligible))
    return tuple(caches)
