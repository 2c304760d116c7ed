"""Which launches of products of few rows a GPU makes beside those of a unit's operations. No torch.

Its kernels for few rows multiply int8. Most operations leave what products take quantised; what others leave is
quantised by a launch of its own (`Activations` of `runtime/kernels/gpu/`). Products of one input go together where
types and biases allow it (`runtime/kernels/gpu/products/few_rows.py`).
"""

from collections.abc import Iterable, Iterator, Sequence

from pshard.quant import QUANT_TYPES, ROW_BLOCK
from pshard.units.operands import Rows
from pshard.units.operations import (
    Attend,
    DeltaNet,
    ExpertProducts,
    GatedProduct,
    GateRows,
    Norm,
    NormStreams,
    Operation,
    Product,
    ProductGroup,
    Route,
    SumSquares,
    matrices_of,
)

MOST_TOGETHER = 3  # matrices of a launch
LEAST_HEAD = 32  # numbers of a head that attention and delta nets leave quantised, a chunk at a time
_MULTIPLIES = (Product, ProductGroup, GatedProduct, ExpertProducts)
_LEAVES_ALONE = (Route, SumSquares)  # what was quantised before them is there after them


def is_packed(qtype: str) -> bool:
    """Whether a matrix meets int8: other types' rows meet the activations as they are."""
    return bool(QUANT_TYPES[qtype].planes)


def find_runs(matrices: Sequence[tuple[str, int, bool]]) -> list[list[int]]:
    """Numbers of those of one input that one launch multiplies: up to three neighbours of one packed type, of whole
    records, all with a bias or none. matrices: type, rows, and whether there is a bias."""
    runs: list[list[int]] = []
    last = None
    for i, (qtype, rows, biased) in enumerate(matrices):
        like = None if not is_packed(qtype) or rows % ROW_BLOCK else (qtype, biased)
        if like is not None and like == last and len(runs[-1]) < MOST_TOGETHER:
            runs[-1].append(i)
        else:
            runs.append([i])
        last = like
    return runs


def list_quantised(operations: Iterable[Operation], ready: Rows | None = None) -> Iterator[int]:
    """Elements a token of each operand that a launch of its own quantises. ready: what was left quantised before."""
    for operation in operations:
        if isinstance(operation, _MULTIPLIES):
            packed = [m for m in matrices_of(operation) if is_packed(m.qtype)]
            if packed and operation.x != ready:
                yield packed[0].cols
            if isinstance(operation, GatedProduct):
                ready = operation.out if _leaves_gated(operation) else None
            elif len(packed) < len(matrices_of(operation)) or operation.x != ready:
                ready = None
        elif not isinstance(operation, _LEAVES_ALONE):
            ready = _leaves(operation)


def _leaves_gated(gated: GatedProduct) -> bool:
    """Whether its result is left quantised: where both are multiplied in one launch, or it is scaled."""
    alike = gated.gate.qtype == gated.up.qtype and is_packed(gated.up.qtype) and not gated.gated_apart
    return (alike or gated.scale is not None) and gated.up.rows % 32 == 0


def _leaves(operation: Operation) -> Rows | None:
    """What an operation that is no product leaves quantised."""
    match operation:
        case Norm(adds=False, out=out, width=width):
            return out if width % 32 == 0 else None
        case NormStreams(out=out) | GateRows(x=out):
            return out if operation.width % 32 == 0 else None
        case Attend(out=out, head_dim=head):
            return out if head >= LEAST_HEAD and head & (head - 1) == 0 else None
        case DeltaNet(out=out, head=head):
            return out if head >= LEAST_HEAD else None
    return None
