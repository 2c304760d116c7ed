"""pshard doctor --gpu: each kernel of the first GPU beside the plain one, in lines for an issue."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from pshard.errors import UserError

if TYPE_CHECKING:
    from pshard.profile.checked.check_kernels import Checked

MOST_TOKENS = 1024  # of a case


def try_gpu(show: Callable[[str], None]) -> "Iterator[Checked]":
    """What came of each kernel, one after the other; `show` hears what begins. Raises UserError where there is no GPU
    that is computed on."""
    import torch

    from pshard.profile.checked.check_kernels import check_kernels
    from pshard.runtime.build_executor import choose_kernels
    from pshard.runtime.devices.device import open_device
    from pshard.runtime.devices.usable_gpus import count_usable, describe_unused

    if not count_usable():
        raise UserError(f"--gpu: {'; '.join(describe_unused()) or 'there is no GPU here'}; leave the flag out")
    device = open_device("cuda")
    fast, *_ = choose_kernels(device, "fast", MOST_TOKENS)

    def run() -> "Iterator[Checked]":
        try:
            yield from check_kernels(torch.device("cuda", 0), fast, show)
        finally:
            device.close()

    return run()


def describe_gpu() -> str:
    """What the card is and what drives it, in one line."""
    import torch
    import triton

    from pshard import __version__
    from pshard.runtime.kernels.gpu.card_limits import card_limits
    from pshard.session.readiness.find_driver import find_driver

    card = card_limits("cuda:0")
    total = torch.cuda.get_device_properties(0).total_memory
    limits = (
        f"compute capability {card.capability // 10}.{card.capability % 10}, {card.processors} processors, "
        f"{card.shared_block >> 10} KB of shared memory a block, {card.shared_processor >> 10} a processor, "
        f"{total / (1 << 30):.1f} GiB{', scheduled by Windows' * card.wddm}"
    )
    versions = f"torch {torch.__version__}, Triton {triton.__version__}, pshard {__version__}"
    return f"{card.name}: {limits}; driver {find_driver() or 'unknown'}, {versions}"


def show_row(row: "Checked") -> str:
    """A line of the table."""
    off = "-" if row.off is None else f"{row.off:.1e}"
    took = "-" if row.seconds is None else f"{row.seconds * 1e6:.0f}"
    says = "ok" if row.passed else f"FAILED: {row.failed}" if row.failed else "WRONG"
    return f"| {row.kernel} | {row.what} | {off} | {took} | {says.replace('|', '/')} |"
