"""Launches of what gates or places an activation: what `CudaKernels` has of it."""

import torch
import triton

from pshard.runtime.kernels.gpu import triton_rows
from pshard.runtime.kernels.gpu.activations import NOT_QUANTISED, Activations
from pshard.runtime.kernels.gpu.default_tiles import row_warps
from pshard.runtime.kernels.plain_rows import resize_heads


class GatesOnGpu:
    """See `Kernels`."""

    _activations: Activations
    _placed: tuple[torch.Tensor, torch.Tensor] | None  # see `NormsOnGpu`

    def place(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """See `Kernels.place`. What `out` is part of was handed over quantised without these rows, if at all."""
        self._activations.ready = None
        if self._placed is None or not all(_is_same(*pair) for pair in zip((rows, out), self._placed)):
            out.copy_(rows)
            self._placed = None

    def gate_rows(self, x: torch.Tensor, gate: torch.Tensor, curve: str = "sigmoid") -> None:
        """See `Kernels.gate_rows`. Up to SMALL_BATCH rows are left quantised as well."""
        tokens, cols = x.shape
        block, ready = triton.next_power_of_2(cols), self._activations.hand_over(x)
        triton_rows.gate_rows_kernel[(tokens,)](
            x, x.stride(0), gate, gate.stride(0), cols, *(ready or NOT_QUANTISED), EACH=cols // gate.shape[1],
            SOFTPLUS=curve == "softplus", BLOCK=block, QUANTISE=ready is not None,
            num_warps=row_warps(block),
        )  # fmt: skip

    def resize_heads(self, x: torch.Tensor, out: torch.Tensor, heads: int, by: float = 1.0) -> None:
        """See `Kernels.resize_heads`."""
        self._activations.ready = self._placed = None
        resize_heads(x, out, heads, by)

    def add_rows(self, x: torch.Tensor, rows: torch.Tensor) -> None:
        """See `Kernels.add_rows`."""
        self._activations.ready = self._placed = None
        x.add_(rows)

    def times_rows(self, x: torch.Tensor, by: torch.Tensor) -> None:
        """See `Kernels.times_rows`."""
        self._activations.ready = self._placed = None
        x.mul_(by)

    def weigh_rows(self, x: torch.Tensor, weights: torch.Tensor) -> None:
        """See `Kernels.weigh_rows`."""
        self._activations.ready = self._placed = None
        x.mul_(weights)
        weights.fill_(1)

    def gate_mul(self, x: torch.Tensor, up: torch.Tensor, out: torch.Tensor, activation: str = "silu") -> None:
        """See `Kernels.gate_mul`."""
        tokens, cols = x.shape
        triton_rows.gate_mul_kernel[(triton.cdiv(cols, 1024), tokens)](
            x, x.stride(0), up, up.stride(0), out, out.stride(0), cols, ACTIVATION=activation, BLOCK=1024, num_warps=4
        )

    def warm_rows(self, x: torch.Tensor, table: torch.Tensor, position: torch.Tensor) -> None:
        """See `Kernels.warm_rows`."""
        x.mul_(table.index_select(0, position)[:, None])

    def centre_rows(self, x: torch.Tensor) -> None:
        """See `Kernels.centre_rows`."""
        self._activations.ready = None
        tokens, cols = x.shape
        block = triton.next_power_of_2(cols)
        triton_rows.centre_rows_kernel[(tokens,)](x, x.stride(0), cols, BLOCK=block, num_warps=row_warps(block))

    def bend_rows(self, x: torch.Tensor, how: str, numbers: torch.Tensor | None = None, limit: float = 0.0) -> None:
        """See `Kernels.bend_rows`."""
        self._activations.ready = self._placed = None
        tokens, cols = x.shape
        if how == "order":
            block = triton.next_power_of_2(cols)
            warps = row_warps(block)
            triton_rows.order_rows_kernel[(tokens,)](x, x.stride(0), numbers, cols, BLOCK=block, num_warps=warps)
            return
        count = 1 if numbers is None else numbers.shape[0]
        triton_rows.bend_rows_kernel[(triton.cdiv(cols, 1024), tokens)](
            x, x.stride(0), numbers, count, limit, cols, HOW=how, BLOCK=1024, num_warps=4
        )

    def norm_heads(self, x: torch.Tensor, weight: torch.Tensor, head: int, eps: float, centred: bool = False) -> None:
        """See `Kernels.norm_heads`."""
        self._activations.ready = None
        tokens, cols = x.shape
        triton_rows.norm_heads_kernel[(cols // head, tokens)](
            x, x.stride(0), weight, head, eps, CENTRED=centred, BLOCK=triton.next_power_of_2(head), num_warps=1
        )

    def sum_squares(self, x: torch.Tensor, first: int, out: torch.Tensor) -> None:
        """See `Kernels.sum_squares`."""
        tokens, cols = x.shape
        block = triton.next_power_of_2(max(first, cols - first))
        triton_rows.sum_squares_kernel[(2, tokens)](
            x, x.stride(0), first, cols, out, BLOCK=block, num_warps=row_warps(block)
        )

    def norm_wide(
        self,
        x: torch.Tensor,
        q_norm: torch.Tensor,
        k_norm: torch.Tensor,
        sums: torch.Tensor,
        of: tuple[int, int],
        eps: float,
    ) -> None:
        """See `Kernels.norm_wide`."""
        self._activations.ready = None
        tokens, widths = x.shape[0], (q_norm.shape[0], k_norm.shape[0])
        triton_rows.norm_wide_kernel[(triton.cdiv(sum(widths), 1024), tokens)](
            x, x.stride(0), q_norm, k_norm, sums, *widths, *of, eps, BLOCK=1024, num_warps=4
        )

    def scale_rows(self, x: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor) -> None:
        """See `Kernels.scale_rows`. Up to SMALL_BATCH rows are left quantised as well."""
        (tokens, cols), width = x.shape, hidden.shape[1]
        block, depth, ready = (
            triton.next_power_of_2(cols),
            triton.next_power_of_2(width),
            self._activations.hand_over(x),
        )
        triton_rows.scale_rows_kernel[(tokens,)](
            x, x.stride(0), hidden, hidden.stride(0), weight, cols, width, *(ready or NOT_QUANTISED), BLOCK=block,
            DEPTH=depth, QUANTISE=ready is not None, num_warps=row_warps(max(block, depth)),
        )  # fmt: skip


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()
