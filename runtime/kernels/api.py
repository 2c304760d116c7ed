"""What blocks ask of a device's kernels: plain (torch, any device, the oracle), host (C++) and cuda (Triton).

Every function writes into `out` and allocates nothing that lasts. Shapes: M tokens (rows), D = d_model, H heads,
G KV heads, d head_dim. Activations are `act_dtype` (float32 on the host, bfloat16 on CUDA); the residual stream
`hidden` is float32 everywhere.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import torch

from pshard.model_config import Experts
from pshard.runtime.ranks.sum_norm import NO_SUM_NORM, SumNorm
from pshard.times.gpu_tiles import Tile, TileChoice
from pshard.units.share import AT_ONCE, Wave

if TYPE_CHECKING:
    from pshard.runtime.kernels.gpu.card_limits import CardLimits
    from pshard.runtime.ranks.peer_memory import PeerExchange


@dataclass(frozen=True)
class Packed:
    """A weight matrix [rows, cols] in the packed layout: `data` is uint8, flat, on the device that computes.

    never_int8: products of many rows stay in bfloat16, whatever is faster.
    """

    data: torch.Tensor
    qtype: str
    rows: int
    cols: int
    never_int8: bool = False


class Demand(Protocol):
    """Experts of a layer that are read from disk as tokens choose them, by one of two ways for all the time."""

    def bring(self, ids: torch.Tensor) -> None:
        """Let all experts of a micro-batch be there: ids, int32 [tokens, used]."""
        ...

    def open(self) -> tuple[int, int]:
        """What the C++ library's `experts` takes to do so by itself, from now on."""
        ...


@dataclass(frozen=True)
class ExpertWeights:
    """Those experts of a layer that a side computes. gate, up [F, D] and down [D, F]: by expert; None: not here.

    addresses: int64 [3, E] on the computing device, where gate, up and down of each begin (multiples of 16); 0 for one
    that is not here.
    biases: float32 [E, F], [E, F] and [E, D] of gate, up and down of all experts; None without. Down's is None on a
    rank that leaves it to another one.
    moved: experts that lie elsewhere than at home, or at present not here (None), by number: `addresses` says the same.
    demand: brings experts that must be read first.
    """

    gate: tuple[Packed | None, ...]
    up: tuple[Packed | None, ...]
    down: tuple[Packed | None, ...]
    addresses: torch.Tensor
    biases: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None = None
    moved: dict[int, tuple[Packed, Packed, Packed] | None] = field(default_factory=dict)
    demand: Demand | None = None
    rule: Experts | None = None  # of the layer, as kernels take it beside these
    # these are some of the layer's, in the wave that they came in: what all of them give is added up with the last one,
    # so that no bit depends on how many waves there are. Between waves the scratch stays as it is. summed: like
    # addresses, not 0 for those that are added up; None where there is one wave
    wave: Wave = AT_ONCE
    summed: torch.Tensor | None = None

    def matrices(self, number: int) -> tuple[Packed, Packed, Packed] | None:
        """Gate, up and down of an expert where it is now; None: not here."""
        if number in self.moved:
            return self.moved[number]
        gate, up, down = self.gate[number], self.up[number], self.down[number]
        return None if gate is None or up is None or down is None else (gate, up, down)


@dataclass(frozen=True)
class Routes:
    """Which experts every token of a micro-batch takes. ids: int32 [M, k], contiguous, different ones (those of chunks
    may come again), by falling score, ties to the lower number; -1 of rows that take none. weights: float32 [M, k]."""

    ids: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True)
class Segment:
    """Consecutive rows of a micro-batch that belong to one sequence: new tokens `start:start+tokens` after `past`.

    `blocks` are those that its cells lie in, old and new ones, in order: see LayerKV. `recent`: those of layers with a
    window, of the same cells, or () without such layers; `first`: the first cell there that is meant, whose block is
    whole. Blocks before it are nobody's and stand as 0. is_open: states that cannot be cut stay as they are, see
    `Kernels.delta_net`.
    """

    sequence: int
    start: int
    tokens: int
    past: int
    blocks: tuple[int, ...]
    recent: tuple[int, ...] = ()
    first: int = 0
    is_open: bool = False


