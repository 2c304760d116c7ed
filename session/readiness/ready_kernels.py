"""Compiles the GPU kernels that a plan's steps start before its first run: on all cores, while the model is loaded.

Triton compiles a kernel when it is first started, one after another: some 60 for a model of one quant type, more than
160 for a mix of fifteen. So the steps are rehearsed, which tells what they start, and processes compile that into
Triton's cache.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from pshard.plan import Variant
from pshard.session.planning_bar import stage_bar

if TYPE_CHECKING:
    from pshard.profile.tuning.compile_ahead import Compiling, Request
    from pshard.runtime.kernels.gpu.card_limits import CardLimits
    from pshard.session.open_plan import Opened
    from pshard.times.gpu_tiles import TileChoice

MOST_SECONDS = 900.0  # what is not compiled by then is when it is first started
LOOK = 0.2  # seconds between two looks at what is left


@contextmanager
def kernels_ready(opened: "Opened", variant: Variant, index: int, notes: list[str]) -> Iterator[None]:
    """What is done meanwhile has the GPU of that index for itself; at the end its kernels are compiled.

    A plan of which that is known is not rehearsed again. Nor are plans of several ranks, or with a limit of host
    memory, which processes that compile would exceed. notes: gets a line where a plan cannot be rehearsed.
    """
    begun = None
    if len(variant.ranks) == 1 and not variant.workload.ram_mib and not variant.ranks[0].beyond_host:
        begun = _begin(opened, variant, index, notes)
    if begun is None:
        yield
        return
    compiling, mark = begun
    try:
        yield
    except BaseException:
        compiling.finish(0.0)
        raise
    _wait(compiling)
    with suppress(OSError):  # else it is rehearsed again, and found compiled
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


def list_kernels(
    opened: "Opened", variant: Variant, tiles: "tuple[TileChoice, ...]", limits: "CardLimits"
) -> "list[Request]":
    """What the steps of a plan start on a GPU with these limits, each once; nothing is started."""
    import torch

    from pshard.profile.tuning.compile_ahead import requests_of
    from pshard.runtime.kernels.gpu.cuda import CudaKernels
    from pshard.runtime.kernels.gpu.products.many_rows import library_left_out
    from pshard.runtime.rehearse import rehearse_steps

    most = variant.ranks[0].tiers[-1].tokens
    kernels = CudaKernels(torch.device("cpu"), most, tiles, limits=limits)
    with library_left_out():
        found = requests_of(lambda: rehearse_steps(opened.file, variant, kernels))
    return list(dict.fromkeys(found))


def _begin(opened: "Opened", variant: Variant, index: int, notes: list[str]) -> "tuple[Compiling, Path] | None":
    """The processes that compile, and the file that says so afterwards; None where there is nothing to do."""
    from triton import __version__, knobs

    from pshard.profile.tuning.compile_ahead import Compiling, count_processes
    from pshard.runtime.kernels.gpu.card_limits import card_limits

    tiles, limits = tuple(opened.profile.tiles_of(index)), card_limits(f"cuda:{index}")
    asked = repr((__version__, _digest_sources(), limits, tiles, variant)).encode()
    mark = Path(knobs.cache.dir) / f"pshard-{sha256(asked).hexdigest()[:32]}"  # goes with the kernels it tells of
    if mark.exists():
        return None
    try:
        requests = list_kernels(opened, variant, tiles, limits)
        return Compiling(requests, count_processes()), mark
    except Exception as error:  # whatever it is, a run needs none of this
        notes.append(f"GPU kernels are compiled one by one as they are first used ({type(error).__name__}: {error})")
        return None


def _digest_sources() -> str:
    """Names the kernels and what starts them."""
    from pshard.runtime.kernels import gpu

    read = sha256()
    for path in sorted(Path(str(gpu.__file__)).parent.rglob("*.py")):
        read.update(path.read_bytes())
    return read.hexdigest()


def _wait(compiling: "Compiling") -> None:
    """Until all is compiled, with a bar on a terminal."""
    started, of = time.monotonic(), max(1, compiling.left)
    with stage_bar("compiling GPU kernels, once") as show:
        while (left := compiling.left) and time.monotonic() - started < MOST_SECONDS:
            show(f"{left} left", 1 - left / of)
            time.sleep(LOOK)
    compiled = sum(error is None for error in compiling.finish(0.0).values())
    seconds = time.monotonic() - started
    if seconds >= 1.0:
        print(
            f"note: {compiled} GPU kernels were compiled for this plan, while the model was loaded and for "
            f"{seconds:.0f} s after that; later runs find them in Triton's cache",
            file=sys.stderr,
        )
