"""Arguments for llama.cpp against its own programs: they start, and put each tensor where the plan says.

LLAMA_CPP_BIN is the folder with llama-cli, llama-server and llama-bench; without it they are looked for on PATH. A
build without a GPU is enough: its log says which tensors were kept out of VRAM, though not where the others would be.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from cli_world import write_profile
from own_port import find_port

from pshard.commands import cli_plan
from pshard.jsonio import from_json
from pshard.models import open_model
from pshard.plan import Registry

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo.gguf"
OVERRIDDEN = re.compile(r"tensor (\S+) \(.*\) buffer type overridden to CPU")
PATIENCE = 120.0  # seconds


@dataclass(frozen=True)
class Emitted:
    """The words of an emitted line as a shell reads them, what the plan has on the host, and its settings."""

    words: list[str]
    on_host: set[str]
    context: int
    sequences: int
    max_ubatch: int


def program(name: str) -> str:
    folder = os.environ.get("LLAMA_CPP_BIN")
    found = shutil.which(name, path=folder)
    if found is None:
        pytest.skip(f"{name} is neither in the folder LLAMA_CPP_BIN nor on PATH")
    return found


@pytest.fixture
def emit(tmp_path: Path, capsys: pytest.CaptureFixture) -> Callable[..., Emitted]:
    profile = write_profile(tmp_path / "cache" / "profile.json")

    def run(to: str, *flags: str) -> Emitted:
        argv = ["-m", str(DEMO), "--profile", str(profile), "--registry", str(tmp_path / "r.json"), "--no-validate"]
        assert cli_plan.main([*argv, *flags, "--emit", to, "--json"]) == 0
        data = json.loads(capsys.readouterr().out)
        (variant,) = from_json(Registry, data["registry"]).variants
        with open_model(DEMO) as model:
            units = model.spec.units
        tier, w = variant.ranks[0].covering(variant.workload.sequences), variant.workload
        outside = [u for u in units if tier.placement(u.name).sort != "pinned" and u.name != "embedding"]
        names = {tensor.name for unit in outside for tensor in unit.tensors}
        if any(unit.name == "output" for unit in outside):
            names.add("token_embd.weight")  # the head of a model with tied weights
        (line,) = data[to]
        return Emitted(shlex.split(line), names, w.context, w.sequences, w.max_ubatch)

    return run


CASES = [
    ("--vram", "4", "-c", "512"),
    ("--vram", "6", "-c", "256", "-np", "2", "-ctk", "f16", "-ctv", "f16"),
    ("--vram", "64", "-c", "512", "-ub", "64"),
]


def start(words: Sequence[str]) -> str:
    """What a program says; it must end well."""
    done = subprocess.run(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=PATIENCE
    )
    text = done.stdout.decode(errors="replace")
    assert done.returncode == 0, text[-2000:]
    return text


def number_after(name: str, text: str) -> int:
    """The last setting of that name in a log, as "n_ctx = 512"."""
    return int(re.findall(rf"\b{name}\s*=\s*(\d+)", text)[-1])


def check_log(text: str, made: Emitted) -> None:
    assert set(OVERRIDDEN.findall(text)) == made.on_host
    assert number_after("n_ctx", text) == made.context and number_after("n_seq_max", text) == made.sequences
    assert number_after("n_ubatch", text) == made.max_ubatch


@pytest.mark.parametrize("flags", CASES, ids=" ".join)
def test_llama_cli_takes_the_arguments(emit: Callable[..., Emitted], flags: tuple[str, ...]) -> None:
    path, made = program("llama-cli"), emit("llama.cpp", *flags)
    once = ["-p", "hi", "-n", "1", "-st", "-t", "1", "--no-warmup", "-v"]
    check_log(start([path, "-m", str(DEMO), *made.words, *once]), made)


@pytest.mark.parametrize("flags", CASES[:2], ids=" ".join)
def test_llama_server_takes_the_arguments(emit: Callable[..., Emitted], tmp_path: Path, flags: tuple[str, ...]) -> None:
    path, made = program("llama-server"), emit("llama.cpp", *flags)
    port = find_port()
    log = tmp_path / "server.log"
    local = ["--host", "127.0.0.1", "--port", str(port), "-t", "1", "--no-warmup", "-v"]
    with log.open("wb") as file:
        server = subprocess.Popen([path, "-m", str(DEMO), *made.words, *local], stdout=file, stderr=file)
    try:
        wait_until_healthy(server, f"http://127.0.0.1:{port}/health")
    finally:
        server.terminate()
        server.wait(PATIENCE)
    check_log(log.read_text(errors="replace"), made)


def wait_until_healthy(server: subprocess.Popen, url: str) -> None:
    end = time.monotonic() + PATIENCE
    while server.poll() is None and time.monotonic() < end:
        try:
            with urllib.request.urlopen(url, timeout=1) as answer:
                if answer.status == 200:
                    return
        except OSError:  # it is loading
            time.sleep(0.1)
    pytest.fail(f"llama-server did not come up (exit code {server.poll()})")


@pytest.mark.parametrize("flags", CASES, ids=" ".join)
def test_llama_bench_takes_the_arguments(emit: Callable[..., Emitted], flags: tuple[str, ...]) -> None:
    path, made = program("llama-bench"), emit("llama-bench", *flags)
    once = ["-p", "0", "-n", "1", "-r", "1", "-t", "1", "--no-warmup", "-v", "-o", "jsonl"]
    text = start([path, "-m", str(DEMO), *made.words, *once])
    (row,) = [json.loads(line) for line in text.splitlines() if line.startswith("{")]  # one test, however many patterns
    assert set(OVERRIDDEN.findall(text)) == made.on_host
    assert row["n_gpu_layers"] == 999 and row["n_ubatch"] == made.max_ubatch
    assert row["no_kv_offload"] == ("-nkvo" in made.words) and row["type_k"] == made.words[-3]


def test_llama_bench_has_neither_context_nor_sequences_and_one_list_of_patterns(emit: Callable[..., Emitted]) -> None:
    made = emit("llama-bench", *CASES[0])
    assert made.on_host and made.words.count("-ot") == 1 and not {"-c", "-np"} & set(made.words)


def test_llama_bench_knows_no_kv_cache_of_f32(capsys: pytest.CaptureFixture) -> None:
    assert cli_plan.main(["-m", str(DEMO), "--vram", "8", "-ctk", "f32", "--emit", "llama-bench"]) == 2
    assert "it has no KV cache of type f32; give another with -ctk and -ctv" in capsys.readouterr().err
