"""Shared test setup: few threads, own cache folder, GPU tests skipped without a GPU, makers of test data importable."""

import os
import signal
import sys
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).with_name("makers")))
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as a shell starts jobs in the background: Ctrl-C is tested too
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's cache, or is steered by the user's environment."""
    for name in list(os.environ):
        if name.startswith("PSHARD_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PSHARD_VALIDATE", "0")  # plans are run before they are written where a test asks for it
    monkeypatch.setenv("PSHARD_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def quick_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of small models take a tenth of their time: where it does not matter how fast the planned model is."""
    from short_searches import shorten_searches

    shorten_searches(monkeypatch)


@pytest.fixture(params=["quick", pytest.param("whole", marks=pytest.mark.slow)])
def search(request: pytest.FixtureRequest) -> str:
    """The test plans with the quick search, and when slow tests run with the whole one too."""
    if request.param == "quick":
        request.getfixturevalue("quick_search")
    return request.param


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA GPU"))
