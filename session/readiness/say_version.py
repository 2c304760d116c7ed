"""What runs here: versions of pshard, torch and the driver, and the commit, without importing any of them."""

import json
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

import pshard
from pshard.session.readiness.find_driver import find_driver


def describe_version() -> str:
    """One line for each."""
    gpu = find_driver()
    return "\n".join(
        (
            f"pshard {pshard.__version__} ({find_commit() or 'commit unknown'})",
            f"torch {_version_of('torch') or 'not installed'}",
            f"driver {gpu}" if gpu else "driver none: no NVIDIA GPU is visible",
            f"Python {platform.python_version()}, {platform.platform()}",
        )
    )


def find_commit() -> str | None:
    """The commit of the clone that is used, or of the one that was installed; None where neither is known."""
    package, root = Path(pshard.__file__).resolve().parents[:2]
    if (root / ".git").exists():
        asked = ("git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*")
        try:
            said = subprocess.run(asked, capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.SubprocessError):
            return None
        return f"commit {said.stdout.strip()}" if said.returncode == 0 else None
    if (package / "commit.txt").is_file():  # which setup.py writes into wheels
        return f"commit {(package / 'commit.txt').read_text(encoding='utf-8').strip()}"
    try:
        origin = json.loads(distribution("pshard").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        return None
    commit = origin.get("vcs_info", {}).get("commit_id")
    return f"commit {commit[:10]}" if commit else None


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
