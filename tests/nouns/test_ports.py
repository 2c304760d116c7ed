"""Ports: what a unit reads was written before, and what a program gives is found by what its units write."""

from dataclasses import replace
from pathlib import Path

import pytest
from family_files import RECIPES, write_family
from model_files import write_gguf

from pshard.model import ModelSpec
from pshard.models import open_model
from pshard.units.ports import GIVES_LOGITS, HIDDEN, IDS, LOGITS


def read_spec(tmp_path: Path, arch: str) -> ModelSpec:
    path = tmp_path / "m.gguf"
    if arch in RECIPES:
        write_family(path, arch)
    else:
        write_gguf(path, arch)
    with open_model(path) as file:
        return file.spec


@pytest.mark.parametrize("arch", ["llama", "qwen2moe", *RECIPES])
def test_every_unit_reads_what_units_before_it_have_written(arch: str, tmp_path: Path) -> None:
    written = {IDS}
    for unit in read_spec(tmp_path, arch).units:
        assert set(unit.ports.reads) <= written, unit.name
        written |= set(unit.ports.writes)
        assert not unit.ports.adds or HIDDEN in written
    assert LOGITS in written


def test_outputs_are_found_by_what_they_write_wherever_they_stand(tmp_path: Path) -> None:
    spec = read_spec(tmp_path, "llama")
    draft = replace(spec.units[2], own_ports=GIVES_LOGITS)
    second = replace(spec, units=(*spec.units[:3], spec.output, spec.units[4], draft))
    assert second.output is spec.output and second.units[-1] is draft
    assert second.outputs == (spec.output, draft)
    assert second.embedding is spec.units[0]
