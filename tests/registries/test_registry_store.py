"""Registries on disk: where they lie, variants that stay, concurrent writers, and places that cannot be written."""

import errno
import multiprocessing
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from registry_samples import INPUTS, make_plan_set, make_variant

from pshard.commands.command_line import parse_ratios
from pshard.errors import StaleRegistry, UserError
from pshard.paths import bundled_model
from pshard.predicted_times import round_seconds
from pshard.registries.choose import choose_variant, plan_command
from pshard.registries.store import MOST_SETS, load_registry, own_plans, registry_path, save_variants
from pshard.speculation import Acceptance, Drafting, PlannedDrafts, Speculation
from pshard.workload import UNLIMITED_MIB, Workload


def budgets(path):
    return [v.workload.vram_mib for v in load_registry(path).variants]


def test_registry_lies_beside_the_model(tmp_path):
    model = tmp_path / "model.gguf"
    model.touch()
    assert registry_path(model) == tmp_path / "model.gguf.pshard.json"
    assert registry_path(model, tmp_path / "other.json") == tmp_path / "other.json"


def test_registry_of_a_model_folder_lies_in_it(tmp_path):
    (tmp_path / "hf").mkdir()
    assert registry_path(tmp_path / "hf") == tmp_path / "hf" / "hf.pshard.json"


def test_registry_of_a_read_only_folder_lies_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PSHARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    one, other = registry_path(tmp_path / "a" / "m.gguf"), registry_path(tmp_path / "b" / "m.gguf")
    assert one.parent == other.parent == tmp_path / "cache" / "registries"
    assert one != other and one.name.startswith("m.gguf-")


def test_the_bundled_models_registry_lies_in_the_cache_and_not_in_the_package(tmp_path, monkeypatch):
    monkeypatch.setenv("PSHARD_CACHE", str(tmp_path / "cache"))
    bundled = bundled_model()
    assert bundled is not None
    assert registry_path(bundled).parent == tmp_path / "cache" / "registries"
    monkeypatch.chdir(bundled.parent)
    assert registry_path(Path("demo.gguf")) == registry_path(bundled)
    assert registry_path(bundled, tmp_path / "other.json") == tmp_path / "other.json"


def test_planning_again_replaces_its_variant_and_keeps_the_others(tmp_path):
    path = tmp_path / "r.json"
    assert save_variants(path, "tiny", INPUTS, [make_variant((100,))]).notes == ()
    assert save_variants(path, "tiny", INPUTS, [make_variant((200,))]).notes == ()
    assert save_variants(path, "tiny", INPUTS, [make_variant((100,), seconds=0.01)]).notes == ()
    assert budgets(path) == [(100,), (200,)]
    assert load_registry(path).variants[0].ranks[0].tiers[0].prediction.seconds == 0.01
    save_variants(path, "tiny", INPUTS, [make_variant((100,), context=1024)])
    assert budgets(path) == [(100,), (200,), (100,)]


LAPTOP, DESKTOP = (("cpu", "laptop"), ("threads", "4")), (("cpu", "desktop"), ("threads", "16"))


def test_a_plan_under_ram_leaves_the_one_without_and_each_run_finds_its_own(tmp_path):
    path = tmp_path / "r.json"
    for mib in (0, 6000, 9000, 6000):
        variant = make_variant((100,))
        variant = replace(variant, workload=replace(variant.workload, ram_mib=mib))
        save_variants(path, "tiny", INPUTS, [variant])
    variants = load_registry(path).variants
    assert [v.workload.ram_mib for v in variants] == [0, 6000, 9000]
    for mib in (0, 6000, 9000):
        assert choose(variants, vram_mib=(100,), ram_mib=mib).workload.ram_mib == mib


