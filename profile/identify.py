"""What this machine is: CPU, caches, memory and accelerators, within the limits that this process was given."""

import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from pshard.errors import UserError
from pshard.machine import AcceleratorInfo, HostInfo
from pshard.runtime.devices.numa import read_nodes
from pshard.runtime.devices.usable_gpus import count_usable, describe_unused
from pshard.runtime.kernels.cpu import native
from pshard.runtime.kernels.gpu.card_limits import card_limits

_SYS_CPU = Path("/sys/devices/system/cpu")
_SIZE_SUFFIX = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def identify_host(threads: int) -> HostInfo:
    """The CPU side, with the thread count that was picked."""
    isa, kernels = _host_kernels()
    caches = _read_caches(_allowed_cpus())
    return HostInfo(
        cpu=_cpu_name(),
        isa=isa,
        kernels=kernels,
        cores=count_cores(),
        numa_nodes=max(1, sum(1 for cpus in read_nodes().values() if set(cpus) & set(_allowed_cpus()))),
        l3_bytes=dict(caches).get("L3", 0),
        memory_bytes=usable_memory(),
        threads=threads,
        caches=caches,
    )


def identify_accelerators(kind: str) -> tuple[AcceleratorInfo, ...]:
    """Every visible GPU that is computed on for "cuda", the CPU itself for "cpu". Raises UserError when there is no
    such GPU."""
    if kind == "cpu":
        return (AcceleratorInfo("cpu", 0, f"{_cpu_name()} (as accelerator)", usable_memory()),)
    if kind != "cuda":
        raise UserError(f"unknown device {kind!r}; choose cuda or cpu")
    import torch

    if not torch.cuda.is_available():
        mend = "install a CUDA build of torch"
        if torch.version.cuda:
            mend = "see that nvidia-smi lists a GPU and CUDA_VISIBLE_DEVICES hides none"
        raise UserError(f"--device cuda: torch sees no GPU here; use --device cpu, or {mend}")
    if not count_usable():
        raise UserError(f"--device cuda: {describe_unused()[0]}; use --device cpu")
    return tuple(_identify_gpu(i) for i in range(count_usable()))


def _host_kernels() -> tuple[str, str]:
    """(ISA, "native" or "torch") of the kernels that the runtime uses on the CPU; a matrix unit counts as ISA."""
    if native.is_available():
        return "+".join(filter(None, (native.isa(), native.tiles()))), "native"
    import torch

    return torch.backends.cpu.get_cpu_capability().lower(), "torch"


def default_accelerator() -> str:
    """ "cuda" where there is a GPU that is computed on, else "cpu"."""
    return "cuda" if count_usable() else "cpu"


def last_cache_bytes() -> int:
    """Bytes of the largest cache level, 0 when unknown; reads must be further apart than this to reach DRAM."""
    return max((nbytes for _, nbytes in _read_caches(_allowed_cpus())), default=0)


def count_cores() -> int:
    """CPUs that this process may use at once: its affinity, cut by a cgroup quota."""
    quota = _cgroup_quota()
    allowed = len(_allowed_cpus())
    return max(1, min(allowed, round(quota))) if quota else allowed


def usable_memory() -> int:
    """Bytes of RAM, or of the lowest limit of a control group above, where that is lower: above memory.high the system
    slows a process down, above memory.max it ends one."""
    import psutil

    limits = [psutil.virtual_memory().total]
    for name in ("memory.max", "memory.high", "memory/memory.limit_in_bytes"):
        limits += [int(text) for text in _cgroup_values(name) if text.isdigit()]
    return min(limits)


def _allowed_cpus() -> tuple[int, ...]:
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def _cgroup_quota() -> float | None:
    """CPUs' worth of time per period, or None without a limit (cgroup v2 `cpu.max`, v1 `cpu.cfs_quota_us`)."""
    quotas = []
    for text in _cgroup_values("cpu.max"):
        limit, _, period = text.partition(" ")
        if limit.isdigit():
            quotas.append(int(limit) / int(period or 100_000))
    for limit, period in zip(_cgroup_values("cpu/cpu.cfs_quota_us"), _cgroup_values("cpu/cpu.cfs_period_us")):
        if limit.isdigit() and int(period) > 0:  # -1: no quota
            quotas.append(int(limit) / int(period))
    return min(quotas, default=None)