class SequenceRows(NamedTuple):
    """Which rows of a micro-batch belong to which sequence, as `Kernels.delta_net` takes it: int32 on the computing
    device. As many sequences for all batches of so many tokens, at the end some without rows; `longest`: none has more,
    a power of two; 0: not told, each is computed token by token.
    """

    slots: torch.Tensor
    offsets: torch.Tensor
    longest: int


@dataclass(frozen=True)
class RowIndex:
    """Where each row of a micro-batch stands: int32 tensors on the computing device, segments on the host.

    position [M]: the row's place in its sequence. blocks: the blocks of every segment, one segment after the other.
    begin [M]: where those of the row's sequence begin in `blocks`; -1 of a row, at position 0, that only fills the
    micro-batch: no kernel keeps anything of it, and what becomes of its numbers is undefined. `cells` is the largest
    context of any row (past + new), an int for choosing launch sizes. spans: of the host's index, what
    `row_index.list_spans` says of the segments in memory that stays where it is (int64, a ctypes array); None where
    kernels are to make it.

    sequences: what a gated delta net asks of them, where the model has one.
    filled: rows of the micro-batch on the accelerator, those that only fill it too, for which buffers that pass between
    the sides are laid out; 0: as many as here.
    window: a row sees so many cells at most, the last of which is its own; 0: all. recent: the index of the layers that
    have a window; None where the model has no such.
    """

    begin: torch.Tensor
    position: torch.Tensor
    blocks: torch.Tensor
    segments: tuple[Segment, ...]
    cells: int
    spans: Any = None
    window: int = 0
    recent: "RowIndex | None" = None
    sequences: SequenceRows | None = None
    filled: int = 0

    @property
    def tokens(self) -> int:
        return self.position.shape[0]

    @property
    def longest(self) -> int:
        """As in `sequences`, which launches depend on; 0 where the model has no gated delta net."""
        return self.sequences.longest if self.sequences else 0


@dataclass(frozen=True, eq=False)
class Scoring:
    """What attention makes of scores, once they are scaled: they become cap tanh(score / cap) (0: they stay), and lose
    a head's number of `slopes`, float32 [H], for each cell that they lie back (None: nothing). chunked: windows are
    chunks of the text that follow each other, of which a row sees the cells of its own up to itself. seen: of the cells
    that a row would see, those that count, as `IndexKernels.choose_cells` leaves them by the rule (each, most)."""

    cap: float = 0.0
    slopes: torch.Tensor | None = None
    chunked: bool = False
    seen: torch.Tensor | None = None
    each: int = 1
    most: int = 0

    @property
    def changes(self) -> bool:
        """Whether anything is other than without it."""
        return self.cap != 0 or self.slopes is not None or self.chunked or self.seen is not None


AS_THEY_ARE = Scoring()


@dataclass(frozen=True)
class LayerKV:
    """KV cache of one layer on the device that attends: k and v are [blocks, n, G, d] float32, float16 or bfloat16, or
    q8_0, q4_0: int8, uint8 [blocks, n, bytes of a cell], see kv_codec. They may be of different types.

    Cell i of a sequence is cell i % n of the block that stands at i // n among the sequence's own. index: float32
    [blocks, n, m], by which cells are chosen; None where all are seen.
    """

    k: torch.Tensor
    v: torch.Tensor
    index: torch.Tensor | None = None


@dataclass(frozen=True)
class DeltaWeights:
    """What a gated delta net has beside its products, float32 on the device that computes.

    conv [C, 4] over the last inputs, the newest last; of dt_bias, decay (<= 0) and norm one number a value head, but of
    norm one of each of its `head` numbers. tiled: value head j uses key head j % key_heads; else
    j // (value_heads // key_heads). C = (2 key_heads + value_heads) head. gate: "silu" or "sigmoid", of what multiplies
    normalised outputs.
    """

    conv: torch.Tensor
    dt_bias: torch.Tensor
    decay: torch.Tensor
    norm: torch.Tensor
    eps: float
    key_heads: int
    value_heads: int
    head: int
    tiled: bool = False
    gate: str = "silu"


