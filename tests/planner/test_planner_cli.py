"""pshard-plan on the bundled model: what it writes, what it prints, and what bad input gets."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from golden.shapes import make_shape
from model_files import write_gguf
from planner_cases import make_model
from rich.console import Console

from pshard.commands.cli_plan import main
from pshard.jsonio import from_json
from pshard.model import ModelSpec
from pshard.plan import Buffers, Placement, RankPlan, Registry, TierPlan, Variant
from pshard.planner.explain import WhatIf
from pshard.planner.llama_cpp_arguments import llama_arguments
from pshard.planner.make_plan import plan_baseline, plan_variant, same_placements
from pshard.planner.price.draft import UNPREDICTED, UNSOLVED
from pshard.planner.price.example_sheets import MACHINES
from pshard.planner.price.example_sheets import main as write_examples
from pshard.planner.published.strategies import NAMES
from pshard.planner.serving.show_promise import show_rate
from pshard.planner.show_plan import print_explanation
from pshard.predicted_times import round_seconds
from pshard.registries.profile_store import load_profile, save_profile
from pshard.registries.store import load_registry
from pshard.reserve import TORCH_RESERVE_MIB
from pshard.units.state import StateShape
from pshard.workload import Workload

OWN = TORCH_RESERVE_MIB
MIB = str(OWN + 4)  # 4 MiB of arena: less than the model
ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples" / "demo.gguf"
PROFILE = ROOT / "registries" / "examples" / "rtx5080-xeon-w5-3425.json"

pytestmark = pytest.mark.skipif(not MODEL.exists(), reason="the bundled model is not here")


@pytest.fixture
def plan(tmp_path, capsys):
    """Runs pshard-plan on the bundled model and the example machine; returns (exit code, stdout, stderr, registry)."""
    registry = tmp_path / "plans.json"

    def run(*flags: str, profile: Path = PROFILE):
        words = ["-m", str(MODEL), "--profile", str(profile), "--registry", str(registry), "-c", "256", *flags]
        code = main(words)
        out, err = capsys.readouterr()
        return code, out, err, registry

    return run


def test_help_is_fast_and_imports_nothing_heavy():
    code = """
import sys
from pshard.reserve import TORCH_RESERVE_MIB
from pshard.commands.cli_plan import main
try:
    main(["--help"])
except SystemExit:
    pass
