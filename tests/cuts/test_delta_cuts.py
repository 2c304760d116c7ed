"""Cuts of gated delta nets: whole key heads with all the value heads that use them, in both orders; all else is
refused."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hybrid_files import random_hybrid, write_hybrid_gguf

from pshard.cuts.check_cut import TensorCut, UnitCut, check_cut
from pshard.cuts.tensor_cuts import cut_model, cut_units, source_ranges
from pshard.errors import UserError
from pshard.model import ModelSpec
from pshard.models import open_model
from pshard.runtime.memory.weights import pack_unit, view_unit
from pshard.units.delta_net import DELTA_NET, OUT, QUERY_KEY, VALUE

RATIOS = [(1.0, 1.0), (1.0, 0.0), (0.3, 0.7), (0.0, 1.0, 1.0), (1.0, 2.0, 1.0)]


@pytest.fixture(scope="module", params=["next", "dense"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("m")
    return write_hybrid_gguf(folder / "m.gguf", request.param, random_hybrid(request.param))


@pytest.fixture
def spec(path: Path) -> ModelSpec:
    with open_model(path) as file:
        return file.spec


def first_net(spec: ModelSpec) -> int:
    return next(i for i, unit in enumerate(spec.units) if unit.kind is DELTA_NET)


@pytest.mark.parametrize("shares", RATIOS, ids=str)
def test_slices_are_smaller_nets_of_the_same_order_and_together_the_whole(path: Path, shares: tuple) -> None:
    with open_model(path) as file:
        spec, delta = file.spec, file.spec.config.delta
        index = first_net(spec)
        whole = spec.units[index]
        blob = torch.empty(whole.packed_nbytes, dtype=torch.uint8)
        pack_unit(file, whole, blob)
        matrices = {
            r: m.data.view(torch.float32).view(m.rows, m.cols) for r, m in view_unit(whole, blob).matrices.items()
        }
        found, heads = [], 0
        for rank in range(len(shares)):
            unit = cut_model(spec, shares, rank).units[index]
            if not unit.tensors:
                continue
            part = torch.empty(unit.packed_nbytes, dtype=torch.uint8)
            pack_unit(file, unit, part, source_ranges(spec, shares, rank))
            own = {
                r: m.data.view(torch.float32).view(m.rows, m.cols) for r, m in view_unit(unit, part).matrices.items()
            }
            keys = own[QUERY_KEY].shape[0] // (2 * delta.head)
            assert own[VALUE].shape[0] == keys * delta.group * delta.head
            for key in range(keys):  # of each key head, here and in the whole, its value heads' rows and columns
                here, there = ([k + n * i if delta.tiled else k * delta.group + i for i in range(delta.group)]
                               for k, n in ((key, keys), (heads + key, delta.key_heads)))  # fmt: skip
                for mine, theirs in zip(here, there):
                    d = delta.head
                    span, of_whole = slice(d * mine, d * mine + d), slice(d * theirs, d * theirs + d)
                    assert torch.equal(own[VALUE][span], matrices[VALUE][of_whole])
                    assert torch.equal(own[OUT][:, span], matrices[OUT][:, of_whole])
            heads += keys
            found.append(keys)
    assert sum(found) == delta.key_heads


def test_ranks_differ_by_what_rounding_gives_them_and_make_it_up(tmp_path: Path) -> None:
    """Two key heads over three ranks: no rank has all, and over the layers each has its share."""
    with open_model(write_hybrid_gguf(tmp_path / "m.gguf", "moe", random_hybrid("moe", 12))) as file:
        cuts = [c for c, u in zip(cut_units(file.spec, (1.0, 1.0, 1.0)), file.spec.units) if u.kind is DELTA_NET]
    counts = np.array([[sum(c.tensors[0].ranges[r][1] > c.tensors[0].ranges[r][0] for c in cuts)] for r in range(3)])
    assert len(cuts) == 9 and counts.min() >= 5


def bad_cut(spec: ModelSpec, role: str, **change: object) -> None:
    index = first_net(spec)
    unit, good = spec.units[index], cut_units(spec, (1.0, 1.0))[index]
    assert role in [t.role for t in good.tensors]
    check_cut(spec, unit, good)
    check_cut(spec, unit, UnitCut(unit.name, tuple(
        replace(t, **change) if t.role == role else t for t in good.tensors)))  # fmt: skip


@pytest.mark.parametrize(
    ("role", "change", "why"),
    [
        ("ssm_norm.weight", {"axis": "rows", "ranges": ((0, 16), (16, 32))}, "the same for every head"),
        ("attn_gate.weight", {"ranges": ((0, 32), (32, 96))}, "not cut at the same key heads"),
        ("ssm_beta.weight", {"ranges": ((0, 2), (2, 2))}, "not cut at the same key heads"),
        ("delta_v.weight", {"stacks": 7}, "not cut at the same key heads"),
        ("ssm_a", {"ranges": ((0, 0), (0, 1))}, "not cut where the heads are"),
        ("delta_conv_v.weight", {"axis": "none", "ranges": ()}, "not cut where the heads are"),
        ("ssm_out.weight", {"stacks": 7}, "cut|columns"),
    ],
)
def test_tensors_that_are_cut_elsewhere_are_named(spec: ModelSpec, role: str, change: dict, why: str) -> None:
    with pytest.raises(UserError, match=why):
        bad_cut(spec, role, **change)


def test_nothing_cut_gives_no_sum(spec: ModelSpec) -> None:
    unit = spec.units[first_net(spec)]
    with pytest.raises(UserError, match="the all-reduce would count wrongly"):
        check_cut(spec, unit, UnitCut(unit.name, tuple(TensorCut(t.role, "none", ()) for t in unit.tensors)))


def test_gates_of_attention_are_cut_where_its_queries_are(spec: ModelSpec) -> None:
    index = next(i for i, unit in enumerate(spec.units) if "attn_q_gate.weight" in unit.by_role)
    unit, good = spec.units[index], cut_units(spec, (1.0, 3.0))[index]
    bad = tuple(replace(t, ranges=t.ranges[::-1]) if "gate" in t.role else t for t in good.tensors)
    with pytest.raises(UserError, match="gate"):
        check_cut(spec, unit, UnitCut(unit.name, bad))
