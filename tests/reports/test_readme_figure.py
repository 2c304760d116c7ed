"""The README's figure comes from a script: from files at hand, or from both programs on a machine."""

import json
import runpy
import sys
from pathlib import Path

import pytest
from report_samples import make_measurement

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "beside_llama_cpp.py"
STORED = ROOT / "benchmarks" / "results" / "h100-beside-llama-cpp.json"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return runpy.run_path(str(SCRIPT))


def test_the_figure_is_drawn_from_the_stored_measurements(script, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["beside", "--draw", str(STORED), "--figures", str(tmp_path / "figures")])
    assert script["main"]() == 0
    assert (tmp_path / "figures" / "speedup.png").read_bytes().startswith(b"\x89PNG")


def test_the_peer_gets_its_better_micro_batch_and_its_command_is_kept(script, tmp_path, monkeypatch) -> None:
    rows = [{"n_prompt": 4096, "n_gen": 0, "test_time": "2026-01-01"}, {"n_prompt": 0, "n_gen": 64, "test_time": ""}]
    program = tmp_path / "llama-bench"
    program.write_text(
        f"#!{sys.executable}\nimport json, sys\nub = int(sys.argv[sys.argv.index('-ub') + 1])\n"
        f"rows = json.loads({json.dumps(json.dumps(rows))})\n"
        "print(json.dumps([r | {'n_ubatch': ub, 'samples_ns': [10**9 * 512 // ub] * 2} for r in rows]))\n"
    )
    program.chmod(0o755)
    monkeypatch.setitem(script["measure_peer"].__globals__, "free_mib", lambda: 80000)
    found = script["measure_peer"](tmp_path / "m.gguf", 12000, program, 2, make_measurement(4096, 0))
    assert [(m.test, m.strategy, m.n_ubatch) for m in found] == [
        ("pp4096", "llama.cpp fit", 4096), ("tg64", "llama.cpp fit", 4096),
    ]  # fmt: skip
    assert found[0].command.startswith("llama-bench -m m.gguf -p 4096 -n 64 -r 2 -fa on -ub 4096")
    assert "-fitt 68000" in found[0].command and found[0].avg_ts == pytest.approx(8 * 4096)


def test_without_a_gpu_the_script_says_what_can_be_done(script, monkeypatch) -> None:
    monkeypatch.setitem(script["free_mib"].__globals__, "free_by_driver", lambda: {1: 5 << 20})
    with pytest.raises(SystemExit, match="--draw FILE"):
        script["free_mib"]()
    monkeypatch.setitem(script["free_mib"].__globals__, "free_by_driver", lambda: {0: 5 << 20})
    assert script["free_mib"]() == 5
