"""Several residual streams, n-grams and an index of cells by the C++ library."""

import torch

from pshard.runtime.kernels.api import RopeTable, RowIndex
from pshard.runtime.kernels.cpu import native
from pshard.runtime.kernels.cpu.host_states import StatesOnHost
from pshard.runtime.kernels.row_index import list_spans


class StreamsOnHost(StatesOnHost):
    """See `StreamKernels` and `IndexKernels`."""

    def spread_stream(self, x: torch.Tensor, streams: torch.Tensor, count: int) -> None:
        native.enter_streams(_rows(x), _rows(streams), (x.shape[0], count, x.shape[1]), spreads=True)

    def inject_stream(self, x: torch.Tensor, streams: torch.Tensor, count: int) -> None:
        native.enter_streams(_rows(x), _rows(streams), (x.shape[0], count, x.shape[1]))

    def norm_streams(
        self, streams: torch.Tensor, weight: torch.Tensor, count: int, eps: float, out: torch.Tensor
    ) -> None:
        shape = streams.shape[0], count, weight.shape[0] // count
        native.enter_streams(None, _rows(streams), shape, norm=(weight, eps, *_rows(out)))

    def enter_streams(
        self,
        x: torch.Tensor,
        streams: torch.Tensor,
        spreads: bool,
        weight: torch.Tensor,
        count: int,
        eps: float,
        out: torch.Tensor,
    ) -> None:
        shape, norm = (x.shape[0], count, x.shape[1]), (weight, eps, *_rows(out))
        native.enter_streams(_rows(x), _rows(streams), shape, spreads=spreads, norm=norm)

    def mix_streams(
        self, x: torch.Tensor, gates: torch.Tensor, count: int, out: torch.Tensor, cleared: torch.Tensor | None = None
    ) -> None:
        shape = x.shape[0], count, out.shape[1]
        native.mix_streams(_rows(x), _rows(gates), shape, _rows(out), (None, 0) if cleared is None else _rows(cleared))

    def gate_grams(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        streams: torch.Tensor,
        norms: tuple[torch.Tensor, torch.Tensor],
        count: int,
        eps: float,
        out: torch.Tensor,
    ) -> None:
        shape = key.shape[0], count, value.shape[1]
        native.gate_grams((_rows(key), _rows(value), _rows(streams)), norms, shape, eps, _rows(out))

    def add_grams(
        self,
        x: torch.Tensor,
        norm: torch.Tensor,
        taps: torch.Tensor,
        sizes: tuple[int, int],
        eps: float,
        streams: torch.Tensor,
        tails: torch.Tensor,
        slots: torch.Tensor,
        offsets: torch.Tensor,
        opened: torch.Tensor | None = None,
    ) -> None:
        (count, apart), (wide, each) = sizes, taps.shape
        whole, index = (count, wide // count, each, apart), (slots, offsets, slots.shape[0])
        left = (None, 0) if opened is None else _rows(opened)
        native.add_grams(_rows(x), (norm, eps), taps, whole, _rows(streams), tails, index, left)

    def store_index(
        self,
        q: torch.Tensor,
        key: torch.Tensor,
        norms: tuple[torch.Tensor, torch.Tensor],
        each: int,
        eps: float,
        rope: RopeTable,
        rows: RowIndex,
        index: torch.Tensor,
    ) -> None:
        head = key.shape[1]
        shape, turn = (q.shape[0], q.shape[1] // head, head), (rope.cos, rope.sin, rope.cos.shape[-1], rope.pairing)
        at = rows.begin, rows.position, rows.blocks
        native.store_index(_rows(q), _rows(key), shape, (*norms, eps), each, turn, at, (index, index.shape[1]))

    def choose_cells(
        self,
        q: torch.Tensor,
        index: torch.Tensor,
        rule: tuple[int, int],
        rows: RowIndex,
        scores: torch.Tensor,
        seen: torch.Tensor,
    ) -> None:
        (_, n, head), spans = index.shape, rows.spans
        spans = native.make_spans(list_spans(rows.segments)) if spans is None else spans
        heads, words = (q.shape[1] // head, head), (*_rows(seen), seen.shape[1])
        native.choose_cells(_rows(q), (index, n), heads, rule, spans, rows.blocks, words)


def _rows(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Rows as the library takes them."""
    return x, x.stride(0)
