"""Attention as another card has it: tiles that fit that card beside the large tiles in the same code.

    python benchmarks/as_card_attention.py --as-card 86 --out FILE

Times of each case, every way in a process of its own: `fits`, tiles of that card, in its code; `large`, tiles of an
H100 in that same code, with the limit of shared memory lifted; `native`, the GPU as it is. `share` is the rate of fits
over that of large; the goal is 0.9.
Then `tiles`: prompts with each tile of TRIED, in that card's code.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from card_ways import run_way

from pshard.profile.timed.operands import OperandPool
from pshard.profile.timed.time_kernels import KernelBench, time_attention
from pshard.profile.timing_loop import Pace
from pshard.times.gpu_tiles import Tile
from pshard.units.operations import Attend

SHAPES = (Attend(64, 8, 64), Attend(32, 8, 128), Attend(16, 8, 256), Attend(16, 2, 256))
CELLS = ("bf16", "q8_0")
CASES = ((4096, 4096, 1), (1024, 16384, 1), (1, 4096, 1), (1, 32768, 1), (1, 4096, 16))  # tokens, cells, sequences
WAYS = ("fits", "large", "native", "tiles")
TRIED = {  # tiles of prompts that fit 99 KB, by the elements of a head
    128: (Tile(128, 64, 8, 3), Tile(128, 32, 8, 3), Tile(64, 64, 4, 3), Tile(64, 64, 4, 2)),
    256: (Tile(128, 32, 8, 2), Tile(64, 64, 4, 2), Tile(64, 32, 8, 2), Tile(64, 64, 8, 1)),
}


def main() -> int:
    """Entry point of the script; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--as-card", default="86", metavar="86", help="capability of the other card (default 86)")
    parser.add_argument("--seconds", type=float, default=100.0, help="no case begins later than this (default 100)")
    parser.add_argument("--out", type=Path, required=True, help="file to write, JSON")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)  # what one of the processes does
    args = parser.parse_args()
    if args.way:
        print(json.dumps((time_tiles if args.way == "tiles" else time_cases)(args.way, args.seconds)))
        return 0
    rates: dict[str, dict[str, Any]] = {}
    for way in WAYS:
        rates[way] = run_way(__file__, way, args.as_card, args.seconds / len(WAYS), args.out) or {}
    rows = [compare(name, *(rates[way].get(name) for way in WAYS[:3])) for name in rates["native"]]
    result = {
        "gpu": torch.cuda.get_device_name(), "as_card": args.as_card, "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d %H:%M"), "rows": rows, "tiles": rates["tiles"],
    }  # fmt: skip
    args.out.write_text(json.dumps(result, indent=1))
    for row in rows:
        print(" ".join(f"{key} {value}" for key, value in row.items()))
    for name, took in rates["tiles"].items():
        print(f"tile {name} {took}")
    return 0


def compare(name: str, fits: Any, large: Any, native: Any) -> dict[str, Any]:
    """One line of the result: microseconds of each way, or what it failed with."""
    share = round(large / fits, 3) if isinstance(fits, float) and isinstance(large, float) else None
    return {"case": name, "share": share, "fits_us": fits, "large_us": large, "native_us": native}


def time_cases(way: str, seconds: float) -> dict[str, Any]:
    """Case -> microseconds, or the error in words."""
    from pshard.runtime.kernels.gpu.card_limits import KNOWN_CARDS
    from pshard.runtime.kernels.gpu.cuda import CudaKernels

    if way == "large":
        lift_limit()
    device, end = torch.device("cuda"), time.monotonic() + seconds
    kernels = CudaKernels(device, 4096, limits=KNOWN_CARDS[90] if way == "large" else None)
    pool = OperandPool(512 << 20, device)
    bench = KernelBench("acc", kernels, device, pool, Pace(0.08), 1.0)
    found: dict[str, Any] = {}
    for tokens, context, sequences in CASES:
        for shape in SHAPES:
            for cells in CELLS:
                if time.monotonic() > end:
                    return found
                name = f"{'x'.join(map(str, shape.heads))} {cells} {sequences}x{tokens}@{context}"
                try:
                    with torch.inference_mode():
                        (row,) = time_attention(bench, shape, cells, tokens, [context], sequences)
                    found[name] = round(row.seconds * 1e6, 2)
                except Exception as error:
                    found[name] = f"{type(error).__name__}: {error}"[:200]
    return found


def time_tiles(_: str, seconds: float) -> dict[str, Any]:
    """Case and tile -> microseconds, or the error in words."""
    from pshard.runtime.kernels.gpu import attend
    from pshard.runtime.kernels.gpu.cuda import CudaKernels

    device, end, found = torch.device("cuda"), time.monotonic() + seconds, dict[str, Any]()
    pool, tokens = OperandPool(256 << 20, device), CASES[0][0]
    for shape in SHAPES:
        for tile in TRIED.get(shape.head_dim, ()):
            attend.prompt_tiles = lambda *_, tile=tile: (tile,)
            bench = KernelBench("acc", CudaKernels(device, tokens), device, pool, Pace(0.08), 1.0)
            for cells in CELLS:
                if time.monotonic() > end:
                    return found
                cut = f"{tile.rows},{tile.depth},{tile.warps},{tile.stages}"
                name = f"{'x'.join(map(str, shape.heads))} {cells} {tokens} tokens by {cut}"
                try:
                    with torch.inference_mode():
                        (row,) = time_attention(bench, shape, cells, tokens, [tokens])
                    found[name] = round(row.seconds * 1e6, 2)
                except Exception as error:
                    found[name] = f"{type(error).__name__}: {error}"[:200]
    return found


def lift_limit() -> None:
    """Kernels of the other card's code may have all of this GPU's shared memory."""
    from triton.compiler import compiler

    compiler.max_shared_mem = lambda device: 227 << 10


if __name__ == "__main__":
    sys.exit(main())
