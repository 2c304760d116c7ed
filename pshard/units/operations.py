"""Operations: what units are made of. What is timed is what is run is what is priced. No torch.

Each is one call of a device's kernels (`runtime/kernels/api.py`). The profile times them, the planner prices a unit as
the sum of its own, and the blocks of the runtime make the same calls. Tensors that a model does not have are None.

An operation names its operands: `reads` and `writes` are columns of buffers (operands.py). What a unit does is the list
of its operations in order, and who cuts, rewrites or carries out that list follows these names.
"""

from dataclasses import dataclass
from typing import ClassVar

from pshard.batch_sizes import DELTA_CHUNK, DELTA_ROWS, DELTA_STEPS
from pshard.tensor import TensorSpec
from pshard.units.operands import ALL_STREAMS, CHOSEN, JOINED, NORMED, NOWHERE, STREAM, TOKENS, Rows


class Onward:
    """An operation of one operand and one result."""

    x: Rows
    out: Rows

    @property
    def reads(self) -> tuple[Rows, ...]:
        """Its operands."""
        return (self.x,)

    @property
    def writes(self) -> tuple[Rows, ...]:
        """What it leaves."""
        return (self.out,)


class InPlace:
    """An operation that changes its operand x, and reads no other unless it says so."""

    x: Rows

    @property
    def reads(self) -> tuple[Rows, ...]:
        """Its operand."""
        return (self.x,)

    @property
    def writes(self) -> tuple[Rows, ...]:
        """The same."""
        return (self.x,)


class Onto(Onward):
    """What adds to what it leaves: it reads that too."""

    @property
    def reads(self) -> tuple[Rows, ...]:
        """Its operand, and what is there."""
        return self.x, self.out


@dataclass(frozen=True)
class LookUp:
    """Rows of a table by token id, times `scale`; or `each` rows by what stands for a token's last ones."""

    table: TensorSpec
    scale: float = 1.0
    out: Rows = STREAM
    each: int = 1
    reads: ClassVar[tuple[Rows, ...]] = (TOKENS,)

    @property
    def writes(self) -> tuple[Rows, ...]:
        return (self.out,)


@dataclass(frozen=True)
class Norm(Onward):
    """RMS norm of x, `width` elements a token; `adds`: onto what is there, which is then multiplied by the one number
    in `scale`. centred: the mean of each row of x is taken from it first, in place, so that this is a layer norm. Of
    `count` vectors side by side each is normalised by itself. eps_by: what the model's epsilon is multiplied by."""

    weight: TensorSpec | None
    width: int
    adds: bool = False
    centred: bool = False
    x: Rows = STREAM
    out: Rows = NORMED
    scale: TensorSpec | None = None
    count: int = 1
    eps_by: float = 1.0


@dataclass(frozen=True)
class Take(Onward):
    """What is in a port, `width` elements a token, in the type of activations; or a copy of it in another port."""

    x: Rows
    width: int
    out: Rows = NORMED


@dataclass(frozen=True)
class Product(Onward):
    """x[tokens, cols] @ W[rows, cols].T of one matrix; `adds`: onto what is there."""

    matrix: TensorSpec
    bias: TensorSpec | None = None
    adds: bool = False
    x: Rows = NORMED
    out: Rows = STREAM


@dataclass(frozen=True)
class ProductGroup:
    """Products of one input with several matrices, in one launch where their types allow it; side by side from the
    first column of `out` on."""

    matrices: tuple[TensorSpec, ...]
    biases: tuple[TensorSpec | None, ...] = ()
    x: Rows = NORMED
    out: Rows = NOWHERE

    @property
    def reads(self) -> tuple[Rows, ...]:
        return (self.x,)

    @property
    def writes(self) -> tuple[Rows, ...]:
        return self.out.beside(*(matrix.rows for matrix in self.matrices))


@dataclass(frozen=True)
class GatedProduct(Onward):
    """silu(gate x) * (up x): two matrices, and the product of what they give, with `scale` times a number of each
    token. biases: of either matrix, added to what it gives. limited: what they give is bounded before, see
    `ModelConfig.ffn_limits`."""

    gate: TensorSpec
    up: TensorSpec
    scale: TensorSpec | None = None
    biases: tuple[TensorSpec | None, TensorSpec | None] = (None, None)
    x: Rows = NORMED
    out: Rows = NOWHERE
    limited: bool = False

    @property
    def biased(self) -> bool:
        """Whether anything is added to what either matrix gives."""
        return any(bias is not None for bias in self.biases)

    @property
    def gated_apart(self) -> bool:
        """Whether a GPU gates it by a launch of its own, as its product of both knows neither bounds nor biases."""
        return self.limited or self.biased