def test_plans_of_several_machines_live_side_by_side_and_each_finds_its_own(tmp_path):
    path = tmp_path / "r.json"
    save_variants(path, "tiny", LAPTOP, [make_variant((100,)), make_variant((200,))])
    assert save_variants(path, "tiny", DESKTOP, [make_variant((100,), seconds=0.01)]).notes == ()
    save_variants(path, "tiny", LAPTOP, [make_variant((100,), seconds=0.03)])
    registry = load_registry(path)
    laptop, desktop = (own_plans(registry, inputs, "plan").variants for inputs in (LAPTOP, DESKTOP))
    assert [v.workload.vram_mib for v in laptop] == [(100,), (200,)]
    assert [v.ranks[0].tiers[0].prediction.seconds for v in (*laptop, *desktop)] == [0.03, 0.05, 0.01]


def test_what_changed_is_told_of_the_nearest_plans(tmp_path):
    path = tmp_path / "r.json"
    save_variants(path, "tiny", DESKTOP, [make_variant()])
    save_variants(path, "tiny", LAPTOP, [make_variant()])
    near = "the nearest of 2 sets of plans differs (threads: 16 -> 12); run: pshard-plan -m m"
    with pytest.raises(StaleRegistry, match=re.escape(near)):
        own_plans(load_registry(path), (("cpu", "desktop"), ("threads", "12")), "pshard-plan -m m")


def test_beyond_so_many_sets_the_one_written_the_longest_ago_is_dropped(tmp_path):
    path = tmp_path / "r.json"
    for n in range(MOST_SETS):
        assert (
            save_variants(path, "tiny", (("threads", str(n)),), [make_variant((100,)), make_variant((200,))]).notes
            == ()
        )
    save_variants(path, "tiny", (("threads", "0"),), [make_variant((300,))])  # written again: the newest
    (note,) = save_variants(path, "tiny", DESKTOP, [make_variant()]).notes
    assert note.endswith("the oldest: 2 plan(s)")
    kept = [dict(plans.inputs)["threads"] for plans in load_registry(path).sets]
    assert kept == ["16", "0", *(str(n) for n in range(MOST_SETS - 1, 1, -1))]


def write_budgets(path, first, inputs):
    for i in range(5):
        save_variants(path, "tiny", inputs, [make_variant((first + i,))])


def test_concurrent_writers_lose_nothing(tmp_path):
    path, context = tmp_path / "r.json", multiprocessing.get_context("spawn")
    tasks = [(path, 100, LAPTOP), (path, 200, LAPTOP), (path, 300, DESKTOP)]
    writers = [context.Process(target=write_budgets, args=task) for task in tasks]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [w.exitcode for w in writers] == [0, 0, 0]
    found = {tuple(v.workload.vram_mib for v in plans.variants) for plans in load_registry(path).sets}
    assert found == {tuple((100 * n + i,) for n in ns for i in range(5)) for ns in ((1, 2), (3,))}


def test_full_disk_leaves_the_old_registry_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "r.json"
    save_variants(path, "tiny", INPUTS, [make_variant((100,))])
    before = path.read_text()

    def fail(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(UserError, match=r"cannot write the registry .*No space left on device; free some space"):
        save_variants(path, "tiny", INPUTS, [make_variant((200,))])
    assert path.read_text() == before
    assert [p.name for p in tmp_path.iterdir() if p.suffix != ".lock"] == ["r.json"]


def test_a_place_that_cannot_be_written_is_a_user_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write the registry .*choose another place with --registry"):
        save_variants(tmp_path / "file" / "r.json", "tiny", INPUTS, [make_variant()])
    with pytest.raises(UserError, match="Is a directory"):
        (tmp_path / "folder").mkdir()
        save_variants(tmp_path / "folder", "tiny", INPUTS, [make_variant()])


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_folder_is_a_user_error(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="cannot write the registry"):
        save_variants(tmp_path / "r.json", "tiny", INPUTS, [make_variant()])
    tmp_path.chmod(0o700)
    assert not list(tmp_path.iterdir())


def test_missing_registry_says_how_to_plan(tmp_path):
    with pytest.raises(UserError, match=r"no plan for this model: .*; run: pshard-plan -m x --vram 100"):
        load_registry(tmp_path / "r.json", "pshard-plan -m x --vram 100")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"version": 2}', "corrupt: Registry lacks the field 'sets'; delete it"),
        (b"{", "corrupt: Expecting property name .* line 1 column 2"),
        (b"\xff\xfe\x00", "corrupt: .*decode"),
        (b'{"version": 99}', "has format version 99, this program reads up to 2; update pshard"),
    ],
)
def test_unreadable_registry_is_refused_and_never_overwritten(tmp_path, content, message):
    path = tmp_path / "r.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_registry(path)
    with pytest.raises(UserError, match=message):
        save_variants(path, "tiny", INPUTS, [make_variant()])
    assert path.read_bytes() == content


