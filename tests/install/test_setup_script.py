"""What an install says by itself: that there is no compiler, that it makes an environment; and what it does when there
is one later. Nothing is fetched or compiled: programs that write down how they are called stand in for Python and uv.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pexpect
import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("bash", "dirname", "find", "sed", "grep", "mkdir", "touch", "rm", "cat")
NOTES = '#!/bin/bash\necho "$(basename "$0") $*" >>"$CALLS"\n'
SLOW = "some ten times slower"


class Clone:
    """A folder with the script, and all that it can call."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin, self.calls = folder / "clone", folder / "bin", folder / "calls"
        (self.folder / "scripts").mkdir(parents=True)
        (self.folder / "runtime/kernels/cpu/csrc").mkdir(parents=True)
        (self.folder / ".venv/bin").mkdir(parents=True)
        self.bin.mkdir()
        shutil.copy(ROOT / "scripts/setup", self.folder / "scripts")
        for name in ("pyproject.toml", "setup.py", "constraints.txt"):
            shutil.copyfile(ROOT / name, self.folder / name)
        for name in (*TOOLS, "basename"):
            found = shutil.which(name)
            assert found
            (self.bin / name).symlink_to(found)
        (self.bin / "python3").symlink_to(sys.executable)
        self.add(self.folder / ".venv/bin/python")

    def add(self, place: Path) -> None:
        place.write_text(NOTES)
        place.chmod(0o755)

    def set_up(self) -> tuple[str, list[str]]:
        """What it says, and what it has called."""
        self.calls.write_text("")
        env = {"PATH": str(self.bin), "CALLS": str(self.calls)}
        done = subprocess.run(
            [str(self.bin / "bash"), "scripts/setup"], cwd=self.folder, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        calls = self.calls.read_text().splitlines()
        return done.stderr, [call for call in calls if "compileall" not in call]  # which goes on behind it


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def test_a_clone_without_a_compiler_says_so_and_takes_one_that_comes_later(clone: Clone) -> None:
    said, calls = clone.set_up()
    assert f"environment of its own in {clone.folder}/.venv" in said and SLOW in said
    assert any("install" in call and call.endswith("-e .") for call in calls)
    assert clone.set_up() == ("", [])  # nothing is to be done
    clone.add(clone.bin / "g++")
    said, calls = clone.set_up()
    assert SLOW not in said and any(call.endswith("-e .") for call in calls)
    assert clone.set_up() == ("", [])


def test_a_clone_without_a_gpu_takes_torch_for_cpus_where_uv_can_fetch_it(clone: Clone) -> None:
    said, calls = clone.set_up()
    assert "uv (pip install uv) spares it" in said and any("install" in c and " torch==" in c for c in calls)
    (clone.folder / ".venv/.installed").unlink()
    clone.add(clone.bin / "uv")
    said, calls = clone.set_up()
    assert "torch's build for CPUs is taken" in said
    assert any(call.startswith("uv pip install") and "--torch-backend cpu torch==" in call for call in calls)
    assert not any(call.startswith("python") and " torch==" in call for call in calls)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the library is for Linux")
def test_a_build_without_a_compiler_says_so_where_pip_hides_what_it_says(tmp_path: Path) -> None:
    """As pip does: what the build writes is thrown away when it succeeds."""
    env = os.environ | {"CC": "/bin/false", "CXX": "/bin/false"}
    command = [sys.executable, "setup.py", "-q", "build_ext", "-f", "-b", str(tmp_path / "lib"), "-t", str(tmp_path)]
    hidden = ["-c", '"$@" >/dev/null 2>&1; echo "code $?"', "bash", *command]
    shell = pexpect.spawn("bash", hidden, cwd=str(ROOT), env=env, encoding="utf-8", timeout=60)
    shell.expect("code 0")
    assert SLOW in shell.before and "pshard doctor" in shell.before
    assert not list((tmp_path / "lib").rglob("*.so"))
