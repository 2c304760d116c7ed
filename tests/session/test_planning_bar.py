"""Whoever waits for a plan sees a bar on a terminal, and a pipe gets nothing."""

from functools import partial

import pytest
import rich.console

from pshard.session.planning_bar import planning_bar


@pytest.mark.parametrize("terminal", [True, False])
def test_the_bar_is_for_terminals_only(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rich.console, "Console", partial(rich.console.Console, force_terminal=terminal))
    with planning_bar("planning demo"):
        pass
    said = capsys.readouterr()
    assert said.out == "" and ("planning demo" in said.err) is terminal
