"""A clone named pshard does not hide the package from a Python that starts in the folder above it."""

import subprocess
import sys
from pathlib import Path

import pytest

import pshard

CLONE = Path(__file__).resolve().parents[2]


@pytest.fixture
def above(tmp_path: Path) -> Path:
    """A folder that holds the clone under the name pshard."""
    (tmp_path / "pshard").symlink_to(CLONE)
    return tmp_path


def start(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=60)


def test_the_package_is_found_from_the_folder_above_the_clone(above: Path) -> None:
    code = "import pshard; from pshard.models import open_model; print(pshard.__file__, callable(pshard.load))"
    done = start(above, "-c", code)
    assert done.stdout.split() == [pshard.__file__, "True"], done.stderr


def test_a_python_without_the_package_says_so_in_the_folder_above_the_clone(above: Path) -> None:
    done = start(above, "-S", "-c", "import pshard")  # -S: without what pip installed
    assert done.returncode == 1 and done.stderr.count("no pshard installed: run") == 1
    assert f"{above}/pshard/scripts/setup" in done.stderr
