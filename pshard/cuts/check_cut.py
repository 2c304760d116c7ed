"""Split states: how every value of a unit lies over the ranks while it is computed, derived from its cut.

A value is mirrored (every rank has all of it), split (each rank has a range of its columns) or partial (the sum over
the ranks is the value). `check_cut` walks a unit's operations and refuses a cut whose result would be wrong. It knows
nothing of how the cut was chosen, so it is an independent check of `pshard.cuts.tensor_cuts`. No torch.
"""

from dataclasses import dataclass, replace

from pshard.errors import UserError
from pshard.model import ModelSpec
from pshard.tensor import TensorSpec
from pshard.units.operands import Rows
from pshard.units.operations import (
    AddGrams,
    AddRows,
    Attend,
    Bend,
    BendLogits,
    ChooseCells,
    Convolve,
    DeltaNet,
    ExpertProducts,
    GatedProduct,
    GateGrams,
    GateRows,
    InjectStream,
    LookUp,
    MixStreams,
    Norm,
    NormHeads,
    NormStreams,
    NormWide,
    Operation,
    PickRows,
    Product,
    ProductGroup,
    ResizeHeads,
    Rotate,
    Route,
    SpreadStream,
    StoreIndex,
    SumSquares,
    Take,
    TimesRows,
    WeighRows,
)
from pshard.units.ports import BESIDE, HIDDEN, IDS, PRIOR
from pshard.units.unit import Unit

Range = tuple[int, int]


@dataclass(frozen=True)
class TensorCut:
    """How one tensor lies over the ranks.

    `axis`: "none" (every rank holds all of it), "rows" (outputs of a matrix, elements of a vector), "cols" (inputs) or
    "sum" (no rank's part has it: all ranks normalise what they have summed by it).
    `ranges`: (start, stop) along that axis for each rank; ranges of k and v may repeat where ranks share a KV head.
    `stacks`: the cut is made in each of so many equal parts, one below the other, as a layer's experts stand, or one
    beside the other.
    """

    role: str
    axis: str
    ranges: tuple[Range, ...]
    stacks: int = 1


@dataclass(frozen=True)
class UnitCut:
    """How the tensors of one unit lie over the ranks, in the order of `Unit.tensors`. enters: a rank without a part of
    the unit's work needs what is whole of it all the same, as the unit leaves to others what it has normalised, or
    leaves states to a head."""

    unit: str
    tensors: tuple[TensorCut, ...]
    enters: bool = False

    def holds(self, rank: int) -> bool:
        """Whether the rank has a part of the unit's work. A unit without a cut tensor is on every rank."""
        cut = [t for t in self.tensors if t.axis not in ("none", "sum")]
        return not cut or any(t.ranges[rank][0] < t.ranges[rank][1] for t in cut)

    def needs(self, tensor: TensorCut, rank: int) -> bool:
        """Whether the rank has some of a tensor, as far as this is the unit's to say."""
        return self.holds(rank) or (self.enters and tensor.axis == "none")


@dataclass(frozen=True)
class Spread:
    """`kind`: "mirrored", "split" (at column `ranges` of each of `stacks` equal parts) or "partial" (a summand on every
    rank)."""

    kind: str
    ranges: tuple[Range, ...] = ()
    stacks: int = 1


PORTS = (IDS, HIDDEN, PRIOR, *BESIDE)  # every rank has all of what stands there
# of which every rank computes all
WHOLE = (
    *(StoreIndex, ChooseCells, GateGrams, AddGrams, NormStreams),
    *(SpreadStream, InjectStream, MixStreams),
)
MIRRORED, PARTIAL = Spread("mirrored"), Spread("partial")


def check_cut(spec: ModelSpec, unit: Unit, cut: UnitCut, lender: UnitCut | None = None) -> None:
    """Raise UserError, naming architecture, tensor and reason, unless the unit gives the same result under this cut.
    lender: the cut of the unit whose cells it reads.

    What is added to the residual stream must end in a partial sum (an all-reduce follows), logits in slices (a gather).
    """
    flow = _Flow(spec, unit, cut, lender)
    for operation in unit.operations(spec.config):
        read = tuple(map(flow.find, operation.reads))
        flow.values.update(zip(operation.writes, flow.follow(operation, read)))
    for rows, value in flow.values.items():
        if rows.buffer in unit.summed:
            flow.expect(value == PARTIAL, unit.tensors[0].role, f"leaves a {value.kind} result where ranks sum parts")
    flow.expect_all_used()


