"""CPU attention of sequences that decode together, against the DRAM read rate of the same threads in the same minute.

Every call reads KV caches that no cache of the processor holds (they are rotated over 1 GiB or more); a pass that only
sums as many bytes is timed between the calls: that is the ceiling. Cells are bf16 unless told otherwise.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
from cpu_kernels import ROTATION, compare_with_ceiling, format_rates, time_in_turn, use_native_threads, write_json

from pshard.commands.command_line import new_parser, parse_ints, run_cli
from pshard.errors import UserError
from pshard.profile.timed.operands import OperandPool
from pshard.runtime.kernels.api import Segment
from pshard.runtime.kernels.cpu import native
from pshard.runtime.kernels.cpu.host import HostKernels
from pshard.runtime.kernels.row_index import make_rows
from pshard.units.kv_cells import KV_BLOCK, kv_blocks


def main(argv: list[str]) -> int:
    """Run the benchmark; prints a table and, with -o, writes JSON."""
    parser = new_parser("cpu_attention.py", str(__doc__).splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, help="JSON file to write")
    parser.add_argument("-np", "--sequences", type=parse_ints, default=(1, 16, 64), help="as 1,16,64")
    parser.add_argument("-d", "--cells", type=parse_ints, default=(1057,), help="of each sequence, as 1057,16384")
    parser.add_argument("--heads", type=parse_ints, default=(64, 8, 128), help="heads, KV heads, head size")
    parser.add_argument("--kv-type", default="bf16", choices=("bf16", "f16", "q8_0"))
    parser.add_argument("-t", "--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seconds", type=float, default=0.6, help="time spent on each case")
    args = parser.parse_args(argv)
    if len(args.heads) != 3 or args.heads[0] % args.heads[1]:
        raise UserError("--heads is heads, KV heads and head size, as 64,8,128, and KV heads divide heads")
    use_native_threads(args.threads)
    torch.set_num_threads(1)
    print("| sequences | cells | ms | GB/s | ceiling GB/s | of ceiling | best of ceiling |")
    print("|---|---|---|---|---|---|---|")
    pool = OperandPool(ROTATION, torch.device("cpu"))
    results = [time_case(pool, n, cells, args) for cells in args.cells for n in args.sequences]
    if args.output:
        write_json(args.output, "cpu_attention", results, argv)
    return 0


def time_case(pool: OperandPool, sequences: int, cells: int, args: argparse.Namespace) -> dict:
    """One row of results: a step of so many sequences of so many cells each, one layer."""
    heads, kv_heads, dim = shape = tuple(args.heads)
    blocks = kv_blocks(cells, 1)
    caches = pool.rotate_kv(sequences * blocks * KV_BLOCK, kv_heads, dim, args.kv_type)
    held = [tuple(range(s * blocks, (s + 1) * blocks)) for s in range(sequences)]
    rows = make_rows([Segment(s, s, 1, cells - 1, held[s]) for s in range(sequences)])
    qkv = torch.randn(sequences, (heads + 2 * kv_heads) * dim, generator=torch.Generator().manual_seed(0))
    out, kernels = torch.empty(sequences, heads * dim), HostKernels()
    nbytes = 2 * sequences * cells * caches[0].k[0, 0].nbytes

    def ours(i: int) -> None:
        kernels.attention(qkv, shape, caches[i % len(caches)], rows, dim**-0.5, out, None)

    def ceiling(i: int) -> None:
        start = i % len(caches) * nbytes % max(1, pool.memory.numel() - nbytes)
        native.read_bandwidth(pool.memory[start:], nbytes)

    seconds, read_seconds = time_in_turn(ours, ceiling, args.seconds)
    result = {
        "sequences": sequences,
        "cells": cells,
        "heads": shape,
        "kv_type": args.kv_type,
        "nbytes": nbytes,
        **compare_with_ceiling(nbytes, seconds, read_seconds),
    }
    print(f"| {sequences} | {cells} | {format_rates(result)} |", flush=True)
    return result


if __name__ == "__main__":
    sys.exit(run_cli(main))
