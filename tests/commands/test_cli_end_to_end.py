"""The whole job through the commands on a tiny model: plan, registry, run, bench, report, and the Python API."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cli_world import World, edit_json, make_world, tokenizer_metadata, world_in
from tokenizers import pre_tokenizers

import pshard
from pshard.commands import cli_bench, cli_plan, cli_report, cli_run
from pshard.commands.command_line import run_cli
from pshard.registries.store import load_registry
from pshard.session import bench_engine
from pshard.times.stolen_time import Lost

pytestmark = pytest.mark.usefixtures("few_to_collect")

# Fields of llama-bench's JSON that tools read; a measurement has them under the same names
LLAMA_BENCH = {"n_prompt", "n_gen", "n_depth", "n_ubatch", "type_k", "type_v", "test_time"}
LLAMA_BENCH |= {"avg_ns", "stddev_ns", "avg_ts", "stddev_ts", "samples_ns", "samples_ts"}
OURS = {"strategy", "budget_mib", "tier", "predicted_ts", "peak_vram_mib", "link_bytes", "ranks", "environment"}
OURS |= {"stolen", "disturbed"}


SHORT = ("-p", "8", "-n", "0", "-r", "1")  # a bench, which takes stored plans only


def slow(flags: list[str]) -> object:
    """Parameters of a case that takes several seconds."""
    return pytest.param(flags, marks=pytest.mark.slow)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return make_world(tmp_path)


@pytest.fixture(scope="module")
def planned_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planned")
    world = make_world(folder)
    with pytest.MonkeyPatch.context() as patch:  # conftest's own is for one test
        patch.setenv("PSHARD_CACHE", str(world.profile.parent))
        patch.setenv("PSHARD_VALIDATE", "0")
        plan(world, "--vram", world.budget)
    return folder


@pytest.fixture
def planned(planned_once: Path, tmp_path: Path) -> World:
    """A world with a plan for its budget, made once: for tests that ask what is done with it."""
    shutil.copytree(planned_once, tmp_path, dirs_exist_ok=True)
    return world_in(tmp_path)


def plan(world: World, *more: object) -> None:
    assert cli_plan.main(["-m", str(world.model), "-c", "256", *map(str, more)]) == 0


def run(world: World, *more: object) -> None:
    assert cli_run.main(["-m", str(world.model), *map(str, more)]) == 0


def test_plan_run_bench_report(world: World, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    plan(world, "--vram", world.budget)
    said = capsys.readouterr()
    assert f"registry: {world.registry}" in said.err
    assert "6 MiB, context 256; " in said.out and "tok/s" in said.out

    run(world, "--vram", world.budget, "-p", "To be", "-n", 6, "-s", 1)
    said = capsys.readouterr()
    used, budget = map(int, re.search(r"(\d+) of (\d+) MiB of the budget", said.err).groups())  # type: ignore
    assert 0 < used <= budget == world.budget
    assert re.search(r"^6 tokens; first after [0-9.]+ s, then [0-9.]+ tok/s", said.err, re.MULTILINE)

    results, page = tmp_path / "bench.json", tmp_path / "report" / "report.html"
    flags = ["-p", "64", "-n", "4", "-r", "2", "--baseline", "fit", "-o", "jsonl", "-of", str(results)]
    assert cli_bench.main(["-m", str(world.model), "--vram", "6", *flags]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows == json.loads(results.read_text())
    assert [(row["strategy"], row["test"]) for row in rows] == [
        ("ilp", "pp64"), ("ilp", "tg4"), ("fit", "pp64"), ("fit", "tg4"),
    ]  # fmt: skip
    for row in rows:
        assert row.keys() >= LLAMA_BENCH | OURS
        assert len(row["samples_ts"]) == 2 and row["avg_ts"] > 0 and row["predicted_ts"] > 0
        assert row["peak_vram_mib"] <= world.budget

    call = [str(results), str(world.registry), "-m", str(world.model), "-o", str(page.parent)]
    assert run_cli(cli_report.make_report, call) == 0
    written = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert written[0] == page and all(p.stat().st_size > 0 for p in written)
    assert {p.suffix for p in written} == {".html", ".png", ".svg"}
    html = page.read_text()
    assert "tiny" in html and "fit" in html and 'src="http' not in html


@pytest.fixture
def experts(tmp_path: Path) -> World:
    return make_world(tmp_path, arch="qwen3moe", qtype="Q4_0", n_experts=16, n_used=4, d_expert=128, n_layers=4)


@pytest.mark.slow
def test_a_model_of_experts_is_planned_by_trial_and_benched_beside_published_ways(
    experts: World, capsys: pytest.CaptureFixture
) -> None:
    plan(experts, "--vram", 5, "--validate", "-ub", 64)
    said = capsys.readouterr()
    assert "Plans that were run (ms)" in said.out and load_registry(experts.registry).variants[0].validated
    flags = ["-p", "16", "-n", "2", "-r", "1", "-o", "json"]
    ways = ["--strategy", "cpu-moe", "--strategy", "hot-experts"]
    assert cli_bench.main(["-m", str(experts.model), "--vram", "5", *flags, *ways]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["strategy"] for row in rows] == [name for name in ("ilp", "cpu-moe", "hot-experts") for _ in range(2)]
    assert all(row["avg_ts"] > 0 and row["peak_vram_mib"] <= 5 for row in rows)


def test_a_sweep_of_a_published_way_skips_budgets_that_it_does_not_fit(
    experts: World, capsys: pytest.CaptureFixture
) -> None:
    plan(experts, "--sweep", "3:7:2", "--strategy", "hot-experts", "-ub", 64)
    assert "skipped: strategy 'hot-experts' does not fit 3 MiB; raise --vram" in capsys.readouterr().err
    assert [v.workload.vram_mib for v in load_registry(experts.registry).variants] == [(5,), (7,)]


def test_streamed_bytes_are_those_of_the_plan(world: World, capsys: pytest.CaptureFixture) -> None:
    plan(world, "--vram", 8, "--strategy", "ffn-stream")
    capsys.readouterr()
    assert cli_bench.main(["-m", str(world.model), "--vram", "8", "-p", "0", "-n", "8", "-r", "2", "-o", "json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    tier = load_registry(world.registry).variants[0].ranks[0].covering(1)
    assert tier.prediction.link_bytes > 0
    assert row["link_bytes"] == pytest.approx(8 * tier.prediction.link_bytes, rel=0.02)


def test_a_strategy_that_does_the_plans_work_is_said_to_be_the_plan(
    world: World, capsys: pytest.CaptureFixture
) -> None:
    plan(world, "--vram", 8, "--strategy", "attention-first")
    capsys.readouterr()
    flags = ["-p", "0", "-n", "2", "-r", "1", "-o", "json", "--baseline", "fit", "--strategy", "ffn-stream"]
    assert cli_bench.main(["-m", str(world.model), "--vram", "8", *flags]) == 0
    said = capsys.readouterr()
    same = {row["strategy"]: row["same_as"] for row in json.loads(said.out)}
    assert same == {"ilp": "", "ffn-stream": "", "fit": "ilp"}
    assert said.err.count("does the same work as the plan here") == 1


def test_seed_decides_the_text(planned: World, capsys: pytest.CaptureFixture) -> None:
    texts = []
    for seed in (7, 7, 8):
        capsys.readouterr()
        run(planned, "--vram", planned.budget, "-p", "To be", "-n", 24, "-s", seed, "--temp", 1)
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def greedy(world: World, capsys: pytest.CaptureFixture, *more: object) -> str:
    capsys.readouterr()
    run(world, "-p", "1,2,3", "--tokens", "-n", 12, "--temp", 0, *more)
    return capsys.readouterr().out


def test_token_ids_in_and_out_and_the_same_under_every_budget(world: World, capsys: pytest.CaptureFixture) -> None:
    plan(world, "--sweep", "3:9:3")
    plan(world, "--vram", world.roomy)
    texts = {mib: greedy(world, capsys, "--vram", mib, "--kernels", "plain") for mib in (3, 6, 9, world.roomy)}
    assert len(texts[3].split()) == 12 and all(0 <= int(token) < 258 for token in texts[3].split())
    assert set(texts.values()) == {texts[3]}


def test_registry_keeps_a_variant_per_budget_and_the_largest_that_fits_runs(
    world: World, capsys: pytest.CaptureFixture
) -> None:
    plan(world, "--vram", 4)
    plan(world, "--vram", 8)
    plan(world, "--vram", 4)
    assert [v.workload.vram_mib for v in load_registry(world.registry).variants] == [(4,), (8,)]
    for given, used in ((4, 4), (7, 4), (8, 8), (4000, 8)):
        capsys.readouterr()
        run(world, "--vram", given, "-p", "a", "-n", 2)
        assert f"of {used} MiB of the budget" in capsys.readouterr().err


def test_replan_after_the_model_changed(world: World, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    plan(world, "--vram", world.budget)
    make_world(tmp_path, n_layers=3)
    call = ["-m", str(world.model), "--vram", "6", "-p", "a", "-n", "2"]
    assert cli_bench.main([*call[:4], *SHORT]) == 2
    assert cli_run.main([*call, "--replan"]) == 0
    assert cli_run.main(call) == 0
    (variant,) = load_registry(world.registry).sets[0].variants  # those of the old file are still there
    assert len(variant.ranks[0].tiers[0].placements) == 2 * 3 + 2
    assert variant.workload.context == 512  # as pshard-plan would, not just what this prompt takes


def test_command_in_an_error_mends_it(world: World, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    place, profile = tmp_path / "a b.json", tmp_path / "lab.json"
    world.profile.rename(profile)
    call = ["-m", str(world.model), "--vram", "6", "--registry", str(place), "--profile", str(profile), *SHORT]
    assert cli_bench.main(call) == 2
    command = shlex.split(capsys.readouterr().err.strip().rpartition("run: ")[2])
    assert command[0] == "pshard-plan" and cli_plan.main(command[1:]) == 0
    assert cli_bench.main(call) == 0


def test_command_in_an_error_names_a_budget_also_when_none_was_given(world: World, capsys) -> None:
    call = ["-m", str(world.model), *SHORT]
    assert cli_bench.main(call) == 2
    command = shlex.split(capsys.readouterr().err.strip().rpartition("run: ")[2])
    assert int(command[command.index("--vram") + 1]) > 0 and cli_plan.main(command[1:]) == 0
    assert cli_bench.main(call) == 0


def test_no_command_asks_for_more_context_than_the_model_has(world: World, capsys) -> None:
    assert cli_run.main(["-m", str(world.model), "--vram", "6", "-p", "a", "-n", "600"]) == 2
    line = capsys.readouterr().err
    assert "more than the model's 512" in line and "pshard-plan" not in line


def test_everything_fits(world: World, capsys: pytest.CaptureFixture) -> None:
    plan(world, "--vram", world.roomy)
    assert "no plan is needed" in " ".join(capsys.readouterr().out.split())
    (variant,) = load_registry(world.registry).variants
    assert not variant.plan_needed
    wheres = {p.where for tier in variant.ranks[0].tiers for p in tier.placements if not p.unit.startswith("embed")}
    assert wheres == {"pinned"}


def test_a_run_says_as_much_of_the_budget_as_its_plan(world: World, capsys: pytest.CaptureFixture) -> None:
    plan(world, "--vram", world.roomy, "-c", 224)  # 13.3 MiB, which is more than 13
    planned = re.search(r"^The budget +(\d+ of \d+ MiB)$", capsys.readouterr().out, re.MULTILINE)
    run(world, "--vram", world.roomy, "-p", "a", "-n", 2)
    assert planned and f"; {planned[1]} of the budget" in capsys.readouterr().err


def test_plan_as_json_is_what_the_registry_holds(world: World, capsys: pytest.CaptureFixture) -> None:
    plan(world, "--vram", world.budget, "--json", "--explain")
    data = json.loads(capsys.readouterr().out)
    stored = json.loads(world.registry.read_text())
    (printed,), (kept,) = data["registry"]["sets"], stored["sets"]
    assert printed["variants"] == kept["variants"] and printed["fingerprint"] == kept["fingerprint"]
    assert data["timelines"] and data["gains"]


def test_explanation_maps_every_layer(world: World, capsys: pytest.CaptureFixture) -> None:
    plan(world, "--vram", world.budget, "--explain")
    said = capsys.readouterr().out
    tiers = load_registry(world.registry).variants[0].ranks[0].tiers
    rows = re.findall(r"^ +(attention|ffn) +([Psc]+)$", said, re.MULTILINE)
    letters = {"pinned": "P", "streamed": "s", "cpu": "c"}
    wanted = [
        (kind, "".join(letters[p.where] for p in tier.placements if p.unit.endswith(kind)))
        for tier in tiers
        for kind in ("attention", "ffn")
    ]
    assert rows == wanted and all(len(row) == 4 for _, row in rows)
    assert len(re.findall(r"^tier \d+: ", said, re.MULTILINE)) == len(tiers)


def test_registry_elsewhere(world: World, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    place = tmp_path / "new folder" / "r.json"
    plan(world, "--vram", world.budget, "--registry", place)
    assert place.exists() and not world.registry.exists()
    run(world, "--vram", world.budget, "--registry", place, "-p", "a", "-n", 2)
    world.profile.unlink()
    assert cli_bench.main(["-m", str(world.model), "--registry", str(place), *SHORT]) == 2


def test_environment_variables_stand_in_for_flags(
    world: World, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PSHARD_MODEL", str(world.model))
    monkeypatch.setenv("PSHARD_VRAM", "6")
    monkeypatch.setenv("PSHARD_CTX_SIZE", "128")
    assert cli_plan.main([]) == 0
    assert cli_plan.main(["--vram", "8", "-c", "64"]) == 0
    assert f"model: {world.model} (from PSHARD_MODEL)" in capsys.readouterr().err
    made = {(v.workload.vram_mib, v.workload.context) for v in load_registry(world.registry).variants}
    assert made == {((6,), 128), ((8,), 64)}
    assert cli_run.main(["-p", "a", "-n", "2"]) == 0
    assert "of 6 MiB" in capsys.readouterr().err


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The token ids of each prompt that a run generates from."""
    from pshard.runtime.engine import Engine

    found, real = [], Engine.generate

    def listen(engine, prompt, *more, **named):
        found.append(list(prompt))
        return real(engine, prompt, *more, **named)

    monkeypatch.setattr(Engine, "generate", listen)
    return found