class _Flow:
    """The operations of one unit, each from the states of what it reads to those of what it writes: `values`, by
    operand."""

    def __init__(self, spec: ModelSpec, unit: Unit, cut: UnitCut, lender: UnitCut | None = None) -> None:
        self.spec, self.unit, self.config = spec, unit, unit.sees(spec.config)
        self.cuts = {t.role: t for t in cut.tensors}
        self.of_cells = {t.role: t for t in lender.tensors} if lender else {}
        self.tensors: dict[str, TensorSpec] = {t.role: t for t in unit.tensors}
        self.used: set[str] = set()
        self.values: dict[Rows, Spread] = {}

    def find(self, operand: Rows) -> Spread:
        """How an operand lies: as it was written, maybe columns beside columns, or as ports lie. Raises ValueError
        where nothing has written it."""
        if operand == Rows(operand.buffer) and operand not in self.values:
            columns = {value for rows, value in self.values.items() if rows.buffer == operand.buffer}
            if columns == {MIRRORED}:
                return MIRRORED
        if operand not in self.values and operand.buffer not in PORTS:
            raise ValueError(f"{self.unit.name} reads {operand}, which none of its operations has written")
        return self.values.get(operand, MIRRORED)

    def follow(self, operation: Operation, values: tuple[Spread, ...]) -> tuple[Spread, ...]:
        """What an operation makes of what it reads, by what it writes."""
        match operation:
            case LookUp(table):
                self.expect(self.cut(table.role).axis == "none", table.role, "is looked up by whole rows but is cut")
            case Norm():
                return self.norm(operation, values)
            case Take() | AddRows() | PickRows() | BendLogits() | WeighRows():
                return values
            case ProductGroup(matrices):
                return tuple(self.linear(values[0], matrix) for matrix in matrices)
            case Rotate():
                for norm in operation.norms:
                    self.head_norm(norm.role)
            case Attend(sinks=sinks, slopes=slopes):
                borrowed = map(self.borrow, ("attn_k.weight", "attn_v.weight")) if operation.borrows else ()
                q, k, v = (*values, *borrowed)[:3]
                for of_heads in (sinks, slopes):
                    if of_heads:
                        self.cut_with_heads(of_heads.role, q)
                return (self.attend(q, k, v),)
            case Bend() | NormHeads() | GateRows() | TimesRows():
                self.bend(operation, values)
                return values[:1]
            case DeltaNet() | Convolve():
                return (_recur(self, operation, values),)
            case ResizeHeads():
                return (_resize(self, operation, values[0]),)
            case SumSquares() | NormWide():
                return _over_all_heads(self, operation, values)
            case Route():
                for tensor in (operation.router, *operation.biases):
                    self.expect(self.cut(tensor.role).axis == "none", tensor.role, "chooses among all but is cut")
            case GatedProduct(gate, up, scale):
                if scale is not None:
                    self.expect(self.cut(scale.role).axis == "none", scale.role, "needs all of its inputs but is cut")
                return (self.gated(values[0], gate, up),)
            case ExpertProducts(gate, up, down):  # of tokens that chose alike on all ranks, each sums what it has
                out = self.linear(self.gated(values[0], gate, up), down)
                self.summed(out, down)
                return (out,)
            case Product():
                return (_multiply(self, operation, values[0]),)
            case _:
                return _keep_all(self, operation, values)
        return values

    def expect(self, good: bool, role: str, reason: str) -> None:
        if not good:
            name = self.tensors[role].name if role in self.tensors else f"{self.unit.name} {role}"
            raise UserError(
                f"{self.spec.config.architecture}: {name} {reason}: it cannot run tensor-parallel; use -sm none"
            )

    def cut(self, role: str) -> TensorCut:
        self.expect(role in self.cuts, role, "is missing")
        self.used.add(role)
        return self.cuts[role]

    def expect_tiling(self, role: str, ranges: tuple[Range, ...], total: int) -> None:
        """Every index belongs to exactly one rank, in rank order."""
        at = 0
        for start, stop in ranges:
            self.expect(start == at <= stop, role, f"is cut into ranges {ranges} that leave a gap or overlap")
            at = stop
        self.expect(at == total, role, f"is cut up to {at} of {total}")

    def expect_all_used(self) -> None:
        for role in self.tensors:
            self.expect(role in self.used, role, "has no rule that says how it is cut")

    def norm(self, norm: Norm, values: tuple[Spread, ...]) -> tuple[Spread, ...]:
        """Of the mirrored residual stream, of what is added to it, or of one of a group of products."""
        role = norm.weight.role if norm.weight else "norm.weight"
        if norm.adds and not self.unit.ports.adds:  # to what every rank has
            self.expect(self.cut(role).axis == "none", role, "normalises over the whole vector but is cut")
            self.expect(
                values[0] == MIRRORED, role, f"is added by every rank, but what it is given is {values[0].kind}"
            )
            if norm.scale is not None:
                self.expect(self.cut(norm.scale.role).axis == "none", norm.scale.role, "multiplies what every rank has")
            return values
        if norm.adds:
            self.sum_norm(role, values[0])
            if norm.scale is not None:
                self.expect(self.cut(norm.scale.role).axis == "sum", norm.scale.role, "multiplies a sum over the ranks")
            return values
        self.expect(norm.weight is not None, role, "is missing")
        self.expect(self.cut(role).axis == "none", role, "normalises over the whole vector but is cut")
        self.expect(values == (MIRRORED,), role, f"normalises what is {values[0].kind} over the ranks")
        return values

    def sum_norm(self, role: str, x: Spread) -> None:
        """RMSNorm of what a unit adds to the residual stream: of the sum over the ranks, not of one rank's part."""
        axis = self.cut(role).axis
        self.expect(axis == "sum", role, "normalises what ranks would have to sum before")
        self.expect(x == PARTIAL, role, f"normalises a sum over the ranks, but what it is given is {x.kind}")

    def head_norm(self, role: str) -> None:
        """RMSNorm inside each head, where the model has it: right only if the weight belongs to one head."""
        self.expect(self.cut(role).axis == "none", role, "is the same for every head but is cut")
        width, head = self.tensors[role].cols, self.config.head_dim
        self.expect(width == head, role, f"normalises over {width} columns, more than one head of {head}")

    def gated(self, x: Spread, gate: TensorSpec, up: TensorSpec) -> Spread:
        """Two products of one input, and the product of what they give, element by element."""
        both = self.linear(x, gate), self.linear(x, up)
        self.expect(both[0] == both[1], up.role, f"is not cut where {gate.role} is")
        return both[0]

    def linear(self, x: Spread, matrix: TensorSpec) -> Spread:
        """x @ W.T + bias, or of each matrix in a stack."""
        role = matrix.role
        weight, parts = self.cut(role), max(1, matrix.parts)
        if weight.axis == "cols":
            self.expect_tiling(role, weight.ranges, self.tensors[role].cols // weight.stacks)
            self.expect(
                x == Spread("split", weight.ranges, weight.stacks),
                role,
                "has its columns cut elsewhere than its inputs are",
            )
            out = PARTIAL
        else:
            self.expect(x == MIRRORED, role, f"needs all of its inputs, which are {x.kind}")
            out = MIRRORED if weight.axis == "none" else Spread("split", weight.ranges, weight.stacks // parts)
        if weight.axis == "rows" and matrix.parts:
            self.expect(weight.stacks == parts, role, f"is {parts} matrices but is cut as {weight.stacks}")
        bias = f"{role.removesuffix('.weight')}.bias"
        if bias in self.tensors:
            cut, width = self.cut(bias), self.tensors[bias].cols
            if out == PARTIAL:
                added = sorted(stop - start for start, stop in cut.ranges)
                once = cut.axis == "rows" and added == [0] * (len(added) - 1) + [width]
                self.expect(once, bias, "must be added on exactly one rank, whole")
            else:
                self.expect(replace(cut, role=role) == weight, bias, f"is not cut as {role} is")
        return out

    def borrow(self, role: str) -> Spread:
        """How cells lie that another unit's matrix makes."""
        self.expect(role in self.of_cells, role, "is of no unit whose cells these are")
        cut = self.of_cells[role]
        return MIRRORED if cut.axis == "none" else Spread("split", cut.ranges)

    def attend(self, q: Spread, k: Spread, v: Spread) -> Spread:
        """Attention of whole q heads, each with its KV head on the same rank, equally many per KV head."""
        if q == k == v == MIRRORED:
            return MIRRORED
        config, role = self.config, "attn_q.weight"
        self.expect(q.kind == "split", role, "is whole where k or v is cut")
        self.expect(k == v, "attn_v.weight", "is not cut where attn_k.weight is")
        self.expect_tiling(role, q.ranges, self.tensors[role].rows)
        d, group = config.head_dim, config.n_heads // config.n_kv_heads
        for rank, ((q0, q1), (k0, k1)) in enumerate(zip(q.ranges, k.ranges)):
            self.expect(q0 % d == q1 % d == 0, role, f"is cut inside a head on rank {rank}")
            heads = range(q0 // d, q1 // d)
            needed = (heads[0] // group * d, (heads[-1] // group + 1) * d) if heads else (k0, k0)
            self.expect((k0, k1) == needed, "attn_k.weight", f"on rank {rank} is not the KV heads of its q heads")
            each = {sum(h // group == g for h in heads) for g in range(k0 // d, k1 // d)}
            self.expect(len(each) <= 1, role, f"on rank {rank} has KV heads with unequal numbers of q heads")
        return q

    def bend(self, operation: Bend | NormHeads | GateRows | TimesRows, values: tuple[Spread, ...]) -> None:
        """An activation that is changed in place, which no rank may have a summand of only."""
        x, role = values[0], self.unit.tensors[0].role
        self.expect(x != PARTIAL, role, "is of a unit that changes what ranks would have to sum before")
        match operation:
            case GateRows():
                each = operation.width // operation.gate.width
                gate = replace(values[1], ranges=tuple((a * each, b * each) for a, b in values[1].ranges))
                self.expect(x == gate, role, "is of a unit whose gate is cut elsewhere")
            case TimesRows():
                self.expect(x == MIRRORED, role, "is multiplied by what every rank has all of, but is cut")
            case NormHeads(weight):
                cut = self.cut(weight.role)
                here = cut.axis == "none" if x == MIRRORED else (cut.axis, cut.ranges) == ("rows", x.ranges)
                self.expect(here, weight.role, "is not cut where the heads are")
            case Bend(how, _, numbers) if numbers is not None:
                alike = how == "xielu" or x == MIRRORED or numbers.cols == self.spec.config.head_dim
                alike = alike or (how == "order" and all(b - a in (0, numbers.cols) for a, b in x.ranges))
                self.expect(self.cut(numbers.role).axis == "none", numbers.role, "is for all of its unit but is cut")
                self.expect(alike, numbers.role, "has a number of each column, which are cut")

    def scan(self, net: DeltaNet, values: tuple[Spread, ...]) -> Spread:
        """A gated delta net of whole key heads, each with all the value heads that use it on the same rank."""
        self.expect(self.cut(net.norm.role).axis == "none", net.norm.role, "is the same for every head but is cut")
        group, d = net.value_heads // max(1, net.key_heads), net.head
        parts, each = (group, 1) if net.tiled else (1, group)  # of what there is one of for each value head
        laid = [(2, d), (parts, each * d), (parts, each * d), (parts, each), (parts, each)]
        vectors = zip((*net.conv, net.dt_bias, net.decay), ((2, 4 * d), (parts, 4 * each * d), *laid[3:]))
        cuts = {tensor.role: self.cut(tensor.role) for tensor in (*net.conv, net.dt_bias, net.decay)}
        role = self.unit.tensors[0].role
        if all(value == MIRRORED for value in values):
            for name, cut in cuts.items():
                self.expect(cut.axis == "none", name, "is cut where the heads are whole")
            return MIRRORED
        self.expect(all(value.kind == "split" for value in values), role, "is of a unit whose inputs are cut in part")
        heads = tuple((start // d, stop // d) for start, stop in values[0].ranges)
        self.expect_tiling(role, heads, net.key_heads)
        wanted = [Spread("split", tuple((a * n, b * n) for a, b in heads), stacks) for stacks, n in laid]
        self.expect(list(values) == wanted, role, "is of a unit whose inputs are not cut at the same key heads")
        for tensor, (stacks, n) in vectors:
            cut = cuts[tensor.role]
            at = tuple((a * n, b * n) for a, b in heads)
            here = (cut.axis, cut.ranges, cut.stacks) == ("rows", at, stacks)
            self.expect(here, tensor.role, "is not cut where the heads are")
        return wanted[2]

    def cut_with_heads(self, role: str, q: Spread) -> None:
        """One number of each q head, on the head's rank."""
        cut, d = self.cut(role), self.config.head_dim
        of_heads = tuple((start // d, stop // d) for start, stop in q.ranges)
        here = cut.axis == "none" if q == MIRRORED else (cut.axis, cut.ranges) == ("rows", of_heads)
        self.expect(here, role, "is not cut where the heads are")

    def summed(self, out: Spread, matrix: TensorSpec) -> None:
        """The all-reduce after the unit: only a partial result may be summed. What all ranks add must be whole."""
        wanted = PARTIAL if self.unit.ports.adds or self.unit.summed else MIRRORED
        self.expect(out == wanted, matrix.role, f"gives a {out.kind} result, which the all-reduce would count wrongly")

    def gathered(self, out: Spread, matrix: TensorSpec) -> None:
        """The gather of the logits: every rank brings its own columns."""
        self.expect(out != PARTIAL, matrix.role, "is cut over its inputs, but logits are gathered, not summed")
        if out.kind == "split":
            self.expect_tiling(matrix.role, out.ranges, matrix.rows)


def _multiply(flow: _Flow, product: Product, x: Spread) -> Spread:
    """A product, and where its result goes."""
    out = flow.linear(x, product.matrix)
    if product.adds:
        flow.summed(out, product.matrix)
    elif flow.unit.kind.gives_logits:
        flow.gathered(out, product.matrix)
    return out


def _recur(flow: _Flow, operation: DeltaNet | Convolve, values: tuple[Spread, ...]) -> Spread:
    """What keeps a state of a fixed size of each sequence."""
    return flow.scan(operation, values) if isinstance(operation, DeltaNet) else _convolve(flow, operation, values)


def _convolve(flow: _Flow, conv: Convolve, values: tuple[Spread, ...]) -> Spread:
    """A short convolution of some channels, which no other reads."""
    cut, role = flow.cut(conv.taps.role), flow.unit.tensors[0].role
    flow.expect(len(set(values)) == 1, role, "is of a unit whose inputs are not cut at the same channels")
    at = tuple((a * conv.each, b * conv.each) for a, b in values[0].ranges)
    whole = values[0] == MIRRORED and cut.axis == "none"
    flow.expect(whole or (cut.axis, cut.ranges) == ("rows", at), conv.taps.role, "is not cut where the channels are")
    return values[0]


def _over_all_heads(flow: _Flow, operation: SumSquares | NormWide, values: tuple[Spread, ...]) -> tuple[Spread, ...]:
    """Norms of q and k over all heads at once."""
    return (_sum_squares(flow, values),) if isinstance(operation, SumSquares) else _norm_wide(flow, operation, values)


def _sum_squares(flow: _Flow, values: tuple[Spread, ...]) -> Spread:
    """Squares of heads of which every rank has its own, for the ranks to sum."""
    for x, role in zip(values, ("attn_q.weight", "attn_k.weight")):
        if x != MIRRORED:
            flow.expect_tiling(role, x.ranges, flow.tensors[role].rows)
    flow.expect(values[0].kind == values[1].kind, "attn_k.weight", "is not cut where attn_q.weight is")
    return MIRRORED if values[0] == MIRRORED else PARTIAL


def _norm_wide(flow: _Flow, operation: NormWide, values: tuple[Spread, ...]) -> tuple[Spread, ...]:
    """Norms over all heads, whoever has them: what is divided by is the sum over the ranks."""
    *heads, sums = values
    for x, weight in zip(heads, operation.weights):
        cut = flow.cut(weight.role)
        here = cut.axis == "none" if x == MIRRORED else (cut.axis, cut.ranges) == ("rows", x.ranges)
        flow.expect(here, weight.role, "is not cut where the heads are")
        summed = flow.unit.ports.between == operation.sums.buffer
        flow.expect(sums == MIRRORED or summed, weight.role, "normalises over heads of which a rank has only its own")
    return values[:2]


def _keep_all(flow: _Flow, operation: Operation, values: tuple[Spread, ...]) -> tuple[Spread, ...]:
    """What every rank computes of all streams, or of an index of all cells."""
    known, role = isinstance(operation, WHOLE), flow.unit.tensors[0].role
    flow.expect(known, role, f"is for {operation}, of which no cut is known")
    tensors: tuple[TensorSpec, ...]
    match operation:
        case StoreIndex(norms):
            tensors = norms
        case GateGrams():
            tensors = operation.norms
        case AddGrams():
            tensors = operation.norm, operation.taps
        case NormStreams(weight):
            tensors = (weight,)
        case _:
            tensors = ()
    for tensor in tensors:
        here = flow.cut(tensor.role).axis == "none"
        flow.expect(here, tensor.role, "is of what every rank computes whole, but is cut")
    whole = all(value == MIRRORED for value in values)
    flow.expect(whole, role, "is of a unit of which every rank must have all, but it is cut")
    return tuple(MIRRORED for _ in operation.writes)


def _resize(flow: _Flow, operation: ResizeHeads, x: Spread) -> Spread:
    """Whole heads with more or fewer numbers each."""
    n, m = (rows.width // operation.heads for rows in (operation.x, operation.out))
    whole = all(a % n == b % n == 0 for a, b in x.ranges)
    flow.expect(whole and x != PARTIAL, flow.unit.tensors[0].role, "is of a unit that is cut inside a head")
    return replace(x, ranges=tuple((a // n * m, b // n * m) for a, b in x.ranges))
