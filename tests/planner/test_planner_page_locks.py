"""Plans for machines that page-lock only part of their memory: what lies beyond is priced as staged."""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import strategies as st
from planner_cases import DESKTOP, OWN, few_or_many, machines, make_model, models, published_variants, try_cases
from test_planner_plans import workload_seconds

from pshard.machine import CopyTiming, MachineProfile
from pshard.plan import Variant
from pshard.planner.check_plan import check_variant
from pshard.planner.make_plan import plan_variant, same_placements
from pshard.planner.prepare_ranks import prepare_ranks
from pshard.planner.price.datasheet import profile_from_datasheet
from pshard.planner.price.draft import simulated_seconds
from pshard.planner.price.predict_published import Predictor
from pshard.planner.price.profile_tables import Tables
from pshard.planner.price.tier_costs import tier_costs
from pshard.predicted_times import round_seconds
from pshard.workload import Workload

GIB = 1 << 30


def limited(profile: MachineProfile, lockable: int | None, share: float = 0.4) -> MachineProfile:
    """The machine with a limit of page-locking, and staged copies at a share of the page-locked rate."""
    pinned = [c for c in profile.copies if (c.direction, c.memory) == ("h2d", "pinned")]
    staged = (CopyTiming("h2d", "staged", c.nbytes, c.seconds / share) for c in pinned)
    return replace(profile, copies=(*profile.copies, *staged), lockable_bytes=lockable)


PROFILE = profile_from_datasheet(replace(DESKTOP, kernel_seconds=1e-6))
SPEC = make_model(layers=24, d_model=4096, heads=32, d_ffn=14336)
WORKLOAD = Workload((OWN + 1800,), context=4096, prompt=3072, generated=64)


def staged_by_hand(spec, plan, workload: Workload, lockable: int) -> set[str]:
    """What the runtime leaves unlocked, written anew: what decode streams, then prefill, is locked first."""
    held = [u for u in spec.units if any(t.placement(u.name).where != "pinned" for t in plan.tiers)]
    cell = 2 * 2 * spec.config.n_kv_heads * spec.config.head_dim
    on_host = sum(any(t.placement(u.name).kv == "host" for t in plan.tiers) for u in spec.units)
    left, beyond = lockable - on_host * cell * workload.context, set()

    def need(unit) -> int:
        streamed = [i for i, t in enumerate(plan.tiers) if t.placement(unit.name).where == "streamed"]
        return min(streamed, default=98 if any(t.placement(unit.name).where == "pinned" for t in plan.tiers) else 99)

    for unit in sorted(held, key=need):
        left -= unit.packed_nbytes
        if left < 0:
            beyond.add(unit.name)
    return beyond


@cache
def plan_without_a_limit() -> Variant:
    return plan_variant(SPEC, PROFILE, WORKLOAD)


@cache
def plan_under(gib: float) -> tuple[MachineProfile, Variant]:
    """The plan of a machine that page-locks so much, and copies much slower what it does not."""
    profile = limited(PROFILE, int(gib * GIB), share=0.15)
    return profile, plan_variant(SPEC, profile, WORKLOAD)


@pytest.mark.slow
def test_without_a_limit_or_under_one_that_holds_everything_nothing_changes():
    want = plan_without_a_limit()
    for got in (plan_variant(SPEC, limited(PROFILE, None), WORKLOAD), plan_under(16.0)[1]):
        assert same_placements(got.ranks[0].tiers, want.ranks[0].tiers)
        assert round_seconds(got) == pytest.approx(round_seconds(want), rel=1e-9)


@pytest.mark.slow
def test_the_lower_the_limit_the_less_is_streamed_and_the_longer_the_round(share: float):
    found = []
    for gib in (16.0, 2.0, 1.0, 0.0) if share == 1 else (16.0, 0.0):
        profile, variant = plan_under(gib)
        check_variant((SPEC,), variant, "cuda")
        (plan,), (task,) = variant.ranks, prepare_ranks(SPEC, profile, WORKLOAD)
        beyond = staged_by_hand(SPEC, plan, WORKLOAD, profile.lockable_bytes or 0)
        decode = next(t for t in plan.tiers if t.tokens == 1)
        streamed = [p.unit for p in decode.placements if p.where == "streamed"]
        found.append((round_seconds(variant), len(streamed), sum(u in beyond for u in streamed)))
        for tier in plan.tiers:  # what is printed is the simulation of what will be staged
            load = next(c.load for c in task.costs if c.load.tokens == tier.tokens)
            cost = tier_costs(SPEC, Tables(profile), load, WORKLOAD, 1, frozenset(beyond))
            assert tier.prediction.seconds == pytest.approx(simulated_seconds(task.room, tier, cost), rel=1e-9)
    seconds, streamed, _ = zip(*found)
    assert all(later >= earlier * 0.99 for earlier, later in pairwise(seconds))
    # no more than 1.09 times: decoding, two thirds of the round, has one streamed unit without a limit
    assert seconds[-1] > 1.05 * seconds[0] and streamed[-1] == 0 < streamed[0]


@pytest.mark.parametrize(
    ("gib", "gain"),
    [
        (0.0, 0.05),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1.0, 0.01), (2.0, -0.001))),
    ],
)
def test_knowing_the_limit_makes_a_plan_that_is_faster_under_it(gib: float, gain: float):
    """The plan that was made without knowing streams more than can be page-locked; under the last limit only in tiers
    that the round does not enter. Decoding of either streams next to nothing: what knowing brings is in the prompt."""
    (profile, informed), naive = plan_under(gib), plan_without_a_limit()
    seconds = []
    for variant in (informed, naive):
        there = Predictor((SPEC,), profile, variant)
        seconds.append(there.prefill(3072) + there.decode(64, depth=3072))
    assert seconds[0] <= (1 - gain) * seconds[1]


@few_or_many
def test_plans_under_a_limit_are_legal_and_no_worse_than_published_strategies(cases):
    try_cases(cases, expect_legal_and_no_worse, st.data())


def expect_legal_and_no_worse(data):
    spec, rates = data.draw(models()), data.draw(machines())
    lockable = int(data.draw(st.floats(0, 1.2)) * spec.packed_nbytes)
    profile = limited(profile_from_datasheet(rates), lockable, data.draw(st.floats(0.2, 0.9)))
    workload = Workload(
        (OWN + 64 + data.draw(st.integers(0, spec.packed_nbytes >> 20)),), context=512, max_ubatch=128, prompt=256
    )
    variant = plan_variant(spec, profile, workload)
    check_variant((spec,), variant, rates.kind)
    for name, published in published_variants(spec, profile, replace(workload, max_ubatch=variant.workload.max_ubatch)):
        if published.workload.max_ubatch == variant.workload.max_ubatch:
            own, other = (workload_seconds(spec, profile, workload, v) for v in (variant, published))
            assert own <= other * (1 + 1e-9), name
