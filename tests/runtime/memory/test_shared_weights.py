"""Engines on one model that share one packing of its weights."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engines import open_engine, pinned_everywhere
from model_files import write_gguf
from plan_samples import make_tier, make_variant
from routing_samples import make_record

from pshard.models import open_model
from pshard.routing.measure_popularity import measure_popularity
from pshard.runtime.build_engine import build_engine
from pshard.runtime.devices.device import open_device
from pshard.runtime.memory.weights import HostWeights
from pshard.units.attention import ATTENTION
from pshard.units.divide_unit import whole_unit


def test_engines_on_lent_weights_compute_what_one_with_its_own_computes(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen3", qtype="Q4_0", n_layers=2)
    file, ids = open_model(path), list(range(40))
    with open_engine(path) as engine:
        expected = engine.forward(ids, all_logits=True)
    weights = HostWeights(map(whole_unit, file.spec.units), open_device("cpu"))
    weights.load(file, None, lambda _: None)
    streamed = {u.name: ("streamed", "vram" if u.kind is ATTENTION else None) for u in file.spec.units}
    streamed["embedding"] = ("cpu", None)
    for tiers in (pinned_everywhere(file.spec), tuple(make_tier(file.spec, n, streamed, 2, 128, 1) for n in (1, 64))):
        with build_engine(
            file, make_variant(file.spec, tiers, 128, 1), open_device("cpu"), kernels="plain", lender=weights
        ) as engine:
            got = engine.forward(ids, all_logits=True)
        assert torch.equal(got, expected)


def test_weights_that_were_packed_in_another_order_of_experts_are_not_taken(tmp_path: Path) -> None:
    file = open_model(write_gguf(tmp_path / "m.gguf", "qwen3moe", n_layers=1))
    weights = HostWeights(map(whole_unit, file.spec.units), open_device("cpu"))
    popularity = measure_popularity(replace(make_record(50, 1, experts=8), layers=(0,)))
    variant = replace(make_variant(file.spec, pinned_everywhere(file.spec), 128, 1), popularity=popularity)
    with pytest.raises(ValueError, match="in another order"):
        build_engine(file, variant, open_device("cpu"), kernels="plain", lender=weights)