BYTES = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}


def spell(text: str) -> list[int]:
    """The ids of the world's tokenizer: one for each letter; the begin token is 256, the end token 257."""
    return [BYTES[{" ": "\u0120", "\n": "\u010a"}.get(letter, letter)] for letter in text]


def test_special_tokens_count_where_a_template_or_a_whole_prompt_spells_them(
    planned: World, prompts: list[list[int]], capsys: pytest.CaptureFixture
) -> None:
    said = "a</s><s>b"
    for flags in (["--chat"], [], ["--no-parse-special"]):
        run(planned, "--vram", planned.budget, "-p", said, "-n", 1, *flags)
    assert prompts[0] == [256, *spell(f"user: {said}\nassistant:")]
    assert prompts[1][-4:] == [*spell("a"), 257, 256, *spell("b")]
    assert prompts[2][-9:] == spell(said)
    assert "chat template" not in capsys.readouterr().err


def test_a_template_that_hides_what_it_wrote_is_named_once(
    tmp_path: Path, prompts: list[list[int]], capsys: pytest.CaptureFixture
) -> None:
    hides = {"tokenizer.chat_template": "<s>{{ '%s</s>' % messages[0].content }}"}
    world = make_world(tmp_path, metadata=tokenizer_metadata() | hides)
    plan(world, "--vram", world.budget)
    capsys.readouterr()
    run(world, "--vram", world.budget, "-p", "a", "-n", 1, "--chat")
    assert prompts == [[256, *spell("a</s>")]]
    assert capsys.readouterr().err.count("hides what it wrote itself: </s> in it is plain text") == 1


