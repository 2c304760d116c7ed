"""Models whose sums are normalised are cut over devices like others; each sum's norm is priced and has its scratch."""

from dataclasses import replace
from pathlib import Path

import pytest
from family_files import RECIPES, write_family
from plan_samples import make_tier
from test_planner_ratios import PAIR, workload

from pshard.buffers import SUM_NORMS, scratch_buffers
from pshard.cuts.check_cut import TensorCut, UnitCut, check_cut
from pshard.cuts.tensor_cuts import cut_model, cut_units, source_ranges
from pshard.errors import UserError
from pshard.model import ModelSpec
from pshard.models import open_model
from pshard.planner.choose_mode import plan_mode
from pshard.planner.prepare_ranks import price_tiers
from pshard.planner.price.datasheet import profile_from_datasheet
from pshard.planner.price.profile_tables import Tables
from pshard.steps.emit import emit_steps
from pshard.steps.step import AllReduce, StepShape
from pshard.units.state import StateShape
from pshard.workload import Split


def read_spec(tmp_path: Path, family: str) -> ModelSpec:
    with open_model(write_family(tmp_path / "m.gguf", family).path) as file:
        return file.spec


@pytest.mark.parametrize("family", RECIPES)
def test_a_sum_s_norm_is_in_no_rank_s_part_but_in_the_scratch_of_all(family: str, tmp_path: Path) -> None:
    spec = read_spec(tmp_path, family)
    layers = spec.config.n_layers if RECIPES[family].after else 0
    for rank in range(3):
        part = cut_model(spec, (1.0, 0.0, 1.0), rank)  # the second has nothing, and sums all the same
        held = {t.name for unit in part.units for t in unit.tensors}
        read = {name for names in source_ranges(spec, (1.0, 0.0, 1.0), rank).values() for name in names}
        assert len(part.sum_norms) == 2 * layers
        assert not {name for _, name in part.sum_norms} & (held | read)
        rows = [b.shape[0] for b in scratch_buffers(part, 1, StateShape(64, 1, "f32", "f32")) if b.name == SUM_NORMS]
        assert rows == ([2 * layers] if layers else [])


def test_a_norm_of_one_rank_s_part_is_refused(tmp_path: Path) -> None:
    spec = read_spec(tmp_path, "glm4")
    unit, cut = spec.units[1], cut_units(spec, (1.0, 1.0))[1]
    check_cut(spec, unit, cut)
    changed = tuple(replace(t, axis="none") if t.axis == "sum" else t for t in cut.tensors)
    with pytest.raises(UserError, match=r"post_attention_norm.weight normalises what ranks would have to sum before"):
        check_cut(spec, unit, UnitCut(unit.name, changed))


def test_a_norm_over_all_heads_keeps_a_layer_s_attention_on_one_rank(tmp_path: Path) -> None:
    """Ranks take turns at attention, by their shares, and have their parts of everything else."""
    spec = read_spec(tmp_path, "olmo2")
    parts = [cut_model(spec, (1.0, 1.0), rank) for rank in range(2)]
    for layer in range(spec.config.n_layers):
        held = [bool(part.unit(f"blk.{layer}.attention").tensors) for part in parts]
        assert held == [layer % 2 == 0, layer % 2 == 1]
        assert all(part.unit(f"blk.{layer}.ffn").tensors for part in parts)
    unit, cut = spec.units[1], cut_units(spec, (1.0, 1.0))[1]
    halves = {t.role: TensorCut(t.role, t.axis, ((0, 64), (64, 128))) for t in cut.tensors if t.role == "attn_q.weight"}
    changed = tuple(halves.get(t.role, t) for t in cut.tensors)
    with pytest.raises(UserError, match=r"attn_q_norm.weight normalises over heads that lie on 2 ranks"):
        check_cut(spec, unit, UnitCut(unit.name, changed))


@pytest.mark.parametrize(("family", "sums"), [("cohere2", 1), ("olmo2", 2)])
def test_ranks_sum_a_parallel_layer_once(family: str, sums: int, tmp_path: Path) -> None:
    spec = cut_model(read_spec(tmp_path, family), (1.0, 1.0), 0)
    for place in ("pinned", "cpu"):
        where = {u.name: ("cpu" if u.kind.is_looked_up else place, "host" if u.kind.state else None)
                 for u in spec.units}  # fmt: skip
        steps = emit_steps(spec, make_tier(spec, 4, where, 2, 64, 1), StepShape(4, 0, 1, 1, "f32", "f32", ranks=2))
        found = [step.unit for step in steps.body if isinstance(step, AllReduce)]
        assert len(found) == sums * spec.config.n_layers
        assert {f"blk.{i}.ffn" for i in range(spec.config.n_layers)} <= set(found)


def test_a_sum_takes_longer_by_its_norm(tmp_path: Path) -> None:
    spec = read_spec(tmp_path, "glm4")
    wanted = replace(workload(900, 900), context=256, prompt=64, generated=64).under(Split("tensor", (0.5, 0.5)))
    costs = price_tiers(spec, Tables(profile_from_datasheet(PAIR)), wanted, (1,))[0].costs[0]
    plain = replace(costs, spec=replace(costs.spec, sum_norms=()))
    step = AllReduce(spec.units[1].name, 4 * spec.config.d_model)
    assert costs.meeting(step) == pytest.approx(plain.meeting(step) + costs.sum_norm)
    assert costs.sum_norm > 0


@pytest.mark.usefixtures("quick_search")
def test_cutting_it_is_among_the_ways_that_are_compared(tmp_path: Path) -> None:
    wanted = replace(workload(900, 900), context=256, prompt=64, generated=64)
    best = plan_mode(read_spec(tmp_path, "glm4"), profile_from_datasheet(PAIR), wanted, auto_ratios=False)
    ways = {way.way.split(",")[0].split(" -ts")[0] for way in best.considered}
    assert ways == {"-sm none", "-sm layer", "-sm tensor"}
