"""What a plan by a record promises of other text of the kind is what a run of that text finds, within three points."""

from typing import NamedTuple

import numpy as np
import pytest
from cache_plans import with_cache
from experts_file import ExpertsFile, skew_routers
from followed_text import write_text
from plan_samples import make_tier
from planner_cases import OWN
from slot_cases import PROFILE

from pshard.model import ModelSpec
from pshard.model_config import Experts
from pshard.plan import Variant
from pshard.planner.make_plan import plan_variant
from pshard.planner.routing.measure_hits import measure_hits
from pshard.planner.routing.plan_slots import plan_slots
from pshard.routing.expert_map import map_experts
from pshard.routing.hits_over_time import follow_hits
from pshard.routing.measure_popularity import measure_popularity
from pshard.routing.order_experts import order_experts
from pshard.routing.record import RoutingRecord
from pshard.runtime.build_engine import build_engine
from pshard.runtime.devices.device import open_device
from pshard.workload import Workload

FILE = skew_routers(ExpertsFile(Experts(16, 2, 160), layers=4, d_model=256), 0.5)
CONTEXT, TEXT = 256, 30  # tokens of a text: what comes first moves the choices of all after it
WORK = Workload((OWN + 12,), context=CONTEXT, max_ubatch=16, prompt=16, generated=400)
MOST = 0.03  # of all choices, between what is promised and what is found


class Run(NamedTuple):
    """What a run recorded, and what share of its choices slots are expected to serve, and did."""

    record: RoutingRecord
    expected: float | None
    found: float


def decode(variant: Variant, text: list[int]) -> Run:
    """Run a plan's placements token by token, with buffers for the CPU as accelerator."""
    (rank,) = variant.ranks
    tiers = tuple(
        make_tier(
            FILE.spec, t.tokens, {p.unit: (p.where, p.kv, *p.share) for p in t.placements}, t.buffers.slots, CONTEXT, 1,
            in_place=t.in_place,
        )
        for t in rank.tiers
    )  # fmt: skip
    runs = with_cache(FILE, tiers, rank.caches, popularity=variant.popularity)
    with build_engine(FILE, runs, open_device("cpu"), records=True) as engine:
        for at, token in enumerate(text):
            if at % TEXT == 0:
                engine.reset()
            engine.forward([token])
        (slots,) = engine.hits_by_rank()
        return Run(engine.record_routing("ab" * 32), slots.expected, slots.found.share)


def plan_by_text(text: list[int]) -> tuple[RoutingRecord, ModelSpec, Variant]:
    """What a run of the text recorded; by that, the model in its order of popularity, and a plan without slots."""
    record = decode(plan_variant(FILE.spec, PROFILE, WORK), text).record
    spec = order_experts(FILE.spec, measure_popularity(record))
    return record, spec, plan_variant(spec, PROFILE, WORK)


@pytest.mark.slow
def test_slots_find_in_other_text_what_the_replay_of_a_record_promised() -> None:
    """Of text in which words come again soon."""
    record, spec, without = plan_by_text(write_text(900, 1, 0.6))
    variant = plan_slots(spec, PROFILE, WORK, without, record)
    run = decode(variant, write_text(600, 2, 0.6))
    assert variant.ranks[0].caches and run.expected == variant.ranks[0].caches[0].found
    assert run.found == pytest.approx(run.expected, abs=MOST) and 0.3 < run.found < 0.9
    (course,) = follow_hits(FILE.spec, variant, run.record, "")
    assert np.mean(course.slots) == pytest.approx(run.found, abs=0.005)  # stretches of 10 tokens
    assert course.expected_slots == pytest.approx(run.expected, abs=MOST) and course.ends[-1] == 600


@pytest.mark.slow  # the share of hits of one text is in test_routing.py
def test_popular_experts_serve_of_other_text_what_a_plan_expects() -> None:
    """Of text without a memory, in which some words are common."""
    _, spec, variant = plan_by_text(write_text(600, 1, 0.0))
    (experts,) = map_experts(spec, variant)
    tier = experts.tiers[0]
    record = decode(variant, write_text(400, 2, 0.0)).record
    found, (course,) = measure_hits(record, spec, tier), follow_hits(FILE.spec, variant, record, "")
    assert np.mean(course.stay) == pytest.approx(found, abs=0.005) and set(course.slots) == {0.0}
    assert found == pytest.approx(tier.served[0], abs=MOST)
    evenly = sum(layer.pinned for layer in tier.layers) / (experts.count * len(tier.layers))
    assert evenly + 2 * MOST < tier.served[0] < 0.95
