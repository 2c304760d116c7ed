"""Two numbers in page-locked host memory by which the GPU and a thread of the host tell each other that they are done.

A kernel tells and a kernel awaits, so both stand in the GPU's queue, or in a graph, long before it is their turn, and
nobody waits for the thread that launches. A number is 1 when something is there; who has seen it makes it 0 again.
"""

import triton
import triton.language as tl


@triton.jit
def tell_kernel(flag):
    """flag[0] = 1, seen by the host after all that kernels before this one wrote there."""
    at = flag.to(tl.int64) + tl.zeros((32,), tl.int64)
    tl.inline_asm_elementwise(
        "st.release.sys.global.u32 [$1], 1; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def await_kernel(flag):
    """Wait until flag[0] is not 0, and make it 0."""
    seen = tl.load(flag, volatile=True)
    while seen == 0:
        seen = tl.load(flag, volatile=True)
    tl.store(flag, 0)
