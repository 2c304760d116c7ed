"""Hypothesis and torch draw the same in every run, whatever ran before."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st


def draw_examples() -> list[int]:
    drawn = []

    @settings(max_examples=200)
    @given(st.integers(0, 10**6))
    def take(number: int) -> None:
        drawn.append(number)

    take()
    return drawn


def test_examples_do_not_depend_on_what_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = draw_examples()
    (tmp_path / "of_numbers.py").write_text(f"NUMBERS = {list(range(1000, 2000))}\n")
    spec = importlib.util.spec_from_file_location("of_numbers", tmp_path / "of_numbers.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "of_numbers", module)
    spec.loader.exec_module(module)
    assert draw_examples() == before


def test_torch_draws_the_same_numbers_in_every_run() -> None:
    drawn = torch.rand(3)
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.rand(3))
