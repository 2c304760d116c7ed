"""pshard serve: what its flags mean, and its life from the first /health to the end."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from cli_world import World, make_world, world_in
from own_port import find_port
from short_searches import shorten_searches
from warm_python import WarmProcess

from pshard.commands import cli_plan
from pshard.commands.everyday import cli_serve

PATIENCE = 60.0


@pytest.fixture(scope="module")
def planned_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A world with plans for two budgets, made once."""
    folder = tmp_path_factory.mktemp("served")
    world = make_world(folder)
    with pytest.MonkeyPatch.context() as patch:
        shorten_searches(patch)
        patch.setenv("PSHARD_CACHE", str(world.profile.parent))
        patch.setenv("PSHARD_VALIDATE", "0")
        for budget in (6, 8):
            flags = ["--vram", str(budget), "-c", "512", "-np", "8", "-ub", "128"]
            assert cli_plan.main(["-m", str(world.model), *flags]) == 0
    return folder


@pytest.fixture
def planned(planned_once: Path, tmp_path: Path) -> World:
    shutil.copytree(planned_once, tmp_path, dirs_exist_ok=True)
    return world_in(tmp_path)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return make_world(tmp_path)


class Running:
    """pshard serve as a process, forked from one that has imported torch, or with `cold` as a user starts it."""

    def __init__(self, world: World, *flags: str, cold: bool = False) -> None:
        port = find_port()
        words = ["-m", str(world.model), "--vram", "8", "--port", str(port), *flags]
        environment = os.environ | {"PSHARD_CACHE": str(world.profile.parent), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pshard.commands.everyday.cli_serve", *words]
        self._said = world.model.parent / f"said-{port}"
        with self._said.open("w") as said:
            self.process = (subprocess.Popen if cold else WarmProcess)(command, env=environment, stderr=said)
        self.url = f"http://127.0.0.1:{port}"

    def ask(self, path: str, body: dict | None = None) -> tuple[int, bytes]:
        data = None if body is None else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(urllib.request.Request(self.url + path, data), timeout=PATIENCE) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()
        except urllib.error.URLError:
            return 0, b""

    def states(self) -> list[int]:
        """Statuses of /health until it is 200."""
        seen, end = [], time.monotonic() + PATIENCE
        while (status := self.ask("/health")[0]) != 200:
            assert time.monotonic() < end and self.process.poll() is None
            seen.append(status)
            time.sleep(0.05)
        return seen

    def end(self) -> str:
        """Tell it to end; what it said."""
        self.process.send_signal(signal.SIGTERM)
        code, said = self.process.wait(PATIENCE), self._said.read_text()
        assert code == 0, said
        return said


@pytest.mark.slow
def test_a_server_says_503_until_it_is_ready_and_finishes_what_runs_when_it_is_told_to_end(planned: World) -> None:
    server = Running(planned, cold=True)
    try:
        assert 503 in server.states()
        status, body = server.ask("/v1/completions", {"prompt": "To be", "max_tokens": 4, "temperature": 0})
        assert status == 200 and json.loads(body)["usage"]["completion_tokens"] == 4
        stream = {"prompt": "To be", "max_tokens": 400, "stream": True, "ignore_eos": True, "logit_bias": {"257": -100}}
        request = urllib.request.Request(server.url + "/v1/completions", json.dumps(stream).encode())
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            while not answer.readline().startswith(b"data"):  # signs of life come first
                continue
            server.process.send_signal(signal.SIGTERM)
            told = answer.read()
        assert b'"finish_reason":"length"' in told and told.rstrip().endswith(b"data: [DONE]")
        said = server.end()
    finally:
        server.process.kill()
    assert re.search(r"ready: http://127.0.0.1:\d+ serves 8 texts at once under 8 MiB", said)
    assert re.search(
        r"predicted for requests of \d+ \+ \d+ tokens, of which \d+ ha(ve|s) room: .* tok/s, a token every", said
    )


LONG = [(7 * i) % 250 for i in range(200)]
ENDLESS = {"prompt": LONG, "max_tokens": 250, "stream": True, "ignore_eos": True, "logit_bias": {"257": -100}}


@pytest.mark.slow
def test_prefixes_are_found_after_a_kill_while_they_are_written(planned: World) -> None:
    prompts = [[number, *LONG] for number in range(12)]

    def ask_all(server: Running) -> list[dict]:
        bodies = ({"prompt": prompt, "max_tokens": 4, "temperature": 0} for prompt in prompts)
        return [json.loads(server.ask("/v1/completions", body)[1]) for body in bodies]

    server = Running(planned, "--prefix-cache", "64")
    try:
        server.states()
        told = ask_all(server)
        while not list(planned.profile.parent.rglob("*.block")):
            time.sleep(0.001)
    finally:
        server.process.kill()
        server.process.wait(PATIENCE)
    server = Running(planned, "--prefix-cache", "64")
    try:
        server.states()
        again = ask_all(server)
        server.end()
    finally:
        server.process.kill()
    assert [one["choices"] for one in again] == [one["choices"] for one in told]
    assert sum(one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in again) > 0


@pytest.mark.slow
def test_streams_go_on_while_the_budget_moves_and_a_server_that_sleeps_is_woken(planned: World) -> None:
    server = Running(planned, "--sleep-idle", "0.5")
    try:
        server.states()
        request = urllib.request.Request(server.url + "/v1/completions", json.dumps(ENDLESS).encode())
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            while not answer.readline().startswith(b"data"):
                continue
            status, told = server.ask("/budget", {"vram_mib": 6})
            assert status == 200 and json.loads(told)["vram_mib"] == 6
            assert json.loads(server.ask("/props")[1])["plan"]["vram_mib"] == [6]
            rest = answer.read()
        assert b'"finish_reason":"length"' in rest and rest.rstrip().endswith(b"data: [DONE]")
        ends = time.monotonic() + PATIENCE
        while json.loads(server.ask("/health")[1])["state"] != "sleeping":
            assert time.monotonic() < ends
            time.sleep(0.05)
        status, told = server.ask("/v1/completions", {"prompt": [*LONG, 1], "max_tokens": 2})
        assert status == 200 and json.loads(told)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert json.loads(server.ask("/props")[1])["plan"]["vram_mib"] == [6]
        server.end()
    finally:
        server.process.kill()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--host", "0.0.0.0"], "--api-key KEY, or --no-api-key"),
        (["--api-key", ""], "--api-key is empty"),
        (["--api-key-file", "/nowhere/keys"], "--api-key-file: cannot read"),
        (["--port", "70000"], "ports are 0 to 65535"),
        (["--max-gap", "0"], "milliseconds above 0"),
        (["--queue", "-1"], "whole number"),
        (["--drain", "nan"], "seconds above 0"),
        (["-np", "0"], "1 or more"),
        (["-np", "3", "--concurrency", "8"], "fewer than --concurrency 8; give -np 8"),
        (["--concurrency", "none"], "neither one of 1, few, many nor a number"),
        (["--temp", "-1"], "--temp is -1"),
        (["-ts", "1,1"], "-ts needs -sm"),
        (["--spec", "draft"], "--spec draft needs a draft model; add -md MODEL"),
        (["--spec-n", "3"], "--spec-draft-n-max is about drafts, and there are none; add --spec auto"),
        (["--spec", "lookup", "--spec-n", "16"], "a step has up to 15 drafts"),
    ],
)
def test_flags_that_mean_nothing_are_refused_in_one_line(world: World, capsys, flags, words) -> None:
    assert cli_serve.main(["-m", str(world.model), *flags]) == 2
    said = capsys.readouterr().err.strip()
    assert words in said and "\n" not in said


