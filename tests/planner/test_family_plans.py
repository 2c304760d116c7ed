"""Models whose sums are normalised are cut over devices like others; each sum's norm is priced and has its scratch."""

from dataclasses import replace
from pathlib import Path

import pytest
from family_files import RECIPES, write_family
from plan_samples import make_tier
from test_planner_ratios import PAIR, workload

from pshard.buffers import SUM_NORMS, scratch_buffers
from pshard.cuts.check_cut import UnitCut, check_cut
from pshard.cuts.tensor_cuts import cut_model, cut_units, source_ranges
from pshard.errors import UserError
from pshard.machine import CollectiveTiming
from pshard.model import ModelSpec
from pshard.models import open_model
from pshard.planner.choose_mode import plan_mode
from pshard.planner.prepare_ranks import price_tiers
from pshard.planner.price.datasheet import profile_from_datasheet
from pshard.planner.price.profile_tables import Tables
from pshard.planner.price.simulate import simulate
from pshard.steps.emit import emit_steps
from pshard.steps.label import label_step
from pshard.steps.step import AllReduce, Compute, StepList, StepShape
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


def test_a_norm_over_all_heads_is_of_sums_over_the_ranks_that_have_them(tmp_path: Path) -> None:
    spec = read_spec(tmp_path, "olmo2")
    unit, cut = spec.units[1], cut_units(spec, (1.0, 1.0))[1]
    assert dict(source_ranges(spec, (1.0, 1.0), 1)[unit.name])["blk.0.attn_q_norms.weight"] == (0, 1, 64, 128)
    check_cut(spec, unit, cut)
    with pytest.raises(UserError, match=r"attn_q_norms.weight normalises over heads of which a rank has only its own"):
        check_cut(spec, replace(unit, own_ports=None), cut)
    whole = tuple(replace(t, axis="none") if "norms" in t.role else t for t in cut.tensors)
    with pytest.raises(UserError, match=r"attn_q_norms.weight is not cut where the heads are"):
        check_cut(spec, unit, UnitCut(unit.name, whole))


def test_ranks_that_sum_squares_have_no_kv_head_in_common(tmp_path: Path) -> None:
    spec = read_spec(tmp_path, "olmo2")
    unit, heads = spec.units[1], spec.config.n_kv_heads
    held = [cut_model(spec, (1.0,) * (heads + 1), rank).unit(unit.name).tensors for rank in range(heads + 1)]
    assert sum(map(bool, held)) == heads
    config, width = spec.config, spec.config.head_dim
    group = config.n_heads // heads * width
    shared = {  # of the first KV head's queries one rank has half, and another the rest
        "attn_q": ((0, group // 2), (group // 2, group), (group, heads * group)),
        "attn_k": ((0, width), (0, width), (width, heads * width)),
    }
    parts = {
        role: shared[role[:6]]
        for role in ("attn_q.weight", "attn_k.weight", "attn_q_norms.weight", "attn_k_norms.weight")
    }
    parts |= {"attn_v.weight": shared["attn_k"], "attn_output.weight": shared["attn_q"]}
    cut = cut_units(spec, (1.0,) * 3)[1]
    changed = tuple(replace(t, ranges=parts[t.role]) if t.role in parts else t for t in cut.tensors)
    with pytest.raises(UserError, match=r"attn_k.weight is cut into ranges .* that leave a gap or overlap"):
        check_cut(spec, unit, UnitCut(unit.name, changed))


@pytest.mark.parametrize("place", ["pinned", "cpu"])
def test_squares_are_summed_on_the_accelerators_halfway_through_attention(place: str, tmp_path: Path) -> None:
    spec = cut_model(read_spec(tmp_path, "olmo2"), (1.0, 1.0), 0)
    where = {u.name: ("cpu" if u.kind.is_looked_up else "pinned", "vram" if u.kind.state else None) for u in spec.units}
    name = spec.units[1].name
    where[name] = (place, "host" if place == "cpu" else "vram")
    steps = emit_steps(spec, make_tier(spec, 4, where, 2, 64, 1), StepShape(4, 0, 1, 1, "f32", "f32", ranks=2)).body
    at = next(i for i, step in enumerate(steps) if isinstance(step, AllReduce))
    assert steps[at] == AllReduce(name, 4 * 2 * 4, "squares")
    computes = [(step.part, step.state) for step in steps if isinstance(step, Compute) and step.unit == name]
    assert computes == [("before", None), ("after", where[name][1])]
    assert label_step(steps[at - 1]) == ("to acc" if place == "cpu" else f"{name} before")
    assert label_step(steps[at + 1]) == ("to cpu" if place == "cpu" else f"{name} after")


def test_both_halves_of_attention_and_the_sum_between_are_priced(tmp_path: Path) -> None:
    wanted = replace(workload(900, 900), context=256, prompt=64, generated=64).under(Split("tensor", (0.5, 0.5)))
    whole = read_spec(tmp_path, "olmo2")
    costs = price_tiers(whole, Tables(profile_from_datasheet(PAIR)), wanted, (1,))[0].costs[0]
    spec, name = costs.spec, whole.units[1].name
    cost = costs.units[name]
    before, after = cost.halve(True), cost.halve(False)
    assert 0 < before.acc < cost.acc and before.acc + after.acc == pytest.approx(cost.acc)
    assert 0 < before.cpu < cost.cpu and before.cpu + after.cpu == pytest.approx(cost.cpu)
    where = {u.name: ("cpu" if u.kind.is_looked_up else "pinned", "vram" if u.kind.state else None) for u in spec.units}
    steps = emit_steps(spec, make_tier(spec, 1, where, 2, 64, 1), StepShape(1, 0, 1, 1, "f32", "f32", ranks=2))
    found = simulate(steps, costs)
    spent = {
        event.step.part: event.end - event.start
        for event in found.events
        if isinstance(event.step, Compute) and event.step.unit == name
    }
    assert spent == {"before": pytest.approx(before.acc), "after": pytest.approx(after.acc)}
    left_out = tuple(step for step in steps.body if not (isinstance(step, AllReduce) and step.port))
    without = simulate(StepList(steps.enter, left_out), costs)
    squares = spec.config.n_layers * costs.meeting(AllReduce(name, 8, "squares"))
    assert found.seconds - without.seconds == pytest.approx(squares, rel=1e-6)


@pytest.mark.parametrize(("family", "sums"), [("cohere2", 1), ("olmo2", 3)])
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
    timed = (CollectiveTiming("rows", 2, 1 << 14, 1e-6), CollectiveTiming("normed", 2, 1 << 14, 2e-6))
    along = Tables(replace(profile_from_datasheet(PAIR), collectives=timed))
    assert price_tiers(spec, along, wanted, (1,))[0].costs[0].sum_norm == 2e-6


def test_cutting_it_is_among_the_ways_that_are_compared(tmp_path: Path) -> None:
    wanted = replace(workload(900, 900), context=256, prompt=64, generated=64)
    best = plan_mode(read_spec(tmp_path, "glm4"), profile_from_datasheet(PAIR), wanted, auto_ratios=False)
    ways = {way.way.split(",")[0].split(" -ts")[0] for way in best.considered}
    assert ways == {"-sm none", "-sm layer", "-sm tensor"}
