"""Example machine profiles from datasheets: `python -m pshard.planner.price.example_sheets FOLDER` writes them.

Rates are what our kernels would reach, by the formula of `kernel_rates.py`; where each comes from is said there and in
docs/published.md. Products are bfloat16 with float32 sums: GeForce cards do these at half the rate
that their boxes name for tensor cores, and a library's GEMM reaches all of it.
"""

import json
import sys
from pathlib import Path

from pshard.jsonio import to_json, write_text_atomically
from pshard.machine import MachineProfile
from pshard.planner.price.datasheet import Rates, profile_from_datasheet
from pshard.planner.price.kernel_rates import RTX_4060, RTX_5080, memory_of, rate_of

HOST_MEMORY = 0.94  # of what threads read: our CPU kernels
SAPPHIRE_RAPIDS = 2.1e12, 0.42e12  # products of 16 tokens, and attention: the 16 virtual cores beside an H100
PRODUCTS, PROMPTS = "products of many tokens", "prompts, heads of 128"
HEADS = ((32, 8, 128), (64, 8, 128), (96, 8, 128))

MACHINES = {
    "rtx5080-xeon-w5-3425": Rates(
        link=54e9, acc_memory=memory_of(RTX_5080), acc_flops=rate_of(RTX_5080, PRODUCTS),
        acc_attention=rate_of(RTX_5080, PROMPTS), acc_unpack=memory_of(RTX_5080), card=RTX_5080,
        host_memory=HOST_MEMORY * 90e9, host_flops=SAPPHIRE_RAPIDS[0], host_attention=SAPPHIRE_RAPIDS[1],
        heads=HEADS, acc_memory_bytes=16 << 30, host_memory_bytes=512 << 30,
        cores=12, cpu="Intel Xeon w5-3425", accelerator=RTX_5080.name,
    ),
    "rtx4060-ryzen-7700": Rates(
        link=13e9, acc_memory=memory_of(RTX_4060), acc_flops=rate_of(RTX_4060, PRODUCTS),
        acc_attention=rate_of(RTX_4060, PROMPTS), acc_unpack=memory_of(RTX_4060), card=RTX_4060,
        host_memory=60e9, host_flops=0.8e12, heads=HEADS, acc_memory_bytes=8 << 30, host_memory_bytes=32 << 30,
        cores=8, cpu="AMD Ryzen 7 7700", accelerator=RTX_4060.name, pcie_generation=4, pcie_width=8,
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
