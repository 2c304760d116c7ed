"""What is known of the machine that a session runs on: whether a profile is of it, what is free, what it is made of."""

import os
from pathlib import Path

from pshard.errors import UserError
from pshard.machine import MachineProfile
from pshard.workload import UNLIMITED_MIB


def check_machine(profile: MachineProfile, given: Path | None = None) -> None:
    """Raise UserError when the profile was measured on another machine than this one. given: its file, where one was
    asked for."""
    from pshard.profile.identify import identify_accelerators, identify_host

    here = identify_host(profile.host.threads)
    pairs = [("cpu", profile.host.cpu, here.cpu), ("isa", profile.host.isa, here.isa)]
    pairs.append(("kernels", profile.host.kernels, here.kernels))
    if here.cores < profile.host.threads:
        pairs.append(("cores", str(profile.host.cores), str(here.cores)))
    kind = profile.accelerators[0].kind
    try:
        accelerators = identify_accelerators(kind)
    except UserError:  # there is none of that kind here
        accelerators = ()
    for i, planned in enumerate(profile.accelerators):
        found = accelerators[i] if i < len(accelerators) else None
        pairs.append((f"{kind} {i}", planned.name, found.name if found else "none"))
        if found and planned.driver:
            pairs.append((f"driver {i}", planned.driver, found.driver))
    changed = [f"{what}: {old} -> {new}" for what, old, new in pairs if old != new]
    if changed:
        from pshard.runtime.kernels.cpu import native

        missing = f" ({native.why_missing()})" if here.kernels != profile.host.kernels and native.why_missing() else ""
        what = "; ".join(changed)
        if given is not None:
            raise UserError(
                f"--profile {given} is of another machine: {what}{missing}; leave it out, or run on that machine"
            )
        raise UserError(f"the machine profile is of another machine: {what}{missing}; run pshard-profile")


def free_vram_mib(profile: MachineProfile) -> int:
    """Free memory of the first accelerator in MiB; without limit for the CPU as accelerator."""
    if profile.accelerators[0].kind != "cuda":
        return UNLIMITED_MIB
    import torch

    return torch.cuda.mem_get_info(0)[0] >> 20


def doubt_free_memory() -> str | None:
    """Why what is said to be free of a GPU may not be, in a line; None where it can be believed."""
    from pshard.runtime.kernels.gpu.card_limits import is_scheduled_by_windows

    if not is_scheduled_by_windows():
        return None
    return (
        "how much VRAM is free is doubtful where Windows schedules the GPU: it lends the same to several programs, and "
        "moves what does not fit into host memory; where a run is much slower than predicted, give a smaller --vram"
    )


def free_host_bytes() -> int:
    """Bytes of host memory that are free now, or hold files that can be read again."""
    import psutil

    return psutil.virtual_memory().available


def free_by_driver() -> dict[int, int]:
    """Free bytes of each GPU, numbered as programs see them under CUDA_VISIBLE_DEVICES, as the driver says, without
    torch; none where it says nothing, or where parts of GPUs are named."""
    try:
        import pynvml

        pynvml.nvmlInit()
        count, named = pynvml.nvmlDeviceGetCount(), os.environ.get("CUDA_VISIBLE_DEVICES")
        handles = []
        for word in map(str, range(count)) if named is None else map(str.strip, named.split(",")):
            if word.startswith("GPU-"):
                handles.append(pynvml.nvmlDeviceGetHandleByUUID(word))
            elif word.isdecimal() and int(word) < count:
                handles.append(pynvml.nvmlDeviceGetHandleByIndex(int(word)))
            else:
                break  # CUDA leaves out what follows a number that no GPU has
        return {i: int(pynvml.nvmlDeviceGetMemoryInfo(handle).free) for i, handle in enumerate(handles)}
    except Exception:
        return {}


def environment_of(profile: MachineProfile) -> tuple[tuple[str, str], ...]:
    """Hardware and versions, as measurements carry them."""
    import torch

    from pshard import __version__

    host, accelerator = profile.host, profile.accelerators[0]
    pairs = [
        ("cpu", host.cpu),
        ("isa", host.isa),
        ("threads", str(host.threads)),
        ("accelerator", accelerator.name),
        ("torch", torch.__version__),
        ("pshard", __version__),
        ("profile", f"{profile.provenance.source} {profile.provenance.date}"),
    ]
    if accelerator.driver:
        pairs.insert(4, ("driver", accelerator.driver))
    return tuple(pairs)
