"""What torch and the kernels take of a GPU beside what is allocated, once everything has been timed."""

import torch

from pshard.machine import Reserve
from pshard.reserve import TORCH_RESERVE_MIB, reserve_mib
from pshard.runtime.devices.device import Device
from pshard.runtime.kernels.gpu.card_limits import is_scheduled_by_windows

LEAST = 16 << 20  # bytes: kernels and libraries take more; where less is found, others gave memory back meanwhile


def measure_reserve(side: str, device: Device, notes: list[str]) -> tuple[Reserve, ...]:
    """The reserve of an accelerator whose kernels were loaded by timing them, and a note of what was found; none for
    the CPU, and where the driver's figures do not say it: 320 MiB are kept then."""
    if device.kind != "cuda":
        return ()
    if is_scheduled_by_windows():
        return _assume("Windows lends VRAM that another program has", notes)
    device.synchronize()
    found = device.process_bytes() - torch.cuda.memory_reserved(device.torch_device)
    if found < LEAST:
        return _assume("other programs gave VRAM back meanwhile", notes)
    if reserve_mib(found) == TORCH_RESERVE_MIB:
        notes.append(
            f"{found >> 20} MiB of VRAM were taken beside what was allocated, kernels that no run needs and other "
            f"programs included: {TORCH_RESERVE_MIB} MiB of a budget are kept for them"
        )
    return (Reserve(side, found),)


def _assume(why: str, notes: list[str]) -> tuple[Reserve, ...]:
    notes.append(f"what torch and the kernels take was not measured, {why}: {TORCH_RESERVE_MIB} MiB are kept for it")
    return ()
