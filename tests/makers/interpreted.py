"""Tests of Triton kernels on a machine without a GPU: run again in Triton's interpreter, which must be chosen before
anything imports Triton, and so in a process of their own."""

import os
import subprocess
import sys


def run_interpreted(file: str) -> subprocess.CompletedProcess[str]:
    """The tests of a file with Triton's interpreter."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", file, "-p", "no:cacheprovider"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
