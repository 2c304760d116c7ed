"""Machines of golden plans. Datasheets are the suite's own: a better example sheet changes no golden plan."""

from pathlib import Path

from pshard.machine import MachineProfile
from pshard.planner.price.datasheet import Rates, profile_from_datasheet
from pshard.registries.profile_store import load_profile

MEASURED = Path(__file__).resolve().parents[2] / "registries" / "examples" / "h100-80gb-16-cores-measured.json"
SHEETS = {
    "h100-sheet": Rates(
        link=53e9, acc_memory=2990e9, acc_flops=700e12, host_memory=76e9, host_flops=2e12,
        acc_memory_bytes=80 << 30, host_memory_bytes=125 << 30, cores=16, cpu="Intel Xeon",
        accelerator="NVIDIA H100 80GB HBM3", link_with_cpu=45.8e9, cpu_with_link=76e9,
    ),
    "rtx4060": Rates(
        link=13e9, acc_memory=0.85 * 272e9, acc_flops=0.75 * 60e12, host_memory=60e9, host_flops=0.8e12,
        acc_memory_bytes=8 << 30, host_memory_bytes=32 << 30, cores=8, cpu="AMD Ryzen 7 7700",
        accelerator="NVIDIA GeForce RTX 4060", pcie_generation=4, pcie_width=8,
    ),
    "rtx5080": Rates(
        link=55e9, acc_memory=0.85 * 960e9, acc_flops=0.75 * 112e12, host_memory=90e9, host_flops=0.6e12,
        acc_memory_bytes=16 << 30, host_memory_bytes=128 << 30, cores=12, cpu="Intel Xeon w5-3425",
        accelerator="NVIDIA GeForce RTX 5080",
    ),
}  # fmt: skip


def find_machine(name: str) -> MachineProfile:
    """A datasheet's profile, or "h100": the measured one."""
    return load_profile(MEASURED) if name == "h100" else profile_from_datasheet(SHEETS[name])
