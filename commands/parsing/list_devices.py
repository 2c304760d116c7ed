"""--list-devices, as llama.cpp has it: what there is to compute on."""

import argparse
from typing import Any


def add_list_flag(group: Any) -> None:
    """Add the flag to a parser or a group of it."""
    group.add_argument("--list-devices", action=_ListDevices, nargs=0, help="list devices with their memory, and end")


class _ListDevices(argparse.Action):
    """Prints a line for each device, and ends the command."""

    def __call__(self, parser: Any, found: argparse.Namespace, value: Any, flag: str | None = None) -> None:
        from pshard.profile.identify import default_accelerator, identify_accelerators
        from pshard.session.this_machine import free_by_driver

        free = free_by_driver()
        print("Available devices:")
        for card in identify_accelerators(default_accelerator()):
            name = f"CUDA{card.index}" if card.kind == "cuda" else "CPU"
            left = f", {free[card.index] >> 20} MiB free" if card.kind == "cuda" and card.index in free else ""
            print(f"  {name}: {card.name} ({card.memory_bytes >> 20} MiB{left})")
        parser.exit()
