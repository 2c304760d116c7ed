"""What a processor with fewer instruction sets runs, on this one: its kernels, and the tests of them."""

import os
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from random_blocks import random_rows

from pshard.runtime.kernels.api import Packed
from pshard.runtime.kernels.codebooks import BOOK_TYPES
from pshard.runtime.kernels.cpu import native
from pshard.runtime.kernels.layout import pack_reference

pytestmark = pytest.mark.skipif(
    not native.is_available() or native.isa() != "avx512_vnni",
    reason="the CPU kernels run here have no AVX-512 to hide",
)

ROOT = Path(__file__).resolve().parents[2]
ASK = "from pshard.runtime.kernels.cpu import native; print(native.isa(), native.tiles())"


def without(sets: str) -> dict[str, str]:
    return os.environ | {"PSHARD_CPU_WITHOUT": sets}


@pytest.mark.parametrize(
    ("hidden", "isa"),
    [("avx512_bf16", "avx512_vnni"), ("amx,avx512", "avx2"), ("avx512,avx2", "portable")],
)
def test_a_hidden_instruction_set_is_left_alone(hidden: str, isa: str) -> None:
    asked = [sys.executable, "-c", ASK]
    done = subprocess.run(asked, env=without(hidden), capture_output=True, text=True, check=True)
    assert done.stdout.split() == [isa]


def digest_products() -> list[int]:
    """A checksum of products and of weights for each type with a codebook."""
    rows, cols, found = 32, 512, []
    x = np.random.default_rng(1).standard_normal((3, cols), np.float32)
    for qtype in BOOK_TYPES:
        packed = Packed(pack_reference(random_rows(qtype, rows, cols), qtype, rows, cols), qtype, rows, cols)
        out, weights = np.empty((3, rows), np.float32), np.empty((rows, cols), np.float32)
        native.linear(x, packed, out, 3)
        native.dequantize(packed, 0, rows, weights, "f32")
        found += [zlib.crc32(out.tobytes()), zlib.crc32(weights.tobytes())]
    return found


@pytest.mark.slow
def test_codebooks_in_registers_and_in_memory_give_the_same_bits() -> None:
    asked = [sys.executable, "-c", "import test_hidden_sets as here; print(here.digest_products())"]
    where = without("avx512_vbmi") | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run(asked, env=where, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(digest_products())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hidden", "files"),
    [("avx512_bf16", ("busy_threads", "tile_kernels")), ("avx512", ("busy_threads", "tile_kernels", "native_experts"))],
    ids=["avx512_bf16", "avx512"],
)
def test_the_tests_of_cpu_kernels_pass_on_processors_with_less(hidden: str, files: tuple[str, ...]) -> None:
    """Ice Lake and many virtual machines have AVX-512 without bf16, which experts are also tried without where it is;
    most desktops have AVX2 alone."""
    asked = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow"]
    asked += ["-k", "not by_the_system"]  # points at which helpers are put aside do
    asked += [f"tests/kernels/test_{name}.py" for name in files]
    done = subprocess.run(asked, env=without(hidden), cwd=ROOT, capture_output=True, text=True)
    assert not done.returncode, done.stdout[-3000:]
