"""Matrices whose columns lie in an order of their own (GPTQ's `desc_act`): they are sorted by group as they are read.

What enters them is put into that order before; what enters `down` is made in it, by the rows of gate and up.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pshard.model_config import ModelConfig
from pshard.models.hybrid.made_tensors import MadeTensor, freeze
from pshard.models.quantised.joined import ColumnOrder, JoinedMatrix
from pshard.models.stored import StoredTensor
from pshard.units.attention import GATE, HEAD_GATE, IN_ORDER, OUT, OUT_ORDER, QKV
from pshard.units.ffn import DOWN, GATE_BIAS, UP, UP_BIAS
from pshard.units.ffn import GATE as FFN_GATE
from pshard.units.ffn import ORDER as FFN_ORDER

_TAKERS = (  # what takes one input
    (IN_ORDER, (*QKV, GATE, HEAD_GATE)),
    (OUT_ORDER, (OUT,)),
    (FFN_ORDER, (FFN_GATE, UP)),
)


@dataclass(frozen=True, kw_only=True)
class OrderVector(MadeTensor):
    """The order of columns that matrices which take the same input share, as float32 numbers."""

    orders: tuple[ColumnOrder, ...]

    def read(self) -> np.ndarray:
        first, *others = (order.read() for order in self.orders)
        for order, given in zip(self.orders[1:], others):
            if not np.array_equal(first, given):
                other = self.orders[0].groups_of.name
                order.groups_of.fail(f"gives columns another order than {other}, which takes the same input")
        return freeze(first.astype(np.float32))


@dataclass(frozen=True, kw_only=True)
class OrderedRows(MadeTensor):
    """The rows of `source` in the order of another matrix' columns."""

    order: ColumnOrder

    def read(self) -> np.ndarray:
        return freeze(self.source.read().reshape(self.shape[0], -1)[self.order.read()])

    def factor(self, number: int = 0) -> float:
        return self.source.factor(number)


def order_columns(config: ModelConfig, tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors by GGUF name, with the orders of columns that units need beside matrices that have some.

    Raises UserError for a matrix in whose place none can be put in order.
    """
    orders = {name: order for name, tensor in tensors.items() for order in _list_orders(tensor)}
    if not orders:
        return tensors
    found, left = dict(tensors), dict(orders)
    plain = config.normed_before and not (config.parallel or config.latent or config.delta or config.conv)
    for block in sorted({_block_of(name) for name in orders}) if plain else ():
        for role, takers in _TAKERS:
            names = [block + taker for taker in takers if block + taker in tensors]
            if any(name in left for name in names):
                found[block + role] = _share_order(block + role, names, tensors, orders)
                for name in names:
                    left.pop(name)
        rows = [block + role for role in (FFN_GATE, UP) if block + role in tensors]
        if block + DOWN in left and rows and not any(block + bias in tensors for bias in (GATE_BIAS, UP_BIAS)):
            order = left.pop(block + DOWN)
            for name in rows:
                made = tensors[name]
                found[name] = OrderedRows(
                    name, made.qtype, made.shape, made.file, made.offset, source=made, order=order
                )
    for order in left.values():
        order.groups_of.fail(
            "gives columns an order of their own (desc_act), which is not supported here", "use a GGUF file"
        )
    return found


def _share_order(
    name: str, names: list[str], tensors: dict[str, StoredTensor], orders: dict[str, ColumnOrder]
) -> StoredTensor:
    for other in names:
        if other not in orders:
            tensors[other].fail("has no order of columns (g_idx), and others that take the same input have one")
    shared, first = tuple(orders[n] for n in names), tensors[names[0]]
    source = shared[0].groups_of
    return OrderVector(name, "F32", (first.shape[-1],), first.file, first.offset, source=source, orders=shared)


def _list_orders(tensor: StoredTensor) -> Iterator[ColumnOrder]:
    """That of a matrix, or of what it is made of."""
    if isinstance(tensor, JoinedMatrix) and tensor.order is not None:
        yield tensor.order
    for source in (*tensor.slabs, *((tensor.source,) if isinstance(tensor, MadeTensor) else ())):
        yield from _list_orders(source)


def _block_of(name: str) -> str:
    """blk.3. of blk.3.attn_q.weight."""
    return ".".join(name.split(".")[:2]) + "."