def _cgroup_values(name: str) -> list[str]:
    """Contents of a cgroup file at this process's group and every group above it. v1 names begin with a controller."""
    controller, _, leaf = name.rpartition("/")
    root = Path("/sys/fs/cgroup") / controller
    values = []
    for line in _read_text(Path("/proc/self/cgroup")).splitlines():
        _, controllers, group = line.split(":", 2)
        if controller not in controllers.split(","):
            continue
        here = Path(group.lstrip("/"))
        values += [_read_text(root / at / leaf).strip() for at in (here, *here.parents)]
    return [v for v in values if v]


def _cpu_name() -> str:
    for line in _read_text(Path("/proc/cpuinfo")).splitlines():
        if line.startswith(("model name", "Hardware", "cpu model")):
            return line.partition(":")[2].strip()
    if sys.platform == "darwin":
        import subprocess

        return subprocess.run(
            ["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True
        ).stdout.strip()
    return platform.processor() or platform.machine()


def _read_caches(cpus: tuple[int, ...]) -> tuple[tuple[str, int], ...]:
    """("L1d", bytes) ... summed over the distinct caches that these CPUs reach; empty where the system does not say."""
    sizes: dict[tuple[str, str], int] = {}
    for cpu in cpus:
        for index in (_SYS_CPU / f"cpu{cpu}" / "cache").glob("index[0-9]*"):
            level, kind, size, shared = (
                _read_text(index / f).strip() for f in ("level", "type", "size", "shared_cpu_list")
            )
            if level and size:
                suffix = {"Data": "d", "Instruction": "i"}.get(kind, "")
                sizes[f"L{level}{suffix}", shared] = int(size.rstrip("KMG")) * _SIZE_SUFFIX.get(size[-1], 1)
    totals: dict[str, int] = {}
    for (name, _), nbytes in sizes.items():
        totals[name] = totals.get(name, 0) + nbytes
    return tuple(sorted(totals.items()))


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _identify_gpu(index: int) -> AcceleratorInfo:
    import torch

    properties, limits = torch.cuda.get_device_properties(index), card_limits(f"cuda:{index}")
    generation, width, driver = _pcie_link(f"GPU-{properties.uuid}")
    capability = f"{limits.capability // 10}.{limits.capability % 10}"
    return AcceleratorInfo("cuda", index, limits.name, properties.total_memory, generation, width, driver, capability)


def unlike_accelerators(accelerators: Sequence[AcceleratorInfo]) -> tuple[AcceleratorInfo, ...]:
    """The first of each kind; its kernels stand for those of all that are like it (name, capability, memory)."""
    first = {a.likeness: a for a in reversed(accelerators)}
    return tuple(sorted(first.values(), key=lambda a: a.index))


def unlike_links(accelerators: Sequence[AcceleratorInfo]) -> tuple[AcceleratorInfo, ...]:
    """The first with each link among those that are like one before."""
    first = {(a.likeness, a.link): a for a in reversed(accelerators)}
    kinds = {a.index for a in unlike_accelerators(accelerators)}
    return tuple(sorted((a for a in first.values() if a.index not in kinds), key=lambda a: a.index))


def _pcie_link(uuid: str) -> tuple[int, int, str]:
    """PCIe generation and width that the link can reach (idle links step down) and the driver; zeros without NVML."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        driver = pynvml.nvmlSystemGetDriverVersion()
        return (
            pynvml.nvmlDeviceGetMaxPcieLinkGeneration(handle),
            pynvml.nvmlDeviceGetMaxPcieLinkWidth(handle),
            driver if isinstance(driver, str) else driver.decode(),
        )
    except pynvml.NVMLError:
        return 0, 0, ""
