"""Cuts of routed and shared experts: every row of every expert is on one rank, whatever the ratios, types and sizes."""

from dataclasses import replace
from math import prod

import numpy as np
import pytest
import torch
from experts_file import ExpertsFile
from hypothesis import given, settings
from hypothesis import strategies as st

from pshard.cuts.check_cut import UnitCut, check_cut
from pshard.cuts.tensor_cuts import cut_model, cut_units, source_ranges
from pshard.errors import UserError
from pshard.model import ModelSpec
from pshard.model_config import Experts
from pshard.quant import QUANT_TYPES, ROW_BLOCK
from pshard.runtime.memory.weights import pack_unit, view_unit
from pshard.tensor import TensorSpec
from pshard.units.moe.experts import BIASES, EXPERTS, count_inner
from pshard.units.moe.router import ROUTER
from pshard.units.moe.shared_experts import SCALE, SHARED_EXPERTS


class Header(ExpertsFile):
    """Shapes without weights."""

    def _draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return np.empty(0, np.float32)


def with_type(spec: ModelSpec, qtype: str) -> ModelSpec:
    """The model with the stacks and shared matrices in that type."""

    def turn(tensor: TensorSpec) -> TensorSpec:
        turned = len(tensor.shape) == 2 and ("exps" in tensor.role or "shexp" in tensor.role)
        return replace(tensor, qtype=qtype) if turned else tensor

    return replace(spec, units=tuple(replace(u, tensors=tuple(map(turn, u.tensors))) for u in spec.units))


@st.composite
def specs(draw: st.DrawFn) -> ModelSpec:
    qtype = draw(st.sampled_from(["F32", "BF16", "Q8_0", "MXFP4", "Q4_K"]))
    block = QUANT_TYPES[qtype].block
    inner = [block * draw(st.integers(1, 9)) if block > 1 else draw(st.integers(1, 200)) for _ in range(2)]
    biases = draw(st.booleans())
    rule = Experts(
        draw(st.integers(2, 6)), 2, inner[0], "chosen" if biases else "softmax", biases=biases,
        d_shared=draw(st.sampled_from([0, inner[1]])), shared_gate=draw(st.booleans()),
    )  # fmt: skip
    return with_type(Header(rule, layers=draw(st.integers(1, 3)), d_model=max(32, block)).spec, qtype)


ratios = st.lists(st.integers(0, 5).map(float), min_size=1, max_size=5).filter(lambda r: sum(r) > 0).map(tuple)


def count_held(tensor: TensorSpec, parts: int, tables: list[dict]) -> np.ndarray:
    """How often each element of each part is held: [parts, rows, cols] of one part."""
    rows = tensor.rows // parts if tensor.parts else tensor.rows
    cols = tensor.cols // parts if not tensor.parts else tensor.cols
    held = np.zeros((parts, rows, cols), int)
    for table in tables:
        r0, r1, c0, c1 = table.get(tensor.name, (0, 0, 0, 0))
        held[:, r0:r1, c0:c1] += 1
    return held


@settings(max_examples=50)
@given(specs(), ratios)
def test_every_row_of_every_expert_is_held_once(spec: ModelSpec, shares: tuple[float, ...]) -> None:
    tables = [source_ranges(spec, shares, r) for r in range(len(shares))]
    ranks = [cut_model(spec, shares, r) for r in range(len(shares))]
    for unit in spec.units:
        held = [rank.unit(unit.name) for rank in ranks]
        for tensor in unit.tensors:
            stacked = tensor.parts or (tensor.role in BIASES[:2] and spec.config.experts.count) or 1
            found = count_held(tensor, stacked, [t[unit.name] for t in tables])
            if unit.kind is ROUTER:
                assert (found == len(shares)).all(), tensor.name
            elif unit.kind in (EXPERTS, SHARED_EXPERTS) and tensor.role != SCALE:
                assert (found == 1).all(), tensor.name
                own = [u.by_role[tensor.role] for u in held if tensor.role in u.by_role]
                assert sum(t.file_nbytes for t in own) == tensor.file_nbytes
                assert all(t.parts == tensor.parts for t in own)


@settings(max_examples=50)
@given(specs(), ratios)
def test_bounds_are_between_records_and_quant_blocks_and_a_zero_share_holds_no_expert(
    spec: ModelSpec, shares: tuple[float, ...]
) -> None:
    for rank, share in enumerate(shares):
        own, table = cut_model(spec, shares, rank), source_ranges(spec, shares, rank)
        assert own.config.experts is not None
        for unit in own.units:
            if unit.kind not in (EXPERTS, SHARED_EXPERTS):
                continue
            assert share or not unit.tensors
            for t in unit.tensors:
                r0, r1, c0, c1 = table[unit.name][t.name]
                assert prod(t.shape) % ((r1 - r0) * (c1 - c0)) == 0
                block = QUANT_TYPES[t.qtype].block
                assert c0 % block == c1 % block == 0 or len(t.shape) == 1
                if "up" in t.role and len(t.shape) == 2:
                    assert r0 % ROW_BLOCK == 0
            if unit.kind is EXPERTS:
                assert own.config.experts.d_expert >= count_inner(unit.by_role)


