"""Launches that begin before the kernel ahead of them has ended (programmatic dependent launch, compute capability 9).

A kernel so launched starts where multiprocessors are free, and waits with `wait_for_earlier` before it reads or writes
anything that kernels write: until the one ahead has ended, which has waited for the one ahead of it. Edges to kernels
that are launched in the ordinary way are ordinary ones.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

ORDINARY, EARLY, EARLIER, AHEAD = range(4)
# EARLY: as programs of the kernel ahead end. EARLIER: as soon as these have nothing to wait for. AHEAD: so too, and
# products have brought their weights into L2 by then.
LEVEL = ORDINARY


def launch_early() -> dict[str, Any]:
    """What a launch of a kernel that has `wait_for_earlier` takes."""
    level = LEVEL if LEVEL and _can_begin_early() else ORDINARY
    return {"LEVEL": level, "launch_pdl": True} if level else {"LEVEL": ORDINARY}


@lru_cache
def _can_begin_early() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


if triton.knobs.runtime.interpret:  # launches follow each other there

    @triton.jit
    def wait_for_earlier(LEVEL: tl.constexpr):
        """Nothing before this may touch what kernels write."""
        pass

else:

    @triton.jit
    def wait_for_earlier(LEVEL: tl.constexpr):
        """Nothing before this may touch what kernels write."""
        if LEVEL > 0:
            tl.extra.cuda.gdc_wait()
        if LEVEL > 1:
            # not before: the kernel behind this one would begin while the one ahead still fills L1 with old numbers
            tl.extra.cuda.gdc_launch_dependents()
