"""Sums and gathers between GPUs of one host that reach each other's memory (kernels/triton_exchange.py).

The memory comes from torch's symmetric memory, which maps it on all ranks; NVLink multicast stays off.
"""

import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from pshard.batch_sizes import SMALL_BATCH
from pshard.collectives import BY_ROWS, MANY_ROWS, elements_at_once
from pshard.runtime.devices.hand_offs import kernels_may_wait
from pshard.runtime.kernels.gpu.exchange import triton_exchange as kernels
from pshard.runtime.kernels.gpu.exchange import triton_many_rows as many_rows
from pshard.runtime.kernels.gpu.experts.picked import Picked
from pshard.runtime.kernels.gpu.products import triton_row_sum as row_sum
from pshard.runtime.ranks.sum_norm import NO_SUM_NORM, SumNorm

ONE_SHOT, TWO_SHOT = "one-shot", "two-shot"  # names in the profile
PATIENCE = 120_000_000  # polls of about a microsecond before a rank is given up as late
WIRES = {"f32": tl.float32, "bf16": tl.bfloat16, "f16": tl.float16}


class PeerExchange:
    """This rank's end of the exchange memories. All ranks make the same calls in the same order on one stream each.

    Calls return at once and may be captured in a CUDA graph.
    """

    def __init__(
        self, memory: torch.Tensor, addresses: Sequence[int], rank: int, late: torch.Tensor, keep: Any = None
    ) -> None:
        """memory: this rank's, uint8 [exchange_nbytes], zeroed on all ranks before the first call; addresses: of every
        rank's memory as mapped here; late: int32 [1] that host and device see, 0; keep: what holds the mappings."""
        self.rank, self.size = rank, len(addresses)
        self._memory, self._late, self._keep = memory, late, keep
        self._addresses = tuple(addresses)
        self._peers = torch.tensor(self._addresses, dtype=torch.int64, device=memory.device)
        self._late_here = late.numpy()  # read after every micro-batch: an item of a tensor takes ten times as long
        self._state = torch.zeros(kernels.FAILED + 1, dtype=torch.int32, device=memory.device)
        slices = row_sum.ROWS, row_sum.MAX_COLS // row_sum.SLICE
        self._epochs = torch.zeros(slices, dtype=torch.int32, device=memory.device)
        self._squares = torch.zeros((2, *slices), dtype=torch.int64, device=memory.device)
        # of `sum_rows_kernel`, in its order: where the ranks meet, and who says that one is late
        self._meeting = self._addresses, self._epochs, self._squares, self._state[kernels.FAILED :], late
        self._bounds: dict[tuple[int, ...], torch.Tensor] = {}
        self._pushed: torch.Tensor | None = None  # the part that `push` was last asked for

    def algorithms(self, rows: int, cols: int, wire: str) -> tuple[str, ...]:
        """Which can sum [rows, cols] in a wire's type, the likely fastest first."""
        large = (TWO_SHOT, ONE_SHOT) if self.size > 2 else (ONE_SHOT, TWO_SHOT)
        if rows <= row_sum.ROWS and cols <= row_sum.MAX_COLS:
            return (BY_ROWS, *large)
        # parts that all go to all are the best way for two ranks only
        whole = rows > SMALL_BATCH and self.size == 2 and many_rows.rows_at_once(cols, wire) > 0
        return (MANY_ROWS, *large) if whole else large

    def push(self, part: torch.Tensor, wire: str) -> dict[str, Any]:
        """Arguments of a kernel that writes `part` and pushes it on the way (`push_part`). It is the next that the
        stream runs before the part's sum by rows."""
        self._pushed = part
        return {
            "peers": self._addresses, "epochs": self._epochs, "SLICES": self._epochs.shape[1], "WIRE": WIRES[wire],
            **self._places(),
        }  # fmt: skip

    def sum_rows(
        self,
        part: torch.Tensor,
        target: torch.Tensor,
        wire: str,
        accumulate: bool,
        norm: tuple[torch.Tensor, float, torch.Tensor] | None = None,
        quantised: tuple[torch.Tensor | None, ...] = (None, None, None),
        within: SumNorm = NO_SUM_NORM,
    ) -> None:
        """target (+)= sum of the ranks' parts, contiguous float32 [rows, cols]; part may be target.

        Args:
            wire: what parts are rounded to before they are added: "f32", "bf16", "f16".
            norm: (weight, eps, out): RMS-normalise the new target's rows into `out`.
            quantised: words, scale and sums to quantise `out` into, as `rms_norm_kernel` does.
            within: how the sum is normalised before it is added, by the `eps` of `norm`.
        """
        rows, cols = part.shape
        weight, eps, out = norm or (None, 0.0, None)
        normed = (weight, out, out.stride(0) if out is not None else 0, cols, eps)
        pushed, self._pushed = self._pushed is not None and self._pushed.data_ptr() == part.data_ptr(), None
        row_sum.sum_rows_kernel[(rows, row_sum.MAX_COLS // row_sum.SLICE)](
            part, target, *within, *normed, *quantised, *self._meeting, 3 * PATIENCE, **self._places(),
            WIRE=WIRES[wire], SLICE=row_sum.SLICE, PUSHED=pushed, ACCUMULATE=accumulate, NORM=norm is not None,
            QUANTISE=quantised[0] is not None, num_warps=row_sum.WARPS,
        )  # fmt: skip

    def sum_many_rows(
        self,
        part: torch.Tensor,
        target: torch.Tensor,
        wire: str,
        accumulate: bool,
        norm: tuple[torch.Tensor, float, torch.Tensor] | None = None,
        rounded: torch.Tensor | None = None,
        pairs: Picked | None = None,
        within: SumNorm = NO_SUM_NORM,
    ) -> None:
        """As `sum_rows`, of more than SMALL_BATCH rows.

        Args:
            rounded: where the norm is left once more, in another type.
            pairs: what the part is to be made of.
        """
        (rows, cols), together = part.shape, many_rows.rows_at_once(part.shape[1], wire)
        places, wide = many_rows.places_of_row(cols, wire), triton.next_power_of_2(cols)
        weight, eps, out = norm or (None, 0.0, None)
        made_of = {"ids": None, "ids_stride": 0, "weights": None, "weights_stride": 0, "addresses": None, "USED": 0}
        many_rows.sum_many_rows_kernel[(min(kernels.LAUNCHED // places, triton.cdiv(rows, together)),)](
            part if pairs is None else pairs.rows, target, *within, rows, cols, *self._common(), weight=weight, out=out,
            out_stride=0 if out is None else out.stride(0), rounded=rounded,
            rounded_stride=0 if rounded is None else rounded.stride(0), eps=eps,
            **(made_of if pairs is None else pairs.arguments()), PARTS=kernels.parts_at(self.size), RANKS=self.size,
            RANK=self.rank, WIRE=WIRES[wire], ROWS=together, WIDE=wide, PLACES=places, ACCUMULATE=accumulate,
            NORM=norm is not None, ROUND=rounded is not None,
            num_warps=kernels.warps_for(elements_at_once(wire)),
            maxnreg=many_rows.REGISTERS if pairs is None else many_rows.PAIRS_REGISTERS,
        )  # fmt: skip

    def sum(self, part: torch.Tensor, target: torch.Tensor, algorithm: str, wire: str, accumulate: bool) -> None:
        """target (+)= sum of the ranks' parts, contiguous, of any shape; target float32, and part may be it."""
        if algorithm == BY_ROWS:
            return self.sum_rows(part, target, wire, accumulate)
        if algorithm == MANY_ROWS:
            return self.sum_many_rows(part, target, wire, accumulate)
        n = part.numel()
        kernel, each, pieces = kernels.sum_one_shot_kernel, elements_at_once(wire), 1
        if algorithm == TWO_SHOT:
            kernel, pieces = kernels.sum_two_shot_kernel, self.size
        kernel[(min(kernels.LAUNCHED, triton.cdiv(n, each * pieces)),)](
            part, target, n, *self._common(), PARTS=kernels.parts_at(self.size), RANKS=self.size, RANK=self.rank,
            WIRE=WIRES[wire], EACH=each, ACCUMULATE=accumulate, num_warps=kernels.warps_for(each),
        )  # fmt: skip
        return None

    def gather(self, table: torch.Tensor, widths: tuple[int, ...]) -> None:
        """Bring the other ranks' columns into table, contiguous float32 [rows, sum(widths)]; ours are there."""
        if widths not in self._bounds:
            bounds = [sum(widths[:r]) for r in range(self.size + 1)]
            self._bounds[widths] = torch.tensor(bounds, dtype=torch.int32, device=table.device)
        rows, most = table.shape[0], table.shape[0] * max(widths)
        programs = min(kernels.LAUNCHED, triton.cdiv(most, kernels.BLOCK))
        kernels.gather_kernel[(programs,)](
            table, rows, most, self._bounds[widths], *self._common(), PARTS=kernels.parts_at(self.size),
            RANKS=self.size, RANK=self.rank, num_warps=kernels.warps_for(kernels.BLOCK),
        )  # fmt: skip

    def late_rank(self) -> int | None:
        """The rank that some call gave up waiting for, as far as the device has come; results are wrong since."""
        found = int(self._late_here[0])
        return found - 1 if found else None

    def _places(self) -> dict[str, int]:
        return {"WORDS": kernels.words_at(self.size), "RANKS": self.size, "RANK": self.rank}

    def _common(self) -> tuple[Any, ...]:
        return self._peers, self._state, self._late, PATIENCE


def open_peer_exchange(store: dist.Store, rank: int, ranks: int) -> PeerExchange | None:
    """Map the exchange memories of all ranks; None when not all GPUs are of this host and reach each other.

    Collective: all ranks call it after torch.distributed is initialised and their device is set.
    """
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # it hangs on some hosts
    here = torch.cuda.current_device()
    store.set(f"peers/{rank}", "yes" if _reaches_all(here, ranks) else "no")
    if not all(store.get(f"peers/{r}") == b"yes" for r in range(ranks)):
        return None
    import torch.distributed._symmetric_memory as symmetric

    mapped = None
    everyone = dist.group.WORLD
    assert everyone is not None
    try:
        memory = symmetric.empty(kernels.exchange_nbytes(ranks), dtype=torch.uint8, device=torch.device("cuda", here))
        handle = symmetric.rendezvous(memory, everyone)
        memory.zero_()
        torch.cuda.synchronize()
        mapped = PeerExchange(memory, handle.buffer_ptrs, rank, torch.zeros(1, dtype=torch.int32).pin_memory(), handle)
    except RuntimeError as error:  # some containers forget the right to share memory between processes
        reason = str(error).strip().splitlines()[0] if str(error).strip() else "unknown error"
        print(
            f"note: GPUs sum through NCCL, which is slower: peers' memory cannot be mapped: {reason}", file=sys.stderr
        )
    store.set(f"peers/{rank}/ready", "yes" if mapped else "no")
    return mapped if all(store.get(f"peers/{r}/ready") == b"yes" for r in range(ranks)) else None


def _reaches_all(here: int, ranks: int) -> bool:
    """Whether the ranks are those of this host, one GPU each, this one reads and writes all others' memory, and kernels
    may wait for those of others."""
    if not kernels_may_wait():
        return False
    if int(os.environ.get("LOCAL_WORLD_SIZE", ranks)) != ranks or torch.cuda.device_count() < ranks:
        return False
    return all(torch.cuda.can_device_access_peer(here, other) for other in range(ranks) if other != here)
