"""Kernels of NVIDIA GPUs in Triton."""

from functools import cache
from importlib.util import find_spec

from pshard.machine import emulated_capability


@cache
def become(capability: int | None) -> None:
    """Have all kernels from now on as a card of that capability would; None changes nothing. See `as_card.py`."""
    if capability and find_spec("triton"):
        from pshard.runtime.kernels.as_card import become_card
        from pshard.runtime.kernels.gpu.card_limits import KNOWN_CARDS

        become_card(capability, KNOWN_CARDS)


become(emulated_capability())
