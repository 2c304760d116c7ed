"""Engines split by layers (`-sm layer`) give one rank's logits bit for bit: any number of ranks, any placement."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engines import open_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from model_files import write_gguf
from plan_samples import make_tier
from routing_samples import make_record
from test_parallel_group import slow
from thread_ranks import random_tiers, run_ranks

from pshard.model import ModelSpec
from pshard.plan import TierPlan
from pshard.routing.follow_use import HitCounts
from pshard.routing.measure_popularity import measure_popularity
from pshard.runtime.engine import Engine
from pshard.units.moe.expert_cache import ExpertCache, slot_nbytes

CONTEXT = 96
MODELS = {
    "llama": {"arch": "llama", "qtype": "Q8_0", "tied": True, "n_layers": 3},
    "qwen2": {"arch": "qwen2", "qtype": "F32", "n_heads": 6, "n_kv_heads": 2, "n_layers": 5},
    "qwen3": {"arch": "qwen3", "qtype": "Q4_0", "qtypes": {"attn_output.weight": "Q6_K"}, "n_layers": 4},
    "wide head": {"arch": "llama", "qtype": "Q4_0", "vocab": 9999, "n_layers": 2},  # as large as the layers together
}
SHARES = [
    (1.0,),
    (1.0, 1.0),
    (3.0, 1.0),
    (1.0, 9.0),
    (1.0,) * 3,
    (2.0, 0.0, 5.0),
    (0.0, 1.0),
    (1.0, 0.0),
    (1.0,) * 4,
    (1.0,) * 8,  # more ranks than layers
]
UNLIKE = [(1.0, 1.0), (2.0, 0.0, 5.0), (1.0,) * 8]  # like shares, a rank without any, more ranks than layers or heads


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: write_gguf(folder / f"{name}.gguf", **args) for name, args in MODELS.items()}


def talk(engine) -> torch.Tensor:
    """A long prompt of which the last logits are wanted (its micro-batches follow each other), a shorter one with all
    logits, single tokens: [n, vocabulary]."""
    rng = random.Random(1)
    ids = [[rng.randrange(320) for _ in range(n)] for n in (53, 19, 1, 1, 4, 1)]
    first = engine.forward(ids[0])
    return torch.cat([first[None], *(engine.forward(part, all_logits=True) for part in ids[1:])])


@pytest.fixture(scope="module")
def wanted(models: dict[str, Path]) -> dict[str, torch.Tensor]:
    found = {}
    for name, path in models.items():
        with open_engine(path, context=CONTEXT, tokens=(4, 16)) as engine:
            found[name] = talk(engine)
    return found


@pytest.mark.quick("qwen2-(2.0, 0.0, 5.0)")
@pytest.mark.parametrize(
    ("name", "shares"),
    [*zip(["llama", "qwen2", "wide head"], UNLIKE), *(slow("qwen3", shares) for shares in UNLIKE)],
    ids=str,
)
def test_logits_are_those_of_one_rank(
    models: dict[str, Path], wanted: dict[str, torch.Tensor], name: str, shares: tuple[float, ...]
) -> None:
    for logits in run_ranks(models[name], shares, talk, CONTEXT, mode="layer"):
        assert torch.equal(logits, wanted[name])


@settings(max_examples=16)
@given(seed=st.integers(0, 10**6), shares=st.sampled_from(SHARES), name=st.sampled_from(sorted(MODELS)))
def test_each_rank_may_place_its_layers_as_it_likes(
    models: dict[str, Path], wanted: dict[str, torch.Tensor], seed: int, shares: tuple[float, ...], name: str
) -> None:
    for logits in run_ranks(models[name], shares, talk, CONTEXT, random_tiers(seed, CONTEXT), mode="layer"):
        assert torch.equal(logits, wanted[name])


@pytest.mark.quick("layer")
@pytest.mark.parametrize("mode", ["layer", "tensor"])
def test_ranks_find_what_they_have_of_experts_in_an_order_of_popularity(tmp_path: Path, mode: str) -> None:
    """The first three in VRAM, the last two on the CPU, others brought: which they are depends on the layer."""
    path = write_gguf(tmp_path / "m.gguf", "qwen3moe", n_layers=3)
    popularity = measure_popularity(replace(make_record(50, 3, experts=8), layers=(0, 1, 2)))
    assert len({popularity.order_of(layer) for layer in range(3)}) == 3

    def tiers(spec):
        places = {u.name: ("pinned", "vram" if u.kind.state else None) for u in spec.units}
        places |= {u.name: ("streamed", None, 2, 3) for u in spec.units if u.kind.parts and u.tensors}
        return tuple(make_tier(spec, n, places, 2, CONTEXT, 1) for n in (4, 16))

    with open_engine(path, context=CONTEXT, tokens=(4, 16)) as engine:
        expected = talk(engine)
    for logits in run_ranks(path, (2.0, 1.0), talk, CONTEXT, tiers, mode=mode, popularity=popularity):
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.quick("layer-shares0")
@pytest.mark.parametrize(("mode", "shares"), [("layer", (2.0, 1.0)), ("tensor", (1.0, 1.0))])
def test_each_rank_has_slots_for_what_it_holds_of_the_experts(
    tmp_path: Path, mode: str, shares: tuple[float, ...]
) -> None:
    """By what its own routers choose; plans of the planner are run in test_rank_slots.py."""
    path = write_gguf(tmp_path / "m.gguf", "qwen3moe", n_layers=3)

    def tiers(spec: ModelSpec) -> tuple[TierPlan, ...]:
        places = {u.name: ("pinned", "vram" if u.kind.state else None) for u in spec.units}
        places |= {u.name: ("streamed", None) for u in spec.units if u.kind.parts and u.tensors}
        return tuple(make_tier(spec, n, places, 2, CONTEXT, 1) for n in (4, 16))

    def pool(spec: ModelSpec) -> tuple[ExpertCache, ...]:
        units = [unit for unit in spec.units if unit.kind.parts and unit.tensors]
        names = tuple(unit.name for unit in units)
        return (ExpertCache(names, 2 * len(units), slot_nbytes(units[0]), "lru", 3),)

    def count(engine: Engine) -> tuple[torch.Tensor, HitCounts]:
        return talk(engine), engine.expert_hits

    without = run_ranks(path, shares, talk, CONTEXT, tiers, mode=mode)
    ranks = run_ranks(path, shares, count, CONTEXT, tiers, mode=mode, pools=pool)
    for (logits, hits), expected in zip(ranks, without):
        assert torch.equal(logits, expected) and hits.hits > 0 < hits.admitted
    if mode == "tensor":  # all choose the same, so all have slices of the same experts in their slots
        assert ranks[0][1] == ranks[1][1]
