"""Experts priced by a routing record: what is used more costs more where it is, and planning by it gains."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from experts_file import ExpertsFile
from planner_cases import DESKTOP, OWN
from routing_samples import make_record

from pshard.batch import Batch
from pshard.model import ModelSpec
from pshard.model_config import Experts
from pshard.plan import Variant
from pshard.planner import make_plan
from pshard.planner.make_plan import plan_baseline, plan_several, plan_to_try, plan_variant, predict_again
from pshard.planner.prepare_ranks import prepare_ranks, price_tiers
from pshard.planner.price.datasheet import profile_from_datasheet
from pshard.planner.price.profile_tables import Tables
from pshard.planner.price.simulate import expect_later
from pshard.planner.price.tier_costs import TierCosts, tier_costs
from pshard.planner.price.tier_loads import TierLoad
from pshard.planner.rank_task import RankTask
from pshard.predicted_times import round_seconds
from pshard.routing.expert_map import map_experts
from pshard.routing.expert_uses import chosen_share, count_last, used_experts, used_nbytes, used_spread
from pshard.routing.measure_popularity import measure_popularity
from pshard.routing.order_experts import order_experts
from pshard.units.moe.popularity import Popularity, pack_uses
from pshard.units.operations import used_share
from pshard.units.share import Share
from pshard.workload import Workload

EXPERTS, USED = 16, 2
FILE = ExpertsFile(Experts(EXPERTS, USED, 160), layers=2, d_model=512)
RATES = replace(DESKTOP, link=20e9, host_memory=80e9, host_flops=10e9, handoff_seconds=5e-6)
PROFILE = profile_from_datasheet(RATES)


def popularity(skew: float, seed: int = 0) -> Popularity:
    record = make_record(2000, 2, EXPERTS, USED, skew, seed)
    return measure_popularity(replace(record, layers=(0, 1)))


def recorded(skew: float = 1.0) -> ModelSpec:
    return order_experts(FILE.spec, popularity(skew))


def even() -> ModelSpec:
    """With a record of experts that were all used alike."""
    found = popularity(0.0)
    uses = pack_uses([USED / EXPERTS] * EXPERTS)
    return order_experts(FILE.spec, replace(found, layers=tuple(replace(each, uses=uses) for each in found.layers)))


def price(spec: ModelSpec, tokens: int, untimed: bool = False) -> TierCosts:
    profile = replace(PROFILE, experts=(), routes=()) if untimed else PROFILE
    return tier_costs(spec, Tables(profile), TierLoad(Batch.even(tokens, 1)), Workload((1000,), context=128))


@pytest.mark.parametrize("tokens", [1, 8, 64, 4096])
def test_experts_that_are_used_alike_are_what_no_record_assumes(tokens: int) -> None:
    uses = even().popularity.uses  # type: ignore[union-attr]
    for places in (range(EXPERTS), range(3), range(5, 16)):
        expected = len(places) * used_share(USED, EXPERTS, tokens)
        assert used_experts(places, USED, EXPERTS, tokens, uses) == pytest.approx(expected)
        assert used_experts(places, USED, EXPERTS, tokens, ()) == expected
        assert chosen_share(places, EXPERTS, uses) == pytest.approx(len(places) / EXPERTS)
    plain, alike = price(FILE.spec, tokens), price(even(), tokens)
    for share in (Share(4), Share(4, 3), Share(0, 5)):
        one, other = plain.divided("blk.0.experts", share), alike.divided("blk.0.experts", share)
        assert (other.acc, other.cpu, other.link) == pytest.approx((one.acc, one.cpu, one.link))


@pytest.mark.parametrize("untimed", [False, True])
@pytest.mark.parametrize("tokens", [1, 4, 8, 16, 64])
def test_with_more_experts_on_a_side_that_side_takes_longer_and_the_other_less(tokens: int, untimed: bool) -> None:
    costs = price(recorded(), tokens, untimed)
    found = [costs.divided("blk.0.experts", Share(n)) for n in range(1, EXPERTS)]
    near = 1.01 if untimed else 1  # whole experts and tokens stand in for what was not timed
    for fewer, more in pairwise(found):
        assert more.cpu * near >= fewer.cpu and more.cpu_reads >= fewer.cpu_reads
        assert more.acc <= fewer.acc * near and more.read <= fewer.read
    kept = [costs.divided("blk.0.experts", Share(2, n)).read for n in range(EXPERTS - 2)]
    assert kept == sorted(kept, reverse=True)


@pytest.mark.parametrize("tokens", [1, 4])
def test_popular_experts_in_vram_leave_less_to_link_and_cpu_than_any_do(tokens: int) -> None:
    plain, ordered = price(FILE.spec, tokens), price(recorded(), tokens)
    for share in (Share(12), Share(4, 4)):
        one, other = plain.divided("blk.0.experts", share), ordered.divided("blk.0.experts", share)
        assert other.cpu < 0.75 * one.cpu and other.cpu_reads < 0.75 * one.cpu_reads
    assert ordered.divided("blk.0.experts", Share(0, 6)).read < 0.8 * plain.divided("blk.0.experts", Share(0, 6)).read


def test_bytes_that_are_used_of_all_places_are_those_of_the_whole_unit() -> None:
    spec, unit = recorded(), FILE.spec.unit("blk.0.experts")
    uses = spec.popularity.uses  # type: ignore[union-attr]
    assert used_nbytes(unit, spec.config, 1, uses) == pytest.approx(unit.packed_nbytes * USED / EXPERTS, rel=1e-6)
    assert used_nbytes(unit, spec.config, 8, uses) < used_nbytes(unit, spec.config, 8)


def test_the_cpu_may_have_experts_for_a_share_of_the_choices() -> None:
    uses = (0.9, 0.5, 0.2, 0.2, 0.1, 0.1)
    assert count_last((0.2, 0.5, 0.75), uses) == (3, 5, 5)
    assert count_last((0.25, 0.5, 0.75), (0.5,) * 8) == (2, 4, 6)


def ignore_record(spec: ModelSpec, workload: Workload) -> Variant:
    """The plan of experts that are all chosen alike, by what the record says that it takes."""
    alike = plan_variant(order_experts(spec, None), PROFILE, workload)
    tiers = tuple(tier.tokens for tier in alike.ranks[0].tiers)
    (task,) = price_tiers(spec, Tables(PROFILE), alike.workload, tiers)
    return predict_again(alike, task)


def slow(mib: int, skew: float) -> object:
    return pytest.param(mib, skew, marks=pytest.mark.slow)


@pytest.mark.parametrize(("mib", "skew"), [(6, 1.0), slow(12, 0.5), slow(20, 2.0)])
def test_a_plan_by_a_record_is_never_slower_than_one_that_ignores_it(mib: int, skew: float) -> None:
    workload = Workload((OWN + mib,), context=128, max_ubatch=16, prompt=16, generated=200)
    layers, record = 4, make_record(2000, 4, EXPERTS, USED, skew)
    deep = ExpertsFile(Experts(EXPERTS, USED, 160), layers=layers, d_model=512)
    spec = order_experts(deep.spec, measure_popularity(replace(record, layers=tuple(range(layers)))))
    planned, ignored = plan_variant(spec, PROFILE, workload), ignore_record(spec, workload)
    assert round_seconds(planned) <= round_seconds(ignored)
    assert planned.popularity == spec.popularity
    (experts,) = map_experts(spec, planned)
    for tier in experts.tiers:
        counts = [sum(layer.counts[i] for layer in tier.layers) / EXPERTS / layers for i in range(4)]
        assert sum(tier.served) == pytest.approx(1) and tier.served[0] >= counts[0] and tier.served[3] <= counts[3]


def test_plans_that_are_run_before_one_is_chosen_have_the_one_that_ignores_the_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the search with the record ended with a slower plan."""
    spec, workload = recorded(), Workload((OWN + 6,), context=128, max_ubatch=16, prompt=16, generated=200)
    (task,) = prepare_ranks(spec, PROFILE, workload)
    poor = plan_baseline("cpu-moe", spec, PROFILE, task.room.workload)

    def search(task: RankTask, time_limit: float, programs: int = 2) -> tuple[Variant, ...]:
        return (poor,) if task.room.spec.popularity else plan_several(task, time_limit, programs)

    monkeypatch.setattr(make_plan, "plan_several", search)
    first, second = plan_to_try(task, Tables(PROFILE), 5.0)
    assert second is poor and round_seconds(first) < round_seconds(poor)
    assert first.popularity == spec.popularity and first.workload == poor.workload
    poor = first
    assert plan_to_try(task, Tables(PROFILE), 5.0) == (poor,)


@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_the_spread_of_what_tokens_use_is_that_of_random_choices(tokens: int) -> None:
    rng, of, chosen = np.random.default_rng(1), 32, 4
    places = ((range(4, 14), 1.0), (range(14, 32), -0.5))
    sums = []
    for _ in range(4000):
        used = {int(e) for _ in range(tokens) for e in rng.permutation(of)[:chosen]}
        sums.append(sum(weight * len(used & set(here)) for here, weight in places))
    assert used_spread(places, chosen, of, tokens, ()) == pytest.approx(np.std(sums), rel=0.05)
    assert used_spread(((range(of), 1.0),), chosen, of, 1, ()) == pytest.approx(0, abs=1e-6), (
        "a token uses as many as any"
    )


def test_the_later_of_two_is_expected_after_either_where_they_vary() -> None:
    rng = np.random.default_rng(2)
    for one, other, spread in ((1.0, 1.2, 0.3), (2.0, 0.5, 0.7), (1.0, 1.0, 0.1)):
        apart = one - other + spread * rng.standard_normal(200_000)
        assert expect_later(one, other, spread) == pytest.approx(other + np.maximum(apart, 0).mean(), rel=5e-3)
    assert expect_later(1.0, 2.0, 0.0) == 2.0
