"""What torch and the kernels take of a GPU's budget beside the arena: code, libraries, CUDA graphs. No torch."""

TORCH_RESERVE_MIB = 320  # where nothing was measured, and at most: a run was measured to take 282 on an H100
RUN_MIB = 128  # what a run takes besides: a library's workspace, rows to choose from, graphs; 97 MiB on an H100


def reserve_mib(measured: int | None) -> int:
    """MiB of a budget on a GPU that are kept for them. measured: bytes that a profile found outside what torch had
    allocated; None where it did not look.

    It grows with a card's processors, whose stacks the driver keeps. A profile loads kernels that a run does without,
    so no more is kept than any run was seen to take.
    """
    if measured is None:
        return TORCH_RESERVE_MIB
    return min(TORCH_RESERVE_MIB, -(-measured // (1 << 20)) + RUN_MIB)
