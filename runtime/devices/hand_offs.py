"""How a GPU and threads of the host hand over to each other: by numbers that kernels wait for, or by events.

Windows gathers what a GPU is given before it starts any of it, and resets one whose kernel runs for two seconds. So a
kernel that waits for the host may wait for ever there, and for good.
"""

import os

from pshard.errors import UserError
from pshard.runtime.kernels.gpu.card_limits import is_scheduled_by_windows

SWITCH = "PSHARD_HAND_OFFS"
WAYS = ("flags", "events")


def kernels_may_wait() -> bool:
    """Whether kernels may wait for what the host, or another GPU, does: not where Windows schedules them, unless
    PSHARD_HAND_OFFS says otherwise ("flags" or "events"). Raises UserError for another word."""
    word = os.environ.get(SWITCH)
    if word is None:
        return not is_scheduled_by_windows()
    if word not in WAYS:
        raise UserError(f"environment variable {SWITCH}: {word!r} is neither flags nor events; correct or unset it")
    return word == "flags"


def describe_hand_offs() -> tuple[str, ...]:
    """A line where kernels do not wait."""
    if kernels_may_wait():
        return ()
    why = f"{SWITCH} says so" if SWITCH in os.environ else "Windows schedules this GPU and resets it where kernels wait"
    return (f"hand-offs between GPU and CPU go by events, which takes longer: {why}",)
