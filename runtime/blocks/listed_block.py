"""Units that are carried out from their list of operations: each is one call of a side's kernels.

What is declared of a unit (pshard/units/) is what runs; rewrites of the list are in pshard/units/rewrites.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pshard.runtime.blocks.block import ALONE, Block, Laid, Residual, Work, leave, normalise, take
from pshard.runtime.kernels.api import DeltaWeights, InnerNorm, Packed, RowIndex, Scoring
from pshard.runtime.memory.weights import UnitWeights
from pshard.units.attention import SCORES, TEMPERATURE
from pshard.units.delta_net import OPEN as OPEN_NETS
from pshard.units.grams import OPEN as OPEN_GRAMS
from pshard.units.latent_attention import sizes_of
from pshard.units.operands import JOINED, NORMED, STREAM, Rows
from pshard.units.operations import (
    AddGrams,
    Attend,
    AttendLatent,
    Bend,
    ChooseCells,
    Convolve,
    DeltaNet,
    GatedProduct,
    GateGrams,
    GateRows,
    HeadProducts,
    InjectStream,
    MixStreams,
    Norm,
    NormHeads,
    NormStreams,
    NormWide,
    PlaceRows,
    Product,
    ProductGroup,
    ResizeHeads,
    Rotate,
    SpreadStream,
    StoreIndex,
    StoreLatent,
    SumSquares,
    Take,
    TimesRows,
)
from pshard.units.rewrites import EndNorms, EnterStreams, Ffn, Gate, Step, rewrite
from pshard.units.short_conv import OPEN as OPEN_CONVS


@dataclass(frozen=True)
class Listed:
    """What a step of the unit carries out, and its tensors. scan: those of a gated delta net as kernels take them; net:
    how many states that cannot be cut come before its own."""

    steps: tuple[Step, ...]
    weights: UnitWeights
    scan: DeltaWeights | None = None
    net: int = 0


class ListedBlock(Block):
    """A unit of any kind whose operations all have an act below."""

    def prepare(self, laid: Laid) -> Listed:
        return Listed(rewrite(laid.operations), laid.weights)

    def inner_norm(self, work: Work, weights: Listed) -> InnerNorm | None:
        last = weights.steps[-1]
        return Course(work, weights, None, ALONE).inner_norm(last) if isinstance(last, EndNorms) else None

    def run(self, work: Work, weights: Listed, state: Any, residual: Residual) -> None:
        Course(work, weights, state, residual).run(weights.steps)
        if not any(STREAM in step.writes for step in weights.steps):  # a rank that only takes what it needs for others
            self.contribute_nothing(work, residual)

    def run_share(self, work: Work, weights: Listed, residual: Residual, out: torch.Tensor | None) -> None:
        places = {} if out is None else {weights.steps[-1].writes[0]: out}
        Course(work, weights, None, residual, places).run(weights.steps)

    def run_rest(self, work: Work, weights: Listed, residual: Residual, from_cpu: torch.Tensor) -> None:
        Course(work, weights, None, residual, {JOINED: from_cpu}).run(weights.steps)


@dataclass
class Course:
    """One unit on its way through its operations. places: where operands are that do not lie in the side's scratch."""

    work: Work
    listed: Listed
    state: Any
    residual: Residual
    places: dict[Rows, torch.Tensor] = field(default_factory=dict)

    def run(self, steps: tuple[Step, ...]) -> None:
        """All of them."""
        for step in steps:
            ACTS[type(step)](self, step)

    @property
    def weights(self) -> UnitWeights:
        """The unit's tensors."""
        return self.listed.weights

    @property
    def tokens(self) -> int:
        """Rows that are computed."""
        return self.work.rows.tokens

    def at(self, operand: Rows) -> torch.Tensor:
        """Where an operand is, [tokens, columns]."""
        if operand in self.places:
            return self.places[operand]
        rows, end = self.work.side.space.rows(operand.buffer, self.tokens), operand.first + operand.width
        return rows[:, operand.first : end] if operand.width else rows

    def target(self, out: Rows, adds: bool) -> tuple[torch.Tensor, bool]:
        """Where a result goes, and whether it is added to what is there: what is added to the residual stream may be a
        rank's part of a sum."""
        return self.residual.target(self.work.side, self.tokens) if adds else (self.at(out), False)

    def vector(self, role: str) -> torch.Tensor:
        return self.weights.vectors[role]

    def norm(self, norm: Norm) -> None:
        assert norm.weight is not None
        side, weight = self.work.side, self.vector(norm.weight.role)
        if norm.x == STREAM:
            normalise(side, weight, self.tokens, self.residual, None if norm.out == NORMED else self.at(norm.out))
        else:
            x, out = (
                self.at(rows).view(-1, norm.width) if norm.count > 1 else self.at(rows) for rows in (norm.x, norm.out)
            )
            scale = None if norm.scale is None else self.vector(norm.scale.role)
            eps = norm.eps_by * side.config.inner_eps
            side.kernels.rms_norm(x, weight, eps, out, accumulate=norm.adds, scale=scale)

    def end(self, step: EndNorms) -> None:
        side = self.work.side
        if self.residual.postpones:
            return
        if step.parts and side.kernels.fuses_norms:
            side.kernels.add_normed(self.inner_norm(step), self.at(step.last.out))
            return
        for norm in step.norms:
            self.norm(norm)

    def inner_norm(self, step: EndNorms) -> InnerNorm:
        """What the step adds to the residual stream."""
        last, vectors = step.last, [self.vector(norm.weight.role) for norm in step.norms if norm.weight]
        parts = tuple((self.at(part.x), weight) for part, weight in zip(step.parts, vectors))
        factor = None if last.scale is None else self.vector(last.scale.role)
        return InnerNorm(self.at(last.x), vectors[-1], self.work.side.config.inner_eps, factor, parts)

    def take(self, operation: Take) -> None:
        if operation.out == NORMED:
            self.places[operation.out] = take(self.work.side, self.at(operation.x))
        else:
            self.work.side.kernels.place(self.at(operation.x), self.at(operation.out))

    def multiply(self, product: Product) -> None:
        side = self.work.side
        x, matrix = self.at(product.x), self.matrix(product.matrix.role, product.out)
        bias = None if product.bias is None else self.part(product.out).vectors[product.bias.role]
        if product.adds:
            leave(side, x, matrix, bias, self.residual)
        else:
            side.kernels.linear(x, matrix, self.at(product.out), side.space.tile, bias)

    def multiply_group(self, group: ProductGroup) -> None:
        side, first = self.work.side, group.writes[0]
        whole = Rows(group.out.buffer, group.out.first, sum(rows.width for rows in group.writes))
        vectors = self.part(first).vectors
        biases = tuple(None if bias is None else vectors[bias.role] for bias in group.biases)
        matrices = tuple(self.matrix(m.role, first) for m in group.matrices)
        side.kernels.linear_group(self.at(group.x), matrices, self.at(whole), side.space.tile, biases)

    def gate_up(self, gated: GatedProduct) -> None:
        side, activation = self.work.side, self.work.side.config.ffn_activation(gated.gate.layer)
        both = self.at(Rows(gated.out.buffer, gated.out.first, 2 * gated.up.rows))
        gate, up = (self.matrix(m.role, gated.out) for m in (gated.gate, gated.up))
        side.kernels.gate_up(self.at(gated.x), gate, up, self.at(gated.out), both, side.space.tile, activation)

    def matrix(self, role: str, out: Rows) -> Packed:
        """A matrix of the weights."""
        return self.part(out).matrices[role]

    def part(self, out: Rows) -> UnitWeights:
        """The weights; of rows that do not come first, those that lie elsewhere."""
        last = self.weights.last
        return last if last is not None and out.first else self.weights

    def gate(self, gate: Gate) -> None:
        kernels, activation = self.work.side.kernels, self.work.side.config.ffn_activation(gate.layer)
        both = self.at(Rows(gate.x.buffer, gate.x.first, 2 * gate.width))  # `out` may lie elsewhere than x
        kernels.gate_mul(both[:, : gate.width], both[:, gate.width :], self.at(gate.out), activation)

    def ffn(self, ffn: Ffn) -> None:
        kernels, m = self.work.side.kernels, self.weights.matrices
        gate, up, down = (m[tensor.role] for tensor in (ffn.gated.gate, ffn.gated.up, ffn.down.matrix))
        out, adds = self.target(ffn.down.out, ffn.down.adds)
        activation = self.work.side.config.ffn_activation(ffn.gated.gate.layer)
        apart = self.residual.leaving is not None
        if apart or not kernels.ffn(self.at(ffn.gated.x), gate, up, down, out, adds, activation):
            self.gate_up(ffn.gated)
            self.multiply(ffn.down)

    def rotate(self, rotate: Rotate) -> None:
        side, rows, qkv = self.work.side, self.rows(rotate.windowed), self.heads(rotate)
        q_norm, k_norm = (*(self.vector(norm.role) for norm in rotate.norms), None, None)[:2]
        heads, eps = (rotate.n_heads, rotate.n_kv_heads, rotate.head_dim), side.config.heads_eps or side.config.norm_eps
        where = side.ropes[rotate.rope], rows, self.state
        side.kernels.rope_store(qkv, heads, q_norm, k_norm, eps, *where, values=rotate.values)
        if rotate.warms and TEMPERATURE in side.space.tensors:  # where any position has another one than 1
            side.kernels.warm_rows(self.at(rotate.reads[0]), side.space.tensors[TEMPERATURE], rows.position)

    def attend(self, attend: Attend) -> None:
        side, sinks = self.work.side, None if attend.sinks is None else self.vector(attend.sinks.role)
        rows, out, partial = self.rows(attend.window > 0), self.at(attend.out), side.space.tensors["partial"]
        scale = side.config.scores_by
        slopes = None if attend.slopes is None else self.vector(attend.slopes.role)
        bent = Scoring(attend.cap, slopes, attend.chunked)
        if attend.seen is not None and (rule := side.config.selection):
            bent = replace(bent, seen=self.at(attend.seen).view(torch.int32), each=rule.each, most=rule.most)
        given = self.heads(attend), attend.heads, self.state, rows
        side.kernels.attention(*given, scale, out, partial, sinks=sinks, bent=bent)

    def rows(self, windowed: bool) -> RowIndex:
        """Where the rows stand, in cells of layers with a window or of others."""
        rows = self.work.rows.recent if windowed else self.work.rows
        assert rows is not None
        return rows

    def heads(self, operation: Rotate | Attend) -> torch.Tensor:
        """Queries, keys and values side by side."""
        beside = (rows.width for rows in operation.reads if rows.buffer == operation.x.buffer)
        return self.at(Rows(operation.x.buffer, operation.x.first, sum(beside)))

    def gate_rows(self, gate: GateRows) -> None:
        self.work.side.kernels.gate_rows(self.at(gate.x), self.at(gate.gate), gate.curve)

    def resize_heads(self, resize: ResizeHeads) -> None:
        self.work.side.kernels.resize_heads(self.at(resize.x), self.at(resize.out), resize.heads, resize.by)

    def times_rows(self, times: TimesRows) -> None:
        self.work.side.kernels.times_rows(self.at(times.x), self.at(times.by))

    def bend(self, bend: Bend) -> None:
        numbers = None if bend.numbers is None else self.vector(bend.numbers.role)
        self.work.side.kernels.bend_rows(self.at(bend.x), bend.how, numbers, bend.limit)

    def norm_heads(self, norm: NormHeads) -> None:
        side, weight = self.work.side, self.vector(norm.weight.role)
        side.kernels.norm_heads(self.at(norm.x), weight, norm.head, side.config.norm_eps, norm.centred)

    def sum_squares(self, squares: SumSquares) -> None:
        self.work.side.kernels.sum_squares(self.beside(squares), squares.q.width, self.at(squares.out))

    def norm_wide(self, norm: NormWide) -> None:
        side, sums = self.work.side, self.at(norm.sums)
        q_norm, k_norm = (self.vector(weight.role) for weight in norm.weights)
        side.kernels.norm_wide(self.beside(norm), q_norm, k_norm, sums, norm.of, side.config.norm_eps)

    def beside(self, operation: SumSquares | NormWide) -> torch.Tensor:
        """Queries and keys side by side."""
        return self.at(Rows(operation.q.buffer, operation.q.first, operation.width))

    def multiply_heads(self, products: HeadProducts) -> None:
        """Each head's own numbers with its own matrix, the first of the operand's into the first of the result's."""
        stack = products.stack
        x, out = self.by_head(products.x, stack.parts), self.by_head(products.out, stack.parts)
        matrix = self.weights.matrices[stack.role]
        self.work.side.kernels.head_products(x[..., : stack.cols], matrix, out[..., : stack.rows // stack.parts])

    def store_latent(self, store: StoreLatent) -> None:
        side, rows = self.work.side, self.work.rows
        queries = self.by_head(store.queries, store.n_heads)
        turned = self.by_head(store.out, store.n_heads)[..., store.rank :]
        norm, rope = (self.vector(store.norm.role), side.config.inner_eps), side.ropes["rope"]
        q = queries[..., queries.shape[2] - store.rope :]
        side.kernels.store_latent(self.at(store.x), q, turned, *norm, rope, rows, self.state)

    def attend_latent(self, attend: AttendLatent) -> None:
        side, latent = self.work.side, sizes_of(self.work.side.config)
        scale, partial = latent.score_scale * latent.query**-0.5, side.space.tensors["partial"]
        q, out = (self.by_head(operand, attend.n_heads) for operand in (attend.x, attend.out))
        side.kernels.attend_latent(q, attend.rank, self.state, self.work.rows, scale, out, partial)

    def scan(self, net: DeltaNet) -> None:
        side, index, scan = self.work.side, self.work.rows.sequences, self.listed.scan
        assert index is not None and scan is not None
        keys, values, gate, beta, alpha = net.reads
        qkv = self.at(Rows(net.x.buffer, net.x.first, keys.width + values.width))
        side.kernels.delta_net(
            qkv, self.at(gate), self.at(beta), self.at(alpha), scan, states=self.state.matrices,
            tails=self.state.tails, slots=index.slots,
            offsets=index.offsets, out=self.at(net.out), longest=index.longest,
            scratch=side.space.tensors["delta_room"].view(torch.uint8),
            opened=side.space.tensors[OPEN_NETS][self.listed.net],
        )  # fmt: skip

    def convolve(self, conv: Convolve) -> None:
        side, index, taps = self.work.side, self.work.rows.sequences, self.vector(conv.taps.role)
        assert index is not None
        x, given = self.at(Rows(conv.x.buffer, conv.x.first, 3 * conv.channels)), taps.view(-1, conv.each)
        side.kernels.short_conv(
            x, given, self.state.tails, index.slots, index.offsets, out=self.at(conv.out), longest=index.longest,
            opened=side.space.tensors[OPEN_CONVS][self.listed.net],
        )  # fmt: skip

    def by_head(self, operand: Rows, heads: int) -> torch.Tensor:
        """An operand as [tokens, heads, numbers of each]."""
        rows = self.at(operand)
        return rows if rows.dim() == 3 else rows.unflatten(1, (heads, -1))

    def join(self, place: PlaceRows) -> None:
        self.work.side.kernels.place(self.at(JOINED), self.at(place.out))


def _store_index(course: Course, store: StoreIndex) -> None:
    side, (q, k) = course.work.side, store.norms
    norms = course.vector(q.role), course.vector(k.role)
    given = course.at(store.x), course.at(store.key), norms, store.each, side.config.norm_eps
    side.kernels.store_index(*given, side.ropes[store.rope], course.work.rows, course.state.index)


def _choose_cells(course: Course, choose: ChooseCells) -> None:
    side, rule = course.work.side, (choose.each, choose.most)
    seen = course.at(choose.out).view(torch.int32)
    side.kernels.choose_cells(
        course.at(choose.x), course.state.index, rule, course.work.rows, side.space.tensors[SCORES], seen
    )


def _spread(course: Course, spread: SpreadStream) -> None:
    course.work.side.kernels.spread_stream(course.at(spread.x), course.at(spread.out), spread.count)


def _inject(course: Course, inject: InjectStream) -> None:
    course.work.side.kernels.inject_stream(course.at(inject.x), course.at(inject.out), inject.count)


def _norm_streams(course: Course, norm: NormStreams) -> None:
    side, weight = course.work.side, course.vector(norm.weight.role)
    side.kernels.norm_streams(course.at(norm.x), weight, norm.count, side.config.norm_eps, course.at(norm.out))


def _enter_streams(course: Course, step: EnterStreams) -> None:
    side, begin, norm = course.work.side, step.begin, step.norm
    x, streams, weight = course.at(begin.x), course.at(begin.out), course.vector(norm.weight.role)
    given = x, streams, isinstance(begin, SpreadStream), weight, norm.count
    side.kernels.enter_streams(*given, side.config.norm_eps, course.at(norm.out))


def _mix_streams(course: Course, mix: MixStreams) -> None:
    cleared = course.at(STREAM) if mix.clears else None
    x, gates, out = course.at(mix.x), course.at(mix.gates), course.at(mix.out)
    course.work.side.kernels.mix_streams(x, gates, mix.count, out, cleared)


def _gate_grams(course: Course, gate: GateGrams) -> None:
    side, norms = course.work.side, (course.vector(gate.norms[0].role), course.vector(gate.norms[1].role))
    given = course.at(gate.key), course.at(gate.value), course.at(gate.streams), norms, gate.count
    side.kernels.gate_grams(*given, side.config.norm_eps, course.at(gate.out))


def _add_grams(course: Course, add: AddGrams) -> None:
    side, index, taps = course.work.side, course.work.rows.sequences, course.vector(add.taps.role)
    assert index is not None
    given = course.at(add.x), course.vector(add.norm.role), taps.view(-1, add.each), (add.count, add.apart)
    side.kernels.add_grams(
        *given, side.config.norm_eps, course.at(add.out), course.state, slots=index.slots, offsets=index.offsets,
        opened=side.space.tensors[OPEN_GRAMS],
    )  # fmt: skip


ACTS: dict[type, Callable[[Course, Any], None]] = {
    Norm: Course.norm,
    EndNorms: Course.end,
    Take: Course.take,
    Product: Course.multiply,
    ProductGroup: Course.multiply_group,
    GatedProduct: Course.gate_up,
    Gate: Course.gate,
    Ffn: Course.ffn,
    PlaceRows: Course.join,
    HeadProducts: Course.multiply_heads,
    StoreLatent: Course.store_latent,
    AttendLatent: Course.attend_latent,
    DeltaNet: Course.scan,
    Convolve: Course.convolve,
    Rotate: Course.rotate,
    Attend: Course.attend,
    GateRows: Course.gate_rows,
    ResizeHeads: Course.resize_heads,
    TimesRows: Course.times_rows,
    Bend: Course.bend,
    NormHeads: Course.norm_heads,
    SumSquares: Course.sum_squares,
    NormWide: Course.norm_wide,
    StoreIndex: _store_index,
    ChooseCells: _choose_cells,
    SpreadStream: _spread,
    InjectStream: _inject,
    NormStreams: _norm_streams,
    EnterStreams: _enter_streams,
    MixStreams: _mix_streams,
    GateGrams: _gate_grams,
    AddGrams: _add_grams,
}
