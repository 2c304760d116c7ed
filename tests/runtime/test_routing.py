"""Runs that record routing, and runs whose experts lie in an order of popularity."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from experts_file import N_EXPERTS, RULES, ExpertsFile, skew_routers
from plan_samples import make_variant
from test_experts import CLOSE, WAYS, make_toy_tier
from toy_kinds import CONTEXT, VOCAB

from pshard.model_config import Experts
from pshard.plan import TierPlan
from pshard.planner.routing.measure_hits import measure_hits
from pshard.routing.expert_map import map_experts
from pshard.routing.measure_popularity import measure_popularity
from pshard.routing.order_experts import order_experts
from pshard.routing.record import RoutingRecord
from pshard.runtime.build_engine import build_engine
from pshard.runtime.devices.device import open_device
from pshard.runtime.engine import Engine
from pshard.runtime.memory.picks import Picks
from pshard.units.moe.popularity import Popularity


def open_recorder(
    file: ExpertsFile,
    tiers: tuple[TierPlan, ...],
    popularity: Popularity | None = None,
    kernels: str = "plain",
    records: bool = True,
) -> Engine:
    variant = replace(make_variant(file.spec, tiers, CONTEXT, 1), popularity=popularity)
    return build_engine(file, variant, open_device("cpu"), kernels=kernels, records=records)


def draw_text(n: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(n)]


def read_text(engine: Engine, text: list[int], prompt: int) -> torch.Tensor:
    """Logits of all tokens: a prompt, then one token after the other."""
    rows = [engine.forward(text[:prompt], all_logits=True)]
    rows += [engine.forward([token], all_logits=True) for token in text[prompt:]]
    return torch.cat(rows)


def record_text(file: ExpertsFile, text: list[int]) -> RoutingRecord:
    tiers = tuple(make_toy_tier(file, n, [("pinned", None)] * 3, 1, 1) for n in (1, 16))
    with open_recorder(file, tiers) as engine:
        read_text(engine, text, 20)
        return engine.record_routing("ab")


@pytest.mark.parametrize(
    ("way", "router", "kernels"),
    [
        (WAYS[0], "cpu", "fast"),
        (WAYS[2], "streamed", "fast"),
        (WAYS[6], "pinned", "plain"),
    ],
    ids=str,
)
def test_a_record_has_the_experts_that_a_plain_forward_chooses(way: tuple, router: str, kernels: str) -> None:
    """Wherever router and experts are, in prompts of several micro-batches and in single tokens that are replayed."""
    file, text, chosen = ExpertsFile(RULES["with shared experts"]), draw_text(60), list[list[list[int]]]()
    others = {unit.name: (router, None) for unit in file.spec.units if unit.kind.routes}
    tiers = tuple(make_toy_tier(file, n, [way] * 3, 2, 1, others) for n in (1, 16))
    with open_recorder(file, tiers, kernels=kernels) as engine:
        read_text(engine, text, 40)
        record = engine.record_routing("ab")
    file.logits(text, chosen)
    assert record.batches == (16, 16, 8, *[1] * 20) and record.layers == (0, 1, 2)
    assert np.array_equal(np.sort(record.ids, 2), np.sort(np.array(chosen).transpose(1, 0, 2), 2))


def test_a_run_that_does_not_record_keeps_nothing() -> None:
    file = ExpertsFile()
    tier = make_toy_tier(file, 16, [("pinned", None)] * 3, 1, 1)
    with open_recorder(file, (tier,), records=False) as engine:
        engine.forward([1, 2])
        with pytest.raises(ValueError, match="not built to record"):
            engine.record_routing("ab")


def test_recording_changes_no_bit_of_the_logits() -> None:
    file, text = ExpertsFile(), draw_text(30)
    tiers = tuple(make_toy_tier(file, n, [("streamed", None, 3, 2)] * 3, 1, 1) for n in (1, 16))
    found = []
    for records in (False, True):
        with open_recorder(file, tiers, kernels="fast", records=records) as engine:
            found.append(read_text(engine, text, 10))
    assert torch.equal(*found)


@pytest.mark.quick("('streamed', None, 3)-softmax")
@pytest.mark.parametrize(  # rules take turns
    ("way", "rule"),
    [
        pytest.param(way, name, marks=[pytest.mark.slow] if i % 2 else [])
        for i, (way, name) in enumerate(zip(WAYS, 2 * list(RULES)))
    ],
    ids=str,
)
def test_experts_in_an_order_of_popularity_give_the_logits_of_the_model(way: tuple, rule: str) -> None:
    """Also with equal scores: routers keep their rows, so that ties go to the lower number as before."""
    file = skew_routers(ExpertsFile(RULES[rule]), 1.0)
    for unit in file.spec.units:
        for tensor in unit.tensors if unit.kind.routes else ():
            values = file.values[tensor.name]
            if len(values) == N_EXPERTS:
                values[5] = values[2]
    popularity = measure_popularity(replace(record_text(file, draw_text(40)), fingerprint="x"))
    assert popularity.order_of(0) != tuple(range(N_EXPERTS))
    text = draw_text(30, seed=1)
    tiers = tuple(make_toy_tier(file, n, [way] * 3, 2, 1) for n in (1, 16))
    with open_recorder(file, tiers, popularity) as engine:
        torch.testing.assert_close(read_text(engine, text, 20).double(), file.logits(text), **CLOSE)


def test_pinned_experts_give_the_same_bits_in_any_order() -> None:
    file, text = skew_routers(ExpertsFile(RULES["of the chosen"]), 1.0), draw_text(40)
    popularity = measure_popularity(record_text(file, draw_text(60)))
    tiers = tuple(make_toy_tier(file, n, [("pinned", None)] * 3, 1, 1) for n in (1, 16))
    found = []
    for order in (None, popularity):
        with open_recorder(file, tiers, order, "fast") as engine:
            found.append(read_text(engine, text, 20))
    assert torch.equal(*found)


def test_the_share_of_hits_that_a_run_measures_is_that_of_its_record() -> None:
    """And near to what the text before it promised, with other experts in VRAM in each layer."""
    file, text = skew_routers(ExpertsFile(Experts(16, 2, 16)), 1.5), draw_text(250)
    popularity = measure_popularity(record_text(file, text[:100]))
    ways = [("streamed", None, 3, 4), ("pinned", None, 12), ("cpu", None)]
    tiers = tuple(make_toy_tier(file, n, ways, 2, 1) for n in (1, 16))
    spec = order_experts(file.spec, popularity)
    chosen = list[list[list[int]]]()
    file.logits(text, chosen)
    hits = [
        sum(expert in popularity.order_of(layer)[:n] for token in chosen[layer][100:] for expert in token)
        for layer, n in ((0, 4), (1, 4))
    ]
    with open_recorder(file, tiers, popularity) as engine:
        read_text(engine, text, 100)
        tier = map_experts(spec, engine.plan)[0].tiers[0]
        measured, expected = measure_hits(engine.record_routing("ab"), spec, tier), tier.served[0]
    assert measured == sum(hits) / (3 * 2 * 150)
    assert measured == pytest.approx(expected, abs=0.08) and expected > 2 / 3 * 4 / 16 + 0.1


def test_choices_of_some_layers_are_those_of_their_routers() -> None:
    """Slots of one pool ask for its layers, of which there may be others before and between."""
    file, tokens = ExpertsFile(layers=4), 3
    spec = file.spec
    picks = Picks(spec, tokens, lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8))
    routers = [unit for unit in spec.units if unit.kind.routes]
    chosen = np.arange(len(routers) * tokens * picks._stage.shape[2]).reshape(len(routers), tokens, -1)
    picks._stage.numpy()[:] = chosen
    layers = tuple(unit.layer for unit in routers)
    some = (layers[-1], layers[1])
    assert np.array_equal(picks.view(2, some), chosen[[len(layers) - 1, 1], :2].swapaxes(0, 1))