@pytest.mark.parametrize("end", [[], [257]])
def test_an_answer_that_ends_within_a_character_shows_it(
    planned: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, end: list[int]
) -> None:
    from pshard.runtime.engine import Engine

    half = [*spell("a"), BYTES["\u00f0"], BYTES["\u0141"]]  # F0 9F: half of an emoji

    def draw_half(engine: Engine, tokens: list[int], sampler: object) -> int:
        return (half + end)[drawn.pop(0)]

    monkeypatch.setattr("pshard.runtime.engine._draw", draw_half)
    drawn = [0, 1, 2, 3]
    with pshard.load(planned.model, vram=planned.budget) as engine:
        assert "".join(engine.generate("x", 3 + len(end))) == "a\ufffd"
    drawn = [0, 1, 2, 3]
    capsys.readouterr()
    run(planned, "--vram", planned.budget, "-p", "x", "-n", 3 + len(end))
    shown = capsys.readouterr()
    assert shown.out.endswith("a\ufffd\n") and "3 tokens;" in shown.err


def test_perplexity_of_a_random_model_is_near_its_vocabulary(
    planned: World, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 20)
    capsys.readouterr()
    call = ["-m", str(planned.model), "--vram", "6", "--perplexity", str(text), "--ppl-window", "100", "-o", "json"]
    assert cli_bench.main(call) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["tokens"], found["window"], found["file"]) == (900, 100, "text.txt")
    assert 100 < found["perplexity"] < 5000


