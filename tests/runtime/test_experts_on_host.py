"""Experts that lie in VRAM under every tier have no copy in host memory."""

import random
from dataclasses import replace

import pytest
import torch
from experts_file import N_EXPERTS, RULES, WAYS, ExpertsFile
from plan_samples import make_variant
from planner_cases import DESKTOP, OWN
from test_experts import check_talk, make_toy_tier, open_toy
from toy_kinds import CONTEXT

from pshard.plan import TierPlan
from pshard.planner.check_plan import _host_bytes
from pshard.planner.prepare_ranks import prepare_ranks
from pshard.planner.price.datasheet import profile_from_datasheet
from pshard.planner.price.host_limits import kept_bytes
from pshard.planner.program.coefficients import count_tier, tier_problem
from pshard.planner.program.counts import host_bytes
from pshard.planner.program.unit_classes import group_units
from pshard.quant import align
from pshard.runtime.build_engine import build_engine
from pshard.runtime.devices.device import open_device
from pshard.runtime.memory import weights
from pshard.runtime.memory.weights import HostWeights, view_unit
from pshard.units.divide_unit import find_portion, last_parts, whole_unit
from pshard.units.moe.experts import EXPERTS

LYING = {way: way[3] if way[3:] else N_EXPERTS - way[2] for way in WAYS if way[3:] or (way[0] == "pinned" and way[2:])}


def make_tiers(file: ExpertsFile, *ways: tuple) -> tuple[TierPlan, ...]:
    """Of 1, 16, ... tokens, in which all layers' experts are placed so."""
    layers = len([u for u in file.spec.units if u.kind is EXPERTS])
    return tuple(make_toy_tier(file, 16**i, [way] * layers, 2, 1) for i, way in enumerate(ways))


