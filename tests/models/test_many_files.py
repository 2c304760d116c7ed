"""Models in more files than a process may open unless it asks."""

import subprocess
import sys
from pathlib import Path

import pytest
from model_files import write_hf_folder

LIMITS = """
import resource, sys
from pshard.models import open_model
soft, hard = int(sys.argv[2]), int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
from pshard.errors import UserError
try:
    print(len(open_model(sys.argv[1])._files))
except UserError as error:
    print(error)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with each of its tensors in a file of its own."""
    write_hf_folder(tmp_path / "model", shard_bytes=1, shape={"n_layers": 4})
    return tmp_path / "model"


def open_in(folder: Path, soft: int, hard: int) -> str:
    run = subprocess.run(
        [sys.executable, "-c", LIMITS, str(folder), str(soft), str(hard)], capture_output=True, text=True, check=True
    )
    return run.stdout.strip()


def test_a_model_in_more_files_than_are_allowed_at_first_is_opened(folder: Path) -> None:
    files = len(list(folder.glob("*.safetensors")))
    assert open_in(folder, files, 4 * files) == str(files)


def test_more_files_than_the_system_allows_are_told_with_a_remedy(folder: Path) -> None:
    files = len(list(folder.glob("*.safetensors")))
    told = open_in(folder, files, files)
    assert "ulimit -n" in told and ".safetensors: cannot be read" in told