print([m for m in ("torch", "pulp", "rich", "numpy", "matplotlib") if m in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr


def test_a_plan_is_printed_and_stored_and_its_program_is_written(plan, tmp_path):
    code, out, err, registry = plan("--vram", MIB, "--write-lp", str(tmp_path / "program.lp"))
    assert code == 0
    text = (tmp_path / "program.lp").read_text(encoding="utf-8")
    assert " vram(t1): " in text and " pin(t1,ffn0)\n" in text
    stored = load_registry(registry)
    (variant,) = stored.variants
    assert variant.plan_needed and variant.workload.vram_mib == (OWN + 4,)
    for tier in variant.ranks[0].tiers:
        assert f"  {show_rate(tier.prediction.seconds * 1e3)}  " in out
    assert str(registry) in err


def test_planning_again_replaces_a_budget_and_keeps_the_others(plan):
    for mib in (MIB, str(OWN + 5), MIB):
        code, _, _, registry = plan("--vram", mib, "--strategy", "attention-first")
        assert code == 0
    assert [v.workload.vram_mib for v in load_registry(registry).variants] == [(OWN + 4,), (OWN + 5,)]


def test_a_registry_of_an_older_format_gives_way(plan, tmp_path):
    (tmp_path / "plans.json").write_text('{"inputs": [], "variants": [{}, {}], "version": 1}')
    code, _, err, registry = plan("--vram", MIB)
    assert code == 0 and "dropped from the registry, as in an older format: 2 plan(s)" in err
    assert [v.workload.vram_mib for v in load_registry(registry).variants] == [(OWN + 4,)]


def test_json_alone_is_on_stdout_and_a_sweep_plans_every_budget(plan):
    code, out, _, _ = plan("--sweep", f"{OWN + 1}:{OWN + 7}:3", "--json")
    assert code == 0
    data = json.loads(out)
    variants = from_json(Registry, data["registry"]).variants
    assert [v.workload.vram_mib for v in variants] == [(OWN + 1,), (OWN + 4,), (OWN + 7,)]
    seconds = [v.ranks[0].covering(1).prediction.seconds for v in variants]
    assert seconds[0] >= seconds[-1]
    assert [t["title"] for t in data["timelines"]] and data["timelines"][0]["events"]


def test_no_plan_of_a_sweep_is_slower_than_one_under_a_smaller_budget(plan, monkeypatch):
    """Though a search under a larger budget finds only a bad one: that of the smaller budget is put there."""

    def plan_badly(spec, profile, workload, *more):
        if workload.vram_mib[0] > OWN + 4:
            return plan_baseline("layer-stream", spec, profile, workload)
        return plan_variant(spec, profile, workload)

    monkeypatch.setattr("pshard.planner.choose_mode.plan_split", plan_badly)
    code, _, _, registry = plan("--sweep", f"{OWN + 4}:{OWN + 5}:1")
    assert code == 0
    small, large = load_registry(registry).variants
    assert large.workload.vram_mib == (OWN + 5,) and large.ranks[0].budget_mib == OWN + 5
    assert round_seconds(large) == pytest.approx(round_seconds(small))
    assert same_placements(large.ranks[0].tiers, small.ranks[0].tiers)


def test_explain_says_what_binds_and_what_more_would_bring(plan):
    _, out, _, _ = plan("--vram", MIB, "--explain")
    assert "1 GiB more VRAM: +" in out and "a link twice as fast: +" in out
    assert "attention" in out and "bound" in out


def test_explain_sets_the_plan_beside_every_published_strategy_by_prediction(plan):
    _, out, _, registry = plan("--vram", MIB, "--explain", "--json")
    (outlook,) = json.loads(out)["outlooks"]
    own, *others = outlook["forecasts"]
    assert outlook["machine"].endswith("(datasheet)") and own["strategy"] == "ilp"
    (variant,) = load_registry(registry).variants
    assert own["round_seconds"] == pytest.approx(round_seconds(variant))
    assert {each["strategy"] for each in others} <= set(NAMES) and len(others) > 2
    rounds = [each["round_seconds"] for each in others]
    assert rounds == sorted(rounds) and own["round_seconds"] <= rounds[0]
    _, out, _, _ = plan("--vram", MIB, "--strategy", others[0]["strategy"], "--explain")
    assert "predicted, not run" in out and re.search(
        rf"this plan .*\+0\.0%.*\n.*{others[0]['strategy']} .*\+0\.0%", out
    )


def test_example_machines_are_what_their_rates_give_and_plan_the_bundled_model(plan, tmp_path):
    assert write_examples([str(tmp_path)]) == 0
    for path in sorted(PROFILE.parent.glob("*.json")):
        told = load_profile(path).provenance
        assert told.source == ("datasheet" if path.stem in MACHINES else "measured")
        if path.stem in MACHINES:
            assert (tmp_path / path.name).read_bytes() == path.read_bytes(), path.stem
            assert "nothing was measured" in told.notes[0]
        assert plan("--vram", MIB, "--strategy", "attention-first", profile=path)[0] == 0


def test_a_published_strategys_gains_are_its_own(plan):
    """More memory and a faster link are worth what they bring to the strategy, not what the planner would do better."""
    measured = PROFILE.with_name("h100-80gb-16-cores-measured.json")  # no sheet, whose formula may change
    _, out, _, registry = plan("--vram", MIB, "--strategy", "attention-first", "--json", "--explain", profile=measured)
    before = load_registry(registry).variants[0].ranks[0].tiers
    memory, link, *others = json.loads(out)["gains"][0]["what_if"]
    assert [each["change"] for each in others] == [
        "host memory twice as fast", "twice the cores", "twice the host memory",
    ]  # fmt: skip
    _, out, _, _ = plan("--vram", str(OWN + 4 + 1024), "--strategy", "attention-first", "--json", profile=measured)
    after = from_json(Registry, json.loads(out)["registry"]).variants[0].ranks[0].tiers
    seconds = {t.tokens: t.prediction.seconds for t in after}
    assert memory["speedups"] == [[t.tokens, pytest.approx(t.prediction.seconds / seconds[t.tokens])] for t in before]
    assert all(gain == pytest.approx(1, abs=0.02) for _, gain in link["speedups"])  # it streams nothing
    assert link["of_round"] == pytest.approx(1, abs=0.02)


def test_what_a_better_machine_would_cost_a_tier_is_said_beside_what_the_round_gains():
    variant = variant_with_states(make_model(2), 100, 64, set())
    gains = tuple(WhatIf(f"{i} more", ((1, tier),), of_round) for i, (tier, of_round) in enumerate(
        [(0.93, 1.042), (0.9999, 0.97), (1.5, 1.0)]
    ))  # fmt: skip
    variant = replace(
        variant, ranks=tuple(
            replace(r, tiers=tuple(replace(t, prediction=replace(t.prediction, seconds=1.0, binds="link"))
                                   for t in r.tiers)) for r in variant.ranks),
    )  # fmt: skip
    out = StringIO()
    print_explanation(variant, gains, (), Console(file=out, width=80))
    assert "; 0 more: -7%; 1 more: +0%; 2 more: +50%\n" in out.getvalue()
    assert (
        "a round of prompts and answers, which plans minimise: 0 more: +4%; 1 more: -3%; 2 more: +0%; a tier may lose "
        "where the round gains\n"
    ) in out.getvalue()


def test_a_published_strategy_can_be_written_instead(plan):
    _, _, _, registry = plan("--vram", MIB, "--strategy", "fit")
    (variant,) = load_registry(registry).variants
    assert {t.solve.strategy for t in variant.ranks[0].tiers} == {"fit"}
    assert "streamed" not in {p.where for t in variant.ranks[0].tiers for p in t.placements}


def test_llama_cpp_arguments_name_what_is_not_pinned_and_are_one_json_document_with_the_plan(plan):
    _, out, _, _ = plan("--vram", MIB, "--emit", "llama.cpp", "--json")
    data = json.loads(out)
    _, out, _, registry = plan("--vram", MIB, "--emit", "llama.cpp")
    assert data["llama.cpp"] == [out.strip()] and data["registry"]["sets"][0]["variants"]
    tier = load_registry(registry).variants[0].ranks[0].covering(1)
    outside = [p.unit for p in tier.placements if p.sort != "pinned" and "ffn" in p.unit]
    assert out.startswith("-ngl 999 ") and out.count("\n") == 1
    assert ("ffn_.*=CPU" in out) == bool(outside)
    assert ("'^(output(_norm)?|token_embd)\\.weight=CPU'" in out) == (tier.placement("output").sort != "pinned")


def variant_with_states(spec: ModelSpec, mib: int, context: int, in_vram: set[str]) -> Variant:
    """10 MiB beside the states, of which 2 are slots; states of the units of these names in VRAM."""
    workload = Workload((mib,), context, max_ubatch=1, prompt=context // 2, generated=context // 2)
    sizes, units = spec.state_sizes(workload.state_shape), [u for u in spec.units if u.layer >= 0]
    places = [
        Placement(u.name, "pinned", "vram" if u.name in in_vram else "host")
        if u.kind.state
        else Placement(u.name, "streamed")
        for u in units
    ]
    buffers = Buffers(6 << 20, 2 << 20, 2, 1 << 20, sum(sizes[name] for name in in_vram))
    tier = TierPlan(1, tuple(places), buffers, UNPREDICTED, UNSOLVED)
    return Variant(workload, True, (RankPlan(0, mib, 1.0, (), (), (tier,)),))


@pytest.mark.parametrize(
    ("layers", "in_vram", "spare_mib", "offloads"),
    [(8, 8, 0, True), (8, 0, 900, False), (8, 2, 3, False), (8, 2, 4, True)],
)
def test_llama_cpp_keeps_its_kv_cache_in_vram_where_all_of_it_fits(layers, in_vram, spare_mib, offloads):
    """It cannot have a part there. Six layers of 1 MiB are on the host; the slots' 2 MiB are free in llama.cpp."""
    spec = make_model(layers, heads=32, kv_heads=32)
    names = {f"attention.{i}" for i in range(in_vram)}
    variant = variant_with_states(spec, 10 + in_vram + spare_mib, 64, names)
    assert {spec.state_sizes(variant.workload.state_shape)[f"attention.{i}"] for i in range(layers)} == {1 << 20}
    assert ("-nkvo" not in llama_arguments(variant, spec)) == offloads


@pytest.mark.parametrize("fits", [True, False])
def test_llama_cpp_keeps_states_of_unlike_layers_in_vram_by_their_own_sizes(fits):
    """Delta nets keep little, whatever the context, and full attention much: what is in VRAM says nothing of the
    rest."""
    spec, context = make_shape("qwen3.5-27b"), 131072
    sizes = spec.state_sizes(StateShape(context, 1, "bf16", "bf16", 1))
    small = {u.name for u in spec.units if u.kind.state and sizes[u.name] < 16 << 20}
    assert len(small) == 48 and sum(sizes.values()) > 8 << 30 > 1 << 28 > sum(sizes[name] for name in small)
    needed = -(-(8 * (1 << 20) + sum(sizes.values())) >> 20)
    variant = variant_with_states(spec, needed - (not fits), context, small)
    assert ("-nkvo" not in llama_arguments(variant, spec)) == fits


def test_arguments_for_llama_cpp_of_several_devices_are_refused_before_anything_is_written(plan):
    code, out, err, registry = plan("--vram", f"{MIB},{MIB}", "-sm", "tensor", "--emit", "llama.cpp")
    assert code == 2 and out == "" and "needs a plan for one device" in err and not registry.exists()


def test_llama_cpp_arguments_of_a_sweep_name_their_budget(plan):
    _, out, _, _ = plan("--sweep", f"{MIB}:{int(MIB) + 2}:2", "--emit", "llama.cpp")
    assert [line.split(" MiB: -ngl ")[0] for line in out.splitlines()] == [str(MIB), str(int(MIB) + 2)]


def test_two_devices_get_a_plan_each(plan):
    code, _, err, registry = plan("--vram", f"{OWN + 3},{OWN + 2}", "-sm", "tensor", "-ts", "3,1")
    assert code == 0 and "no collectives" in err
    (variant,) = load_registry(registry).variants
    assert [r.budget_mib for r in variant.ranks] == [OWN + 3, OWN + 2] and variant.workload.tensor_split == (0.75, 0.25)


def test_ratios_are_chosen_and_the_others_named(plan):
    code, out, _, registry = plan("--vram", f"{OWN + 4},{OWN + 2}", "-sm", "tensor", "-ts", "auto")
    (variant,) = load_registry(registry).variants
    assert code == 0 and len(variant.ranks) == 2 and sum(variant.workload.tensor_split) == pytest.approx(1)
    shares = ",".join(f"{share:.4g}" for share in variant.workload.tensor_split)
    assert variant.considered[0].way == f"-sm tensor -ts {shares}"
    assert "-sm tensor -ts 0.5,0.5" in [c.way for c in variant.considered]
    assert all(c.way in out for c in variant.considered) and "the chosen one first" in out


@pytest.mark.slow
def test_modes_are_compared_and_explained(plan):
    code, out, err, registry = plan("--vram", f"{OWN + 4},{OWN + 2}", "-sm", "auto", "--explain")
    (variant,) = load_registry(registry).variants
    assert code == 0 and "no collectives" in err
    assert {way.way.split(" -ts")[0].split(",")[0] for way in variant.considered} == {
        "-sm none", "-sm layer", "-sm tensor",
    }  # fmt: skip
    assert "a decode step" in out and all(way.way in out and way.why in out for way in variant.considered)
    _, out, _, _ = plan("--vram", f"{OWN + 4},{OWN + 2}", "-sm", "auto", "--json")
    (kept,) = from_json(Registry, json.loads(out)["registry"]).variants
    assert kept.considered == variant.considered


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--vram", str(OWN)), "the smallest budget that works is"),
        (("--vram", f"{MIB},{MIB}"), "2 budgets for one device"),
        (("--vram", MIB, "--strategy", "luck"), "unknown strategy 'luck'; choose from ilp, fit"),
        (("--vram", MIB, "-sm", "tensor", "-ts", "auto"), "the profile knows one device; give --vram a budget for"),
        (("--vram", f"{MIB},{MIB}", "-sm", "tensor", "-ts", "autos"), "autos"),
        (("--vram", MIB, "--expl"), "there is no flag --expl (did you mean --explain?)"),
        (("--vram", f"{MIB},{MIB}", "-sm", "tensor", "--write-lp", "program.lp"), "one plan for one device"),
        (("--vram", MIB, "--strategy", "fit", "--write-lp", "program.lp"), "one plan for one device"),
        (("--vram", MIB, "--write-lp", "nowhere/program.lp"), "there is no folder nowhere"),
        (("--vram", MIB, "--write-lp", "."), "--write-lp .: is a folder; give a file name"),
        (("--vram", "0,0", "-sm", "tensor", "-ts", "auto"), "the smallest budget that works is"),
        (("--vram", "0,0", "-sm", "layer", "-ts", "auto"), "the smallest budget that works is"),
        (("--vram", "0,0", "-sm", "auto"), "the smallest budget that works is"),
        (("--vram", MIB, "-np", "0"), "'0' is not a whole number"),
        (("--vram", MIB, "-np", "600", "-c", "512"), "-c 512 is too little for -np 600 texts at once; give a smaller"),
        (("--vram", MIB, "--serve", "-np", "600", "-c", "512"), "-c 512 is too little for -np 600 texts at once"),
        (("--vram", MIB, "--concurrency", "few"), "--concurrency is the load of a server; add --serve"),
        (("--vram", MIB, "--serve", "--concurrency", "some"), "'some' is neither one of 1, few, many nor a number"),
        (("--vram", MIB, "--serve", "--concurrency", "4", "-np", "2"), "-np 2 texts at once are fewer than"),
        (("--vram", MIB, "--serve", "--prompt", "250", "--generated", "9"), "do not fit the context of 256; give -c"),
    ],
)
def test_bad_input_gets_one_line_and_exit_code_2(plan, flags, complaint):
    code, out, err, registry = plan(*flags)
    assert code == 2 and out == ""
    lines = [line for line in err.splitlines() if not line.startswith("note:")]
    assert len(lines) == 1 and complaint in lines[0]
    assert not registry.exists()


def test_a_missing_or_damaged_profile_says_what_to_run(plan, tmp_path):
    assert "run pshard-profile" in plan("--vram", MIB, profile=tmp_path / "none.json")[2]
    broken = tmp_path / "broken.json"
    broken.write_text(PROFILE.read_text()[:500])
    code, _, err, _ = plan("--vram", MIB, profile=broken)
    assert code == 2 and "run pshard-profile" in err


def test_a_model_that_the_hosts_memory_cannot_hold_is_refused_in_one_line(plan, tmp_path):
    _, _, err, registry = plan("--vram", MIB)
    assert "will not load" not in err
    machine = json.loads(PROFILE.read_text())
    machine["host"]["memory_bytes"] = 4 << 20
    small = tmp_path / "small.json"
    small.write_text(json.dumps(machine))
    before = registry.read_bytes()
    code, out, err, _ = plan("--vram", MIB, profile=small)
    assert code == 2 and out == "" and registry.read_bytes() == before
    lines = [line for line in err.splitlines() if not line.startswith("note:")]
    assert len(lines) == 1 and "MiB of weights and KV cache stay in host memory, and the machine has 3 for" in lines[0]
    assert "it will not load; what may work: --vram " in lines[0]
    enough = int(lines[0].split("--vram ")[1].split()[0].rstrip(","))
    assert plan("--vram", str(enough), profile=small)[0] == 0


def test_a_plan_says_once_that_its_profile_has_no_experts(tmp_path, capsys):
    model = write_gguf(tmp_path / "tiny.gguf", "qwen3moe")
    for profile, times in ((load_profile(PROFILE), 0), (replace(load_profile(PROFILE), experts=()), 1)):
        path = save_profile(profile, tmp_path / "profile.json")
        code = main(["-m", str(model), "--profile", str(path), "--sweep", f"{OWN + 1}:{OWN + 2}:1", "-c", "64"])
        err = capsys.readouterr().err
        assert code == 0 and err.count("the profile has no routed experts") == times
