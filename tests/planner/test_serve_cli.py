"""pshard-plan --serve: what it writes and says."""

import json
import re
from pathlib import Path

import pytest

from pshard.commands.cli_plan import main
from pshard.registries.store import load_registry
from pshard.reserve import TORCH_RESERVE_MIB

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples" / "demo.gguf"
PROFILE = ROOT / "registries" / "examples" / "rtx5080-xeon-w5-3425.json"
BUDGET = TORCH_RESERVE_MIB + 4

pytestmark = pytest.mark.skipif(not MODEL.exists(), reason="the bundled model is not here")


@pytest.fixture
def plan(tmp_path, capsys):
    """Runs pshard-plan on the bundled model and the example machine; returns (stdout, variants of the registry)."""
    registry = tmp_path / "plans.json"

    def run(*flags: str):
        words = ["-m", str(MODEL), "--profile", str(PROFILE), "--registry", str(registry), "--vram", str(BUDGET)]
        assert main([*words, *flags]) == 0
        return capsys.readouterr().out, load_registry(registry).variants

    return run


def test_a_load_is_written_with_its_ladder_beside_the_plan_of_a_single_text(plan):
    plan("-c", "256")
    out, (single, load) = plan("--serve", "--prompt", "48", "--generated", "16", "-ub", "128")
    assert single.workload.concurrency == 0 and load.workload.concurrency == 4
    assert (load.workload.sequences, load.workload.prompt, load.workload.generated) == (16, 48, 16)
    assert [tier.tokens for tier in load.ranks[0].tiers][:5] == [1, 2, 4, 8, 16]
    assert load.workload.context >= 9 * 64
    assert "tok/s of all with 4 requests running on average" in out


def test_explain_and_json_say_what_a_server_can_promise(plan):
    flags = (
        "--serve",
        "--concurrency",
        "2",
        "-np",
        "4",
        "-c",
        "256",
        "-ub",
        "16",
        "--prompt",
        "48",
        "--generated",
        "16",
    )
    out, _ = plan(*flags, "--explain", "--strategy", "attention-first")
    assert f"A server under {BUDGET} MiB runs up to 4 requests of 48 + 16 tokens at once" in out
    assert re.search(r"requests at once +tok/s of all +gap ms +gap beside a prompt ms +first token s", out)
    out, _ = plan(*flags, "--json")
    (told,) = json.loads(out)["promises"]
    assert told["at_once"] == 4 and [pace["requests"] for pace in told["paces"]] == [1, 2, 4]


def test_a_plan_of_texts_promises_nothing_of_a_server(plan):
    out, _ = plan("-c", "256", "--json")
    assert json.loads(out)["promises"] == []
