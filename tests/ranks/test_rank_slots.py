"""Plans with slots for experts that follow use, for several ranks, run: they give the plain model's logits, and each
rank finds the very hits that a replay of the run's own record finds."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from followed_text import CONTEXT, FILE, PROMPT, TEXT, Walk, run_here, walk_text, write_text
from planner_cases import DESKTOP, OWN
from test_parallel_group import processes_of, run_ranks
from thread_ranks import run_variant

from pshard.cuts.rank_parts import cut_ranks
from pshard.jsonio import to_json
from pshard.plan import Variant
from pshard.planner.check_plan import check_runnable
from pshard.planner.make_plan import plan_variant
from pshard.planner.price.datasheet import profile_from_datasheet
from pshard.planner.routing.plan_slots import plan_slots
from pshard.predicted_times import round_seconds
from pshard.routing.expert_map import map_experts
from pshard.routing.follow_use import HitCounts
from pshard.routing.followed import follow_plan, under_plan
from pshard.routing.hits_over_time import follow_hits
from pshard.routing.measure_popularity import measure_popularity
from pshard.routing.order_experts import order_experts
from pshard.routing.record import RoutingRecord
from pshard.routing.replay_slots import replay_run
from pshard.workload import Workload

RATES = replace(DESKTOP, link=2e9, host_memory=2e9, host_flops=1e9, handoff_seconds=5e-6)
PROFILE = profile_from_datasheet(RATES)
WORK = Workload((OWN + 4,), context=CONTEXT, max_ubatch=16, prompt=16, generated=400)
WAYS = {
    "slices": ("tensor", (2, 2), (1.0, 1.0)),
    "unequal slices": ("tensor", (4, 2), (3.0, 1.0)),
    "a rank of zero": ("tensor", (4, 1), (1.0, 0.0)),
    "layers": ("layer", (3, 2), (3.0, 1.0)),
    "a rank without layers": ("layer", (1, 4), (0.0, 1.0)),
}


@cache
def record_text() -> RoutingRecord:
    """Of other text of the kind, on one rank."""
    plan = run_here(plan_variant(FILE.spec, PROFILE, WORK))

    def read(engine) -> RoutingRecord:
        text = write_text(240, 1, 0.6)
        for at in range(0, len(text), 30):
            engine.reset()
            for token in text[at : at + 30]:
                engine.forward([token])
        return engine.record_routing("ab" * 32)

    return run_variant(FILE, plan, read, records=True)[0]


@cache
def walk_alone() -> Walk:
    return run_variant(FILE, run_here(plan_variant(FILE.spec, PROFILE, WORK)), walk_text, records=True)[0]


def plan_way(way: str) -> Variant:
    """A plan with slots by the record, that is faster than without, with buffers for this machine."""
    mode, more, shares = WAYS[way]
    spec = order_experts(FILE.spec, measure_popularity(record_text()))
    work = replace(WORK, vram_mib=tuple(OWN + mib for mib in more), split_mode=mode, tensor_split=shares)
    without = plan_variant(spec, PROFILE, work)
    variant = plan_slots(spec, PROFILE, without.workload, without, record_text())
    assert round_seconds(variant) < round_seconds(without)
    variant = run_here(variant)
    check_runnable(cut_ranks(under_plan(FILE.spec, variant), variant.split), variant, "cpu")
    return variant


def check_walk(variant: Variant, walks: list[Walk]) -> None:
    """Every rank has the logits and the choices of one rank; its slots have found what a replay of these finds."""
    wanted = FILE.logits(TEXT)[PROMPT:]
    parts, alone, found = cut_ranks(under_plan(FILE.spec, variant), variant.split), walk_alone().record, []
    record = walks[0].record
    for part, rank in zip(parts, variant.ranks):
        pools = [(own, follow_plan(part, rank, own)) for own in rank.caches]
        layers = [[part.unit(name).layer for name in own.units] for own in rank.caches]
        counts = [replay_run(record, rows, follower, own.tokens) for (own, follower), rows in zip(pools, layers)]
        found.append(sum(counts, HitCounts()))
    for walk in walks:
        assert ((walk.logits - wanted) ** 2).sum() < 1e-9 * (wanted**2).sum()
        assert (walk.record.ids == alone.ids).all() and walk.record.ids.dtype == alone.ids.dtype
        assert walk.record.layers == alone.layers and walk.record.batches == record.batches
        assert walk.hits == found
    assert [bool(counts.hits) for counts in found] == [bool(rank.caches) for rank in variant.ranks]
    assert any(rank.caches for rank in variant.ranks)


@pytest.mark.slow  # a quick case with slots by hand is in test_pipeline_engine.py
def test_ranks_find_in_their_slots_what_a_replay_finds() -> None:
    """Layers and unequal slices run as processes."""
    for variant in map(plan_way, ("slices", "a rank of zero", "a rank without layers")):
        walks = run_variant(FILE, variant, walk_text, records=True)
        check_walk(variant, walks)
        courses = follow_hits(FILE.spec, variant, walks[0].record, "text")  # what a report draws
        for course, experts in zip(courses, map_experts(FILE.spec, variant), strict=True):
            hits = sum(np.diff((0, *course.ends)) * course.slots) * len(experts.units) * experts.used
            assert hits == pytest.approx(walks[0].hits[experts.rank].hits)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["unequal slices", "layers"])
def test_processes_on_cpus(tmp_path: Path, way: str) -> None:
    variant = plan_way(way)
    (tmp_path / "plan.json").write_text(json.dumps(to_json(variant)))
    done = run_ranks("followed@shm", len(variant.ranks), tmp_path)
    assert done.returncode == 0, done.stderr
    assert not processes_of(tmp_path)
    walks = []
    for rank in range(len(variant.ranks)):
        logits, hits, *record = torch.load(tmp_path / f"followed-{rank}.pt", weights_only=False)
        ids, layers, batches = record
        walks.append(Walk(logits, hits, RoutingRecord("ab" * 32, layers, 16, ids, batches)))
    check_walk(variant, walks)
