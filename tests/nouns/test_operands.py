"""Operations name their operands: each reads what was written before it, within scratch that its unit asks for."""

from dataclasses import replace
from pathlib import Path

import pytest
from family_files import RECIPES, write_family
from hybrid_files import random_hybrid, write_hybrid_gguf
from latent_files import random_tensors, write_latent_gguf
from model_files import write_gguf

from pshard.buffers import scratch_buffers
from pshard.model import ModelSpec
from pshard.models import open_model
from pshard.tensor import TensorSpec
from pshard.units.operands import BRANCH, NORMED, Rows
from pshard.units.operations import PlaceRows
from pshard.units.ports import HIDDEN, LOGITS
from pshard.units.state import StateShape

MODELS = ["llama", "qwen2moe", "gpt-oss", "lite", "v3", "next", "dense", *RECIPES]


@pytest.fixture(params=MODELS)
def spec(request: pytest.FixtureRequest, tmp_path: Path) -> ModelSpec:
    path, arch = tmp_path / "m.gguf", request.param
    if arch in RECIPES:
        write_family(path, arch)
    elif arch in ("next", "dense"):
        write_hybrid_gguf(path, arch, random_hybrid(arch))
    elif arch in ("lite", "v3"):
        write_latent_gguf(path, arch, random_tensors(arch))
    else:
        write_gguf(path, arch)
    with open_model(path) as file:
        return file.spec


def covers(written: Rows, read: Rows) -> bool:
    """Whether all that is read was written; width 0 stands for all columns."""
    if written.buffer != read.buffer or (read.width == 0 and written.width > 0):
        return False
    end = written.first + written.width
    return not written.width or (written.first <= read.first and read.first + read.width <= end)


def test_every_operation_reads_a_port_or_what_one_before_it_has_written(spec: ModelSpec) -> None:
    for unit in spec.units:
        written = [Rows(port) for port in unit.ports.reads]
        for operation in unit.operations(spec.config):
            for read in operation.reads:
                assert any(covers(w, read) for w in written), (unit.name, operation, read)
            written += operation.writes
        left = {rows.buffer for rows in written}
        assert set(unit.ports.writes) <= left and (not unit.ports.adds or HIDDEN in left)


def test_operands_lie_within_the_scratch_of_their_unit(spec: ModelSpec) -> None:
    buffers = {b.name: b.shape for b in scratch_buffers(spec, 4, StateShape(64, 1, "f32", "f32"))}
    for unit in spec.units[1:]:
        for operation in unit.operations(spec.config):
            for rows in (*operation.reads, *operation.writes):
                assert rows.buffer in buffers, rows
                if rows.buffer not in (LOGITS, HIDDEN):
                    assert rows.first + rows.width <= buffers[rows.buffer][-1] or len(buffers[rows.buffer]) > 2


def test_a_divided_ffn_s_rows_are_joined_beside_the_accelerator_s_own(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "llama")
    with open_model(tmp_path / "m.gguf") as file:
        spec = file.spec
    unit = next(u for u in spec.units if u.kind.divide)
    f = unit.by_role["ffn_up.weight"].rows
    assert unit.kind.divide is not None
    own, other = (
        {**unit.by_role, **{r: _first_rows(unit.by_role[r], n) for r in unit.kind.divided if r in unit.by_role}}
        for n in (f - 64, 64)
    )
    division = unit.kind.divide(own, other, spec.config)
    joined = next(o for o in division.after if isinstance(o, PlaceRows))
    (made,) = division.on_acc[-1].writes
    assert (made.first, made.width) == (0, f - 64)
    assert joined.writes == (Rows(made.buffer, f - 64, 64),)
    assert division.on_acc[-1].reads == (NORMED,) and BRANCH not in division.after[-1].reads


def _first_rows(tensor: TensorSpec, rows: int) -> TensorSpec:
    return replace(tensor, shape=(rows, tensor.cols))
