"""Experts that live on disk, in slots of host memory that follow use: the logits of all in memory, the right bytes."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engines import converse, open_engine, pinned_everywhere
from model_files import write_gguf
from plan_samples import make_tier, make_variant, with_workload

from pshard.errors import StepFailed
from pshard.model import ModelSpec
from pshard.models import open_model
from pshard.plan import Variant
from pshard.planner.check_plan import check_runnable
from pshard.routing.follow_use import DemandFollower
from pshard.routing.followed import follow_plan
from pshard.routing.record import RoutingRecord
from pshard.routing.replay_slots import replay_run
from pshard.runtime.build_engine import build_engine
from pshard.runtime.devices.device import open_device
from pshard.runtime.engine import Engine
from pshard.runtime.kernels.cpu import native
from pshard.units.moe.expert_cache import DEMAND, ExpertCache, slot_nbytes
from pshard.units.unit import Unit

FAST = "fake:rate=20G,jitter=1ms"  # reads arrive in random order
SLOTS = 2  # for whole layers
FOLLOW = 4  # tokens of the largest tier that uses slots


@pytest.fixture(autouse=True)
def disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PSHARD_DISK", FAST)


def write_model(folder: Path, **shape) -> Path:
    return write_gguf(folder / "m.gguf", "qwen3moe", **({"qtype": "Q8_0"} | shape))


def plan_by_hand(
    spec: ModelSpec,
    slots: int,
    on_host: bool = False,
    context: int = 256,
    reserve_mib: int = 0,
    follow: int = FOLLOW,
    crowded: bool = False,
) -> Variant:
    """All experts on disk, with so many slots for up to `follow` tokens; all else in the arena. on_host: the slots are
    in host memory beside the accelerator. reserve_mib: of a GPU's budget, for torch. crowded: answers have the first
    layer's experts in the arena, and attention is streamed in every other layer."""
    places = {u.name: ("pinned", "vram" if u.kind.state else None) for u in spec.units}
    if crowded:
        places |= stream_attention(spec)
    experts = list_experts(spec)
    far = experts[1:] if crowded else experts
    prompts = places | {unit.name: ("disk", None) for unit in experts}
    answers = places | {unit.name: ("demand" if on_host else "disk", None) for unit in far}
    names = tuple(unit.name for unit in far)
    cache = ExpertCache(names, slots, slot_nbytes(far[0]), DEMAND, 0, tokens=follow, on_host=on_host)
    tiers = [
        make_tier(spec, n, prompts if n > follow else answers, SLOTS, context, 1, batch=64, in_place=n <= follow)
        for n in (1, follow, 64)
    ]
    if not on_host:
        tiers = [replace(tier, buffers=replace(tier.buffers, cached=cache.nbytes)) for tier in tiers]
    variant = make_variant(spec, tuple(tiers), context, 1, reserve_mib=reserve_mib)
    variant = with_workload(variant, type_k="f32", type_v="f32")
    return replace(variant, ranks=tuple(replace(rank, caches=(cache,)) for rank in variant.ranks))


def stream_attention(spec: ModelSpec) -> dict[str, tuple]:
    """Places of attention in every other layer: its weights come over the link, its cells lie in the arena."""
    return {unit.name: ("streamed", "vram") for unit in [unit for unit in spec.units if unit.kind.state][::2]}


def list_experts(spec: ModelSpec) -> list[Unit]:
    return [unit for unit in spec.units if unit.kind.parts]


@contextmanager
def open_on_disk(
    path: Path,
    slots: int,
    kernels: str = "fast",
    records: bool = False,
    on_host: bool = False,
    follow: int = FOLLOW,
    crowded: bool = False,
) -> Iterator[Engine]:
    with open_model(path) as file:
        variant = plan_by_hand(file.spec, slots, on_host, follow=follow, crowded=crowded)
        check_runnable((file.spec,), variant, "cpu")
        with build_engine(file, variant, open_device("cpu"), kernels=kernels, records=records) as engine:
            yield engine


