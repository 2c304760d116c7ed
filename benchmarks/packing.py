"""Packing a model's weights into host memory as the runtime does: rate, page-locking, and the memory it takes at most.

    python benchmarks/packing.py -m MODEL -o packing.json

The file is read once before, so that it comes from the system's cache. The ceiling is a plain copy of as many bytes by
the same threads, once into memory that was never touched, once again.
"""

import argparse
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

from cpu_kernels import use_native_threads, write_json

from pshard.commands.command_line import new_parser, run_cli
from pshard.errors import UserError
from pshard.models import ModelFile, open_model
from pshard.runtime.devices.device import open_device
from pshard.runtime.kernels.cpu import native
from pshard.runtime.memory.host.host_memory import map_memory
from pshard.runtime.memory.weights import HostWeights
from pshard.units.divide_unit import whole_unit


def main(argv: list[str]) -> int:
    """Measure and print; with -o also write JSON."""
    parser = new_parser("packing.py", str(__doc__).splitlines()[0])
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="what the memory is page-locked for")
    parser.add_argument("-t", "--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("-o", "--output", type=Path, help="JSON file to write")
    args = parser.parse_args(argv)
    use_native_threads(args.threads)
    with open_model(args.model) as model:
        result = measure_packing(model, args)
    gb = result["packed_bytes"] / 1e9
    print(f"{gb:.2f} GB packed in {result['seconds']:.2f} s ({gb / result['seconds']:.2f} GB/s), page-locked "
          f"{'' if result['page_locked'] else 'not '}in {result['lock_seconds']:.2f} s; "
          f"peak {result['peak_of_packed']:.2f} times the packed size")  # fmt: skip
    for name in ("first", "again"):
        print(f"a copy into memory touched {name}: {gb / result[f'copy_{name}_seconds']:.2f} GB/s")
    if args.output:
        write_json(args.output, "packing", [result], argv)
    return 0


def measure_packing(model: ModelFile, args: argparse.Namespace) -> dict:
    """Seconds and bytes of packing all units of a model. Raises UserError when they do not fit into free memory."""
    nbytes, device = model.spec.packed_nbytes, open_device(args.device)
    free = os.sysconf("SC_PAGESIZE") * os.sysconf("SC_AVPHYS_PAGES")
    if nbytes > free:
        raise UserError(f"{args.model} takes {nbytes >> 20} MiB packed, {free >> 20} MiB are free")
    for unit in model.spec.units:
        for tensor in unit.tensors:
            model.tensor_bytes(tensor.name).reshape(-1)[::4096].sum()
            model.forget_tensor(tensor.name)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    weights, ends = HostWeights(map(whole_unit, model.spec.units), device), [time.perf_counter()]
    weights.load(model, None, lambda _: ends.append(time.perf_counter()))
    end, peak = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    locked = weights.page_locked
    weights.close()
    del weights
    source, target = map_memory(64 << 20).fill_(1), map_memory(nbytes)

    def copy_all() -> None:
        for at in range(0, nbytes, source.numel()):
            part = target[at : at + source.numel()]
            native.memcpy(part, source, part.numel())

    return {
        "model": args.model.name,
        "packed_bytes": nbytes,
        "seconds": ends[-1] - ends[0],
        "lock_seconds": end - ends[-1],
        "page_locked": locked,
        "peak_of_packed": peak * 1024 / nbytes,
        "copy_first_seconds": time_call(copy_all),
        "copy_again_seconds": time_call(copy_all),
    }


def time_call(call: Callable[[], None]) -> float:
    """Seconds of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(run_cli(main))
