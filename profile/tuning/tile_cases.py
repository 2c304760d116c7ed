"""What tiles are chosen for: kernels, quant types, batches, and the matrices on which candidates are tried."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from pshard.batch_sizes import LOGIT_ROWS
from pshard.buffers import DEQUANT_BYTES
from pshard.profile.effort import Shapes
from pshard.quant import QUANT_TYPES, packed_nbytes
from pshard.runtime.kernels.api import Kernels, Packed
from pshard.runtime.kernels.gpu.default_tiles import gated_kernel
from pshard.times.gpu_tiles import INT8_GATED, INT8_KERNEL, INT8_TYPES, Tile, TileChoice

INT8_TOKENS = (128, 512, 4096)  # of products of many rows, each up to the next


@dataclass(frozen=True)
class TileCase:
    """What one tile is chosen for: a kernel, a quant type, a batch of `tokens` (a power of two), and on what it is
    tried, what weighs most first: matrices (rows, cols), or what `attention_cases` says."""

    kernel: str
    qtype: str
    tokens: int
    matrices: tuple[tuple[Any, ...], ...]

    @property
    def is_listed_by_call(self) -> bool:
        """Whether candidates depend on more than this: the kernels know them once they were called."""
        return not self.kernel.startswith(("matvec", "gated", INT8_KERNEL))

    def choose(self, tile: Tile, device: str = "acc", seconds: float = 1.0, default_seconds: float = 1.0) -> TileChoice:
        """A tile as the choice for this case."""
        return TileChoice(device, self.kernel, self.qtype, self.tokens, tile, seconds, default_seconds)


def tile_cases(shapes: Shapes, tokens: tuple[int, ...], most: int) -> list[TileCase]:
    """All that is to be chosen for these shapes, small batches first; of head matrices only what no layer has.

    most: matrices of a case, the largest.
    """
    found: dict[tuple[str, str, int], set[tuple[int, int]]] = {}
    for count in tokens:
        for qtype, rows, cols in shapes.matmuls:
            gated = (cols, rows) in shapes.widths
            kernel = gated_kernel(qtype, count, rows) if gated else "matvec"
            found.setdefault((kernel, qtype, count), set()).add((rows, cols))
        in_layers = {(qtype, count) for kernel, qtype, count in found if kernel == "matvec"}
        for qtype, rows, cols in shapes.heads:
            if count <= LOGIT_ROWS and (qtype, count) not in in_layers:
                found.setdefault(("matvec", qtype, count), set()).add((rows, cols))
    cases = [
        TileCase(*key, _take_largest(matrices, most)) for key, matrices in found.items() if QUANT_TYPES[key[1]].planes
    ]
    return sorted(cases, key=lambda c: (c.tokens, -packed_nbytes(c.qtype, *c.matrices[0]), c.kernel, c.qtype))


def int8_cases(shapes: Shapes, most: int) -> list[TileCase]:
    """Products of many rows, and gates with ups, in int8 or by a library: each type of these shapes and INT8_TOKENS."""
    found: dict[tuple[str, str], set[tuple[int, int]]] = {}
    for qtype, rows, cols in shapes.matmuls:
        if qtype in INT8_TYPES:
            found.setdefault((INT8_KERNEL, qtype), set()).add((rows, cols))
            if (cols, rows) in shapes.widths:
                found.setdefault((INT8_GATED, qtype), set()).add((rows, cols))
    largest = {key: _take_largest(matrices, most) for key, matrices in sorted(found.items())}
    return [TileCase(*key, n, matrices) for n in INT8_TOKENS for key, matrices in largest.items()]


def _take_largest(matrices: set[tuple[int, int]], most: int) -> tuple[tuple[int, int], ...]:
    return tuple(sorted(matrices, key=lambda m: (-m[0] * m[1], m))[:most])


def calls_of(
    kernels: Kernels, case: TileCase, weights: list[Packed], x: torch.Tensor
) -> tuple[Callable[[int], None], torch.Tensor]:
    """A function of i that makes the case's product of x [tokens, cols] with copy i of a matrix, and where it goes."""
    room = DEQUANT_BYTES if case.kernel in (INT8_KERNEL, INT8_GATED) else 0
    out, none = x.new_empty(x.shape[0], weights[0].rows), torch.empty(room, dtype=torch.uint8, device=x.device)
    if case.kernel in ("matvec", INT8_KERNEL):
        return lambda i: kernels.linear(x, weights[i % len(weights)], out, none), out
    both = x.new_empty(x.shape[0], 2 * weights[0].rows)

    def gate_up(i: int) -> None:
        gate, up = weights[2 * i % len(weights)], weights[(2 * i + 1) % len(weights)]
        kernels.gate_up(x, gate, up, out, both, none)

    return gate_up, out