@dataclass(frozen=True)
class OpenNet:
    """Where a gated delta net, or a short convolution, left rows open: tails, `opened` and states as the kernel had
    them, and how a net's heads lie. A convolution has neither states nor heads."""

    tails: torch.Tensor
    opened: torch.Tensor
    states: torch.Tensor | None = None
    key_heads: int = 0
    tiled: bool = False

    @property
    def heads(self) -> tuple[int, int, int]:
        """Key heads, value heads, elements of each."""
        return (0, 0, 0) if self.states is None else (self.key_heads, *self.states.shape[1:3])

    def split(self, rows: slice) -> tuple[torch.Tensor, ...]:
        """Of open rows: what tails take in [n, C], keys as they count [n, key heads, d], what each value head adds
        along them [n, Hv, d], and what it leaves of its state before [n, Hv]."""
        keys, values, head = self.heads
        sizes = (self.tails.shape[2], keys * head, values * head, values)
        raw, k, u, left = self.opened[rows, : sum(sizes)].split(sizes, 1)
        return raw, k.unflatten(1, (keys, head)), u.unflatten(1, (values, head)), left


@dataclass(frozen=True)
class RopeTable:
    """cos and sin, float32 [context, dims/2], on the device; `pairing` as in pshard.model.Rope."""

    cos: torch.Tensor
    sin: torch.Tensor
    pairing: str


@dataclass(frozen=True)
class InnerNorm:
    """What a unit that ends in norms adds to the residual stream: x [M, D], RMS-normalised by weight [D]; then the
    stream is multiplied by factor [1]. float32, row strides of x free.

    parts: two results with weights, each RMS-normalised by its own; their sum is to be x, whose numbers may become
    anything.
    """

    x: torch.Tensor
    weight: torch.Tensor
    eps: float
    factor: torch.Tensor | None = None
    parts: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()