@pytest.mark.parametrize("shares", [(1.0, 1.0), (3.0, 0.0, 2.0)], ids=str)
def test_a_rank_packs_its_rows_of_every_expert(shares: tuple[float, ...]) -> None:
    rule = Experts(4, 2, 48, "chosen", biases=True, d_shared=32, shared_gate=True)
    file = ExpertsFile(rule, layers=2)
    summed: dict[str, float] = {}
    for rank in range(len(shares)):
        own, ranges = cut_model(file.spec, shares, rank), source_ranges(file.spec, shares, rank)
        for unit in own.units:
            blob = torch.zeros(unit.packed_nbytes, dtype=torch.uint8)
            pack_unit(file, unit, blob, ranges)
            weights = view_unit(unit, blob)
            for role, vector in weights.vectors.items():
                summed[role] = summed.get(role, 0.0) + float(vector.double().sum())
            for tensor in unit.matrices:
                if tensor.parts:
                    r0, r1, c0, c1 = ranges[unit.name][tensor.name]
                    cols = file.spec.unit(unit.name).by_role[tensor.role].cols
                    whole = file.values[tensor.name].reshape(rule.count, -1, cols)
                    packed = weights.matrices[tensor.role].data.numpy().view(np.float32)
                    np.testing.assert_array_equal(packed, whole[:, r0:r1, c0:c1].ravel())
    for role in BIASES:
        wanted = sum(float(v.astype(np.float64).sum()) for name, v in file.values.items() if name.endswith(role))
        assert summed[role] == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("kind", "role", "fields", "reason"),
    [
        (EXPERTS, "ffn_up_exps.weight", {"ranges": ((0, 16), (16, 48))}, "ffn_up_exps.bias is not cut as"),
        (EXPERTS, "ffn_up_exps.weight", {"stacks": 1}, "is 4 matrices but is cut as 1"),
        (EXPERTS, "ffn_up_exps.bias", {"stacks": 1}, "is not cut as ffn_up_exps.weight is"),
        (EXPERTS, "ffn_down_exps.weight", {"axis": "none", "ranges": ()}, "needs all of its inputs"),
        (EXPERTS, "ffn_down_exps.bias", {"axis": "none", "ranges": ()}, "added on exactly one rank"),
        (ROUTER, "ffn_gate_inp.weight", {"axis": "rows", "ranges": ((0, 2), (2, 4))}, "chooses among all but is cut"),
        (ROUTER, "ffn_gate_inp.bias", {"axis": "rows", "ranges": ((0, 2), (2, 4))}, "chooses among all but is cut"),
        (SHARED_EXPERTS, SCALE, {"axis": "rows", "ranges": ((0, 32), (32, 64))}, "needs all of its inputs but is cut"),
        (SHARED_EXPERTS, "ffn_down_shexp.weight", {"ranges": ((0, 16), (16, 24))}, "is cut up to 24 of 32"),
    ],
)  # fmt: skip
def test_a_wrong_cut_is_refused_with_its_reason(kind: object, role: str, fields: dict, reason: str) -> None:
    rule = Experts(4, 2, 48, "chosen", biases=True, d_shared=32, shared_gate=True)
    spec = ExpertsFile(rule, layers=1).spec
    unit, cut = next((u, c) for u, c in zip(spec.units, cut_units(spec, (1.0, 1.0))) if u.kind is kind)
    check_cut(spec, unit, cut)
    wrong = UnitCut(cut.unit, tuple(replace(t, **fields) if t.role == role else t for t in cut.tensors))
    with pytest.raises(UserError, match=reason):
        check_cut(spec, unit, wrong)


def test_256_column_blocks_take_turns_over_the_layers() -> None:
    """768 rows in Q4_K are three blocks: of two ranks each has two of them in every other layer."""
    spec = with_type(Header(Experts(4, 2, 768), layers=4, d_model=256).spec, "Q4_K")
    ranks = [cut_model(spec, (1.0, 1.0), r) for r in range(2)]
    held = [[count_inner(u.by_role) for u in rank.units if u.kind is EXPERTS] for rank in ranks]
    assert sorted(held) == [[256, 512, 256, 512], [512, 256, 512, 256]]
    assert all(rank.config.experts and rank.config.experts.d_expert == 512 for rank in ranks)
