"""Layers that read the cells of others: these stand in VRAM in every tier, and all of them are on one rank."""

from dataclasses import replace

import pytest
from gemma4_files import SMALL, make_gemma4, write_gemma4
from planner_cases import OWN
from test_planner_ratios import PAIR

from pshard.cuts.check_cut import TensorCut, UnitCut, check_cut
from pshard.cuts.layer_cuts import cut_layers, share_layers
from pshard.cuts.rank_parts import cut_ranks
from pshard.cuts.tensor_cuts import cut_units
from pshard.errors import UserError
from pshard.model import ModelSpec
from pshard.models import open_model
from pshard.planner.check_plan import PlanError, check_variant
from pshard.planner.make_plan import plan_variant
from pshard.planner.price.datasheet import profile_from_datasheet
from pshard.workload import Split, Workload

CONTEXT = 1 << 17
STANDING = 16 << 20  # bytes at least, of the cells that a full layer lends in so long a context


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    recipe = replace(SMALL, context=CONTEXT)
    with open_model(write_gemma4(tmp_path_factory.mktemp("m") / "m.gguf", recipe, make_gemma4(recipe))) as file:
        return file.spec


def workload(*budgets: int, mode: str = "none") -> Workload:
    wanted = Workload(tuple(OWN + mib for mib in budgets), CONTEXT, max_ubatch=64, prompt=2000, generated=100)
    return wanted.under(Split(mode, (1 / len(budgets),) * len(budgets))) if len(budgets) > 1 else wanted


def test_cells_that_others_read_stand_in_vram_whatever_else_is_there(spec: ModelSpec) -> None:
    profile = profile_from_datasheet(replace(PAIR, ranks=1))
    variant = plan_variant(spec, profile, workload(45))
    check_variant((spec,), variant, "cuda")
    assert spec.standing_nbytes(variant.workload.state_shape) > STANDING
    rank = variant.ranks[0]
    bound = [u for u in spec.units if u.borrows or u.kind.stands]
    assert [u.layer for u in bound] == [2, 3, 4, 5, 6]
    for tier in rank.tiers:
        assert tier.buffers.scratch > STANDING
        assert any(p.has_state_on_host for p in tier.placements), "the other full layer's cells have no room"
        assert all(tier.placement(u.name).is_on_acc and tier.placement(u.name).kv is None for u in bound)
    tier = rank.tiers[0]
    moved = tuple(replace(p, where="cpu") if p.unit == "blk.5.attention" else p for p in tier.placements)
    changed = replace(variant, ranks=(replace(rank, tiers=(replace(tier, placements=moved), *rank.tiers[1:])),))
    with pytest.raises(PlanError, match=r"blk.5.attention cannot be cpu"):
        check_variant((spec,), changed, "cuda")


@pytest.mark.parametrize("mode", ["tensor", "layer"])
def test_plans_for_ranks_are_right(mode: str, spec: ModelSpec) -> None:
    variant = plan_variant(spec, profile_from_datasheet(PAIR), workload(50, 50, mode=mode))
    parts = cut_ranks(spec, variant.split)
    check_variant(parts, variant, "cuda")
    if mode == "layer":
        units = [[replace(u, tensors=()) if u.name == "blk.4.attention" else u for u in part.units] for part in parts]
        lacking = tuple(replace(part, units=tuple(own)) for part, own in zip(parts, units, strict=True))
        with pytest.raises(PlanError, match="are not the model's units, each once, in order"):
            check_variant(lacking, variant, "cuda")


@pytest.mark.parametrize("shares", [(1.0, 1.0), (5.0, 1.0), (1.0, 5.0), (1.0, 1.0, 1.0), (1.0, 0.0, 2.0)], ids=str)
def test_a_layer_is_on_the_rank_whose_cells_it_reads(shares: tuple[float, ...], spec: ModelSpec) -> None:
    runs = share_layers(spec, shares)
    assert [i for run in runs for i in run] == list(range(spec.config.n_layers + 1))
    for rank, run in enumerate(runs):
        part = cut_layers(spec, shares, rank)
        held = {unit.name for unit in part.units if unit.tensors}
        assert all(unit.borrows.unit in held for unit in part.units if unit.borrows and unit.tensors)
        if run and part.neighbours:
            assert part.neighbours.brought == (("layered",) if 0 < run.start < spec.config.n_layers else ())


def test_heads_are_cut_where_the_cells_are_that_they_read(spec: ModelSpec) -> None:
    cuts = {cut.unit: cut for cut in cut_units(spec, (1.0, 0.0, 3.0))}
    for unit in spec.units:
        if unit.borrows:
            mine, theirs = (
                next(t.ranges for t in cuts[name].tensors if t.role == "attn_q.weight")
                for name in (unit.name, unit.borrows.unit)
            )
            assert mine == theirs
    unit = spec.unit("blk.6.attention")
    whole = tuple(TensorCut(t.role, "none", ()) for t in cuts[unit.name].tensors)
    with pytest.raises(UserError, match="is whole where k or v is cut"):
        check_cut(spec, unit, UnitCut(unit.name, whole), cuts["blk.3.attention"])