def test_an_older_format_names_the_command_that_plans_again_and_gives_way_to_its_plans(tmp_path):
    path = tmp_path / "r.json"
    path.write_text('{"inputs": [], "variants": [{"vram_mib": [4]}, {"vram_mib": [8]}], "version": 1}')
    stale = r"the plans in .* are stale, as it has the older format version 1, .*; run: pshard-plan -m x --vram 100$"
    with pytest.raises(StaleRegistry, match=stale):
        load_registry(path, "pshard-plan -m x --vram 100")
    assert save_variants(path, "tiny", INPUTS, [make_variant()]).older == 2
    assert budgets(path) == [(100,)]


def choose(variants, **want):
    fields = {"vram_mib": (1000,), "context": 512, "max_ubatch": 16} | want
    return choose_variant(make_plan_set(variants=tuple(variants)), Workload(**fields), "pshard-plan -m m").variant


def test_the_largest_budget_that_fits_is_taken():
    variants = [make_variant((mib,)) for mib in (500, 900, 1001)]
    assert choose(variants).workload.vram_mib == (900,)
    assert choose(variants, vram_mib=(900,)).workload.vram_mib == (900,)
    assert choose(variants, vram_mib=(899,)).workload.vram_mib == (500,)


def test_each_device_must_hold_its_budget():
    variants = [make_variant((500, 500), split_mode="tensor"), make_variant((900, 100), split_mode="tensor")]
    assert choose(variants, vram_mib=(900, 400), split_mode="tensor").workload.vram_mib == (900, 100)


def test_shares_that_differ_by_rounding_are_the_same():
    thirds = make_variant((500, 500, 500), split_mode="tensor", tensor_split=(1 / 3, 1 / 3, 1 / 3))
    want = {"vram_mib": (500, 500, 500), "split_mode": "tensor"}
    rounded = (0.3333333333333334, 0.3333333333333333, 0.3333333333333333)
    assert choose([thirds], tensor_split=rounded, **want) is thirds
    with pytest.raises(UserError):
        choose([thirds], tensor_split=(0.5, 0.25, 0.25), **want)


@pytest.mark.parametrize("ratios", [(5, 1), (10, 1), (1, 1, 1), (7, 3, 1), (1, 0, 6), (97, 2)], ids=str)
def test_the_command_that_an_error_names_makes_a_plan_with_the_ratios_that_were_asked_for(ratios):
    shares = parse_ratios(",".join(map(str, ratios)))
    want = {"vram_mib": (500,) * len(ratios), "split_mode": "tensor", "tensor_split": shares}
    words = plan_command("m", Workload(**want)).split()
    planned = make_variant(
        want["vram_mib"], split_mode="tensor", tensor_split=parse_ratios(words[words.index("-ts") + 1])
    )
    assert choose([planned], **want) is planned


def test_plans_of_other_ratios_and_devices_are_told_apart():
    made = [
        make_variant((500, 500), split_mode="tensor", tensor_split=(0.75, 0.25)),
        make_variant((400,), device=1),
    ]
    listed = r"-sm tensor -ts 0\.5,0\.5; .* -sm tensor -ts 0\.75,0\.25; 400 MiB .* on device 1; "
    with pytest.raises(UserError, match=listed):
        choose(made, vram_mib=(500, 500), split_mode="tensor", tensor_split=(0.5, 0.5))


def test_limits_are_those_that_were_asked_for():
    some = make_variant((500, 500), split_mode="tensor", tensor_split=(0.5, 0.5), max_tp=(("attention", 1),))
    want = {"vram_mib": (500, 500), "split_mode": "tensor"}
    assert choose([some], **want) is some
    assert choose([some], max_tp=(("attention", 1),), **want) is some
    with pytest.raises(UserError, match=r"--max-tp ffn=1; planned are: .* --max-tp attn=1; run: "):
        choose([some], max_tp=(("ffn", 1),), **want)