class RowKernels(Protocol):
    """What moves or scales rows of activations."""

    def look_up(self, table: Packed, ids: torch.Tensor, out: torch.Tensor) -> None:
        """out[M, D] = rows `ids` (int64 [M], all of them rows of the table) of table [rows, D], as the file defines
        them: float32, the same bits on every device. out contiguous."""
        ...

    def place(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """out[M, n] = rows[M, n], float32 that another side computed, as act_dtype. Row strides free."""
        ...

    def add_rows(self, x: torch.Tensor, rows: torch.Tensor) -> None:
        """x[M, n] += rows[M, n], float32. Row strides free."""
        ...

    def gate_rows(self, x: torch.Tensor, gate: torch.Tensor, curve: str = "sigmoid") -> None:
        """x[M, n] *= curve(gate[M, n]), act_dtype: the sigmoid or the "softplus" of it. A gate of fewer columns has one
        number for each of as many equal parts of a row of x. Row strides free."""
        ...

    def resize_heads(self, x: torch.Tensor, out: torch.Tensor, heads: int, by: float = 1.0) -> None:
        """out[M, heads * m] = the first m numbers of each head of x[M, heads * n] times `by`, act_dtype; zeros behind
        them where a head has fewer. out is no part of x. Row strides free."""
        ...

    def times_rows(self, x: torch.Tensor, by: torch.Tensor) -> None:
        """x[M, n] *= by[M, n], x act_dtype, by float32. Row strides free."""
        ...

    def gate_mul(self, x: torch.Tensor, up: torch.Tensor, out: torch.Tensor, activation: str = "silu") -> None:
        """out[M, n] = act(x[M, n]) * up[M, n], act_dtype, as `gate_up` makes it of two products. Rows of x and up are
        equally far apart; out may be x. Row strides free."""
        ...

    def warm_rows(self, x: torch.Tensor, table: torch.Tensor, position: torch.Tensor) -> None:
        """x[M, n] *= table[position[M]], x act_dtype, table float32 [positions], position int32. Row strides free."""
        ...

    def weigh_rows(self, x: torch.Tensor, weights: torch.Tensor) -> None:
        """x[M, n] *= weights[M, 1], float32, which become 1. Row strides free."""
        ...

    def centre_rows(self, x: torch.Tensor) -> None:
        """x[M, n] -= the mean of each row, float32. Row strides free."""
        ...

    def bend_rows(self, x: torch.Tensor, how: str, numbers: torch.Tensor | None = None, limit: float = 0.0) -> None:
        """x[M, n] as bent in one of `BENDS`, act_dtype or float32, in float32 arithmetic. Row strides free.

        "times", "plus": each by its number, numbers [n] or a divisor of n of them, again and again; "clamp": to within
        +-limit; "relu2": max(x, 0)^2; "gelu", "gelu16": as of `gate_up`; "xielu" (arXiv 2411.13010), of numbers
        (a, b, c, e): a x^2 + c x above 0, else b (expm1(min(x, e)) - x) + c x; "order": number i of a row becomes what
        number numbers[i] was. numbers float32."""
        ...

    def norm_heads(self, x: torch.Tensor, weight: torch.Tensor, head: int, eps: float, centred: bool = False) -> None:
        """Each `head` numbers of x[M, n], act_dtype, RMS-normalised, with `centred` less their mean before, times
        weight[n], float32: every head has its own. Row strides free."""
        ...

    def sum_squares(self, x: torch.Tensor, first: int, out: torch.Tensor) -> None:
        """out[M, 2] = the squares of the first `first` columns of x[M, n], act_dtype, added up, and those of the rest,
        float32. Row strides of x free, out contiguous."""
        ...

    def norm_wide(
        self,
        x: torch.Tensor,
        q_norm: torch.Tensor,
        k_norm: torch.Tensor,
        sums: torch.Tensor,
        of: tuple[int, int],
        eps: float,
    ) -> None:
        """x[M, n], act_dtype: its first columns, which have weights q_norm, and the others with k_norm, RMS-normalised
        by sums[M, 2] of the squares of so many numbers, `of`, of which they are some; weights and sums float32. Row
        strides of x free."""
        ...

    def scale_rows(self, x: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor) -> None:
        """x[M, n] *= sigmoid(hidden[M, D] . weight[D]), one number a row; x act_dtype, hidden and weight float32. Row
        strides free."""
        ...


class StateKernels(Protocol):
    """What takes and leaves states of a fixed size of each sequence."""

    def delta_net(
        self,
        qkv: torch.Tensor,
        z: torch.Tensor,
        beta: torch.Tensor,
        alpha: torch.Tensor,
        weights: DeltaWeights,
        states: torch.Tensor,
        tails: torch.Tensor,
        slots: torch.Tensor,
        offsets: torch.Tensor,
        out: torch.Tensor,
        longest: int,
        scratch: torch.Tensor | None = None,
        opened: torch.Tensor | None = None,
    ) -> None:
        """A gated delta net: convolution of qkv [M, C] over its last inputs, silu, L2 norms of q and k, the recurrence,
        and out [M, Hv d] = RMSNorm(o) * gate(z [M, Hv d]). beta, alpha [M, Hv]: as the products give them.

        Columns of qkv are all q, all k, all v. Tokens of sequence i, those from offsets[i] to offsets[i + 1], continue
        its state states[slots[i]] [Hv, dk, dv], float32, and its last three inputs tails[slots[i]] [3, C], float32, the
        oldest first; both are changed in place. A sequence without tokens, and rows from offsets[-1] on, touch nothing.
        Slots are different ones. slots [s] and offsets [s + 1]: int32 on the device.

        Rows are open where the slot stands as -1 - slot: state and tail stay as they are, and `opened`, float32
        [rows, `DeltaNet.open_width`], has in the place of each row what `settle_states` needs. Such sequences, of
        at most DELTA_STEPS tokens, go token by token whatever others do.

        qkv, z, beta, alpha and out: act_dtype or float32, row strides free; out is none of the others. longest: no
        sequence has more tokens, known to the host, or 0: what is launched, and whether token by token (0 too) or in
        chunks, depends on it and on shapes alone, so one captured launch serves every batch of these. scratch: uint8,
        of `DeltaNet.scratch_nbytes`.
        """
        ...

    def short_conv(
        self,
        x: torch.Tensor,
        taps: torch.Tensor,
        tails: torch.Tensor,
        slots: torch.Tensor,
        offsets: torch.Tensor,
        out: torch.Tensor,
        longest: int,
        opened: torch.Tensor | None = None,
    ) -> None:
        """A gated short convolution: out [M, C] = g * conv(a * b), where x [M, 3 C] has a, g and b side by side, and
        conv multiplies a channel's last n inputs by its taps [C, n], float32, the newest by the last.

        tails [s, n - 1, C], slots, offsets and longest are as in `delta_net`. x and out act_dtype, row strides free.
        opened: float32 [rows, C], where open rows leave a * b; they have the bits of tokens that come one by one.
        """
        ...

    def settle_states(self, nets: Sequence[OpenNet], slot: int, rows: slice) -> None:
        """Take the first of a sequence's open rows into its states and tails, of layers that `delta_net` or
        `short_conv` left them of: the same bits as if it had computed these rows alone."""
        ...


class StreamKernels(Protocol):
    """What several residual streams take, S of them of D numbers: streams [M, S D + more], float32, side by side; and
    n-grams, which are added to them. Row strides free."""

    def spread_stream(self, x: torch.Tensor, streams: torch.Tensor, count: int) -> None:
        """x[M, D], float32, as each of the `count` streams."""
        ...

    def inject_stream(self, x: torch.Tensor, streams: torch.Tensor, count: int) -> None:
        """Each stream += x[M, D], float32, times twice the sigmoid of its own of the S numbers behind the streams."""
        ...

    def norm_streams(
        self, streams: torch.Tensor, weight: torch.Tensor, count: int, eps: float, out: torch.Tensor
    ) -> None:
        """out[M, S D], act_dtype: each stream as RMS-normalised, times weight[S D], divided by S."""
        ...

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
        """`spread_stream`, or without `spreads` `inject_stream`, and then `norm_streams`, in one call."""
        ...

    def mix_streams(
        self, x: torch.Tensor, gates: torch.Tensor, count: int, out: torch.Tensor, cleared: torch.Tensor | None = None
    ) -> None:
        """out[M, D], float32: the sum over the S parts of x[M, S D] * sigmoid(gates[M, S D]), act_dtype. cleared
        becomes all zeros."""
        ...

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
        """out[M, S D], float32: for each stream value[M, D] times sigmoid(sign(s) sqrt(max(|s|, 1e-6))), where s is the
        product of the stream and its part of key[M, S D], both RMS-normalised with `norms` [S D], over sqrt(D). key and
        value act_dtype."""
        ...

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
        """streams += x[M, S D], float32, and silu(conv(n)), where n is each stream's part of x as RMS-normalised, and
        conv multiplies a channel's inputs 0, a, 2 a... tokens back by its taps [S D, t], the newest by the last. sizes:
        (S, a).

        tails [s, (t - 1) a, S D], slots and offsets are as in `delta_net`. opened: float32 [rows, S D], where open rows
        leave n.
        """
        ...


class IndexKernels(Protocol):
    """What an index of cells takes: see `Selection`. index [blocks, n, d], float32, in the blocks of a KV cache: in the
    last cell of each block of `each` tokens its key, in those before it the sum of raw keys up to their own."""

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
        """q [M, H d]: every head RMS-normalised and rotated by the row's position, in place. key [M, d], raw, goes into
        the row's cell: added to what is in the cell before it in its block; in the last one the mean, RMS-normalised
        and rotated by the position of the block's first token. act_dtype; norms, of q and keys, float32 [d]."""
        ...

    def choose_cells(
        self,
        q: torch.Tensor,
        index: torch.Tensor,
        rule: tuple[int, int],
        rows: RowIndex,
        scores: torch.Tensor,
        seen: torch.Tensor,
    ) -> None:
        """Bit b of word w of a row of seen, int32 [M, W], says whether the row sees its block w n / each + b: those
        `most` complete ones of the largest sum over the heads of max(q . key, 0), of equal ones the first; and that
        which follows the complete ones. rule: (each, most). q [M, H d] act_dtype. Cells behind the row's own do not
        count, whatever bits say. scores: float32 scratch [R, n W / each] for so many rows at a time."""
        ...


class Kernels(RowKernels, StateKernels, StreamKernels, IndexKernels, Protocol):
    """One device's kernels."""

    act_dtype: torch.dtype
    repeatable: bool  # nothing allocated that lasts, launch sizes by shapes and RowIndex.cells: fit for a graph
    fills: bool  # rows that only fill a micro-batch may be among theirs, see RowIndex
    fuses_sums: bool  # whether these are `SumKernels`
    leaves_norms: bool  # whether these are `NormKernels`
    fuses_norms: bool  # whether `add_normed` is less than the norms that it is made of
    recordable: bool  # their calls of the C++ library may be written down, and made again as one

    def forget(self) -> None:
        """Rows may have been written by others since the last call: no kernel goes by what it has made of them."""
        ...

    def rms_norm(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor,
        accumulate: bool = False,
        rounded: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
    ) -> None:
        """out[M, D] = (out if accumulate else 0) + hidden[M, D] * rsqrt(mean(hidden^2) + eps) * weight[D].

        scale: float32 [1], with accumulate: the sum is multiplied by it.
        hidden, weight float32; out float32 or act_dtype, and not hidden. rounded: where `place` will put `out`, of more
        than SMALL_BATCH rows that are not added: it may be done by then.
        """
        ...

    def add_normed(
        self,
        inner: InnerNorm,
        hidden: torch.Tensor,
        norm: "tuple[torch.Tensor, float, torch.Tensor] | None" = None,
        rounded: torch.Tensor | None = None,
    ) -> None:
        """hidden[M, D], float32, as `rms_norm` of `inner` with accumulate leaves it; then, of norm (weight, eps, out),
        `rms_norm` of hidden into out. rounded: as there."""
        ...

    def linear(
        self,
        x: torch.Tensor,
        weight: Packed,
        out: torch.Tensor,
        tile: torch.Tensor,
        bias: torch.Tensor | None = None,
        accumulate: bool = False,
    ) -> None:
        """out[M, rows] = (out if accumulate else 0) + x[M, cols] @ W.T + bias[rows].

        x act_dtype, row stride free, columns contiguous; out act_dtype or float32 (row stride free: a slice of a wider
        buffer). `tile`: uint8 scratch of pshard.buffers.dequant_bytes for M above SMALL_BATCH (may be empty below).
        """
        ...

    def linear_group(
        self,
        x: torch.Tensor,
        weights: tuple[Packed, ...],
        out: torch.Tensor,
        tile: torch.Tensor,
        biases: tuple[torch.Tensor | None, ...],
    ) -> None:
        """out[M, sum of rows] = x @ W.T + bias of each weight, side by side: `linear` of several weights at once."""
        ...

    def gate_up(
        self,
        x: torch.Tensor,
        gate: Packed,
        up: Packed,
        out: torch.Tensor,
        both: torch.Tensor,
        tile: torch.Tensor,
        activation: str = "silu",
    ) -> None:
        """out[M, F] = act(x @ gate.T) * (x @ up.T), act_dtype; act is "silu", "gelu" approximated by tanh, or "gelu16",
        the same of half-precision numbers, in half precision, where activations are float32; of "silu<7" silu's numbers
        are at most 7, and x @ up.T is within it.

        `both` [M, 2F] act_dtype is scratch; out may be a view of its first M*F elements' columns (both[:, :F]).
        """
        ...

    def ffn(
        self,
        x: torch.Tensor,
        gate: Packed,
        up: Packed,
        down: Packed,
        out: torch.Tensor,
        accumulate: bool,
        activation: str = "silu",
    ) -> bool:
        """A whole FFN at once, as `gate_up` and then `linear` give it, where that saves calls; False: nothing was done.

        x [M, D] act_dtype; out [M, D] float32. Row strides free.
        """
        ...

    def route(
        self,
        x: torch.Tensor,
        router: Packed,
        rule: Experts,
        routes: Routes,
        bias: torch.Tensor | None = None,
        choice_bias: torch.Tensor | None = None,
        begin: torch.Tensor | None = None,
        factors: torch.Tensor | None = None,
    ) -> None:
        """Which experts x[M, D] (float32) takes, and with which weights, by the rule; written into `routes`.

        Scores are made of x @ router.T + bias[E] in float32; router [E, D] is F32, F16 or BF16. begin: of `RowIndex`,
        where rows may be there only to fill the micro-batch: these take no expert. Nor do rows that `routes` has beyond
        those of x, on the CPU: the accelerator's, which only fill it. factors: float32 [E], by which weights are
        multiplied at last.
        """
        ...

    def choose_chunks(self, scored: Routes, rule: Experts, routes: Routes) -> None:
        """Which experts of chunks rows take, and with which weights, by `Chunks`; written into `routes`. scored: all
        experts with their softmax scores, as `route` gives them."""
        ...

    def experts(
        self,
        x: torch.Tensor,
        routes: Routes,
        weights: ExpertWeights,
        rule: Experts,
        out: torch.Tensor,
        scratch: dict[str, torch.Tensor],
        accumulate: bool,
    ) -> None:
        """out[M, D] = (out if accumulate else 0) + the sum over the experts of each token that `weights` has of its
        weight * (down . act(gate . x + bias, up . x + bias) + bias). x [M, D] float32 or act_dtype;
        out float32, row strides free.

        act(g, u) is silu(g) * u, relu(g) * u, a gelu as in `gate_up`, or for "clamped" with g = min(g, 7), u =
        clamp(u, -7, 7): g * sigmoid(1.702 g) * (u + 1). The order of sums depends on shapes and routes only. Of several
        waves `out` is written with the last. scratch: what pshard.units.moe.experts lists, and for float32 x "normed"
        [M, D] of act_dtype.
        """
        ...

    def rope_store(
        self,
        qkv: torch.Tensor,
        heads: tuple[int, int, int],
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
        rope: RopeTable,
        rows: RowIndex,
        kv: LayerKV,
        values: bool = False,
    ) -> None:
        """qkv [M, (H + 2G) d] act_dtype, heads = (H, G, d). Per head: RMS-normalise q and k where a norm weight
        (float32 [d]) is given, and v, without weights, with `values`; rotate q in place and k by each row's position,
        and store k and v in the row's cell of kv.k and kv.v, quantised where these are codes. What is left of k and v
        in qkv is undefined. Of G = 0 there are only queries, and nothing is stored."""
        ...

    def attention(
        self,
        qkv: torch.Tensor,
        heads: tuple[int, int, int],
        kv: LayerKV,
        rows: RowIndex,
        scale: float,
        out: torch.Tensor,
        partial: torch.Tensor | None,
        sinks: torch.Tensor | None = None,
        bent: Scoring = AS_THEY_ARE,
    ) -> None:
        """Causal attention with grouped KV heads: the q part of qkv against the cells 0..position of the row's
        sequence, with `rows.window` against the last so many of them.

        out [M, H d] act_dtype. sinks: float32 [H], a logit of each head, not scaled, that takes part in the softmax and
        has no value. bent: what becomes of scores. `partial`: float32 scratch of n H (d + 2) decode_pieces for any n up
        to M and SMALL_BATCH.
        """
        ...

    def head_products(self, x: torch.Tensor, stack: Packed, out: torch.Tensor) -> None:
        """out[M, H, rows] = x[M, H, cols] @ W_h.T for each head's matrix of the H in `stack`, [H rows, cols].

        x and out act_dtype, the last dimension contiguous, other strides free; they do not overlap.
        """
        ...

    def store_latent(
        self,
        kv: torch.Tensor,
        q: torch.Tensor,
        out: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        rope: RopeTable,
        rows: RowIndex,
        cells: torch.Tensor,
    ) -> None:
        """kv [M, R + r]: a latent, which is RMS-normalised (norm float32 [R]), and a key, which is rotated; both into
        the row's cell. q [M, H, r], rotated, into out [M, H, r]. All act_dtype, the last dimension contiguous. What is
        left of kv is undefined.

        cells: [blocks, n, 1, R + r], or int8 [blocks, n, bytes] of q8_0: see LayerKV.
        """
        ...

    def attend_latent(
        self,
        q: torch.Tensor,
        rank: int,
        cells: torch.Tensor,
        rows: RowIndex,
        scale: float,
        out: torch.Tensor,
        partial: torch.Tensor | None,
    ) -> None:
        """Causal attention of q [M, H, R + r] over the cells 0..position of the row's sequence, whose first R = rank
        numbers are the values: the first R of out [M, H, R + r]; what the others become is undefined.

        q and out act_dtype, contiguous. partial: float32 scratch of n H (R + 2) latent_pieces for any n up to M and
        SMALL_BATCH.
        """
        ...


@runtime_checkable
class TiledKernels(Kernels, Protocol):
    """Kernels whose tiles can be chosen.

    limits: of the card that they run on. passed_over: one line for every tile that was wanted and does not work there.
    """

    @property
    def limits(self) -> "CardLimits": ...

    @property
    def passed_over(self) -> tuple[str, ...]: ...

    def use_tiles(self, choices: Iterable[TileChoice]) -> None:
        """From now on, these tiles for their kernels, types and tokens, and the defaults for all others; where one does
        not work on this card, the next that does."""
        ...

    def tiles_of(self, kernel: str, qtype: str, tokens: int) -> tuple[Tile, ...]:
        """What a kernel may be cut into on this card, the default first; of kernels that are no products of few rows
        since they were called, none before."""
        ...

    def try_tile(self, choice: TileChoice) -> None:
        """From now on this tile and no other for its kernel, type and tokens: KernelRefused where it does not work."""
        ...


NextNorm = tuple[torch.Tensor, float]  # weight and eps of the `rms_norm` that comes next


@dataclass(frozen=True)
class PendingSum:
    """Ranks' parts [M, D], see `Group.part_dtype`, whose sum the unit that follows adds to `hidden` as it normalises
    it. wire: the type that they are rounded to before they are added."""

    exchange: "PeerExchange"
    part: torch.Tensor
    wire: str
    norm: SumNorm = NO_SUM_NORM


class NormKernels(Kernels, Protocol):
    """Kernels whose products can leave a norm of what they have been added to.

    following: the product is added to rows of which that `rms_norm` comes next; what this gives is taken by
    `linear_group` of packed matrices, or by `route`, alone. The product may make the norm as it ends.
    """

    def linear(
        self,
        x: torch.Tensor,
        weight: Packed,
        out: torch.Tensor,
        tile: torch.Tensor,
        bias: torch.Tensor | None = None,
        accumulate: bool = False,
        following: NextNorm | None = None,
    ) -> None:
        """See `Kernels.linear`."""
        ...

    def experts(
        self,
        x: torch.Tensor,
        routes: Routes,
        weights: ExpertWeights,
        rule: Experts,
        out: torch.Tensor,
        scratch: dict[str, torch.Tensor],
        accumulate: bool,
        following: NextNorm | None = None,
    ) -> None:
        """See `Kernels.experts`."""
        ...


class SumKernels(Kernels, Protocol):
    """Kernels that sum over ranks too."""

    def linear_part(
        self,
        exchange: "PeerExchange",
        wire: str,
        x: torch.Tensor,
        weight: Packed,
        part: torch.Tensor,
        tile: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> None:
        """part[M, rows] = x . weight + bias as in `linear`, for the `sum_rms_norm` that comes next: where it can, the
        kernel brings its results to the peers as they are made. wire: as in that sum."""
        ...

    def experts_part(
        self,
        x: torch.Tensor,
        routes: Routes,
        weights: ExpertWeights,
        rule: Experts,
        part: torch.Tensor,
        scratch: dict[str, torch.Tensor],
    ) -> None:
        """part[M, D] as `experts` gives it, for the `sum_rms_norm` of that very tensor, which comes next: where it can,
        what the experts gave is added up no sooner than it leaves for the peers."""
        ...

    def sum_rms_norm(
        self,
        sums: PendingSum,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor,
        rounded: torch.Tensor | None = None,
    ) -> None:
        """hidden[M, D] += sum of the ranks' part[M, D], which is float32 or, of more than SMALL_BATCH rows, bfloat16;
        then as `rms_norm`. See `PeerExchange.sum_rows` and `sum_many_rows`."""
        ...
