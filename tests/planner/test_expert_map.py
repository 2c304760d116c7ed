"""How many experts of each layer lie where, as --explain says it and as reports draw it."""

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from golden.machines import find_machine
from golden.shapes import make_shape
from model_files import write_gguf
from planner_cases import make_model
from report_samples import leave_undrawn
from rich.console import Console
from routing_samples import make_record

from pshard.commands import cli_plan
from pshard.commands.cli_report import make_report
from pshard.commands.command_line import run_cli
from pshard.cuts.rank_parts import cut_ranks
from pshard.plan import Variant
from pshard.planner.make_plan import plan_baseline
from pshard.planner.show_plan import print_explanation
from pshard.routing.expert_map import LayerExperts, group_layers, map_experts
from pshard.routing.measure_popularity import measure_popularity
from pshard.units.operations import used_share
from pshard.workload import Workload

SPEC, H100 = make_shape("qwen3-30b-a3b"), find_machine("h100")
EXAMPLE = Path(__file__).parents[2] / "registries" / "examples" / "rtx4060-ryzen-7700.json"


def place(how: str) -> Variant:
    return plan_baseline(how, SPEC, H100, Workload((6000,)))


def explain(variant: Variant) -> str:
    out = StringIO()
    print_explanation(variant, (), (), Console(file=out, width=200), map_experts(SPEC, variant))
    return out.getvalue()


def test_every_expert_of_a_layer_is_somewhere_in_every_tier() -> None:
    for how in ("hot-experts", "layer-stream", "attention-first", "per-tier"):
        (experts,) = map_experts(SPEC, place(how))
        assert (experts.count, experts.used, len(experts.units)) == (128, 8, 48)
        for tier in experts.tiers:
            assert [layer.layer for layer in tier.layers] == list(range(48))
            assert {sum(layer.counts) for layer in tier.layers} == {128}


def test_hot_experts_are_in_vram_and_the_others_on_the_cpu_or_streamed() -> None:
    variant = place("hot-experts")
    decode, *_, prompt = map_experts(SPEC, variant)[0].tiers
    ((layers, few),), ((_, many),) = (list(group_layers(tier.layers)) for tier in (decode, prompt))
    assert layers == "0-47" and few.cpu == 128 - few.pinned > 0 == few.streamed + few.in_place
    assert many.pinned == few.pinned and many.streamed == few.cpu
    shares = decode.served
    text = explain(variant)
    assert f"experts    layers 0-47: {few.pinned} in VRAM, {few.cpu} on the CPU\n" in text
    assert f"of its 8 experts in a layer {8 * shares[0]:.2g} in VRAM, {8 * shares[3]:.2g} on the CPU; " in text
    assert "FFN" not in text  # experts are no rows of gate and up


def test_what_is_read_over_the_link_in_place_counts_by_what_tokens_are_expected_to_choose() -> None:
    variant = place("layer-stream")
    tier = variant.ranks[0].covering(1)
    (experts,) = map_experts(SPEC, variant)
    away = [SPEC.unit(p.unit) for p in tier.placements if p.where == "streamed"]
    assert sum(layer.in_place == 128 for layer in experts.tiers[0].layers) == len(away) > 0
    expected = used_share(8, 128, 1) * sum(u.packed_nbytes for u in away)
    assert experts.tiers[0].link_nbytes == tier.prediction.link_bytes
    assert expected <= tier.prediction.link_bytes < 1.01 * expected  # and a few activations
    assert f"{experts.tiers[0].link_nbytes / 1e6:.3g} MB over the link" in explain(variant)
    many = experts.tiers[-1]
    assert many.link_nbytes == variant.ranks[0].tiers[-1].prediction.link_bytes and not many.layers[0].in_place


def test_ranks_have_maps_of_their_own_layers() -> None:
    workload = Workload((6000, 4000), split_mode="layer")
    variant = plan_baseline("cpu-moe", SPEC, H100, workload)
    maps = map_experts(SPEC, variant)
    held = [[u.layer for u in part.units if u.kind.parts] for part in cut_ranks(SPEC, variant.split)]
    assert [[layer.layer for layer in each.tiers[0].layers] for each in maps] == held and sum(map(len, held)) == 48


def test_with_a_record_layers_with_the_same_experts_say_how_many_choices_these_serve() -> None:
    record = replace(make_record(300, 48, 128, 8), layers=tuple(range(48)))
    variant = replace(place("hot-experts"), popularity=measure_popularity(record))
    (experts,) = map_experts(SPEC, variant)
    decode = experts.tiers[0]
    ((_, few),) = group_layers(decode.layers)
    hits = [sum(variant.popularity.uses_of(n)[: few.pinned]) / 8 for n in range(48)]  # type: ignore[union-attr]
    assert [layer.hits for layer in decode.layers] == pytest.approx(hits)
    assert few.hits == pytest.approx(sum(hits) / 48) == decode.served[0] and few.hits > few.pinned / 128 + 0.1
    assert f"{few.pinned} in VRAM for {few.hits:.0%} of the choices, {few.cpu} on the CPU\n" in explain(variant)
    assert f"of its 8 experts in a layer {8 * few.hits:.2g} in VRAM" in explain(variant)


def test_a_dense_model_has_no_map() -> None:
    spec = make_model()
    assert map_experts(spec, plan_baseline("fit", spec, H100, Workload((360,), context=512, prompt=256))) == ()


def test_layers_with_the_same_experts_are_named_together() -> None:
    rows = [LayerExperts(n, 4, 0, 0, 0 if n in (0, 1, 2, 5) else 4) for n in range(6)]
    assert [name for name, _ in group_layers(rows)] == ["0-2, 5", "3-4"]


def test_a_plans_json_and_a_report_hold_the_experts(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_undrawn(monkeypatch)
    model = write_gguf(tmp_path / "m.gguf", "qwen3moe", qtype="Q4_0")
    registry = tmp_path / "r.json"
    argv = ["-m", str(model), "--profile", str(EXAMPLE), "--registry", str(registry), "--strategy", "cpu-moe"]
    assert cli_plan.main([*argv, "--vram", "330", "--no-validate", "--json"]) == 0
    (tmp_path / "plan.json").write_text(said := capsys.readouterr().out)
    (experts,) = json.loads(said)["experts"]
    assert experts["tiers"][0]["layers"][0] == {
        "layer": 0,
        "pinned": 0,
        "streamed": 0,
        "in_place": 0,
        "cpu": 8,
        "disk": 0,
        "hits": None,
    }
    for number, files in enumerate(([tmp_path / "plan.json"], [registry, "-m", model, "--profile", EXAMPLE])):
        out = tmp_path / str(number)
        assert run_cli(make_report, [*map(str, files), "-o", str(out)]) == 0
        assert (out / "experts.png").stat().st_size and "Where the experts lie" in (out / "report.html").read_text()