def count_bytes(file: ExpertsFile, lying: int) -> int:
    """Of host memory, where only the embedding lies there, and experts but for so many of every layer."""
    total = file.spec.unit("embedding").packed_nbytes
    for unit in file.spec.units:
        for t in unit.tensors if unit.kind is EXPERTS else ():
            total += align(t.packed_nbytes * (t.parts - lying) // t.parts, 64) if t.parts else align(4 * t.cols, 64)
    return total


@pytest.mark.quick("('pinned', None, 3)-5")
@pytest.mark.parametrize(("way", "lying"), LYING.items(), ids=str)
def test_host_memory_holds_the_experts_that_some_tier_has_elsewhere(way: tuple, lying: int) -> None:
    """And what all of them share, as biases, which each side needs."""
    file = ExpertsFile(RULES["of the chosen"])
    with open_toy(file, make_tiers(file, way, ("streamed", None, 0, lying)), 1) as engine:
        assert engine._executor.host_nbytes == count_bytes(file, lying)
        check_talk(engine, file, 1, lying)


def test_experts_that_a_tier_has_outside_vram_are_all_in_host_memory() -> None:
    file = ExpertsFile()
    tiers = make_tiers(file, ("streamed", None, 0, 6), ("streamed", None))
    with open_toy(file, tiers, 1) as engine:
        assert engine._executor.host_nbytes == count_bytes(file, 0)
        check_talk(engine, file, 1, 0)


def test_layers_that_are_whole_in_vram_behind_divided_ones_are_not_in_host_memory() -> None:
    file = ExpertsFile()
    ways: list[tuple] = [("streamed", None, 0, 5), ("pinned", None), ("pinned", None, 3)]
    tiers = tuple(make_toy_tier(file, n, ways, 2, 1) for n in (1, 16))
    with open_toy(file, tiers, 1) as engine:
        assert set(engine._executor.weights.held) == {"embedding", "blk.0.experts", "blk.2.experts"}
        check_talk(engine, file, 1, 0)


@pytest.mark.parametrize("seed", range(2))
def test_weights_on_loan_give_the_bits_of_those_that_an_engine_packs(seed: int) -> None:
    """A lender holds all experts, an engine of its own only those that do not stay in VRAM."""
    file, rng = ExpertsFile(), random.Random(seed)
    ways = [rng.choice(list(LYING)) for _ in range(3)]
    tiers = tuple(make_toy_tier(file, n, ways, 2, 1) for n in (1, 16))
    lender = HostWeights(map(whole_unit, file.spec.units), open_device("cpu"))
    lender.load(file, None, lambda _: None)
    found = []
    for lends in (lender, None):
        variant = make_variant(file.spec, tiers, CONTEXT, 1)
        with build_engine(file, variant, open_device("cpu"), kernels="plain", lender=lends) as engine:
            found.append(engine.forward(list(range(20)), all_logits=True))
    assert torch.equal(*found)


def test_a_portion_is_found_in_a_blob_of_another_one() -> None:
    file, rng = ExpertsFile(RULES["of the chosen"]), random.Random(0)
    unit = file.spec.unit("blk.0.experts")
    whole, held = whole_unit(unit), last_parts(unit, 3)
    blob = torch.tensor([rng.randrange(256) for _ in range(unit.packed_nbytes)], dtype=torch.uint8)
    part = torch.zeros(held.nbytes, dtype=torch.uint8)
    for piece in held.pieces:
        part[piece.to : piece.to + piece.nbytes] = blob[piece.start : piece.start + piece.nbytes]
    wanted = last_parts(unit, 5)
    assert find_portion(wanted, whole) == wanted
    for portion, origin in ((find_portion(wanted, held), part), (wanted, blob)):
        copy = torch.zeros(wanted.nbytes, dtype=torch.uint8)
        for piece in portion.pieces:
            copy[piece.to : piece.to + piece.nbytes] = origin[piece.start : piece.start + piece.nbytes]
        assert portion.first == 5
        view = view_unit(portion.unit, copy)
        expected = view_unit(unit, blob)
        for role, matrix in view.matrices.items():
            rows = expected.matrices[role].data
            assert torch.equal(matrix.data, rows[rows.numel() * 5 // N_EXPERTS :])
        assert all(torch.equal(v, expected.vectors[role]) or v.isnan().any() for role, v in view.vectors.items())
    with pytest.raises(ValueError, match="is not there"):
        find_portion(last_parts(unit, 2), held)


@pytest.mark.parametrize("way", LYING, ids=str)
def test_every_count_of_a_plan_is_what_a_run_takes(way: tuple) -> None:
    """Of the search, of the integer program, and of the check of a finished plan."""
    file = ExpertsFile()
    tiers, profile = make_tiers(file, way, way), profile_from_datasheet(DESKTOP)
    variant = make_variant(file.spec, tiers, CONTEXT, 1)
    with build_engine(file, variant, open_device("cpu"), kernels="plain") as engine:
        taken = engine._executor.host_nbytes
    (task,) = prepare_ranks(file.spec, profile, replace(variant.workload, vram_mib=(OWN + 64,), max_ubatch=16))
    share = tiers[0].placement("blk.0.experts").share
    classes = tuple(replace(c, on_cpu=(share.cpu,) * bool(share.cpu)) for c in group_units(file.spec))
    problem = tier_problem(task.room, classes, task.costs[0], 2, divide=True)
    assert kept_bytes(task.room, tiers) == taken
    assert host_bytes(problem, count_tier(classes, tiers[0])) == (taken, 0)
    assert _host_bytes(file.spec, variant, variant.ranks[0], "cuda") == taken


@pytest.mark.parametrize(
    ("order", "runs"), [((), 1), ((5, 6, 7, 0, 1, 2, 3, 4), 2), ((7, 6, 5, 4, 3, 2, 1, 0), 8)], ids=str
)
def test_experts_that_lie_together_in_the_file_are_packed_at_once(
    order: tuple[int, ...], runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, packed = ExpertsFile(), list[int]()
    unit = replace(file.spec.unit("blk.1.experts"), order=order)
    one_by_one, pack = torch.zeros(unit.packed_nbytes, dtype=torch.uint8), weights.pack_matrix
    for at, tensor in unit.offsets().values():
        size = tensor.packed_nbytes // tensor.parts
        part = replace(tensor, shape=(tensor.rows // tensor.parts, tensor.cols), parts=0)
        for place, number in enumerate(order or range(N_EXPERTS)):
            pack(file.part_bytes(tensor.name, number), part, one_by_one[at + place * size :][:size])
    monkeypatch.setattr(weights, "pack_matrix", lambda *given: (packed.append(1), pack(*given)))
    together = torch.zeros_like(one_by_one)
    weights.pack_unit(file, unit, together)
    assert torch.equal(together, one_by_one) and len(packed) == 3 * runs
