"""Ways to keep experts in VRAM are compared when each has its best share on the CPU."""

import pytest
from golden.cases import CASES

from pshard.planner.search import divide_ffns
from pshard.predicted_times import round_seconds


@pytest.mark.slow
def test_a_way_that_keeps_none_of_a_layers_experts_wins_where_moving_single_parts_makes_it_faster(monkeypatch):
    case = next(case for case in CASES if case.name == "v2-lite-two-layer")
    seconds = round_seconds(case.plan()[2][0])
    monkeypatch.setattr(divide_ffns, "_balance_parts", lambda room, classes, costs, placed, main: placed)
    assert seconds < 0.999 * round_seconds(case.plan()[2][0])