def test_the_fastest_of_several_ratios_is_taken():
    shares = {(0.5, 0.5): 0.05, (0.75, 0.25): 0.04, (0.25, 0.75): 0.06}
    made = [make_variant((500, 500), seconds=s, split_mode="tensor", tensor_split=r) for r, s in shares.items()]
    assert choose(made, vram_mib=(500, 500), split_mode="tensor").workload.tensor_split == (0.75, 0.25)


def with_prediction(variant, **fields):
    """The variant with these fields of every prediction."""
    ranks = tuple(
        replace(r, tiers=tuple(replace(t, prediction=replace(t.prediction, **fields)) for t in r.tiers))
        for r in variant.ranks
    )
    return replace(variant, ranks=ranks)


def choose_auto(*variants):
    want = Workload((1000, 1000), context=512, max_ubatch=16, split_mode="auto")
    return choose_variant(make_plan_set(variants=variants), want, "pshard-plan -m m")


def test_auto_compares_a_plan_that_was_run_with_one_that_was_not_by_what_the_profile_predicts():
    split = make_variant((1000, 1000), seconds=0.04, split_mode="tensor", tensor_split=(0.5, 0.5))
    one = with_prediction(make_variant((1000,), seconds=0.05), measured_seconds=0.05, profile_seconds=0.03)
    found = choose_auto(split, one)
    assert found.variant == one  # fitted to its trial it would have lost, with nothing alike known of the other
    assert "shortest of the predicted rounds: -sm none, device 0 (1000 MiB)" in found.why
    assert "-sm none, device 0 (1000 MiB) was also measured, which is left out" in found.why


def test_auto_compares_plans_that_were_all_run_as_they_were_measured():
    first = with_prediction(make_variant((1000,), seconds=0.03), measured_seconds=0.05)
    other = with_prediction(make_variant((900,), seconds=0.04), measured_seconds=0.045)
    found = choose_auto(first, other)
    assert found.variant == other and "shortest of the measured rounds" in found.why


def test_auto_compares_plans_as_predicted_where_others_disturbed_what_was_measured():
    first = with_prediction(make_variant((1000,), seconds=0.03), measured_seconds=0.05, disturbed=0.3)
    other = with_prediction(make_variant((900,), seconds=0.04), measured_seconds=0.045)
    found = choose_auto(first, other)
    assert found.variant == first and "shortest of the predicted rounds" in found.why


def test_auto_compares_rounds_of_texts_that_the_context_holds():
    made = [make_variant((1000,), seconds=0.05), make_variant((900,), seconds=0.04)]
    rounds = [round_seconds(replace(v, workload=replace(v.workload, prompt=256, generated=256))) for v in made]
    why = choose_auto(*made).why
    assert all(f"({v.workload.vram_mib[0]} MiB) {s:.3g} s" in why for v, s in zip(made, rounds))


def test_auto_also_takes_a_plan_for_the_first_of_the_devices():
    pair = make_variant((900, 900), seconds=0.03, split_mode="tensor", tensor_split=(0.5, 0.5))
    want = Workload((1000, 1000, 100, 1000), context=512, max_ubatch=16, split_mode="auto")
    assert choose_variant(make_plan_set(variants=(pair,)), want, "plan").variant is pair
    with pytest.raises(UserError):  # it is not for just any two
        choose_variant(make_plan_set(variants=(pair,)), replace(want, vram_mib=(100, 1000, 1000)), "plan")


def test_given_ratios_and_limits_are_for_splits_and_auto_may_have_chosen_one_device():
    one, split = make_variant((1000,)), make_variant((1000, 1000), split_mode="layer", tensor_split=(0.5, 0.5))
    limited = {"max_tp": (("attention", 1),), "tensor_split": (0.75, 0.25)}
    want = Workload((1000, 1000), context=512, max_ubatch=16, split_mode="auto", **limited)
    assert choose_variant(make_plan_set(variants=(one, split)), want, "plan").variant is one
    same = replace(want, tensor_split=(0.5, 0.5))
    assert choose_variant(make_plan_set(variants=(split,)), same, "plan").variant is split