def test_bench_says_when_the_plan_is_a_published_strategy(world: World, capsys: pytest.CaptureFixture) -> None:
    """Rows of the registry's plan are called ilp, whoever made it: figures of one would pass for the planner's."""
    call = ["-m", str(world.model), "--vram", "6", "-p", "0", "-n", "2", "-r", "1"]
    note = "note: the registry's plan is the published strategy 'fit'; its rows are called ilp"
    for strategy in ("fit", "ilp"):
        plan(world, "--vram", "6", "--no-validate", *(["--strategy", strategy] if strategy != "ilp" else []))
        made = load_registry(world.registry).variants[0].ranks[0].tiers[0].solve.strategy
        capsys.readouterr()
        assert cli_bench.main(call) == 0
        assert (note in capsys.readouterr().err) == (made == "fit") and (made == strategy or strategy == "ilp")


def test_bench_says_when_the_plan_is_a_published_strategy_improved(world: World, capsys: pytest.CaptureFixture) -> None:
    plan(world, "--vram", "6", "--no-validate", "--strategy", "fit")
    text = world.registry.read_text()
    world.registry.write_text(text.replace('"fit"', '"improved fit"'))
    assert world.registry.read_text() != text
    capsys.readouterr()
    assert cli_bench.main(["-m", str(world.model), "--vram", "6", "-p", "0", "-n", "2", "-r", "1"]) == 0
    assert "note: the registry's plan is the published strategy 'fit', improved;" in capsys.readouterr().err