def test_a_port_that_is_taken_is_refused(world: World, capsys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert cli_serve.main(["-m", str(world.model), "--port", str(taken.getsockname()[1])]) == 2
    assert "choose another --port" in capsys.readouterr().err


def test_keys_come_from_flags_a_file_and_the_environment(world: World, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "keys").write_text("b\n\nc \n")
    monkeypatch.setenv("PSHARD_API_KEY", "d")
    args = cli_serve.make_parser().parse_args(["--api-key", "a", "--api-key-file", str(tmp_path / "keys")])
    assert cli_serve._read_keys(args) == ("a", "d", "b", "c")


def test_names_by_which_a_server_is_reached_are_its_own_unless_a_key_is_wanted() -> None:
    def door(*flags: str):
        return cli_serve.read_door(cli_serve.make_parser().parse_args(flags))

    here = door("--allow-host", "Box.lan")
    assert set(here.hosts) == {"localhost", "127.0.0.1", "::1", "box.lan"} and not here.addresses
    keyless = door("--host", "0.0.0.0", "--no-api-key")
    assert socket.gethostname().lower() in keyless.hosts and "*" not in keyless.hosts and keyless.addresses
    assert door("--host", "0.0.0.0", "--api-key", "k").hosts == ("*",)
    named = door("--host", "0.0.0.0", "--api-key", "k", "--allow-host", "a.example")
    assert "a.example" in named.hosts and "*" not in named.hosts and named.addresses


def test_a_model_that_is_not_there_ends_the_server_with_one_line(tmp_path: Path, capsys) -> None:
    assert cli_serve.main(["-m", str(tmp_path / "gone.gguf"), "--port", "0"]) == 2
    assert "gone.gguf" in capsys.readouterr().err


def test_a_server_wants_a_plan_for_its_load_and_plans_for_one(world: World) -> None:
    from pshard.models import open_model
    from pshard.registries.profile_store import load_profile
    from pshard.session.run_request import full_workload, wanted_workload

    def made(*flags: str):
        args = cli_serve.make_parser().parse_args(["-m", str(world.model), "--vram", "8", *flags])
        request = cli_serve.read_request(args).run
        want = wanted_workload(request, load_profile(world.profile))
        with open_model(world.model) as file:
            return want, full_workload(request, want, file.spec)

    want, full = made("-c", "512")
    assert (want.concurrency, want.sequences, full.sequences) == (4, 4, 16)  # any plan for so many texts will do
    assert full.concurrency == 4 and full.context == 512
    want, full = made("-c", "512", "--concurrency", "many", "-np", "20")
    assert (want.concurrency, want.sequences, full.sequences) == (16, 20, 20)
    assert made("-np", "2", "-c", "512")[0].concurrency == 2
