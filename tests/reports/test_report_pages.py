"""pshard-report from files to figures and a page, and what it says of files that it cannot use."""

import contextlib
import io
import json
import re
from dataclasses import replace

import pytest
from plan_samples import with_workload
from report_samples import (
    leave_undrawn,
    make_bench,
    make_expert_map,
    make_full_profile,
    make_measurement,
    make_outlook,
    make_plan_registry,
    make_plan_variant,
    make_scaling,
    make_timeline,
)

from pshard.commands.cli_report import make_report
from pshard.commands.command_line import run_cli
from pshard.jsonio import to_json
from pshard.registries.codec import encode_registry
from pshard.reports.figures.expert_places import draw_experts
from pshard.reports.figures.machine_ceilings import draw_machine
from pshard.reports.inputs import read_inputs
from pshard.reports.tables.bench_formats import format_measurements
from pshard.routing.expert_map import Slots, TierExperts
from pshard.times.measurement import Timeline


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """One file of every kind."""
    texts = {
        "bench.json": format_measurements(make_bench(), "json"),
        "scaling.jsonl": format_measurements(make_scaling(), "jsonl"),
        "model.pshard.json": encode_registry(make_plan_registry((6000,), (12000,))),
        "profile.json": json.dumps(to_json(make_full_profile())),
        "outlook.json": json.dumps({"outlooks": [to_json(make_outlook())]}),
        "plan.json": json.dumps({"timelines": [to_json(Timeline("A decode step", make_timeline()))]}),
        "experts.json": json.dumps({"experts": [to_json(make_expert_map())]}),
    }
    folder = tmp_path_factory.mktemp("files")
    for name, text in texts.items():
        (folder / name).write_text(text)
    return [folder / name for name in texts]


@pytest.fixture(scope="module")
def report(files, tmp_path_factory):
    """The folder of the report of them all, and what the command printed."""
    out, said = tmp_path_factory.mktemp("report") / "out", io.StringIO()
    with contextlib.redirect_stdout(said):
        assert run_cli(make_report, [*map(str, files), "-o", str(out)]) == 0
    return out, said.getvalue()


@pytest.mark.slow
def test_every_kind_of_file_becomes_its_figures(report):
    out, said = report
    page, *figures = [line.rsplit("/", 1)[1] for line in said.splitlines()]
    names = {"speedup", "scaling", "predicted", "outlook", "sweep", "placement-1", "placement-2", "timeline", "machine"}
    names |= {"experts", "in-short"}
    assert page == "report.html" and set(figures) == {f"{n}.{kind}" for n in names for kind in ("png", "svg")}
    assert set(figures) | {page} == {p.name for p in out.iterdir()}
    for name in names:
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "</svg>" in (out / f"{name}.svg").read_text()


@pytest.mark.slow
def test_the_page_fetches_nothing_and_holds_figures_tables_and_origin(report):
    page = (report[0] / "report.html").read_text()
    assert page.count("data:image/svg+xml;base64,") == 11
    assert not re.search(r"(?:src|href)=\"(?!data:)", page) and "url(" not in page and page.count("<script") == 1
    for held in ("Some GPU", "pshard-bench -m invented.gguf", "9832.67 ± 246.63", "<td>accelerator</td>", "bench.json"):
        assert held in page


def test_the_page_says_how_ranks_held_the_model_and_in_which_type_they_summed(tmp_path, monkeypatch):
    leave_undrawn(monkeypatch)
    one, layers = make_measurement(0, 8), make_measurement(0, 8, budget_mib=(1, 2), split_mode="layer")
    tensor = make_measurement(0, 8, budget_mib=(1, 2), split_mode="tensor", reduce_dtype="f16")
    plan = with_workload(make_plan_variant((6000, 3000)), reduce_dtype="bf16", max_tp=(("attention", 1),))
    (tmp_path / "b.json").write_text(format_measurements([one, layers, tensor], "json"))
    (tmp_path / "p.json").write_text(json.dumps(to_json(plan)))
    run_cli(make_report, [str(tmp_path / "b.json"), str(tmp_path / "p.json"), "-o", str(tmp_path)])
    page = (tmp_path / "report.html").read_text()
    assert "<th>sums</th>" in page and "<td>f16</td>" in page
    assert "<th>split</th>" in page and "<td>layer</td>" in page
    assert "-sm tensor -ts 0.5,0.5 --max-tp attn=1; ranks&#x27; parts are summed in bf16." in page


def test_one_device_sums_nothing_and_the_table_says_nothing_of_sums():
    assert " sums " not in format_measurements(make_bench(), "md")


