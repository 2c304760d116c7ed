"""Whoever waits for a plan sees a bar on a terminal, and a pipe gets nothing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import rich.console
from planner_cases import DESKTOP, make_model

import pshard.session.planning_bar
from pshard.commands.plan_output import Planned, explain_plans
from pshard.planner.make_plan import plan_baseline
from pshard.planner.price.datasheet import profile_from_datasheet
from pshard.session.planning_bar import planning_bar
from pshard.workload import Workload


@pytest.mark.parametrize("terminal", [True, False])
def test_the_bar_is_for_terminals_only(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rich.console, "Console", partial(rich.console.Console, force_terminal=terminal))
    with planning_bar("planning demo"):
        pass
    said = capsys.readouterr()
    assert said.out == "" and ("planning demo" in said.err) is terminal


def test_explaining_a_plan_tells_its_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """It plans many times, which takes longer than a person waits without a word."""
    told = list[tuple[str, float]]()

    @contextmanager
    def bar(what: str) -> Iterator[Callable[[str, float], None]]:
        assert what == "explaining made"
        yield lambda label, share: told.append((label, share))

    monkeypatch.setattr(pshard.session.planning_bar, "stage_bar", bar)
    profile, workload = profile_from_datasheet(DESKTOP), Workload((360,), context=512, prompt=256)
    variant = plan_baseline("fit", make_model(), profile, workload)
    explained = explain_plans(Planned(make_model(), profile, (), workload, (variant,), ((),)), "fit")
    assert [label for label, _ in told] == ["with a better machine", "published strategies", "tiers alone"]
    assert [share for _, share in told] == sorted(share for _, share in told) and told[-1][1] < 1
    assert explained.gains and explained.outlooks and not explained.alone
