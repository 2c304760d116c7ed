"""Timelines of plans: simulated by the planner's own simulation of the model's steps."""

import json
import re
from pathlib import Path

import pytest
from model_files import write_gguf
from report_samples import leave_undrawn
from short_searches import shorten_searches

from pshard.commands.cli_report import make_report
from pshard.commands.command_line import run_cli
from pshard.jsonio import to_json
from pshard.models.model_file import open_model
from pshard.planner.make_plan import plan_variant
from pshard.planner.price.datasheet import Rates, profile_from_datasheet
from pshard.registries.store import save_variants
from pshard.workload import Workload

PROFILE = profile_from_datasheet(Rates(2e9, 20e9, 2e11, 10e9, 5e10, kind="cpu"))
TIGHT = Workload((3,), context=64, max_ubatch=32, prompt=32, generated=32, type_k="f32", type_v="f32")


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """A tiny model, its spec, and a plan under a budget smaller than the model."""
    path = write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", "llama", n_layers=4)
    with open_model(path) as model:
        spec = model.spec
    assert spec.packed_nbytes > TIGHT.vram_mib[0] << 20
    with pytest.MonkeyPatch.context() as patch:
        shorten_searches(patch)
        variant = plan_variant(spec, PROFILE, TIGHT)
    assert variant.plan_needed
    return path, spec, variant


def test_the_command_adds_timelines_of_decode_and_prefill(planned, tmp_path, capsys, monkeypatch):
    leave_undrawn(monkeypatch)
    path, spec, variant = planned
    save_variants(tmp_path / "r.json", spec.name, (("model bytes", "1"),), [variant])
    (tmp_path / "profile.json").write_text(json.dumps(to_json(PROFILE)))
    given = [str(tmp_path / "r.json"), str(tmp_path / "profile.json"), "-m", str(path), "-o", str(tmp_path / "out")]
    assert run_cli(make_report, given) == 0
    drawn = [Path(line).name for line in capsys.readouterr().out.splitlines()]
    assert {"timeline-1.svg", "timeline-2.svg"} <= set(drawn) and "timeline-3.svg" not in drawn


def test_another_model_is_refused(planned, tmp_path, capsys):
    _, spec, variant = planned
    save_variants(tmp_path / "r.json", spec.name, (("model bytes", "1"),), [variant])
    (tmp_path / "profile.json").write_text(json.dumps(to_json(PROFILE)))
    other = write_gguf(tmp_path / "other.gguf", "llama", n_layers=2)
    given = [str(tmp_path / "r.json"), "--profile", str(tmp_path / "profile.json"), "-m", str(other)]
    assert run_cli(make_report, [*given, "-o", str(tmp_path / "out")]) == 2
    assert re.search(r"other\.gguf is not the model that was planned", capsys.readouterr().err)