def test_accelerators_unlike_the_first_are_drawn_apart(tmp_path):
    profile = make_full_profile()
    others = tuple(replace(m, device="acc1") for m in profile.matmuls if m.device == "acc")
    copies = tuple(replace(c, device="acc1", seconds=2 * c.seconds) for c in profile.copies)
    both = replace(profile, matmuls=(*profile.matmuls, *others), copies=(*profile.copies, *copies))
    one, two = draw_machine(profile), draw_machine(both)
    first, second = ([len(ax.lines) for ax in figure.axes] for figure in (one, two))
    assert first[1] == second[1] and second[2] == first[2] + len({m.qtype for m in others})
    assert "accelerator 1" in [text.get_text() for text in two.axes[2].get_legend().get_texts()]


def test_what_files_say_is_not_taken_as_html(tmp_path):
    nasty = make_measurement(8, 0, model="<img src=x>", environment=(("cpu", "<script>"),))
    (tmp_path / "b.json").write_text(format_measurements([nasty], "json"))
    run_cli(make_report, [str(tmp_path / "b.json"), "-o", str(tmp_path)])
    page = (tmp_path / "report.html").read_text()
    assert page.count("<script") == 1 and "<img src=x" not in page and "&lt;img src=x&gt;" in page


def test_measurements_without_baseline_or_prediction_still_make_a_page(tmp_path, capsys):
    (tmp_path / "b.jsonl").write_text(format_measurements([make_measurement(0, 8)], "jsonl"))
    assert run_cli(make_report, [str(tmp_path / "b.jsonl"), "-o", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / "out" / "report.html")]


def test_the_figure_of_experts_has_a_strip_for_each_tier_and_a_bar_for_each_place():
    places = draw_experts(make_expert_map())
    decode, prompt = places.axes
    heights = [[int(bar.get_height()) for bar in ax.patches] for ax in (decode, prompt)]
    assert heights == [[16, 16, 0, 8, 48, 40], [16, 16, 48, 8, 0, 40]]
    assert decode.get_ylabel() == "1 token" and decode.texts[0].get_text() == "3.00 MB a token\nover the link"
    assert [text.get_text() for text in places.legends[0].texts][1] == "streamed: copied before use"


def test_the_figure_of_experts_says_what_slots_are_expected_to_find():
    found = make_expert_map()
    first, *others = found.tiers
    slots = (Slots(9, 3, "lru", 4, 0.4, 2.0, 1 << 20),)
    texts = [
        text.get_text()
        for strip in draw_experts(replace(found, slots=slots, tiers=(replace(first, found=0.4), *others))).axes
        for text in strip.texts
    ]
    assert [text.splitlines()[-1] == "40% in 9 slots" for text in texts] == [True] + [False] * len(others)


def test_places_of_experts_without_a_tier_or_a_layer_draw_nothing(tmp_path, capsys):
    for n, changes in enumerate(({"tiers": ()}, {"tiers": (TierExperts(1, (), 0),)})):
        (tmp_path / "e.json").write_text(json.dumps(to_json(replace(make_expert_map(), **changes))))
        out = tmp_path / f"out{n}"
        assert run_cli(make_report, [str(tmp_path / "e.json"), "-o", str(out)]) == 0
        assert capsys.readouterr().out.splitlines() == [str(out / "report.html")]


def test_the_same_file_twice_shows_once(files):
    assert read_inputs([files[0], files[0]]).measurements == read_inputs([files[0]]).measurements
    assert len(read_inputs([files[2], files[2]]).plans) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read .*No such file"),
        ("", "is broken: not JSON at line 1"),
        ("{", "is broken: not JSON at line 1"),
        ('{"a": 1}\n{', "is broken: not JSON at line 2"),
        ("[]", "holds no measurement, plan, profile or timeline"),
        ('{"hello": [1, {"x": null}]}', "holds no measurement"),
        ('[{"samples_ts": [], "strategy": "ilp"}]', "is broken: Measurement lacks the field 'test'"),
        (
            '{"sets": [{"fingerprint": 1, "inputs": [], "model": "m", "created": "", "variants": []}], "version": 2}',
            r"is broken: Registry.sets\[0\].fingerprint is 1, not str",
        ),
        ('{"fingerprint": "", "variants": [], "version": 1}', "has the older format version 1, .*; write it again"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_and_nothing_is_written(tmp_path, capsys, content, message):
    path = tmp_path / "input.json"
    if content is not None:
        path.write_text(content)
    assert run_cli(make_report, [str(path), "-o", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert re.search(f"^error: .*{message}", err) and err.count("\n") == 1 and "input.json" in err
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_is_an_error(files, tmp_path, capsys):
    assert run_cli(make_report, [str(files[0]), "-o", str(files[1])]) == 2
    assert "cannot write the report" in capsys.readouterr().err
