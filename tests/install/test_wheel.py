"""An installed wheel, as pip, pipx and uv install it, works like the clone.

The library of CPU kernels is not compiled here, which takes minutes: the clone's is put in its place.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from pshard.runtime.kernels.cpu import native

ROOT = Path(__file__).resolve().parents[2]
BUILT = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "constraints.txt")
FOLDERS = (
    *("pshard", "examples", "models", "planner", "profile", "registries", "reports", "runtime"),
    *("hub", "session", "server", "commands"),
)
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.so", "*.pshard.json", ".*.lock")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the sources at hand, built where there is no compiler."""
    folder = tmp_path_factory.mktemp("built")
    for name in BUILT:
        shutil.copy(ROOT / name, folder)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=LEFT_OUT)
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "of the wheel"]):
        git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", *words]
        subprocess.run(git, cwd=folder, check=True, timeout=60)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", "dist", "."]
    none = {"CC": "/bin/false", "CXX": "/bin/false"}
    subprocess.run(command, cwd=folder, env=os.environ | none, check=True, capture_output=True, timeout=250)
    (made,) = (folder / "dist").iterdir()
    return made


def test_one_wheel_serves_all_versions_of_python(wheel: Path) -> None:
    assert "-py3-none-linux_" in wheel.name


def test_a_wheel_says_which_commit_it_is_made_from(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(tmp_path)
    code = "from pshard.session.readiness.say_version import describe_version; print(describe_version())"
    env = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"}
    said = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True).stdout
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=wheel.parents[1], capture_output=True, text=True).stdout
    assert said.startswith(f"pshard 0.1.0 (commit {head[:10]})")


def test_a_wheel_has_what_the_package_reads_and_no_sources_of_the_library(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    read = {"registries/FORMAT.md", "reports/page.html", "reports/page.css", "reports/page.js"}
    read |= {f"examples/{name}" for name in ("demo.gguf", "mtp-demo.gguf", "demo-draft.gguf")}
    assert {f"pshard/{name}" for name in read} <= names
    assert not [name for name in names if name.endswith((".cpp", ".h"))]


@pytest.mark.skipif(not native.is_available(), reason=f"no native library: {native.why_missing()}")
def test_commands_of_a_wheel_plan_and_run_the_bundled_model(wheel: Path, tmp_path: Path) -> None:
    place = tmp_path / "site"
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(place)
    shutil.copy(native.library_path(), place / "pshard/runtime/kernels/cpu")
    env = {k: v for k, v in os.environ.items() if not k.startswith("PSHARD_")}
    env |= {"PYTHONPATH": str(place), "PSHARD_CACHE": str(tmp_path / "cache"), "PYTHONSAFEPATH": "1"}

    def call(code: str) -> str:
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert str(place) in call("import pshard; print(pshard.__file__)")
    assert call("from pshard.runtime.kernels.cpu import native; print(native.why_missing())").strip() == "None"
    where = "from pshard.registries.store import registry_path; from pshard.paths import bundled_model as model; "
    assert call(f"{where}print(registry_path(model()))").startswith(str(tmp_path / "cache"))
    sheet = place / "pshard/registries/examples/rtx4060-ryzen-7700.json"
    plan = "from pshard.commands.cli_plan import main; import sys; sys.exit(main("
    assert "Predicted" in call(f"{plan}['--vram', '500', '--profile', {str(sheet)!r}]))")