@dataclass(frozen=True)
class PickRows:
    """Of the residual stream the rows whose logits are wanted, `width` elements each."""

    width: int
    reads: ClassVar[tuple[Rows, ...]] = (STREAM,)
    writes: ClassVar[tuple[Rows, ...]] = ()


@dataclass(frozen=True)
class BendLogits(InPlace):
    """Logits, `width` a row, times `scale` (1: as they are), then bent so that none is above `cap` (0: as they are)."""

    width: int
    scale: float
    cap: float
    x: Rows


@dataclass(frozen=True)
class WeighRows(InPlace):
    """What experts take, `width` elements a token, times the weight of the one that was chosen."""

    width: int
    x: Rows


@dataclass(frozen=True)
class PlaceRows:
    """What another side computed of an activation, put where this side has its own: `width` elements a token."""

    width: int
    out: Rows = STREAM
    reads: ClassVar[tuple[Rows, ...]] = (JOINED,)

    @property
    def writes(self) -> tuple[Rows, ...]:
        return (self.out,)


@dataclass(frozen=True)
class AddRows(Onward):
    """An activation, `width` elements a token, added to what is there."""

    width: int
    x: Rows
    out: Rows = STREAM


@dataclass(frozen=True)
class Rotate:
    """Rotary embedding of q and k, with the store into the KV cache; with `norms` each head is normalised before. rope:
    the scratch with sines and cosines. windowed: the cells are those of layers with a window. warms: queries are then
    multiplied by the temperature of their positions. values: each head's are normalised too, without weights. Without
    KV heads there are only queries, and nothing is stored."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    norms: tuple[TensorSpec, ...] = ()
    normed: bool = False
    x: Rows = NOWHERE
    rope: str = ""
    windowed: bool = False
    warms: bool = False
    values: bool = False

    @property
    def reads(self) -> tuple[Rows, ...]:
        return heads_of(self.x, self, self.n_kv_heads == 0)

    @property
    def writes(self) -> tuple[Rows, ...]:
        return self.reads

    @property
    def width(self) -> int:
        """Elements of q and k of one token."""
        return (self.n_heads + self.n_kv_heads) * self.head_dim


@dataclass(frozen=True)
class Attend:
    """Attention of the new tokens over the cells of their sequences: over the last `window` of them, the token's own
    among these (0: all), with a sink of every head beside them where there are some. cap, slopes, chunked: what becomes
    of scores, as in `Scoring` of the kernels' interface. borrows: the cells are another unit's, and the new tokens' own
    are there already. seen: which of the cells count, as `ChooseCells` leaves it, `chosen` at most; None: all."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    window: int = 0
    sinks: TensorSpec | None = None
    x: Rows = NOWHERE
    out: Rows = NOWHERE
    cap: float = 0.0
    slopes: TensorSpec | None = None
    chunked: bool = False
    borrows: bool = False
    seen: Rows | None = None
    chosen: int = 0

    @property
    def reads(self) -> tuple[Rows, ...]:
        return *heads_of(self.x, self, self.borrows), *((self.seen,) if self.seen else ())

    @property
    def writes(self) -> tuple[Rows, ...]:
        return (self.out,)

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, KV heads, elements of each, as kernels take them."""
        return self.n_heads, self.n_kv_heads, self.head_dim


def heads_of(x: Rows, of: Rotate | Attend, alone: bool) -> tuple[Rows, ...]:
    """Queries, keys and values, which stand side by side from the first column of x on; or queries alone."""
    return x.beside(of.n_heads * of.head_dim, *(() if alone else 2 * (of.n_kv_heads * of.head_dim,)))


@dataclass(frozen=True)
class StoreIndex:
    """Of an index of cells: norm and rotation of each of `heads` queries, in place, and what a token's key makes of its
    block's, into the token's cell. rope: the scratch with sines and cosines."""

    norms: tuple[TensorSpec, TensorSpec]
    heads: int
    head: int
    each: int
    x: Rows = NOWHERE
    key: Rows = NOWHERE
    rope: str = ""

    @property
    def reads(self) -> tuple[Rows, ...]:
        return self.x, self.key

    @property
    def writes(self) -> tuple[Rows, ...]:
        return self.x, self.key

    @property
    def width(self) -> int:
        """Elements of a token."""
        return (self.heads + 1) * self.head


@dataclass(frozen=True)
class ChooseCells(Onward):
    """Which cells each token sees by an index of them, blocks of `each`, at most `most` of the complete ones: a bit of
    `out` for each block, see `Kernels.choose_cells`."""

    heads: int
    head: int
    each: int
    most: int
    x: Rows = NOWHERE
    out: Rows = NOWHERE


@dataclass(frozen=True)
class GateRows(InPlace):
    """An activation, `width` elements a token, times the sigmoid or the "softplus" of another one, of which it has as
    many, or one for each of so many equal parts: `Kernels.gate_rows`."""

    width: int
    x: Rows = NOWHERE
    gate: Rows = NOWHERE
    curve: str = "sigmoid"

    @property
    def reads(self) -> tuple[Rows, ...]:
        return self.x, self.gate


@dataclass(frozen=True)
class ResizeHeads(Onward):
    """Each head of an activation with more or fewer numbers, times `by`: `Kernels.resize_heads`."""

    heads: int
    x: Rows
    out: Rows
    by: float = 1.0

    @property
    def width(self) -> int:
        """Elements of a token that are read or written, whichever are more."""
        return max(self.x.width, self.out.width)


@dataclass(frozen=True)
class TimesRows(InPlace):
    """An activation times what stands in a port, `width` elements a token each."""

    width: int
    x: Rows = NOWHERE
    by: Rows = NOWHERE

    @property
    def reads(self) -> tuple[Rows, ...]:
        return self.x, self.by


BENDS = ("times", "plus", "clamp", "relu2", "gelu", "gelu16", "xielu", "order")  # as `Kernels.bend_rows` has them


@dataclass(frozen=True)
class Bend(InPlace):
    """An activation, `width` elements a token, as bent in place in one of `BENDS`: by `numbers`, or within `limit`."""

    how: str
    width: int
    numbers: TensorSpec | None = None
    limit: float = 0.0
    x: Rows = NORMED


@dataclass(frozen=True)
class NormHeads(InPlace):
    """Each head of an activation as normalised in place by weights of its own; centred: less its mean before."""

    weight: TensorSpec
    head: int
    centred: bool = False
    x: Rows = NOWHERE

    @property
    def width(self) -> int:
        """Elements of a token."""
        return self.weight.cols


@dataclass(frozen=True)
class SumSquares:
    """The squares of q's numbers added up, and those of k's, which stand side by side: of a token one number each. What
    ranks have of both is summed before anything reads it."""

    q: Rows
    k: Rows
    out: Rows

    @property
    def reads(self) -> tuple[Rows, ...]:
        return self.q, self.k

    @property
    def writes(self) -> tuple[Rows, ...]:
        return (self.out,)

    @property
    def width(self) -> int:
        """Elements of a token."""
        return self.q.width + self.k.width


@dataclass(frozen=True)
class NormWide:
    """q and k as normalised in place over all heads, by weights of q and of k, and by sums of squares of so many
    numbers each, `of`."""

    weights: tuple[TensorSpec, TensorSpec]
    of: tuple[int, int]
    q: Rows
    k: Rows
    sums: Rows

    @property
    def reads(self) -> tuple[Rows, ...]:
        return self.q, self.k, self.sums

    @property
    def writes(self) -> tuple[Rows, ...]:
        return self.q, self.k

    @property
    def width(self) -> int:
        """Elements of a token."""
        return self.q.width + self.k.width


def halve(operations: tuple["Operation", ...]) -> tuple[tuple["Operation", ...], tuple["Operation", ...]]:
    """What a unit does before ranks sum its squares, and what it does then."""
    at = 1 + next(i for i, operation in enumerate(operations) if isinstance(operation, SumSquares))
    return operations[:at], operations[at:]


@dataclass(frozen=True)
class HeadProducts(Onward):
    """A product of each head's own numbers with its own matrix, of those that stand in `stack` (TensorSpec.parts)."""

    stack: TensorSpec
    x: Rows = NOWHERE
    out: Rows = NOWHERE


