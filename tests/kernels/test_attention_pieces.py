"""Prompts whose values are summed some numbers at a time, as cards without wide products have them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pshard.runtime.kernels.gpu.card_limits import KNOWN_CARDS
from pshard.runtime.kernels.gpu.tiles.attention_tiles import attention_bytes, prompt_tiles, sum_piece
from pshard.times.gpu_tiles import Tile

BF16 = 4.0  # bytes of a number of k and of one of v


def test_no_more_numbers_are_summed_at_once_than_warps_have_rows_for() -> None:
    """Of wider sums Triton gives each warp some columns, and all warps exchange what cells weigh: 8 KB that heads of
    256 lack on a card with 99."""
    geforce, h100 = KNOWN_CARDS[86], KNOWN_CARDS[90]
    roomy = Tile(128, 32, 8, 2)
    assert sum_piece(roomy, 128, 256, geforce) == 128 and sum_piece(roomy, 128, 128, geforce) == 128
    assert sum_piece(Tile(64, 64, 4, 2), 64, 256, geforce) == 64
    assert sum_piece(Tile(64, 64, 8, 2), 64, 256, geforce) == 256  # eight warps share 64 rows anyway
    assert sum_piece(roomy, 128, 256, h100) == 256  # multiplied from shared memory, by four warps together
    assert attention_bytes(roomy, 128, 256, BF16, geforce) == 98304  # as Triton 3.6 allocates it
    assert prompt_tiles(geforce, 256, BF16)[0] == Tile(64, 64, 4, 2)
    assert prompt_tiles(h100, 256, BF16)[0] == Tile(64, 64, 8, 2)


PROGRAM = """
import sys
from dataclasses import replace
from functools import partial
sys.path.insert(0, sys.argv[1])
from interpreted import mend_interpreter
mend_interpreter()
import torch
from pshard.profile.checked.check_kernels import check_case
from pshard.profile.checked.kernel_cases import KernelCase, _attend
from pshard.runtime.kernels.gpu import attend
from pshard.runtime.kernels.gpu.card_limits import KNOWN_CARDS
from pshard.runtime.kernels.gpu.cuda import CudaKernels
from pshard.times.gpu_tiles import Tile
pieces, sum_piece = [], attend.sum_piece
attend.sum_piece = lambda *given: pieces.append(sum_piece(*given)) or pieces[-1]
for heads, cells, tokens, window, tile in (
    ((1, 1, 256), "bf16", 65, 0, Tile(128, 32, 8, 2)),
    ((1, 1, 192), "q8_0", 65, 0, Tile(64, 64, 4, 2)),
    ((1, 1, 128), "f16", 65, 100, Tile(64, 32, 4, 2)),
):
    attend.prompt_tiles = lambda *_, tile=tile: (tile,)
    kernels = CudaKernels("cpu", 128, limits=KNOWN_CARDS[86])
    case = KernelCase("", f"{heads} {cells}", partial(_attend, heads, cells, tokens, window))
    row = check_case(case, kernels, torch.device("cpu"))
    assert row.passed, row
assert pieces == [128, 64, 64], pieces
"""


@pytest.mark.slow
def test_sums_by_pieces_are_those_of_plain_torch() -> None:
    """Two pieces of 128 numbers, four of 64 of which the last has none, and two with a window and sinks."""
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, str(Path(__file__).parents[1] / "makers")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
