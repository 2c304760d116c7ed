"""pshard-plan --spec: what it writes and says."""

import json
from pathlib import Path

import pytest

from pshard.commands.cli_plan import main
from pshard.models import open_model
from pshard.registries.acceptance_file import keep_acceptance
from pshard.registries.store import load_registry
from pshard.reserve import TORCH_RESERVE_MIB
from pshard.speculation import AcceptanceRecord

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples" / "demo.gguf"
PROFILE = ROOT / "registries" / "examples" / "rtx5080-xeon-w5-3425.json"
BUDGET = TORCH_RESERVE_MIB + 4

pytestmark = pytest.mark.skipif(not MODEL.exists(), reason="the bundled model is not here")


@pytest.fixture
def plan(tmp_path, capsys):
    """Runs pshard-plan on the bundled model and the example machine; returns (exit code, stdout, stderr)."""

    def run(*flags: str):
        words = ["-m", str(MODEL), "--profile", str(PROFILE), "--registry", str(tmp_path / "plans.json")]
        code = main([*words, "--vram", str(BUDGET), "-c", "256", *flags])
        return (code, *capsys.readouterr())

    return run


def test_drafts_are_planned_beside_the_plan_without_and_by_what_is_assumed(plan, tmp_path):
    assert plan()[0] == 0
    code, _, err = plan("--spec", "lookup", "--spec-n", "3")
    assert code == 0 and ".27 is assumed for drafts of lookup" in " ".join(err.split())
    written = load_registry(tmp_path / "plans.json").variants
    without, drafting = sorted(written, key=lambda v: v.workload.drafting.drafts)
    assert without.workload.drafting.kind == "none" and without.speculation is None
    assert (drafting.workload.drafting.kind, drafting.workload.drafting.drafts) == ("lookup", 3)
    assert [tier.tokens for tier in drafting.ranks[0].tiers][:2] == [1, 4]
    assert drafting.workload.acceptance.source == "assumed" and len(drafting.speculation.rows) == 4
    assert "3 drafts of lookup accepted by .27" in drafting.terms


def test_an_acceptance_that_was_recorded_is_taken_and_a_given_one_before_it(plan, tmp_path):
    with open_model(MODEL) as model:
        keep_acceptance(tmp_path / "plans.json", model.fingerprint_inputs(), AcceptanceRecord("lookup", 10, (5,), (4,)))
    flags = ("--spec", "lookup", "--spec-n", "1", "--json")
    _, out, err = plan(*flags)
    (table,) = json.loads(out)["drafts"]
    assert table["acceptances"][table["own"]] == {"rates": [0.8], "source": "recorded", "share": 0.5}
    said = "as recorded, 50% of steps have drafts, and the first, the first two, ... of these are all accepted with"
    assert f"{said} chances of .8" in " ".join(err.split())
    (table,) = json.loads(plan(*flags, "--spec-rates", ".9,.5")[1])["drafts"]
    assert table["acceptances"][table["own"]] == {"rates": [0.9, 0.5], "source": "given", "share": 1.0}
    assert [row["drafts"] for row in table["rows"]] == [0, 1] and table["chosen"] == 1


def test_explain_shows_what_each_number_of_drafts_brings_and_from_where_on_it_pays(plan):
    _, out, _ = plan("--spec", "auto", "--spec-n", "2", "--spec-rates", ".8,.6", "--explain")
    assert "Drafts of lookup,mtp, each number with a plan of its own" in out
    assert "tok/s at .8,.6" in out and "tok/s at .7,.455" in out and "tok/s at .9,.765" in out
    assert "Planned by .8,.6: chances that the first, the first two, ... drafts are all accepted; given." in out
    assert "pays from" in out and "round s" in out


def test_a_plan_says_without_being_asked_what_its_drafts_cost_or_why_it_has_none(plan):
    _, out, _ = plan("--spec", "lookup", "--spec-n", "3", "--spec-rates", "0")
    rate, drafts = (
        next(line for line in out.splitlines() if line.startswith(name)) for name in ("Predicted", "Drafts")
    )
    assert rate.endswith(" tok/s with 3 drafts of lookup a step") and "none would be faster: " in drafts
    _, out, _ = plan("--spec", "auto", "--spec-rates", "0")
    rate, drafts = (
        next(line for line in out.splitlines() if line.startswith(name)) for name in ("Predicted", "Drafts")
    )
    assert rate.endswith(" tok/s") and "none, for the shortest round of prompts and answers, " in drafts
    assert "with 1 draft of lookup,mtp a step" in drafts
    assert "Drafts" not in plan()[1]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--spec", "lookup", "--spec-rates", ".5,.6"), "--spec-rates .5,.6: give the chances"),
        (("--spec", "lookup", "--spec-rates", "1.5"), "--spec-rates 1.5: give the chances"),
        (("--spec", "auto", "--spec-n", "16"), "--spec-n 16: a step has up to 15 drafts"),
        (("--spec-n", "3"), "--spec-n is about drafts, and none are planned; add --spec"),
        (("--spec-rates", ".5"), "--spec-rates is about drafts"),
        (("--spec", "lookup", "--strategy", "naive-layers"), "--spec and --strategy exclude each other"),
        (("--spec", "lookup", "--spec-n", "7", "-ub", "4"), "7 drafts need steps of 8 rows for -np 1"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(plan, tmp_path, flags, said):
    code, out, err = plan(*flags)
    errors = [line for line in err.splitlines() if "error" in line]
    assert code == 2 and not out and len(errors) == 1 and said in errors[0]
    assert not (tmp_path / "plans.json").exists()
