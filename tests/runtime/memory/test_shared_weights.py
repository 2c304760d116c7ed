"""Engines on one model that share one packing of its weights."""

from pathlib import Path

import torch
from engines import open_engine, pinned_everywhere
from model_files import write_gguf
from plan_samples import make_tier, make_variant

from pshard.models import open_model
from pshard.runtime.build_engine import build_engine
from pshard.runtime.devices.device import open_device
from pshard.runtime.memory.weights import HostWeights
from pshard.units.attention import ATTENTION


def test_engines_on_lent_weights_compute_what_one_with_its_own_computes(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen3", qtype="Q4_0", n_layers=2)
    file, ids = open_model(path), list(range(40))
    with open_engine(path) as engine:
        expected = engine.forward(ids, all_logits=True)
    weights = HostWeights(file.spec.units, open_device("cpu"))
    weights.load(file, None, lambda _: None)
    streamed = {u.name: ("streamed", "vram" if u.kind is ATTENTION else None) for u in file.spec.units}
    streamed["embedding"] = ("cpu", None)
    for tiers in (pinned_everywhere(file.spec), tuple(make_tier(file.spec, n, streamed, 2, 128, 1) for n in (1, 64))):
        with build_engine(
            file, make_variant(file.spec, tiers, 128, 1), open_device("cpu"), kernels="plain", lender=weights
        ) as engine:
            got = engine.forward(ids, all_logits=True)
        assert torch.equal(got, expected)
