"""Models with norms after sums are planned over devices in whole layers, and not cut."""

from dataclasses import replace
from pathlib import Path

import pytest
from family_files import RECIPES, write_family
from test_planner_ratios import PAIR, workload

from pshard.cuts.tensor_cuts import cut_units
from pshard.errors import UserError
from pshard.models import open_model
from pshard.planner.choose_mode import plan_mode
from pshard.planner.price.datasheet import profile_from_datasheet


@pytest.mark.parametrize("family", RECIPES)
def test_what_is_normalised_after_its_sum_is_not_cut(family: str, tmp_path: Path) -> None:
    with open_model(write_family(tmp_path / "m.gguf", family).path) as file:
        spec = file.spec
    if RECIPES[family].after:
        with pytest.raises(UserError, match=r"units of kind .*attention cannot be cut over devices yet; use -sm layer"):
            cut_units(spec, (1.0, 1.0))
    else:
        assert len(cut_units(spec, (1.0, 1.0))) == len(spec.units)


@pytest.mark.usefixtures("quick_search")
def test_a_model_that_cannot_be_cut_is_planned_without(tmp_path: Path) -> None:
    with open_model(write_family(tmp_path / "m.gguf", "glm4").path) as file:
        spec = file.spec
    wanted = replace(workload(900, 900), context=256, prompt=64, generated=64)
    best = plan_mode(spec, profile_from_datasheet(PAIR), wanted, auto_ratios=False)
    assert {way.way.split(",")[0].split(" -ts")[0] for way in best.considered} == {"-sm none", "-sm layer"}
