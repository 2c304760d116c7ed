"""What running plans teaches: factors on the profile's times, fitted so that simulations give what was measured."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pshard.machine import MachineProfile
from pshard.plan import Correction, Factor, RankPlan, TierPlan, Variant, batch_of
from pshard.planner.price.draft import Room, simulated_seconds
from pshard.planner.price.page_locks import stage_by
from pshard.planner.price.profile_tables import Tables
from pshard.planner.price.tier_costs import tier_costs
from pshard.planner.price.tier_loads import TierLoad

OFF = 0.08  # a prediction further than this from what was measured is off
PRIOR = 0.1  # weight of "the profile is right" against "the measurement is right"
NUDGE = 0.05  # step of the numeric derivatives
ITERATIONS = 4  # another lane may bind after a step
LEAST, MOST = 0.1, 10.0  # a factor beyond says that something else is wrong


@dataclass(frozen=True)
class Sample:
    """One tier's micro-batch as it was run: what, under which plan, and how many seconds it took."""

    plan: RankPlan
    tier: TierPlan
    load: TierLoad
    seconds: float


def measured_tiers(variant: Variant, loads: Sequence[TierLoad]) -> list[Sample]:
    """The tiers of a variant of one device that were measured while not much else ran."""
    (plan,) = variant.ranks
    return [
        Sample(plan, tier, load, tier.prediction.quiet_seconds)
        for tier, load in zip(plan.tiers, loads, strict=True)
        if tier.prediction.quiet_seconds is not None
    ]


def is_off(variant: Variant) -> bool:
    """Whether any tier of any rank that was measured undisturbed took a time that is not what was predicted."""
    predictions = [t.prediction for r in variant.ranks for t in r.tiers]
    return any(
        p.quiet_seconds is not None and abs(p.seconds - p.quiet_seconds) > OFF * p.quiet_seconds for p in predictions
    )


def fit_correction(room: Room, profile: MachineProfile, samples: Sequence[Sample]) -> Correction:
    """Factors per device and kind of unit, for small and for large micro-batches, that explain the samples.

    Non-negative least squares on relative errors, with a weak pull towards 1, by Gauss-Newton steps: simulated time
    is piecewise linear in the factors.
    """
    tables = Tables(profile)
    factors: tuple[Factor, ...] = ()
    for batch in ("small", "large"):
        own = [s for s in samples if batch_of(s.load.tokens) == batch]
        if own:
            factors += _fit_batch(room, tables, own, batch)
    return Correction(tuple(f for f in factors if abs(f.value - 1) > 1e-3))


def _fit_batch(room: Room, tables: Tables, samples: list[Sample], batch: str) -> tuple[Factor, ...]:
    import numpy as np
    from scipy.optimize import nnls

    kinds = dict.fromkeys(u.kind.name for u in room.spec.units if not u.kind.is_looked_up)
    names = [(device, kind) for device in ("acc", "host") for kind in kinds] + [("link", "")]
    now = [Factor(device, kind, batch, 1.0) for device, kind in names]
    measured = np.array([s.seconds for s in samples])
    for _ in range(ITERATIONS):
        base = np.array([_simulated(room, tables, s, now) for s in samples])
        slopes = np.empty((len(samples), len(now)))
        for i, factor in enumerate(now):
            nudged = [*now[:i], replace(factor, value=factor.value * (1 + NUDGE)), *now[i + 1 :]]
            more = np.array([_simulated(room, tables, s, nudged) for s in samples])
            slopes[:, i] = (more - base) / (NUDGE * factor.value)
        rest = base - slopes @ np.array([f.value for f in now])  # what no factor touches
        left = np.vstack([slopes / measured[:, None], PRIOR * np.eye(len(now))])
        right = np.concatenate([(measured - rest) / measured, np.full(len(now), PRIOR)])
        found, _ = nnls(left, right)
        now = [replace(f, value=float(min(max(v, LEAST), MOST))) for f, v in zip(now, found)]
    return tuple(now)


def _simulated(room: Room, tables: Tables, sample: Sample, factors: Sequence[Factor]) -> float:
    corrected = tables.corrected(Correction(tuple(factors)))
    costs = tier_costs(room.spec, corrected, sample.load, room.workload, room.ranks)
    return simulated_seconds(room, sample.tier, stage_by(sample.plan, [costs])[0])
