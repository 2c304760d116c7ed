"""What may fit where nothing does: a budget, a shorter context, a smaller file."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from pshard.model import ModelSpec
from pshard.workload import Workload

LEAST_CONTEXT = 512  # cells of each sequence: fewer are no use
GIB = 1 << 30
BITS = (("Q8_0", 8.5), ("Q6_K", 6.6), ("Q5_K_M", 5.7), ("Q4_K_M", 4.9), ("Q3_K_M", 3.9), ("Q2_K", 3.0))  # a weight

Fits = Callable[[Workload], bool]


def suggest_fitting(
    specs: Sequence[ModelSpec], workload: Workload, fits: Fits, smallest_mib: int | None, missing: int
) -> str:
    """What may work, one way or another, for a line that says why nothing does.

    fits: whether a plan may exist for a workload. smallest_mib: the smallest budget that works, None where none does.
    missing: bytes of host memory that the model takes too many.
    """
    ways = [f"--vram {smallest_mib}"] if smallest_mib is not None else []
    context = workload.context // 2
    while context >= LEAST_CONTEXT * workload.sequences and not fits(replace(workload, context=context)):
        context //= 2
    if context >= LEAST_CONTEXT * workload.sequences:
        ways.append(f"-c {context}")
    if missing > 0 and (file := _smaller_file(specs, missing)):
        ways.append(file)
    return "what may work: " + ", or ".join(ways) if ways else "a smaller model is needed, or a larger machine"


def _smaller_file(specs: Sequence[ModelSpec], missing: int) -> str | None:
    """The largest usual quantisation that saves so many bytes; None where none does."""
    bits = sum(spec.packed_nbytes for spec in specs) * 8
    weights = sum(_count_weights(spec) for spec in specs)
    most = (bits - missing * 8) / weights
    name = next((name for name, each in BITS if each <= most), None)
    return f"a file of at most {most * weights / 8 / GIB:.1f} GiB, as {name} makes" if name else None


def _count_weights(spec: ModelSpec) -> int:
    """Weights of all matrices."""
    return sum(t.rows * t.cols for unit in spec.units for t in unit.tensors if len(t.shape) > 1)
