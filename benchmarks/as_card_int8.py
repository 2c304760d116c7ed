"""Products of prompts in int8, as another card has them, beside plain int8 through the same instruction.

    python benchmarks/as_card_int8.py --as-card 86 --out FILE

Each type is multiplied with every tile that profiles try, and the fastest counts: 4096 rows of 5120 x 25600, and
experts (128 of 768, 8 used; of MXFP4 32 of 2880, 4 used). `share` is the rate over that of plain int8 in the same code
and run, a product of matrices without scales. `bf16_us` is the way that int8 races: a library's
product, or our experts in bfloat16. The same is done in this GPU's own code. Products of a library are in its own code
both times.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from card_ways import run_way

from pshard.model_config import Experts
from pshard.profile.timed.operands import OperandPool
from pshard.profile.timed.time_kernels import KernelBench
from pshard.profile.timing_loop import Pace
from pshard.profile.tuning.attention_cases import calls_of_experts
from pshard.profile.tuning.tile_cases import TileCase, calls_of
from pshard.runtime.kernels.gpu.default_tiles import INT8_WAYS
from pshard.times.gpu_tiles import INT8_EXPERTS, INT8_KERNEL, LIBRARY, Tile, TileChoice, pairs_together

WAYS = ("as_card", "native")
QTYPES = ("Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "Q5_0", "IQ4_NL", "MXFP4")
TOKENS, ROWS, COLS = 4096, 25600, 5120
GOALS = {"Q4_0": 0.42, "Q4_K": 0.34, INT8_EXPERTS: 0.30}
MANY, FEW = (2048, Experts(128, 8, 768)), (2880, Experts(32, 4, 2880, "chosen", normed=False))
PLAIN_TILES = ((128, 128, 64, 8, 3), (128, 256, 64, 8, 3), (128, 128, 128, 8, 2), (128, 64, 64, 4, 4))
POOL_BYTES = 2 << 30


@triton.jit
def plain_kernel(a, b, out, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """out[M, N] = a[M, K] @ b[N, K].T in int8 with sums in int32; tiles in bands of eight share columns in L2."""
    across = tl.cdiv(M, BM)
    band = tl.program_id(0) // (8 * across)
    tile = tl.program_id(0) % (8 * across)
    rows = tile // 8 * BM + tl.arange(0, BM)
    cols = (band * 8 + tile % 8) * BN + tl.arange(0, BN)
    depth = tl.arange(0, BK)
    left, right = a + rows[:, None] * K + depth, b + cols[None, :] * K + depth[:, None]
    total = tl.zeros((BM, BN), tl.int32)
    for _ in range(0, K, BK):
        total = tl.dot(tl.load(left), tl.load(right), total, out_dtype=tl.int32)
        left += BK
        right += BK
    tl.store(out + rows[:, None] * N + cols[None, :], total.to(tl.float16))


def time_plain() -> dict[str, Any]:
    """The rate of plain int8, TOP/s, with the best of some tiles; the first result is held against float64."""
    a, b = (torch.randint(-127, 128, (n, COLS), dtype=torch.int8, device="cuda") for n in (TOKENS, ROWS))
    out = torch.empty(TOKENS, ROWS, dtype=torch.float16, device="cuda")
    found: dict[str, Any] = {}
    for bm, bn, bk, warps, stages in PLAIN_TILES:
        grid = (TOKENS // bm * (ROWS // bn),)

        def run(grid=grid, shape=(bm, bn, bk), warps=warps, stages=stages) -> None:
            plain_kernel[grid](a, b, out, TOKENS, ROWS, COLS, *shape, num_warps=warps, num_stages=stages)

        try:
            run()
        except triton.runtime.errors.OutOfResources as error:
            found[f"{bm}x{bn}x{bk}"] = str(error)
            continue
        right = (a[:64].double() @ b[:64].double().T).clamp(-65504, 65504)
        if not torch.allclose(out[:64, :64].double().clamp(-65504, 65504), right, rtol=1e-3):
            raise SystemExit("the plain product is wrong")
        seconds = triton.testing.do_bench(run, warmup=200, rep=500, return_mode="median") / 1e3
        found[f"{bm}x{bn}x{bk}"] = round(2.0 * TOKENS * ROWS * COLS / seconds / 1e12, 1)
    return {"tops": max(rate for rate in found.values() if isinstance(rate, float)), "tiles": found}


def list_cases(bench: KernelBench) -> Iterator[tuple[str, str, float, int, Callable[[], Callable[[int], None]]]]:
    """Kernel, type, operations, number of tokens that tiles are kept by, and what makes the calls of a case."""
    for qtype in QTYPES:
        yield INT8_KERNEL, qtype, 2.0 * TOKENS * ROWS * COLS, TOKENS, partial(_product, bench, qtype)
    for qtype in QTYPES[:5] + QTYPES[-1:]:
        width, rule = FEW if qtype == "MXFP4" else MANY
        work = 6.0 * TOKENS * rule.used * width * rule.width
        together = pairs_together(TOKENS * rule.used, rule.count)
        yield INT8_EXPERTS, qtype, work, together, partial(_experts, bench, qtype, width, rule)


def _product(bench: KernelBench, qtype: str) -> Callable[[int], None]:
    weights = bench.pool.rotate_weights(qtype, ROWS, COLS)
    case = TileCase(INT8_KERNEL, qtype, TOKENS, ((ROWS, COLS),))
    return calls_of(bench.kernels, case, weights, bench.activations(TOKENS, COLS))[0]


def _experts(bench: KernelBench, qtype: str, width: int, rule: Experts) -> Callable[[int], None]:
    return calls_of_experts(bench, qtype, qtype, width, rule, TOKENS)[0]


def time_case(bench: KernelBench, kernel: str, qtype: str, work: float, key: int, make: Callable) -> dict[str, Any]:
    """Microseconds of each tile and of bfloat16; errors in words."""
    found: dict[str, Any] = {"kernel": kernel, "type": qtype, "tiles": {}}
    for tile in (*INT8_WAYS[kernel], LIBRARY):
        bench.kernels.try_tile(TileChoice("acc", kernel, qtype, key, tile, 1.0, 1.0))
        try:
            with torch.inference_mode():
                us: Any = round(1e6 * bench.seconds(make(), TOKENS), 1)
        except Exception as error:
            us = f"{type(error).__name__}: {error}"[:120]
        if tile == LIBRARY:
            found["bf16_us"] = us
        else:
            found["tiles"][_name(tile)] = us
    times = {name: us for name, us in found["tiles"].items() if isinstance(us, float)}
    if times:
        best = min(times, key=lambda name: times[name])
        found |= {"us": times[best], "tile": best, "tops": round(work / times[best] / 1e6, 1)}
    return found


def _name(tile: Tile) -> str:
    cut = f"{tile.rows}x{tile.tokens}, {tile.depth} deep, {tile.warps} warps"
    return f"{cut}, {tile.stages} ahead, {tile.registers} registers"


def time_way(seconds: float) -> dict[str, Any]:
    """What one of the processes does; no case begins later than `seconds`."""
    from pshard.runtime.kernels.gpu.cuda import CudaKernels

    until, device = time.monotonic() + seconds, torch.device("cuda")
    plain = time_plain()
    bench = KernelBench("acc", CudaKernels(device, TOKENS), device, OperandPool(POOL_BYTES, device), Pace(0.2), 1.0)
    rows = []
    for kernel, qtype, work, key, make in list_cases(bench):
        if time.monotonic() > until:
            break
        rows.append(time_case(bench, kernel, qtype, work, key, make))
        if "tops" in rows[-1]:
            rows[-1]["share"] = round(rows[-1]["tops"] / plain["tops"], 3)
    return {"plain": plain, "rows": rows, "gpu": torch.cuda.get_device_name()}


def main() -> int:
    """Entry point of the script; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--as-card", default="86", metavar="86", help="capability of the other card (default 86)")
    parser.add_argument("--seconds", type=float, default=240.0, help="no case begins later than this (default 240)")
    parser.add_argument("--out", type=Path, required=True, help="file to write, JSON")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)  # what one of the processes does
    args = parser.parse_args()
    if args.way:
        print(json.dumps(time_way(args.seconds)))
        return 0
    result: dict[str, Any] = {
        "as_card": args.as_card, "torch": torch.__version__, "triton": triton.__version__,
        "date": time.strftime("%Y-%m-%d %H:%M"), "command": " ".join(sys.argv), "goals": GOALS,
    }  # fmt: skip
    for way in WAYS:
        if found := run_way(__file__, way, args.as_card, args.seconds / 2, args.out):
            result[way] = found
            args.out.write_text(json.dumps(result, indent=1))
            print_way(way, result[way])
    return 0 if all(way in result for way in WAYS) else 1


def print_way(way: str, found: dict[str, Any]) -> None:
    """One code's table."""
    print(f"{way}: plain int8 {found['plain']['tops']} TOP/s on {found['gpu']}")
    for row in found["rows"]:
        goal = GOALS.get(row["kernel"], GOALS.get(row["type"])) if row["type"] in ("Q4_0", "Q4_K") else None
        said = f"{row['us']:9.1f} us {row['tops']:7.1f} TOP/s {row['share']:6.1%}" if "us" in row else "no tile runs"
        print(
            f"{row['kernel']:14s} {row['type']:7s} {said}  bf16 {row['bf16_us']} us"
            + (f"  goal {goal:.0%}" if goal else "")
        )


if __name__ == "__main__":
    sys.exit(main())
