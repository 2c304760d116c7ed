"""The flag that takes the GPU for another card."""

import argparse
import os
from typing import Any

from pshard.errors import UserError
from pshard.machine import AS_CARD


def add_card_flag(group: Any) -> None:
    """Add the flag to a parser or a group of it."""
    group.add_argument(
        "--as-card", action=_TakeForCard, metavar="86",
        help="for developers: take this NVIDIA GPU for a card of an older capability, as 86 for 8.6 (docs/cards.md)",
    )  # fmt: skip


class _TakeForCard(argparse.Action):
    """Sets what this process and all that it starts go by. Raises UserError for a card that cannot be had here."""

    def __call__(self, parser: Any, found: argparse.Namespace, value: Any, flag: str | None = None) -> None:
        from pshard.runtime.kernels import gpu
        from pshard.runtime.kernels.gpu.card_limits import KNOWN_CARDS

        if value not in map(str, KNOWN_CARDS):
            known = ", ".join(f"{capability} ({card.name})" for capability, card in KNOWN_CARDS.items())
            raise UserError(f"{flag} {value}: there is no such card; choose one of {known}")
        import torch

        if not torch.cuda.is_available() or torch.version.hip:
            raise UserError(f"{flag} {value}: there is no NVIDIA GPU here to be taken for it; leave it out")
        major, minor = torch.cuda.get_device_capability()
        if 10 * major + minor < int(value):
            raise UserError(f"{flag} {value}: this GPU is of {major}.{minor}; choose an older card")
        os.environ[AS_CARD] = value
        gpu.become(int(value))
        setattr(found, self.dest, value)
