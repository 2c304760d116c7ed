"""All-reduces between CPU ranks of this machine: shared memory beside gloo, median seconds of sums made in bursts.

python benchmarks/cpu_sums.py -n 2 -o sums.json
"""

import argparse
import sys
from pathlib import Path

from cpu_kernels import use_native_threads, write_json

from pshard.commands.command_line import new_parser, parse_counts, run_cli
from pshard.profile.timed.collective_times import SIZES, measure_collectives


def main(argv: list[str]) -> int:
    """Measure and print; with -o also write JSON."""
    parser = new_parser("cpu_sums.py", str(__doc__).splitlines()[0])
    parser.add_argument("-n", "--ranks", type=parse_counts, default=(2,), help="numbers of ranks, as 2,4")
    parser.add_argument("-s", "--sizes", type=parse_counts, default=SIZES, help="bytes of float32, as 4096,16384")
    parser.add_argument("-o", "--output", type=Path, help="JSON file to write")
    args = parser.parse_args(argv)
    use_native_threads(1)
    results = measure_both(args)
    print("| ranks | KB | shared memory, us | gloo, us |\n|---|---|---|---|")
    for r in results:
        print(f"| {r['ranks']} | {r['nbytes'] / 1024:g} | {1e6 * r['shm']:.1f} | {1e6 * r['gloo']:.1f} |")
    if args.output:
        write_json(args.output, "cpu_sums", results, argv)
    return 0


def measure_both(args: argparse.Namespace) -> list[dict]:
    """Seconds of each way for each number of ranks and size."""
    rows: dict[tuple[int, int], dict] = {}
    for shared_memory in (True, False):
        for t in measure_collectives("cpu", args.ranks, args.sizes, shared_memory):
            row = rows.setdefault((t.ranks, t.nbytes), {"ranks": t.ranks, "nbytes": t.nbytes})
            row[t.backend] = t.seconds
    return list(rows.values())


if __name__ == "__main__":
    sys.exit(run_cli(main))