def test_auto_says_nothing_where_there_is_nothing_to_compare():
    assert choose_auto(make_variant((1000,)), make_variant((1000,), context=1024)).why == ""


def test_the_smallest_context_that_covers_is_taken():
    variants = [make_variant(context=c) for c in (256, 2048, 1024)]
    assert choose(variants).workload.context == 1024
    assert choose(variants, context=200).workload.context == 256


def test_the_wanted_ubatch_goes_first():
    variants = [make_variant(max_ubatch=n) for n in (16, 64, 256)]
    assert choose(variants, max_ubatch=64).workload.max_ubatch == 64
    assert choose(variants, max_ubatch=32).workload.max_ubatch == 256


@pytest.mark.parametrize(
    "want",
    [
        {"vram_mib": (499,)},
        {"vram_mib": (500, 500)},
        {"context": 513},
        {"sequences": 2},
        {"type_k": "f32"},
        {"split_mode": "tensor"},
        {"tensor_split": (0.5, 0.5)},
    ],
)
def test_no_match_lists_what_is_planned_and_the_command(want):
    with pytest.raises(UserError, match=r"planned are: 500 MiB -c 512 -np 1 .*; run: pshard-plan -m m"):
        choose([make_variant((500,))], **want)


def test_no_match_lists_each_plan_once_with_its_ram_and_a_few_of_many():
    made = [make_variant((mib,), ram_mib=ram) for mib in (500, 600) for ram in (0, 7, 8)]
    alike = [replace(v, workload=replace(v.workload, max_ubatch=8)) for v in made]
    with pytest.raises(UserError) as refused:
        choose([each for pair in zip(made, alike) for each in pair], vram_mib=(UNLIMITED_MIB,), context=600, ram_mib=9)
    told, rest = str(refused.value).split("; planned are: ")
    cells = " -np 1 -ctk bf16 -ctv bf16"
    assert told == f"no plan fits --ram 9 -c 600{cells}"
    plans = [f"{budget} -c 512{cells}" for budget in ("500 MiB", "500 MiB --ram 7", "500 MiB --ram 8", "600 MiB")]
    assert rest == "; ".join([*plans, "and 2 more", "run: pshard-plan -m m"])


def test_plan_command_names_what_differs_from_the_defaults():
    assert plan_command("a b.gguf", Workload((12000,))) == "pshard-plan -m 'a b.gguf' --vram 12000 -c 8192 -np 1"
    tensor = Workload((1, 2), type_k="f16", split_mode="tensor", tensor_split=(0.75, 0.25))
    assert plan_command("m", tensor).endswith("--vram 1,2 -c 8192 -np 1 -ctk f16 -ctv bf16 -sm tensor -ts 0.75,0.25")
    limited = Workload((1, 2), split_mode="tensor", max_tp=(("attention", 1),))
    assert plan_command("m", limited).endswith("-np 1 -sm tensor --max-tp attn=1")


def test_a_plan_that_chose_no_drafts_replaces_the_one_with_drafts_and_one_that_was_not_asked_does_not(tmp_path):
    path, held = tmp_path / "r.json", Acceptance((0.8,))
    none = make_variant((100,))
    said = Speculation("lookup", held, 1.0, (PlannedDrafts(0, 1.0, 1.0, 1.0), PlannedDrafts(3, 1.0, 1.1, 1.0)))
    work = replace(none.workload, drafting=Drafting("lookup", 3), acceptance=held)
    drafts = replace(none, workload=work, speculation=said)
    save_variants(path, "tiny", INPUTS, [drafts, replace(drafts, workload=replace(work, context=1024))])
    save_variants(path, "tiny", INPUTS, [none])
    assert [v.workload.drafting.drafts for v in load_registry(path).variants] == [0, 3, 3]
    save_variants(path, "tiny", INPUTS, [replace(none, speculation=said)])
    left = load_registry(path).variants
    assert sorted((v.workload.drafting.drafts, v.workload.context) for v in left) == [(0, work.context), (3, 1024)]