@dataclass(frozen=True)
class StoreLatent:
    """Norm of the latent, rotary embedding of the queries' last numbers and of the shared key, store of both."""

    norm: TensorSpec
    n_heads: int
    rank: int
    rope: int
    x: Rows = NOWHERE
    queries: Rows = NOWHERE
    out: Rows = NOWHERE

    @property
    def reads(self) -> tuple[Rows, ...]:
        return self.x, self.queries

    @property
    def writes(self) -> tuple[Rows, ...]:
        return (self.out,)

    @property
    def width(self) -> int:
        """Elements of a token that are read."""
        return self.rank + (self.n_heads + 1) * self.rope


@dataclass(frozen=True)
class AttendLatent(Onward):
    """Attention of the new tokens' absorbed queries over the cells of their sequences: a latent, which is the value
    too, and the shared key behind it."""

    n_heads: int
    rank: int
    rope: int
    x: Rows = NOWHERE
    out: Rows = NOWHERE

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, KV heads, elements of each, as tables of attention have them."""
        return self.n_heads, 1, self.rank + self.rope


@dataclass(frozen=True)
class DeltaNet:
    """A gated delta net between its products: of what these give of q, k, v, z, beta and alpha, in this order, the
    gated output of all value heads. `conv`: of all channels, or of those of q, of k and of v.

    tiled: value head j uses key head j % key_heads; else j // (value_heads // key_heads).
    """

    conv: tuple[TensorSpec, ...]
    dt_bias: TensorSpec
    decay: TensorSpec
    norm: TensorSpec
    key_heads: int
    value_heads: int
    head: int
    tiled: bool = False
    x: Rows = NOWHERE
    out: Rows = NOWHERE

    @property
    def reads(self) -> tuple[Rows, ...]:
        """q and k, v, z, beta and alpha, which stand side by side from the first column of x on."""
        keys, values = 2 * self.key_heads * self.head, self.value_heads * self.head
        return self.x.beside(keys, values, values, self.value_heads, self.value_heads)

    @property
    def writes(self) -> tuple[Rows, ...]:
        return (self.out,)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Key heads, value heads, elements of each, as tables have them."""
        return self.key_heads, self.value_heads, self.head

    @property
    def channels(self) -> int:
        """Elements of q, k and v of one token."""
        return (2 * self.key_heads + self.value_heads) * self.head

    @property
    def open_width(self) -> int:
        """Numbers that an open row leaves, for `Kernels.settle_states`: its channels; the key of each key head; of each
        value head what it adds along the key, and how much of its state it leaves."""
        return self.channels + (self.key_heads + self.value_heads) * self.head + self.value_heads

    @property
    def state_nbytes(self) -> int:
        """Of one sequence's matrices, float32."""
        return 4 * self.value_heads * self.head**2

    @property
    def tail_nbytes(self) -> int:
        """Of one sequence's last inputs, float32."""
        return 4 * 3 * self.channels

    @property
    def kept_nbytes(self) -> int:
        """Of all that is kept of one sequence."""
        return self.state_nbytes + self.tail_nbytes

    def flops(self, tokens: int, chunked: bool) -> float:
        """Of so many tokens: one by one, or in chunks of DELTA_CHUNK."""
        if not chunked:
            return tokens * self.value_heads * 7.0 * self.head**2
        each = DELTA_CHUNK * 8.0 * self.head + DELTA_CHUNK**2 + 6.0 * self.head**2
        return tokens * self.value_heads * each

    def scratch_nbytes(self, tokens: int, sequences: int, element: int) -> int:
        """Bytes that a GPU needs for micro-batches of up to so many tokens of up to so many sequences, whose
        activations have `element` bytes each: see `Kernels.delta_net`."""
        if tokens <= DELTA_STEPS:
            return 0
        rows = min(max(DELTA_ROWS, DELTA_CHUNK * sequences), -(-tokens // DELTA_CHUNK) * DELTA_CHUNK * sequences)
        keys = 2 * self.key_heads * self.head
        return rows * element * (keys + self.value_heads * (2 * self.head + DELTA_CHUNK + 2))  # sums: twice the bytes


@dataclass(frozen=True)
class Convolve:
    """What a gated short convolution has between its products: what these give of its input, of what gates the result,
    and of what multiplies the input. taps: of all channels, `each` of them for each."""

    taps: TensorSpec
    each: int
    x: Rows = NOWHERE
    out: Rows = NOWHERE

    @property
    def channels(self) -> int:
        """Elements of the result of a token."""
        return self.taps.cols // self.each

    @property
    def kept_nbytes(self) -> int:
        """Of one sequence's last inputs, float32."""
        return 4 * (self.each - 1) * self.channels

    @property
    def reads(self) -> tuple[Rows, ...]:
        return self.x.beside(*(3 * (self.channels,)))

    @property
    def writes(self) -> tuple[Rows, ...]:
        return (self.out,)


@dataclass(frozen=True)
class SpreadStream(Onward):
    """The residual stream, `width` elements a token, as each of `count` streams."""

    width: int
    count: int
    x: Rows = STREAM
    out: Rows = ALL_STREAMS


@dataclass(frozen=True)
class InjectStream(Onto):
    """What blocks have given, `width` elements a token, added to each of `count` streams by its share."""

    width: int
    count: int
    x: Rows = STREAM
    out: Rows = ALL_STREAMS


@dataclass(frozen=True)
class NormStreams(Onward):
    """Each of `count` streams as normalised by weights of its own, divided by their number."""

    weight: TensorSpec
    count: int
    x: Rows = ALL_STREAMS
    out: Rows = NOWHERE

    @property
    def width(self) -> int:
        """Elements of a token."""
        return self.weight.cols


@dataclass(frozen=True)
class MixStreams:
    """The sum over `count` streams, `width` elements a token each, times the sigmoids of gates; clears: the residual
    stream is all zeros then, for what blocks add up."""

    width: int
    count: int
    x: Rows
    gates: Rows
    out: Rows
    clears: bool

    @property
    def reads(self) -> tuple[Rows, ...]:
        return self.x, self.gates

    @property
    def writes(self) -> tuple[Rows, ...]:
        return (self.out, STREAM) if self.clears else (self.out,)


@dataclass(frozen=True)
class GateGrams:
    """What n-grams add to each of `count` streams: their value, `width` elements a token, times a gate of each stream,
    from the product of the stream and of the n-grams' key for it, both normalised. norms: of keys and of streams."""

    width: int
    count: int
    norms: tuple[TensorSpec, TensorSpec]
    key: Rows
    value: Rows
    out: Rows
    streams: Rows = ALL_STREAMS

    @property
    def reads(self) -> tuple[Rows, ...]:
        return self.key, self.value, self.streams

    @property
    def writes(self) -> tuple[Rows, ...]:
        return (self.out,)


@dataclass(frozen=True)
class AddGrams(Onto):
    """That, and a convolution of it over time as each stream's part is normalised, added to the streams. taps: of all
    channels, `each` of them for each, which lie `apart` tokens apart."""

    norm: TensorSpec
    taps: TensorSpec
    count: int
    each: int
    apart: int
    x: Rows
    out: Rows = ALL_STREAMS

    @property
    def channels(self) -> int:
        """Elements of a token."""
        return self.norm.cols

    @property
    def kept_nbytes(self) -> int:
        """Of one sequence's last inputs, float32."""
        return 4 * (self.each - 1) * self.apart * self.channels


@dataclass(frozen=True)
class Route(Onward):
    """Which `chosen` of the rows of `router` take each token, and with which weights."""

    router: TensorSpec
    chosen: int
    biases: tuple[TensorSpec, ...] = ()
    x: Rows = CHOSEN
    out: Rows = CHOSEN


@dataclass(frozen=True)
class ExpertProducts:
    """The FFNs of those experts in these stacks that tokens have chosen, and their weighted sum. A token takes `chosen`
    of the `of` experts of the layer. `first`: at which place of the layer the first of these stands."""

    gate: TensorSpec
    up: TensorSpec
    down: TensorSpec
    chosen: int
    of: int
    biases: tuple[TensorSpec, ...] = ()
    first: int = 0
    out: Rows = STREAM
    x: Rows = CHOSEN
    routes: Rows = CHOSEN

    @property
    def reads(self) -> tuple[Rows, ...]:
        return (self.x,) if self.x == self.routes else (self.x, self.routes)

    @property
    def writes(self) -> tuple[Rows, ...]:
        return (self.out,)

    @property
    def places(self) -> range:
        """Those of the layer that are here."""
        return range(self.first, self.first + self.gate.parts)


def used_share(chosen: int, of: int, tokens: float) -> float:
    """The share of equal parts that so many tokens are expected to use, of which each takes `chosen` at random."""
    return 1 - (1 - chosen / of) ** tokens


Operation = (
    LookUp
    | Norm
    | Take
    | PickRows
    | BendLogits
    | WeighRows
    | Product
    | ProductGroup
    | GatedProduct
    | PlaceRows
    | AddRows
    | Rotate
    | Attend
    | GateRows
    | ResizeHeads
    | TimesRows
    | Bend
    | NormHeads
    | SumSquares
    | NormWide
    | HeadProducts
    | StoreLatent
    | AttendLatent
    | DeltaNet
    | Convolve
    | StoreIndex
    | ChooseCells
    | SpreadStream
    | InjectStream
    | NormStreams
    | MixStreams
    | GateGrams
    | AddGrams
    | Route
    | ExpertProducts
)


def matrices_of(operation: Operation) -> tuple[TensorSpec, ...]:
    """The matrices that an operation multiplies."""
    match operation:
        case Product():
            return (operation.matrix,)
        case ProductGroup():
            return operation.matrices
        case GatedProduct():
            return operation.gate, operation.up
        case HeadProducts():
            return (operation.stack,)
        case Route():
            return (operation.router,)
        case ExpertProducts():
            return operation.gate, operation.up, operation.down
    return ()
