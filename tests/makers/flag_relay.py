"""A relay for the CPU as accelerator: flags in place of the kernels that tell and await."""

import time
from collections.abc import Callable
from typing import Any

import torch

from pshard.runtime.devices.device import Device
from pshard.runtime.devices.relay import LINE, Relay

POLL_SECONDS = 5e-5


class FlagKernel:
    """What `act` does with a flag, started as a Triton kernel is."""

    def __init__(self, act: Callable[[torch.Tensor], Any]) -> None:
        self._act = act

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return lambda flag, num_warps: self._act(flag)


def wait_for(flag: torch.Tensor) -> None:
    """Until the CPU has done what it was asked for."""
    end = time.monotonic() + 60
    while not int(flag[0]):
        assert time.monotonic() < end, "the CPU's part was not done"
        time.sleep(POLL_SECONDS)  # other threads want Python, and others the core
    flag[0] = 0


def open_on_flags(device: Device, runs: int) -> Relay:
    """As `open_relay`."""
    flags = torch.zeros(2 * runs * LINE * 4, dtype=torch.uint8)
    return Relay(device, runs, flags, (FlagKernel(lambda flag: flag[:1].fill_(1)), FlagKernel(wait_for)))


def open_late_on_flags(device: Device, runs: int) -> Relay:
    """The same, of an accelerator that goes on some time after the CPU's part was done."""

    def wait_long(flag: torch.Tensor) -> None:
        wait_for(flag)
        time.sleep(0.003)

    relay = open_on_flags(device, runs)
    relay._kernels = relay._kernels[0], FlagKernel(wait_long)
    return relay