def test_bench_names_the_tests_while_which_others_had_cores(
    planned: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    shares = iter((0.3, 0.0))
    monkeypatch.setattr(bench_engine, "lost_since", lambda began, ranks: Lost(0.0, next(shares)))
    call = ["-m", str(planned.model), "--vram", "6", "-p", "8", "-n", "2", "-r", "1", "-o", "json"]
    assert cli_bench.main(call) == 0
    said = capsys.readouterr()
    assert [row["disturbed"] for row in json.loads(said.out)] == [0.3, 0.0]
    assert said.err.count("had cores during ilp pp8 (30%): rates may be too low") == 1 and "tg2 (" not in said.err


def test_tables_of_bench(world: World, capsys: pytest.CaptureFixture) -> None:
    plan(world, "--vram", world.budget, "-np", 2)
    for form in ("md", "csv"):
        capsys.readouterr()
        call = ["-m", str(world.model), "--vram", "6", "-p", "8,16", "-n", "0", "-npl", "1,2", "-r", "1", "-o", form]
        assert cli_bench.main(call) == 0
        said = capsys.readouterr().out
        assert len(said.splitlines()) == {"md": 2, "csv": 1}[form] + 4
        assert "pp16 x2" in said and "predicted" in said


@pytest.mark.slow
def test_batched_bench_has_a_row_for_each_prompt_and_number_of_sequences(
    world: World, capsys: pytest.CaptureFixture
) -> None:
    plan(world, "--vram", world.budget, "-np", 4)
    call = ["-m", str(world.model), "--vram", "6", "-npl", "1,4", "-r", "1", "-o", "batched"]
    capsys.readouterr()
    assert cli_bench.main([*call, "-p", "16,24", "-n", "4"]) == 0
    rows = [[cell.strip() for cell in line.split("|")[2:6]] for line in capsys.readouterr().out.splitlines()[2:]]
    assert rows == [[p, "4", b, str(int(b) * (int(p) + 4))] for b in "14" for p in ("16", "24")]
    assert cli_bench.main([*call, "-p", "16", "-n", "0"]) == 2
    assert "give both -p and -n" in capsys.readouterr().err


@pytest.mark.slow
def test_a_prompt_cache_is_used_by_another_number_of_ranks(
    world: World, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PSHARD_MODEL", str(world.model))
    cache, split = tmp_path / "cache.kv", ["--vram", "64,64", "-sm", "tensor", "-ts", "1,1"]
    layers = ["--vram", "64,64,64", "-sm", "layer"]
    for flags in (["--vram", 64], split, layers):
        plan(world, *flags)
    texts = []
    for flags, prompt, taken in (
        (["--vram", "64"], "1,2,3,4,5", None),
        ([*split, "--reduce-dtype", "f32", "--prompt-cache-all"], "1,2,3,4,5", 4),
        (layers, "1,2,3,4,5", 4),
        (["--vram", "64", "--prompt-cache-ro"], "1,2,3,9,9", 3),
        (["--vram", "64", "--prompt-cache-all"], "1,2,3,4,5", 4),
        (["--vram", "64"], "1,2,3,4,5", 4),
    ):
        capfd.readouterr()
        command = [*flags, "-p", prompt, "--tokens", "-n", "4", "--temp", "0", "--prompt-cache", str(cache)]
        assert cli_run.main(command) == 0
        said = capfd.readouterr()
        assert (f"{taken} of 5 tokens" in said.err) if taken else ("prompt cache" not in said.err)
        texts.append(said.out)
    assert texts[0] == texts[1] == texts[2] == texts[4] == texts[5]
    assert cli_run.main(["-p", "1", "--tokens", "--prompt-cache-ro"]) == 2


@pytest.mark.parametrize(
    "split",
    [
        ["--vram", "64,64", "-sm", "tensor", "-ts", "3,1"],
        slow(["--vram", "64,64", "-sm", "layer", "-ts", "3,1"]),
        slow(["--vram", "64,64,64", "-sm", "tensor", "-ts", "1,1,1", "--max-tp", "attn=2"]),
        slow(["--vram", "3,3,3", "-sm", "tensor", "-ts", "1,2,1", "--max-tp", "ffn=1,head=2"]),
        slow(["--vram", "3,2,4", "-sm", "layer"]),
    ],
    ids=lambda split: " ".join((split[3], split[1], *split[6:])),
)
def test_ranks_give_the_tokens_of_one(
    world: World, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, split: list[str]
) -> None:
    monkeypatch.setenv("PSHARD_MODEL", str(world.model))
    plan(world, "--vram", 64)
    plan(world, *split)
    texts = []
    for flags in (["--vram", "64"], split):
        capfd.readouterr()
        assert cli_run.main([*flags, "-p", "1,2,3", "--tokens", "-n", "6", "--temp", "0"]) == 0
        said = capfd.readouterr()
        texts.append(said.out)
        assert said.err.count("(from PSHARD_MODEL)") == 1
    assert len(texts[0].split()) == 6 and texts[0] == texts[1]


@pytest.mark.slow
def test_ranks_with_slices_of_experts_give_the_tokens_of_one(
    world: World, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    make_world(tmp_path, arch="qwen2moe", qtype="Q8_0", d_expert=160, d_shared=96)
    split = ["--vram", "4,3", "-sm", "tensor", "-ts", "3,2"]
    plan(world, "--vram", 64)
    plan(world, *split)
    texts = []
    for flags in (["--vram", "64"], split):
        capfd.readouterr()
        run(world, *flags, "-p", "1,2,3", "--tokens", "-n", "6", "--temp", "0")
        texts.append(capfd.readouterr().out)
    assert len(texts[0].split()) == 6 and texts[0] == texts[1]


def test_ranks_without_a_seed_draw_the_same_tokens(
    world: World, tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_world(tmp_path, metadata={})  # without an end-of-text token, which one in eleven runs drew
    monkeypatch.setenv("PSHARD_MODEL", str(world.model))
    split, cache = ["--vram", "64,64", "-sm", "tensor"], ["--prompt-cache", str(tmp_path / "c.kv")]
    plan(world, *split)
    plan(world, "--vram", 64)

    def tokens(*flags: str) -> str:
        capfd.readouterr()
        assert cli_run.main([*flags, "--tokens"]) == 0
        return capfd.readouterr().out.strip()

    drawn = tokens(*split, "-p", "1,2,3", "-n", "24", "--temp", "3", "--top-k", "0", *cache, "--prompt-cache-all")
    follow = ["--vram", "64", "-p", f"1,2,3 {drawn}", "-n", "4", "--temp", "0"]
    assert len(drawn.split()) == 24
    assert tokens(*follow, *cache, "--prompt-cache-ro") == tokens(*follow)  # both ranks' cells are of these


@pytest.mark.slow
@pytest.mark.parametrize("ways", [["--numa"], ["--vram 6 --numa", "--numa", "--vram 6,6 --numa"]], ids=len)
def test_numa_starts_a_rank_for_each_node_of_the_host(
    world: World, capfd: pytest.CaptureFixture, ways: list[str]
) -> None:
    edit_json(world.profile, "host", "numa_nodes", value=2)  # on a machine of one node the two share its cores
    run = ["-m", str(world.model), "-p", "1,2,3", "--tokens", "-n", "6", "--temp", "0"]
    plan(world, "--vram", 64)
    plan(world, "--vram", 6, "--numa")
    two = load_registry(world.registry).variants[-1]
    assert (two.workload.vram_mib, two.workload.split_mode, len(two.ranks)) == ((6, 6), "tensor", 2)
    texts = []
    for flags in ("--vram 64", *ways):
        capfd.readouterr()
        assert cli_run.main([*run, *flags.split()]) == 0
        texts.append(capfd.readouterr())
        assert ("rank 1" in texts[-1].err) is ("--numa" in flags)
    assert len(texts[0].out.split()) == 6 and len({said.out for said in texts}) == 1


@pytest.mark.slow
def test_a_bench_of_two_nodes_measures_two_ranks(world: World, capfd: pytest.CaptureFixture) -> None:
    edit_json(world.profile, "host", "numa_nodes", value=2)
    plan(world, "--vram", 6, "--numa")
    capfd.readouterr()
    assert cli_bench.main(["-m", str(world.model), "--numa", "-p", "0", "-n", "4", "-r", "1", "-o", "json"]) == 0
    (row,) = json.loads(capfd.readouterr().out)
    assert row["ranks"] == 2 and len(row["rank_peaks_mib"]) == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--vram", "6,6,6"], "--numa: --vram is for 3 ranks, the host has 2 NUMA nodes"),
        (["--vram", "6", "-ts", "1,1,1"], "--numa: -ts is for 3 ranks, the host has 2 NUMA nodes"),
    ],
)
def test_numa_and_another_number_of_ranks_exclude_each_other(
    world: World, capsys: pytest.CaptureFixture, flags: list[str], message: str
) -> None:
    edit_json(world.profile, "host", "numa_nodes", value=2)
    for main in (cli_plan.main, cli_run.main):
        more = ["-p", "a"] if main is cli_run.main else []
        assert main(["-m", str(world.model), "--numa", *flags, *more]) == 2
        assert message in capsys.readouterr().err


def test_numa_is_for_ranks_on_cpus(world: World, capsys: pytest.CaptureFixture) -> None:
    edit_json(world.profile, "accelerators", 0, "kind", value="cuda")
    call = ["-m", str(world.model), "--numa", "--vram", "600", "--profile", str(world.profile), "--no-validate"]
    assert cli_plan.main(call) == 2
    assert "--numa is for ranks on CPUs" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_takes_the_split_that_was_chosen(
    world: World, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PSHARD_MODEL", str(world.model))
    plan(world, "--vram", "4,4", "-sm", "auto")
    said = capfd.readouterr().out
    (variant,) = load_registry(world.registry).variants
    assert all(f"-sm {mode}" in said for mode in ("none", "layer", "tensor"))
    assert "sums take" in said and said.index(variant.considered[0].way) < said.index(variant.considered[1].way)
    plan(world, "--vram", "3,3", "-sm", "tensor")
    run = ["-p", "1,2,3", "--tokens", "-n", "6", "--temp", "0"]
    texts = []
    for flags in (["--vram", "4,4"], ["--vram", "3,3"]):  # whatever was chosen, and two ranks
        capfd.readouterr()
        assert cli_run.main([*flags, "-sm", "auto", *run]) == 0
        texts.append(capfd.readouterr().out)
    assert len(texts[0].split()) == 6 and texts[0] == texts[1]


@pytest.mark.parametrize(
    "split",
    [["-sm", "auto"], ["-sm", "tensor", "-ts", "auto"], ["-sm", "layer", "-ts", "auto"]],
    ids=lambda split: " ".join(split[1::2]),
)
@pytest.mark.slow
def test_replan_chooses_splits_as_pshard_plan_does(
    world: World, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, split: list[str]
) -> None:
    monkeypatch.setenv("PSHARD_MODEL", str(world.model))
    flags = ["--vram", "4,3", *split, "-c", "128"]
    plan(world, *flags)
    (planned,) = load_registry(world.registry).variants
    world.registry.unlink()
    capfd.readouterr()
    assert cli_run.main([*flags, "--replan", "-p", "1,2,3", "--tokens", "-n", "4", "--temp", "0"]) == 0
    assert len(capfd.readouterr().out.split()) == 4
    (made,) = load_registry(world.registry).variants
    assert made.considered
    assert {way.way for way in made.considered} == {way.way for way in planned.considered}
    assert made.split == planned.split


def test_replan_with_ratios_to_choose_needs_to_know_the_devices(world: World, capsys: pytest.CaptureFixture) -> None:
    call = ["-m", str(world.model), "--vram", "4", "--replan", "-p", "1", "--tokens", "--temp", "0"]
    assert cli_run.main([*call, "-sm", "tensor", "-ts", "auto"]) == 2
    assert "-ts auto: the profile knows one device" in capsys.readouterr().err


def test_ranks_of_torchrun_do_not_each_make_a_plan(
    world: World, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    flags = ["-m", str(world.model), "--vram", "4,4", "-sm", "tensor", "--replan"]
    assert cli_run.main([*flags, "-p", "1", "--tokens", "--temp", "0"]) == 2
    assert "--replan is for one process" in capsys.readouterr().err and not world.registry.exists()


def test_torchrun_with_another_number_of_ranks_than_the_plan_that_auto_takes_is_told_how_many(
    world: World, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan(world, "--vram", world.roomy)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    flags = ["-m", str(world.model), "--vram", f"{world.roomy},{world.roomy}", "-sm", "auto"]
    assert cli_run.main([*flags, "-p", "1", "--tokens", "--temp", "0"]) == 2
    assert "(-sm none, device 0) is for 1 rank, but 2 were started; start 1 with torchrun" in capsys.readouterr().err


def test_python_api(world: World) -> None:
    from pshard.errors import UserError

    with pytest.raises(UserError, match="run: pshard-plan"):
        pshard.load(world.model, vram=world.budget, plan=False)
    plan(world, "--vram", world.budget)
    with pshard.load(world.model, vram=world.budget, context=128) as engine:
        assert engine.plan.workload.vram_mib == (world.budget,) and engine.vocab == 258
        logits = engine.forward([1, 2, 3])
        assert logits.shape == (258,) and engine.lengths == (3,)
        engine.reset()
        assert engine.forward([1, 2, 3], all_logits=True)[-1].equal(logits)
        engine.reset()
        assert len(list(engine.generate([1, 2, 3], 5, text=False))) == 5
        memory = engine.memory()
        assert 0 < memory.accelerator <= memory.budget == world.budget << 20
        with pytest.raises(UserError, match=r"token ids must be in 0\.\.257"):
            engine.forward([258])
    with pytest.raises(RuntimeError, match="closed"):
        engine.forward([1])


def test_python_plans_at_first_use_and_says_what_an_engine_is(world: World, capsys) -> None:
    with pshard.load(world.model, vram=world.budget, context=64) as engine:
        assert "plan:" in capsys.readouterr().err and world.registry.exists()
        first = "".join(engine.generate("ab", 3))
        told = repr(engine)
        assert told.startswith("<Engine tiny: 6 MiB (") and "64 tokens of context>" in told
    assert repr(engine).endswith(", closed>")
    with pshard.load(world.model, vram=world.budget, context=64, plan=False) as engine:
        assert isinstance(first, str) and "plan:" not in capsys.readouterr().err
    with pshard.load(world.model, vram=world.budget, context=48, replan=True) as engine:
        assert engine.plan.workload.context == 48


@pytest.mark.parametrize("command", ["plan", "profile", "run", "bench", "report"])
def test_help_needs_none_of_the_heavy_packages(command: str) -> None:
    function = "make_report" if command == "report" else "main"
    code = (
        f"import sys; from pshard.commands.cli_{command} import {function} as main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'torch', 'pulp', 'numpy', 'scipy', 'matplotlib', 'tokenizers', 'gguf', 'rich'} & set(sys.modules)\n"
        "heavy |= {'pshard.planner.price.simulate', 'pshard.steps.emit'} & set(sys.modules)  # what prices plans\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: pshard-{command} ")


def test_planning_needs_no_torch(tmp_path: Path) -> None:
    """Not even the whole search, which takes long for more layers."""
    world = make_world(tmp_path, n_layers=2)
    code = (
        "import sys; from pshard.commands.cli_plan import main\n"
        f"assert main(['-m', {str(world.model)!r}, '--vram', '3', '-c', '128']) == 0\n"
        "assert not {'torch', 'matplotlib'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert load_registry(world.registry).variants[0].plan_needed
