"""Operands that rotate: so many copies of a weight or KV cache that re-reads never come from a cache."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch

from pshard.errors import NoRoom
from pshard.profile.identify import count_cores
from pshard.quant import QUANT_TYPES, ROW_BLOCK, TENSOR_ALIGN, align, packed_nbytes, plane_offsets, record_nbytes
from pshard.runtime.kernels.api import LayerKV, Packed
from pshard.runtime.kernels.kv_codec import encode_cells
from pshard.runtime.memory.host.host_memory import map_memory
from pshard.runtime.memory.kv_cache import view_cells, view_layer
from pshard.units.state import CellState, LatentState, StateShape

LEAST_ROTATION = 512 << 20  # bytes between two reads of the same copy; read-then-flush does not evict a large L3
QUICK_ROTATION = 64 << 20
CACHES = 32  # times the last cache; what 16 cores read at 200 GB/s over twice a 300 MiB L3, they read at 158 over this
MOST_COPIES = 4096  # handed out at once, spread over the pool: more than a timing reads
PAGE = 4096
MOST_FILLING, FILLED_AT_ONCE = 8, 32 << 20  # threads, and bytes that each takes in turn
SHARE = 8  # of the host's memory at most
ORDINARY = (0x20, 0x40)  # bytes that are ordinary numbers as scales, exponents, halves and floats of every type


def rotation_bytes(cache_bytes: int, memory_bytes: int, quick: bool) -> int:
    """Bytes that lie between two reads of one copy: 32 times the last cache, and 512 MiB (64 when quick) at least.

    Never more than an eighth of the memory.
    """
    least = QUICK_ROTATION if quick else LEAST_ROTATION
    return min(max(CACHES * cache_bytes, least), memory_bytes // SHARE)


@dataclass
class OperandPool:
    """One buffer on a device that holds the copies; allocated and touched once, and again after `release`.

    On the host its bytes are ordinary numbers in every type, and stay. A GPU's clock depends on its operands, so that
    its pool is refilled for every shape. What a rotation hands out is valid until the next one is made.
    """

    nbytes: int
    device: torch.device
    _buffer: torch.Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._buffer = self._allocate(self.nbytes)

    def _allocate(self, nbytes: int) -> torch.Tensor:
        if self.device.type == "cpu":
            return fill_ordinary(map_memory(nbytes))  # touched: untouched pages are all one page, and cached
        try:
            return torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        except torch.cuda.OutOfMemoryError:
            raise NoRoom(
                f"operands of {nbytes >> 20} MiB do not fit the GPU's free memory; end other programs on it"
            ) from None

    @property
    def memory(self) -> torch.Tensor:
        """All of the pool's bytes, uint8."""
        return self._buffer

    def release(self) -> None:
        """Give the memory back; the next rotation takes what it needs again."""
        self._buffer = self._buffer.new_empty(0)

    def rotate_weights(self, qtype: str, rows: int, cols: int) -> list[Packed]:
        """Copies of a random [rows, cols] matrix that together span the pool's bytes; at least one."""
        nbytes = packed_nbytes(qtype, rows, cols)
        copies = self._split(nbytes)
        self._fill(copies, qtype, cols)
        return [Packed(copy, qtype, rows, cols) for copy in copies]

    def rotate_experts(
        self, gate_qtype: str, down_qtype: str, d_expert: int, d_model: int
    ) -> list[tuple[Packed, Packed, Packed]]:
        """Copies of a random expert that together span the pool's bytes: its gate and up [d_expert, d_model], and down
        [d_model, d_expert]."""
        shapes = [(gate_qtype, d_expert, d_model)] * 2 + [(down_qtype, d_model, d_expert)]
        sizes = [packed_nbytes(*shape) for shape in shapes]
        at = [0, align(sizes[0], TENSOR_ALIGN), 2 * align(sizes[0], TENSOR_ALIGN)]
        copies = self._split(at[2] + sizes[2])
        parts = [[copy[start : start + size] for copy in copies] for start, size in zip(at, sizes)]
        for (qtype, _, cols), those in zip(shapes, parts):
            self._fill(those, qtype, cols)
        gate, up, down = ([Packed(c, *shape) for c in those] for shape, those in zip(shapes, parts))
        return list(zip(gate, up, down))

    def _fill(self, copies: list[torch.Tensor], qtype: str, cols: int) -> None:
        """Write a random matrix of so many columns into every copy; the host's pool has ordinary numbers already."""
        if self.device.type == "cpu":
            return
        record, nbytes = torch.from_numpy(random_record(qtype, cols)).to(self.device), copies[0].numel()
        copies[0].copy_(record.repeat(-(-nbytes // record.numel()))[:nbytes])
        for copy in copies[1:]:
            copy.copy_(copies[0])

    def rotate_kv(self, context: int, n_kv_heads: int, head_dim: int, kv_type: str) -> list[LayerKV]:
        """Copies of a random one-sequence KV cache that together span the pool's bytes; at least one."""
        shape = StateShape(context, 1, kv_type, kv_type)
        nbytes = CellState(n_kv_heads * head_dim, kv_type, kv_type).nbytes(shape)
        caches = [view_layer(copy, n_kv_heads, head_dim, shape) for copy in self._split(nbytes)]
        if self.device.type != "cpu":
            noise = torch.randn(n_kv_heads, head_dim, device=self.device)
            for cache in caches:
                cache.k.copy_(encode_cells(noise, cache.k.dtype))
                cache.v.copy_(encode_cells(noise, cache.v.dtype))
        return caches

    def rotate_latents(self, context: int, width: int, kv_type: str) -> list[torch.Tensor]:
        """The same for cells of latents: see `Kernels.store_latent`."""
        shape = StateShape(context, 1, kv_type, kv_type)
        caches = [view_cells(copy, width, shape) for copy in self._split(LatentState(width, kv_type).nbytes(shape))]
        if self.device.type != "cpu":
            noise = torch.randn(1, width, device=self.device)
            for cache in caches:
                cache.copy_(encode_cells(noise, cache.dtype))
        return caches

    def rotate_states(self, nbytes: int) -> list[torch.Tensor]:
        """Copies of so many bytes of ordinary float32 numbers that together span the pool's bytes; at least one."""
        copies = self._split(nbytes)
        if self.device.type != "cpu":
            self._buffer.view(torch.float32).normal_(0, 0.1)
        return copies

    def _split(self, nbytes: int) -> list[torch.Tensor]:
        stride = -(-nbytes // PAGE) * PAGE
        if stride > self._buffer.numel():
            self.release()  # both at once may not fit
            self._buffer = self._allocate(max(stride, self.nbytes))
        stride = max(stride, self._buffer.numel() // MOST_COPIES // PAGE * PAGE)
        return [self._buffer[at : at + nbytes] for at in range(0, self._buffer.numel() - stride + 1, stride)]


def fill_ordinary(memory: torch.Tensor) -> torch.Tensor:
    """The same memory (uint8, host), filled with random bytes that are ordinary numbers whatever they are read as."""
    block = torch.from_numpy(np.random.default_rng(0).integers(*ORDINARY, 1 << 20, np.uint8))

    def fill(part: torch.Tensor) -> None:
        for piece in part.split(block.numel()):
            piece.copy_(block[: piece.numel()])

    # by several threads: where the host behind a virtual machine has to find the memory, one takes 4 s for a gigabyte
    with ThreadPoolExecutor(min(MOST_FILLING, count_cores())) as threads:
        list(threads.map(fill, memory.split(FILLED_AT_ONCE)))
    return memory


def random_record(qtype: str, cols: int, seed: int = 0) -> np.ndarray:
    """16 rows of a random packed matrix, u8: random codes with ordinary scales (no NaN, infinity or denormal)."""
    rng = np.random.default_rng(cols + seed)
    if qtype == "FP8":
        codes = rng.integers(0, 0x7F, (ROW_BLOCK, cols), np.uint8)
        scales = rng.uniform(0.0001, 0.001, (ROW_BLOCK, cols // 128)).astype(np.float32).view(np.uint8)
        return np.concatenate((codes, scales), 1).reshape(-1)
    if not QUANT_TYPES[qtype].planes:
        values = torch.from_numpy(rng.normal(0, 0.02, (ROW_BLOCK, cols)).astype(np.float32))
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[qtype]
        return values.to(dtype).view(torch.uint8).numpy().reshape(-1)
    record = np.zeros(record_nbytes(qtype, cols), np.uint8)
    for name, (at, size) in plane_offsets(qtype, cols).items():
        if name in ("d", "m", "dmin"):
            plane = rng.uniform(0.001, 0.01, size // 2).astype(np.float16).view(np.uint8)
        elif name == "factor":
            plane = np.ones(size // 4, np.float32).view(np.uint8)
        elif name == "e8m0":
            plane = rng.integers(118, 124, size, np.uint8)  # powers of two around 1/256
        elif name in ("scales", "mins"):
            plane = rng.integers(1, 64, size, np.uint8)  # six bits are valid in every type
        else:
            plane = rng.integers(0, 256, size, np.uint8)
        record[at : at + size] = plane
    return record