@pytest.mark.quick("plain-1-False-False", "fast-3-True-True")
@pytest.mark.parametrize(  # slots: beyond the least
    ("kernels", "slots", "on_host", "crowded"),
    [("fast", 3, True, False), ("plain", 1, False, False), ("fast", 0, True, False), ("fast", 3, True, True)],
)
def test_logits_are_those_of_all_in_memory_in_whatever_order_experts_arrive(
    tmp_path: Path, kernels: str, slots: int, on_host: bool, crowded: bool
) -> None:
    path = write_model(tmp_path, n_layers=4 if crowded else 2)
    spec = open_model(path).spec
    with open_engine(path, pinned_everywhere(spec, (1, FOLLOW, 64), 256), kernels, context=256) as engine:
        right = converse(engine)
    with open_on_disk(path, 8 + slots, kernels, on_host=on_host, crowded=crowded) as engine:
        assert torch.equal(converse(engine), right)
        assert engine.expert_hits.hits > 0 < engine.expert_hits.admitted


@pytest.mark.parametrize("on_host", [False, True])
def test_steps_of_many_rows_find_experts_in_slots_too(tmp_path: Path, on_host: bool) -> None:
    """As steps that verify many drafts have them."""
    path = write_model(tmp_path)
    spec = open_model(path).spec
    with open_engine(path, pinned_everywhere(spec, (1, 12, 64), 256), "fast", context=256) as engine:
        right = engine.forward(list(range(12)), all_logits=True)
    with open_on_disk(path, 16, on_host=on_host, follow=12) as engine:
        assert torch.equal(engine.forward(list(range(12)), all_logits=True), right)
        assert engine.expert_hits.chosen == 12 * 2 * len(list_experts(spec)) and engine.expert_hits.hits


