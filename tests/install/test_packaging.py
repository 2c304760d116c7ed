"""The unit for systemd and the Dockerfile: their commands run, and their flags are there."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from test_wheel import BUILT, FOLDERS, LEFT_OUT

from pshard.commands.everyday.cli_serve import make_parser

ROOT = Path(__file__).resolve().parents[2]
PLACE = ROOT / "packaging"


def read_dockerfile() -> list[tuple[str, str]]:
    """Instructions with their words."""
    text = re.sub(r"\\\n", "", (PLACE / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def read_unit() -> dict[str, str]:
    """Settings of the unit."""
    lines = (PLACE / "pshard.service").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


def test_the_unit_is_hardened_and_calls_what_there_is() -> None:
    unit = read_unit()
    hard = {"NoNewPrivileges": "yes", "PrivateTmp": "yes", "ProtectSystem": "strict", "DynamicUser": "yes"}
    assert hard.items() <= unit.items() and unit["CapabilityBoundingSet"] == ""
    program, command, *flags = shlex.split(unit["ExecStart"])
    assert (program, command) == ("/opt/pshard/bin/pshard", "serve")
    args = make_parser().parse_args(flags)
    assert args.registry.is_relative_to("/var/cache") and args.host == "127.0.0.1"
    assert int(unit["TimeoutStopSec"]) > args.drain
    assert "PSHARD_CACHE=/var/cache/pshard" in unit["Environment"] and unit["CacheDirectory"] == "pshard"
    if verify := shutil.which("systemd-analyze"):
        done = subprocess.run([verify, "verify", str(PLACE / "pshard.service")], capture_output=True, text=True)
        assert not re.search("Unknown|Invalid|Failed to parse", done.stderr), done.stderr


def test_the_image_serves_by_flags_that_there_are() -> None:
    said = dict(read_dockerfile())
    assert json.loads(said["ENTRYPOINT"]) == ["pshard"] and said["USER"] == "pshard"
    command, *flags = json.loads(said["CMD"])
    args = make_parser().parse_args(flags)
    assert command == "serve" and args.host == "0.0.0.0" and str(args.port) == said["EXPOSE"]
    json.loads(said["HEALTHCHECK"].partition("CMD ")[2])


@pytest.mark.slow
def test_the_commands_of_the_dockerfile_install_into_an_empty_folder(tmp_path: Path) -> None:
    """All but the system's packages, a user, and torch, which is gigabytes: that of this environment stands in."""
    sources, place = tmp_path / "src", tmp_path / "opt"
    sources.mkdir()
    for name in BUILT:
        shutil.copy(ROOT / name, sources)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, sources / name, ignore=LEFT_OUT)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PSHARD_", "PYTHON"))}
    env |= {"CC": "/bin/false", "CXX": "/bin/false", "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}
    env |= {"PSHARD_CACHE": str(tmp_path / "cache"), "PATH": f"{Path(sys.executable).parent}:{env['PATH']}"}

    def call(command: str) -> str:
        done = subprocess.run(
            command, shell=True, cwd=sources, env=env, capture_output=True, text=True, timeout=250
        )  # fmt: skip
        assert done.returncode == 0, f"{command}: {done.stdout[-3000:]} {done.stderr[-3000:]}"
        return done.stdout

    ran = 0
    for word, rest in read_dockerfile():
        if word != "RUN" or "apt-get" in rest or "useradd" in rest:
            continue
        if " torch" in rest:
            assert "--torch-backend $TORCH" in rest
            (there,) = place.glob("lib/python*/site-packages")
            (there / "others.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
            call(f"{place}/bin/pip uninstall -q -y setuptools")  # that of this environment builds
            continue
        call(rest.replace("/opt/pshard", str(place)))
        ran += 1
    assert ran == 2
    call(f"rm -rf {sources}/*")  # what was installed needs no sources
    assert "pshard 0" in call(f"{place}/bin/pshard --version")
    found = call(f"{place}/bin/python -c 'import pshard; print(pshard.__file__)'")
    assert found.startswith(str(place))
    assert "--registry" in call(f"{place}/bin/pshard serve --help")
