"""Example machine profiles from datasheets: `python -m pshard.planner.price.example_sheets FOLDER` writes them.

Rates are what our kernels would reach, by public measurements of such cards and our own on an H100; where each comes
from is said in docs/published.md. Products are bfloat16 with float32 sums: GeForce cards do these at half the rate
that their boxes name for tensor cores, and a library's GEMM reaches all of it.
"""

import json
import sys
from pathlib import Path

from pshard.jsonio import to_json, write_text_atomically
from pshard.machine import MachineProfile
from pshard.planner.price.datasheet import Rates, profile_from_datasheet

MEMORY = 0.85  # of a card's memory rate: copies reach 91%, our kernels for one token 78 to 108% of copies
ATTENTION = 0.8  # of the tensor rate: FlashAttention reaches 89 to 95%, one in Triton 83%
HOST_MEMORY = 0.94  # of what threads read: our CPU kernels
SAPPHIRE_RAPIDS = 2.1e12, 0.42e12  # products of 16 tokens, and attention: the 16 virtual cores beside an H100
RTX_5080, RTX_4060 = 112.6e12, 30.2e12  # bfloat16 with float32 sums
HEADS = ((32, 8, 128), (64, 8, 128), (96, 8, 128))

MACHINES = {
    "rtx5080-xeon-w5-3425": Rates(
        link=54e9, acc_memory=MEMORY * 960e9, acc_flops=RTX_5080, acc_attention=ATTENTION * RTX_5080,
        acc_unpack=MEMORY * 960e9, host_memory=HOST_MEMORY * 90e9, host_flops=SAPPHIRE_RAPIDS[0],
        host_attention=SAPPHIRE_RAPIDS[1], heads=HEADS, acc_memory_bytes=16 << 30, host_memory_bytes=512 << 30,
        cores=12, cpu="Intel Xeon w5-3425", accelerator="NVIDIA GeForce RTX 5080",
    ),
    "rtx4060-ryzen-7700": Rates(
        link=13e9, acc_memory=MEMORY * 272e9, acc_flops=RTX_4060, acc_attention=ATTENTION * RTX_4060,
        acc_unpack=MEMORY * 272e9, host_memory=60e9, host_flops=0.8e12, heads=HEADS,
        acc_memory_bytes=8 << 30, host_memory_bytes=32 << 30, cores=8, cpu="AMD Ryzen 7 7700",
        accelerator="NVIDIA GeForce RTX 4060", pcie_generation=4, pcie_width=8,
    ),
    "h100-sxm-xeon": Rates(
        link=53e9, acc_memory=2990e9, acc_flops=700e12, host_memory=76e9, host_flops=2e12,
        acc_memory_bytes=80 << 30, host_memory_bytes=125 << 30, cores=16, cpu="Intel Xeon",
        accelerator="NVIDIA H100 80GB HBM3", link_with_cpu=45.8e9, cpu_with_link=76e9,
    ),
}  # fmt: skip


def write_profile(profile: MachineProfile, path: Path) -> None:
    """One row of a table per line, so that a diff shows which timing changed."""
    lines = []
    for name, value in to_json(profile).items():
        if isinstance(value, list) and value:
            rows = ",\n".join("  " + json.dumps(row) for row in value)
            lines.append(f' "{name}": [\n{rows}\n ]')
        else:
            lines.append(f' "{name}": {json.dumps(value)}')
    write_text_atomically(path, "{\n" + ",\n".join(lines) + "\n}\n")


def main(argv: list[str]) -> int:
    """Write every example into the folder that is given."""
    folder = Path(argv[0])
    for name, rates in MACHINES.items():
        note = "made from a datasheet's rates by pshard.planner.price.example_sheets; nothing was measured"
        write_profile(profile_from_datasheet(rates, (note,)), folder / f"{name}.json")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