@pytest.mark.quick("fast-True-24", "plain-False-40")
@pytest.mark.parametrize("slots", [24, 40])  # there is room for what few tokens choose of all layers, not for 16
@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("kernels", ["fast", "plain"])
def test_a_short_prompt_reads_only_experts_that_it_chooses_and_that_no_slot_has(
    tmp_path: Path, kernels: str, on_host: bool, slots: int
) -> None:
    path = write_model(tmp_path, n_layers=4, n_experts=16)
    spec, read, logits = open_model(path).spec, list[int](), list[torch.Tensor]()
    prompts = [[(7 * n + i) % 320 for i in range(n)] for length in (2, 3, 4, 8, 16) for n in (length, 1, 1)]
    with open_engine(path, pinned_everywhere(spec, (1, 16, 64), 256), kernels, context=256) as engine:
        right = [engine.forward(ids, all_logits=True) for ids in prompts]
    with open_on_disk(path, slots, kernels, records=True, on_host=on_host, follow=16) as engine:
        follower = follow_plan(spec, engine.rank_plan, engine.rank_plan.caches[0])
        for ids in prompts:
            before = engine.memory().read
            logits.append(engine.forward(ids, all_logits=True))
            read.append(engine.memory().read - before)
        record, hits = engine.record_routing(""), engine.expert_hits
    assert all(torch.equal(*both) for both in zip(logits, right, strict=True))
    each, at = sum(t.file_nbytes // t.parts for t in list_experts(spec)[0].tensors), 0
    for ids, nbytes in zip(prompts, read, strict=True):
        assert nbytes == each * sum(count_lacking(follower, record.ids[at : at + len(ids)]))
        at += len(ids)
    assert hits == follower.counts and hits.hits > 0 < hits.admitted


def count_lacking(follower: DemandFollower, ids: np.ndarray) -> Iterator[int]:
    """By layer the experts that tokens choose and no slot has, which are just what comes; ids: [tokens, layers,
    used]."""
    for layer in range(ids.shape[1]):
        chosen = ids[:, layer].astype(int)
        lacking = {expert for expert in chosen.ravel().tolist() if follower.slot_of[layer, expert] < 0}
        turn = follower.look_up(layer, chosen)
        assert {move.expert for move in turn.started} == lacking
        follower.arrive(turn.started)
        yield len(lacking)


@pytest.mark.parametrize("on_host", [False, True])
def test_from_the_second_token_on_a_layer_is_replayed(
    tmp_path: Path, on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_on_disk(write_model(tmp_path), 10, on_host=on_host) as engine:
        engine.forward([1])
        engine.forward([2])
        before = engine.expert_hits
        monkeypatch.setattr(native, "experts", None)
        monkeypatch.setattr(native, "route", None)
        engine.forward([3])
        assert (engine.expert_hits - before).chosen


def test_biases_of_experts_are_found_in_memory(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "gpt-oss", qtype="F32", qtypes={"ffn_up_exps.weight": "MXFP4"})
    with open_engine(
        path, pinned_everywhere(open_model(path).spec, (1, FOLLOW, 64), 256), "fast", context=256
    ) as engine:
        right = converse(engine)
    with open_on_disk(path, 9) as engine:
        assert torch.equal(converse(engine), right)


@pytest.mark.quick("True")
@pytest.mark.parametrize("on_host", [False, True])
def test_hits_and_bytes_are_those_of_a_replay_of_the_run(tmp_path: Path, on_host: bool) -> None:
    """Prompts read of whole layers what slots have not, before and after answers have changed these."""
    path = write_model(tmp_path, n_layers=4)
    with open_on_disk(path, 13, records=True, on_host=on_host) as engine:
        spec, plan = open_model(path).spec, engine.rank_plan
        experts, (cache,) = list_experts(spec), plan.caches
        each = sum(t.file_nbytes // t.parts for t in experts[0].tensors)
        begun = engine.memory().read
        assert engine.memory().slots == on_host * cache.nbytes and engine.memory().process > 0
        assert begun == cache.slots * each  # slots are full at the start
        converse(engine)
        engine.forward(list(range(19)))
        record, follower = engine.record_routing(""), follow_plan(spec, plan, cache)
        counts = replay_run(record, [u.layer for u in experts], follow_plan(spec, plan, cache), FOLLOW)
        assert counts == engine.expert_hits and counts.hits
        expected, until = begun + each * count_reads(record, follower), time.monotonic() + 60
        while engine.memory().read < expected and time.monotonic() < until:
            time.sleep(0.01)  # what is read ahead is on its way
        assert engine.memory().read == expected


def count_reads(record: RoutingRecord, follower: DemandFollower) -> int:
    """Experts that are read in a run. A prompt lacks what is in no slot. When it begins after answers, and again when
    its micro-batch ends, the first layers are read ahead."""
    found, at, prompts = 0, 0, False
    for n in record.batches:
        if n <= FOLLOW:
            before = follower.counts.admitted
            follower.observe(record.ids[at : at + n])
            found += follower.counts.admitted - before
        else:
            lacking = follower.slot_of < 0
            found += int(lacking.sum() + (not prompts) * lacking[:SLOTS].sum())
        at, prompts = at + n, n > FOLLOW
    return found


def test_a_disk_that_fails_ends_the_step_and_names_file_and_place(
    tmp_path: Path,
) -> None:
    path = write_model(tmp_path)
    with open_on_disk(path, 9) as engine:
        os.truncate(path, path.stat().st_size // 4)
        with pytest.raises(StepFailed, match=r"m\.gguf at byte \d+.*beyond the end|m\.gguf at byte \d+: was cut"):
            for n in range(20):
                engine.forward([n])


def test_slots_for_less_than_a_token_uses_are_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path)
    with (
        pytest.raises(ValueError, match="7 slots are fewer than the 8 experts of one micro-batch"),
        open_on_disk(path, 7),
    ):
        pass
