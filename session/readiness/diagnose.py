"""What may be wrong with a machine for our purposes, and what to do about it."""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from pshard.errors import UserError
from pshard.session.readiness.find_driver import find_driver
from pshard.session.readiness.name_reinstall import name_reinstall
from pshard.session.this_machine import doubt_free_memory

GIB = 1 << 30
CPU_TORCH = "pip install uv && uv pip install --reinstall-package torch --torch-backend cpu torch"
OLD_DAYS = 90  # of a profile: drivers, kernels of the system and neighbours have changed since


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `state`: "ok", "note" or "wrong"; `remedy`: what to do, "" where nothing is."""

    what: str
    state: str
    says: str
    remedy: str = ""


def diagnose() -> Iterator[Finding]:
    """Look at everything, one after the other; what cannot be looked at is a finding too."""
    looks: tuple[tuple[str, Callable[[], Finding]], ...] = (
        ("CPU kernels", _look_at_kernels), ("GPU", _look_at_gpu), ("page-locking", _look_at_page_locks),
        ("limits", _look_at_cgroup), ("NUMA", _look_at_numa), ("free memory", _look_at_memory),
        ("profile", _look_at_profile),
    )  # fmt: skip
    for what, look in looks:
        try:
            yield look()
        except Exception as error:  # a doctor does not faint
            yield Finding(what, "note", f"could not be looked at: {type(error).__name__}: {error}")


def _look_at_kernels() -> Finding:
    from pshard.runtime.kernels.cpu import native

    if native.is_available():
        isa = "+".join(filter(None, (native.isa(), native.tiles())))
        return Finding("CPU kernels", "ok", f"compiled, for {isa}")
    compiler = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
    why = native.why_missing() or "the library is not there"
    first = "" if compiler else "install a C++20 compiler (g++ 11 or newer, or clang), then "
    says = f"not compiled, so torch computes on the CPU, some ten times slower: {why}"
    return Finding("CPU kernels", "wrong", says, f"{first}{name_reinstall()}")


def _look_at_gpu() -> Finding:
    import torch

    driver = find_driver()
    if torch.cuda.is_available():
        from pshard.profile.identify import identify_accelerators
        from pshard.runtime.devices.usable_gpus import LEAST, count_usable, describe_unused, find_lack

        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        says = f"{', '.join(names)}; driver {driver or 'unknown'}, torch {torch.__version__}"
        if (used := count_usable()) < len(names):
            lack, what = find_lack(used), describe_unused()[0]
            says += f"; {what if used else f'the CPU computes: {what}'}"
            return Finding("GPU", "wrong" if lack and lack.remedy else "note", says, lack.remedy if lack else "")
        capabilities = {a.capability for a in identify_accelerators("cuda")}
        says += f"; compute capability {', '.join(sorted(capabilities))}, of which {LEAST} is the least"
        return Finding("GPU", "ok", says)
    if driver:
        remedy = "install torch for CUDA: pip install --force-reinstall torch"
        if torch.version.cuda:
            remedy = f"torch is made for CUDA {torch.version.cuda}: update the driver, or see that the GPU is visible"
        return Finding("GPU", "wrong", f"driver {driver} is there, but torch {torch.__version__} sees no GPU", remedy)
    remedy = f"torch is built for GPUs, which takes gigabytes: {CPU_TORCH}" if torch.version.cuda else ""
    return Finding("GPU", "note", f"none: the CPU computes (torch {torch.__version__})", remedy)


def _look_at_page_locks() -> Finding:
    from pshard.registries.profile_store import recall_lockable

    if find_driver() is None:
        return Finding("page-locking", "ok", "not needed: only a GPU copies from memory that is locked")
    met = recall_lockable()
    if met is not None:
        return Finding(
            "page-locking", "note", f"the system let a run lock {met / GIB:.1f} GiB of host memory, and no more",
            "copies of the rest are slower; more memory, or a larger limit of the container, helps",
        )  # fmt: skip
    try:
        import resource
    except ImportError:
        return Finding("page-locking", "note", "this system does not say how much memory can be locked")
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("page-locking", "ok", "no limit is set, and no run has met one")
    # CUDA locks through its driver, which this limit does not bind
    return Finding("page-locking", "ok", f"ulimit -l is {soft >> 10} KiB, which the CUDA driver is not bound by")


def _look_at_cgroup() -> Finding:
    import psutil

    from pshard.profile.identify import count_cores, usable_memory

    cores, all_cores = count_cores(), os.cpu_count() or 1
    memory, all_memory = usable_memory(), psutil.virtual_memory().total
    cut = []
    if cores < all_cores:
        cut.append(f"{cores} of {all_cores} cores")
    if memory < all_memory:
        cut.append(f"{memory / GIB:.1f} of {all_memory / GIB:.1f} GiB of memory")
    if not cut:
        return Finding("limits", "ok", f"all {cores} cores and {memory / GIB:.1f} GiB of memory may be used")
    says = f"this process may use {' and '.join(cut)} (affinity or control group)"
    return Finding("limits", "note", says, "raise them where the container or job is started, then profile again")


def _look_at_numa() -> Finding:
    from pshard.profile.identify import identify_host

    nodes = identify_host(1).numa_nodes
    if nodes == 1:
        return Finding("NUMA", "ok", "one node")
    return Finding(
        "NUMA", "note", f"{nodes} nodes: memory of another node is slower",
        "without a GPU, --numa runs a rank on each; with one, its own node is taken",
    )  # fmt: skip


def _look_at_memory() -> Finding:
    import psutil
    import torch

    memory = psutil.virtual_memory()
    says = [f"host {memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB"]
    short = memory.available < memory.total / 4
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(i)
        says.append(f"GPU {i} {free / GIB:.1f} of {total / GIB:.1f} GiB")
        short = short or free < total / 2
    remedies = ["end what else holds memory: plans fill what is free when they are made"] if short else []
    if says[1:] and (doubt := doubt_free_memory()):
        remedies.append(doubt)
    return Finding("free memory", "note" if remedies else "ok", "; ".join(says), "; ".join(remedies))


def _look_at_profile() -> Finding:
    from pshard.registries.profile_store import default_profile_path, load_profile
    from pshard.session.this_machine import check_machine

    place = default_profile_path()
    if not place.exists():
        return Finding(
            "profile", "note", "none yet: the first run makes a short one", "pshard profile makes a good one"
        )
    try:
        profile = load_profile()
        check_machine(profile)
    except UserError as error:
        return Finding("profile", "wrong", str(error), "pshard profile")
    made = profile.provenance
    days = (datetime.now(UTC) - datetime.fromisoformat(made.date)).days
    sort = "short" if made.short else "quick" if made.quick else "full"
    says = f"{sort}, of this machine, {days} days old ({place})"
    if made.short or days > OLD_DAYS or profile.busy:
        why = profile.busy or ("it was made in seconds" if made.short else "it is old")
        return Finding("profile", "note", f"{says}; {why}", "pshard profile, while nothing else runs")
    return Finding("profile", "ok", says)
