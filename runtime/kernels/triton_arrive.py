"""How programs of one launch find out which of them is the last to have done its part."""

import triton
import triton.language as tl


@triton.jit
def arrive(counter):
    """How many programs came here before, once all that this one has stored can be seen by those that come later."""
    tl.debug_barrier()
    return tl.atomic_add(counter, 1, sem="acq_rel")
