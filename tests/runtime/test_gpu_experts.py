"""Routed experts on a CUDA GPU: in the arena, in slots, read over the link, and shared with the CPU. Skipped without
one."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engines import open_engine, pinned_everywhere
from experts_file import WAYS
from model_files import write_gguf
from plan_samples import make_tier, make_variant

from pshard.models import open_model
from pshard.reserve import TORCH_RESERVE_MIB
from pshard.routing.follow_use import HitCounts
from pshard.routing.followed import follow_plan
from pshard.routing.measure_popularity import measure_popularity
from pshard.routing.record import RoutingRecord
from pshard.routing.replay_slots import replay_run
from pshard.runtime.build_engine import build_engine
from pshard.runtime.devices.device import open_device
from pshard.units.moe.expert_cache import FOLLOW_TOKENS, ExpertCache, slot_nbytes
from pshard.units.moe.experts import EXPERTS
from pshard.units.moe.popularity import Popularity
from pshard.units.moe.router import ROUTER

pytestmark = pytest.mark.gpu
CONTEXT = 256
ROUNDED = 2e-2  # of the logits' mean square: now and then bfloat16 lets another expert be chosen, which shifts a row


def talk(engine) -> torch.Tensor:
    """Prompts and single tokens: logits of every position."""
    rng = random.Random(1)
    prompts = [[rng.randrange(320) for _ in range(n)] for n in (70, 9, 1, 1, 4, 1, 1, 70, 1, 1)]
    with engine:
        return torch.cat([engine.forward(p, all_logits=True) for p in prompts])


@pytest.mark.parametrize("router", ["pinned", "cpu"])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_experts_give_the_reference_logits_wherever_they_are(tmp_path: Path, way: tuple, router: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen3moe", qtype="Q4_0", n_layers=3)
    with open_model(path) as file:
        spec = file.spec
    places: dict[str, tuple] = {u.name: ("pinned", "vram" if u.kind.state else None) for u in spec.units}
    places |= {u.name: way for u in spec.units if u.kind is EXPERTS}
    places |= {u.name: (router, None) for u in spec.units if u.kind is ROUTER}
    tiers = tuple(make_tier(spec, n, places, 2, CONTEXT, 1, in_place=n <= 24) for n in (4, 24, 80))
    expected = talk(open_engine(path, pinned_everywhere(spec, (4, 24, 80), CONTEXT), context=CONTEXT))
    got = talk(open_engine(path, tiers, "fast", CONTEXT, device="cuda"))
    assert torch.isfinite(got).all()
    assert ((got - expected) ** 2).mean() < ROUNDED * (expected**2).mean()
    assert torch.equal(got, talk(open_engine(path, tiers, "fast", CONTEXT, device="cuda")))


@pytest.mark.parametrize("arch", ["qwen2moe", "glm4moe", "qwen3moe"])
def test_tiers_that_take_turns_have_their_own_experts_and_shared_ones_their_gate(tmp_path: Path, arch: str) -> None:
    """Single tokens are replayed graphs: after a prompt they must not read what lay where its tables lay."""
    path = write_gguf(tmp_path / "m.gguf", arch, qtype="Q4_0", n_layers=3)
    with open_model(path) as file:
        spec = file.spec
    tiers = []
    for tokens, way in ((4, ("streamed", None)), (24, ("streamed", None, 3)), (80, ("pinned", None))):
        places: dict[str, tuple] = {u.name: ("pinned", "vram" if u.kind.state else None) for u in spec.units}
        places |= {u.name: way for u in spec.units if u.kind is EXPERTS}
        tiers.append(make_tier(spec, tokens, places, 2, CONTEXT, 1))
    expected = talk(open_engine(path, pinned_everywhere(spec, (4, 24, 80), CONTEXT), context=CONTEXT))
    got = talk(open_engine(path, tuple(tiers), "fast", CONTEXT, device="cuda"))
    assert ((got - expected) ** 2).mean() < ROUNDED * (expected**2).mean()


@pytest.mark.parametrize("router", ["pinned", "cpu"])
def test_a_graph_brings_the_experts_that_routers_choose_and_an_order_of_them_changes_no_bit(
    tmp_path: Path, router: str
) -> None:
    """Single tokens are replayed graphs. Rounding lets another expert be chosen now and then."""
    path = write_gguf(tmp_path / "m.gguf", "qwen3moe", qtype="Q4_0", n_layers=3)
    with open_model(path) as file:
        spec = file.spec
        places: dict[str, tuple] = {u.name: ("pinned", "vram" if u.kind.state else None) for u in spec.units}
        places |= {u.name: (router, None) for u in spec.units if u.kind is ROUTER}
        tiers = tuple(make_tier(spec, n, places, 2, CONTEXT, 1) for n in (4, 80))
        variant = make_variant(spec, tiers, CONTEXT, 1, reserve_mib=TORCH_RESERVE_MIB)

        def run(device: str, popularity: Popularity | None, records: bool) -> tuple[torch.Tensor, RoutingRecord | None]:
            made, kernels = replace(variant, popularity=popularity), "fast" if device == "cuda" else "plain"
            engine = build_engine(file, made, open_device(device), kernels=kernels, records=records)
            logits = talk(engine)
            return logits, engine.record_routing("ab") if records else None

        logits, record = run("cuda", None, True)
        _, reference = run("cpu", None, True)
        assert record and reference and record.batches == reference.batches
        same = (np.sort(record.ids, 2) == np.sort(reference.ids, 2)).mean()
        assert same > 0.9
        assert torch.equal(logits, run("cuda", None, False)[0])
        assert torch.equal(logits, run("cuda", measure_popularity(record), False)[0])


@pytest.mark.parametrize("way", [("streamed", None), ("streamed", None, 3, 2), ("pinned", None, 5)], ids=str)
def test_experts_that_follow_use_give_the_reference_logits_from_slots(tmp_path: Path, way: tuple) -> None:
    """Graphs read tables that change between tokens, and the relay's thread too; where the GPU computes all experts no
    bit changes. A fresh engine repeats every bit and every hit."""
    path = write_gguf(tmp_path / "m.gguf", "qwen3moe", qtype="Q4_0", n_layers=3)
    with open_model(path) as file:
        spec = file.spec
        places: dict[str, tuple] = {u.name: ("pinned", "vram" if u.kind.state else None) for u in spec.units}
        places |= {u.name: way for u in spec.units if u.kind is EXPERTS}
        tiers = tuple(make_tier(spec, n, places, 2, CONTEXT, 1) for n in (1, 4, 80))
        experts = [u for u in spec.units if u.kind is EXPERTS]
        names = tuple(u.name for u in experts)
        cache = ExpertCache(names, 6, slot_nbytes(experts[0]), "frequency", 3)

        def run(caches: tuple[ExpertCache, ...]) -> tuple[torch.Tensor, HitCounts, RoutingRecord]:
            cached = sum(each.nbytes for each in caches)
            own = tuple(replace(tier, buffers=replace(tier.buffers, cached=cached)) for tier in tiers)
            variant = make_variant(spec, own, CONTEXT, 1, reserve_mib=TORCH_RESERVE_MIB)
            variant = replace(variant, ranks=tuple(replace(rank, caches=caches) for rank in variant.ranks))
            rng = random.Random(1)
            with build_engine(file, variant, open_device("cuda"), kernels="fast", records=True) as engine:
                sizes = (70, 9, *[1] * 30, 4, 70, *[1] * 30)
                prompts = [[rng.randrange(320) for _ in range(n)] for n in sizes]
                logits = torch.cat([engine.forward(p, all_logits=True) for p in prompts])
                return logits, engine.expert_hits, engine.record_routing("ab")

        without, _, _ = run(())
        logits, hits, record = run((cache,))
        again, same_hits, _ = run((cache,))
        (rank,) = make_variant(spec, tiers, CONTEXT, 1).ranks
    assert torch.equal(logits, again) and hits == same_hits and hits.hits > 0 < hits.admitted
    if way == ("streamed", None):
        assert torch.equal(logits, without)
    assert ((logits - without) ** 2).mean() < ROUNDED * (without**2).mean()
    follower = follow_plan(spec, rank, cache)
    assert replay_run(record, record.layers, follower, FOLLOW_TOKENS) == hits
