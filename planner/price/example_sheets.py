"""Example machine profiles from datasheets: `python -m pshard.planner.price.example_sheets FOLDER` writes them.

Rates are what the sheet says times what kernels usually reach of it: 85% of a memory's rate, 75% of the tensor
peak, all of the link's measured-in-practice 55 GB/s (PCIe 5 x16).
"""

import json
import sys
from pathlib import Path

from pshard.jsonio import to_json, write_text_atomically
from pshard.machine import MachineProfile
from pshard.planner.price.datasheet import Rates, profile_from_datasheet

MEMORY, FLOPS = 0.85, 0.75

MACHINES = {
    "rtx5080-xeon-w5-3425": Rates(
        link=55e9, acc_memory=MEMORY * 960e9, acc_flops=FLOPS * 112e12, host_memory=90e9, host_flops=0.6e12,
        acc_memory_bytes=16 << 30, host_memory_bytes=128 << 30, cores=12, cpu="Intel Xeon w5-3425",
        accelerator="NVIDIA GeForce RTX 5080",
    ),
    "rtx4060-ryzen-7700": Rates(
        link=13e9, acc_memory=MEMORY * 272e9, acc_flops=FLOPS * 60e12, host_memory=60e9, host_flops=0.8e12,
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
