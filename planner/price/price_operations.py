"""What operations cost: one formula for each noun of `pshard.units.operations`, from the profile's tables."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum

from pshard.batch_sizes import SMALL_BATCH
from pshard.planner.price.profile_tables import Tables, count_pairs, runs_on_host
from pshard.planner.price.tier_loads import TierLoad
from pshard.quant import QUANT_TYPES
from pshard.routing.expert_uses import Uses, chosen_share, used_experts
from pshard.tensor import TensorSpec
from pshard.units.kv_cells import CODED
from pshard.units.operands import Rows
from pshard.units.operations import (
    AddGrams,
    AddRows,
    Attend,
    AttendLatent,
    Bend,
    BendLogits,
    ChooseCells,
    Convolve,
    DeltaNet,
    ExpertProducts,
    GatedProduct,
    GateGrams,
    GateRows,
    HeadProducts,
    InjectStream,
    LookUp,
    MixStreams,
    Norm,
    NormHeads,
    NormStreams,
    NormWide,
    Operation,
    PickRows,
    PlaceRows,
    Product,
    ProductGroup,
    ResizeHeads,
    Rotate,
    Route,
    SpreadStream,
    StoreIndex,
    StoreLatent,
    SumSquares,
    Take,
    TimesRows,
    WeighRows,
)
from pshard.units.quantised import find_runs, list_quantised
from pshard.units.rewrites import EnterStreams, end_norms, enter_once
from pshard.units.unit import Unit

# tokens of a prompt whose cells are read together: rows of GPU tiles (runtime/kernels/gpu/tiles/attention_tiles.py);
# plain torch takes as many as a window of 128 has
ATTENDED_AT_ONCE = 128


@dataclass(frozen=True)
class OneSide:
    """Who computes what: "acc" or "host" by the tables, `rows` of the micro-batch `load` over keys of `kv_type`, of
    experts by their `uses`, as so many unrelated tokens (`distinct`; None: the
    rows) use them. ready: what the unit before has left quantised for products of few rows. unit: whose operations
    they are, where that matters (see `Unit.stays_in_bf16`). behind_norms: the last norms of the unit before are made
    with the first one here."""

    side: str
    tables: Tables
    load: TierLoad
    rows: int
    kv_type: str
    uses: Uses = ()
    distinct: float | None = None
    ready: Rows | None = None
    unit: Unit | None = None
    behind_norms: bool = False

    @property
    def apart(self) -> float:
        """How many unrelated tokens use as many experts."""
        return self.rows if self.distinct is None else self.distinct

    @property
    def on_host(self) -> bool:
        """See `runs_on_host`."""
        return runs_on_host(self.side, self.tables.kind)


class Order(IntEnum):
    """Terms of a price, in the order in which they are added: plans hang on the last bits of what they compare."""

    PRODUCT = 0
    SAVED = 1
    NORM = 2
    RESIDUAL = 3
    OTHER = 4


Term = tuple[Order, float]


def price_operations(operations: Iterable[Operation], by: OneSide) -> float:
    """Seconds of operations in turn, with what a GPU launches beside them."""
    operations = tuple(operations)
    terms = [term for step in enter_once(operations) for term in price_operation(step, by)]
    if not by.on_host and by.rows <= SMALL_BATCH:
        terms += [(Order.OTHER, _quantise(by, cols)) for cols in list_quantised(operations, by.ready)]
    terms += [(Order.SAVED, -seconds) for seconds in _list_saved_by_norms(operations, by)]
    seconds = 0.0
    for kind in (Order.PRODUCT, Order.SAVED, Order.NORM, Order.RESIDUAL):
        seconds += sum(s for k, s in terms if k is kind)
    for kind, s in terms:
        seconds += s if kind is Order.OTHER else 0.0
    return seconds


def _list_saved_by_norms(operations: tuple[Operation, ...], by: OneSide) -> Iterator[float]:
    """What a GPU saves that makes norms by which units end in one launch, and the next unit's first norm in the same:
    what two norms apart take longer, and of further ones all but what they read."""
    first, ends = operations[0] if operations else None, end_norms(operations)
    if by.on_host:
        return
    if by.behind_norms and isinstance(first, Norm) and (timed := _elementwise(by, "two norms", first.width)):
        norm, added = _elementwise(by, "norm", first.width), _elementwise(by, "residual", first.width)
        yield min(norm, max(0.0, 2 * norm + added - timed))
    if ends is not None and _elementwise(by, "two norms", ends.last.width):
        for part in ends.parts:
            yield by.tables.elementwise(by.side, "norm", 1, part.width)


def price_operation(operation: Operation | EnterStreams, by: OneSide) -> list[Term]:
    """Seconds that one operation is made of. Raises TypeError for one that has no formula."""
    match operation:
        case LookUp(table, scale, each=each):
            scaled = [] if scale == 1 else [(Order.OTHER, _elementwise(by, "silu_mul", each * table.cols))]
            return [(Order.OTHER, _elementwise(by, "embed", each * table.cols)), *scaled]
        case Norm(width=width, adds=adds, count=count):
            added = [(Order.RESIDUAL, _elementwise(by, "residual", count * width))] if adds else []
            seconds = _elementwise(by, "norm", count * width)
            return [(Order.NORM, 2 * seconds if operation.centred else seconds), *added]
        case Take(width=width):  # as much as a norm, but where products take the port as it is
            return [] if by.on_host else [(Order.NORM, _elementwise(by, "norm", width))]
        case Product(matrix):
            added = [(Order.RESIDUAL, _elementwise(by, "residual", matrix.rows))] if operation.adds else []
            return [*_products(by, (matrix,)), *added]
        case ProductGroup(matrices):
            saved = -sum(_saved_by_one_launch(by, run) for run in _list_launches(operation, by))
            return [*_products(by, matrices), (Order.SAVED, saved)]
        case GatedProduct():
            return _gated(by, operation)
        case Bend() | NormHeads() | NormWide() | SumSquares():  # reads and writes as much as a norm
            return [(Order.OTHER, _elementwise(by, "norm", operation.width))]
        case ResizeHeads(x=x, out=out):  # as well, and what is new in longer heads is another launch
            return [(Order.OTHER, (1 + (out.width > x.width)) * _elementwise(by, "norm", operation.width))]
        case Convolve():  # reads three numbers for each, where the gate of an FFN reads two
            return [(Order.OTHER, _elementwise(by, "silu_mul", 3 * operation.channels // 2))]
        case GateRows(width) | TimesRows(width):  # reads and writes as much as the gate of an FFN
            return [(Order.OTHER, _elementwise(by, "silu_mul", width))]
        case Rotate():
            return [(Order.OTHER, _elementwise(by, "rope", operation.width)), *_beside_rotation(operation, by)]
        case Attend():
            return [(Order.OTHER, _attention(by, operation))]
        case HeadProducts(stack):  # as of one matrix as tall as all heads' together; its kernel knows no int8
            return _products(replace(by, tables=by.tables.in_bf16 or by.tables), (stack,))
        case StoreLatent():  # which normalises the latent as it goes
            return [(Order.OTHER, _elementwise(by, "rope", operation.width))]
        case AttendLatent():
            return [(Order.OTHER, _attend_latent(by, operation))]
        case DeltaNet():
            timed = by.tables.deltas.seconds(by.side, operation, by.load.tokens, by.load.sequences)
            return [(Order.OTHER, _untimed_delta(by, operation) if timed is None else timed)]
        case Route(router, chosen):
            timed = by.tables.routed.route(by.side, operation, by.rows)
            chunks = _elementwise(by, "norm", router.rows) if chosen == router.rows else 0.0  # chosen by all scores
            return [(Order.OTHER, (_untimed_route(by, router) if timed is None else timed) + chunks)]
        case ExpertProducts():
            by = by if len(by.uses) in (0, operation.of) else replace(by, uses=())  # which say nothing of chunks
            timed = by.tables.routed.experts(by.side, operation, by.apart, by.uses)
            return [(Order.OTHER, _untimed_experts(by, operation) if timed is None else timed)]
    return _price_others(operation, by)


def _pass_over(operation: PlaceRows | AddRows | PickRows | WeighRows | BendLogits, by: OneSide) -> list[Term]:
    """What reads and writes rows once or more: as much as a norm, of logits as the gate of an FFN."""
    if isinstance(operation, BendLogits):  # times; and divided, bent, times again
        passes = (operation.scale != 1) + 3 * (operation.cap != 0)
        return [(Order.OTHER, passes * _elementwise(by, "silu_mul", operation.width))]
    weights = _elementwise(by, "norm", 1) if isinstance(operation, WeighRows) else 0.0  # they become 1
    return [(Order.RESIDUAL, _elementwise(by, "norm", operation.width) + weights)]


def _beside_rotation(rotate: Rotate, by: OneSide) -> list[Term]:
    """A GPU normalises heads while their rows are rotated; it makes codes of keys and of values in launches of their
    own, looks temperatures up in one more, and multiplies by them in another."""
    n = int(rotate.normed) if by.on_host else 2 * (by.kv_type in CODED and rotate.n_kv_heads > 0)
    warms = 2 * rotate.warms
    return [(Order.OTHER, (n + warms) * _elementwise(by, "norm", rotate.width))] if n + warms else []


def _price_others(operation: Operation | EnterStreams, by: OneSide) -> list[Term]:
    """The same of what goes over rows, and of what models of several streams have. Raises TypeError for another
    operation."""
    match operation:
        case PlaceRows() | AddRows() | PickRows() | WeighRows() | BendLogits():
            return _pass_over(operation, by)
        case EnterStreams(begin, norm) if timed := _elementwise(by, "streams", norm.width):
            seconds = timed
        case EnterStreams(begin, norm):
            return _price_others(begin, by) + _price_others(norm, by)
        case NormStreams() | SpreadStream() | InjectStream():  # alone, in the same launch, or as much as a norm moves
            width = operation.width if isinstance(operation, NormStreams) else operation.count * operation.width
            seconds = _elementwise(by, "streams", width) or _elementwise(by, "norm", width)
        case StoreIndex():
            seconds = _elementwise(by, "norm", operation.width)
        case MixStreams():
            width = operation.count * operation.width
            seconds = _elementwise(by, "mix", width) or _elementwise(by, "silu_mul", width)
        case GateGrams():
            seconds = _elementwise(by, "silu_mul", operation.count * operation.width)
        case AddGrams():  # a norm, and a sum over a few inputs of each channel
            seconds = _elementwise(by, "norm", operation.channels)
            seconds += _elementwise(by, "silu_mul", operation.each * operation.channels)
        case ChooseCells():
            seconds = _choose_cells(by, operation)
        case _:
            raise TypeError(f"no formula says what {operation} costs")
    return [(Order.OTHER, seconds)]


def _gated(by: OneSide, gated: GatedProduct) -> list[Term]:
    """Two products, and what is made of both: of few rows on a GPU in one launch, unless it is gated apart."""
    pair = gated.gate, gated.up
    together = not by.on_host and _in_one_launch(by, pair)
    alike = together and len({bias is None for bias in gated.biases}) == 1
    saved = [(Order.SAVED, -_saved_by_one_launch(by, pair))] if alike else []
    made = [] if together and not gated.gated_apart else [(Order.OTHER, _elementwise(by, "silu_mul", gated.up.rows))]
    # reads all of a token as well, as a norm does
    scaled = [(Order.OTHER, _elementwise(by, "norm", gated.gate.cols + gated.up.rows))] if gated.scale else []
    return [*_products(by, pair), *saved, *made, *scaled]


def _products(by: OneSide, matrices: tuple[TensorSpec, ...]) -> list[Term]:
    return [(Order.PRODUCT, _matmul(by, matrix)) for matrix in matrices]


def _matmul(by: OneSide, matrix: TensorSpec) -> float:
    never_int8 = by.unit is not None and by.unit.stays_in_bf16(matrix)
    tables = by.tables.in_bf16 if never_int8 else None
    return (tables or by.tables).matmul(by.side, matrix.qtype, matrix.rows, matrix.cols, by.rows)


def _untimed_delta(by: OneSide, net: DeltaNet) -> float:
    """Where a profile has no delta nets: the bytes of states, tails and rows at the rate of a norm, which moves eight
    for each number; or arithmetic as of a product of bfloat16, where that takes longer."""
    load, chunked = by.load, by.load.takes_chunks
    nbytes = 2 * load.sequences * net.kept_nbytes
    nbytes += 4 * load.tokens * (net.channels + 2 * net.value_heads * net.head)
    moved = by.tables.elementwise(by.side, "norm", 1, nbytes // 8)
    rows = net.value_heads * net.head
    cols = round(net.flops(load.tokens, chunked) / (2 * rows * load.tokens))
    return max(moved, by.tables.matmul(by.side, "BF16", rows, cols, load.tokens) if chunked else 0.0)


def _untimed_route(by: OneSide, router: TensorSpec) -> float:
    """Where a profile has no routers: a product, and a choice that takes what a norm of the scores does."""
    return _matmul(by, router) + _elementwise(by, "norm", router.rows)


def _untimed_experts(by: OneSide, experts: ExpertProducts) -> float:
    """Where a profile has no experts: all that are used as one matrix as tall as they are together, of as many tokens
    as each of them has."""
    found = used_experts(experts.places, experts.chosen, experts.of, by.apart, by.uses)
    picks = experts.chosen * chosen_share(experts.places, experts.of, by.uses)  # of a token, among these
    used, tokens = max(1, round(found)), max(1, round(by.rows * picks / found))
    seconds = 0.0
    for stack in (experts.gate, experts.up, experts.down):
        rows = used * (stack.rows // stack.parts)
        seconds += by.tables.matmul(by.side, stack.qtype, rows, stack.cols, tokens)
    seconds += _elementwise(by, "silu_mul", round(picks * experts.down.cols))
    return seconds + _elementwise(by, "residual", round(picks * experts.gate.cols))


def _elementwise(by: OneSide, what: str, width: int) -> float:
    return by.tables.elementwise(by.side, what, by.rows, width)


def _quantise(by: OneSide, cols: int) -> float:
    """A launch that quantises what a product of few rows takes; where it was not timed, as the gate of an FFN."""
    return _elementwise(by, "quantise", cols) or _elementwise(by, "silu_mul", cols)


def _list_launches(group: ProductGroup, by: OneSide) -> list[tuple[TensorSpec, ...]]:
    """The matrices of one input by launches: a GPU's hold a few, the host's all."""
    matrices = group.matrices
    if by.on_host or by.rows > SMALL_BATCH:
        return [matrices]
    biases = group.biases or (None,) * len(matrices)
    runs = find_runs([(m.qtype, m.rows, bias is not None) for m, bias in zip(matrices, biases, strict=True)])
    return [tuple(matrices[i] for i in run) for run in runs]


def _in_one_launch(by: OneSide, matrices: tuple[TensorSpec, ...]) -> bool:
    """Whether matrices of one input are multiplied in one launch: small batches, one type with packed kernels."""
    few = by.rows <= (by.tables.vector_tokens if by.on_host else SMALL_BATCH)
    types = {m.qtype for m in matrices}
    return few and len(types) == 1 and bool(QUANT_TYPES[matrices[0].qtype].planes)


def _saved_by_one_launch(by: OneSide, matrices: tuple[TensorSpec, ...]) -> float:
    """Seconds by which one product as tall as those launched together is faster than they are in turn."""
    if not _in_one_launch(by, matrices):
        return 0.0
    qtype, cols = matrices[0].qtype, matrices[0].cols
    in_turn = sum(_matmul(by, m) for m in matrices)
    return max(0.0, in_turn - by.tables.matmul(by.side, qtype, sum(m.rows for m in matrices), cols, by.rows))


def _attention(by: OneSide, heads: Attend) -> float:
    """Attention of all sequences of the micro-batch; with a window over the cells that it sees. Tokens of a prompt are
    attended ATTENDED_AT_ONCE, so the cells of that many are read beside the window."""
    load, window = by.load, heads.window
    if heads.chosen and load.past + load.tokens // load.sequences > heads.chosen:
        return _attend_chosen(by, heads)
    if load.is_decode:
        context = min(load.past + 1, window) if window else load.past + 1
        return by.tables.decode_attention(by.side, heads, by.kv_type, load.sequences, context)
    each = -(-load.tokens // load.sequences)
    context = min(load.past, window - 1) + each if window else load.past + each
    if load.verifies:  # a text's cells are read once for its rows: as long as for one row at least
        together = by.tables.decode_attention(by.side, heads, by.kv_type, load.sequences, context)
        several, one = (by.tables.attention(by.side, heads, by.kv_type, n, context) for n in (each, 1))
        return together * max(1.0, several / one)
    seen = window + min(each, ATTENDED_AT_ONCE)
    seconds = load.sequences * by.tables.attention(by.side, heads, by.kv_type, each, context)
    return seconds * min(1.0, seen * each / count_pairs(each, context)) if window else seconds


def _attend_chosen(by: OneSide, heads: Attend) -> float:
    """The same of tokens of which some see no more than the chosen cells. These are attended one by one, but in a GPU's
    prompts, which read all cells and leave out others."""
    load, each = by.load, max(1, by.load.tokens // by.load.sequences)
    if not (by.on_host or load.is_decode or load.verifies):
        return _attention(by, replace(heads, chosen=0))
    whole = max(0, min(each, heads.chosen - load.past))  # tokens that see all cells
    one = by.tables.decode_attention(by.side, heads, by.kv_type, load.sequences, heads.chosen)
    first = load.sequences * by.tables.attention(by.side, heads, by.kv_type, whole, load.past + whole) if whole else 0.0
    return first + (each - whole) * one


def _choose_cells(by: OneSide, index: ChooseCells) -> float:
    """Products of the queries with the keys of complete blocks, as of a matrix of these; then what is best of the
    scores, which are read as often as a float has bits, in chunks that caches hold; but nothing where all are seen. By
    its own row where there is one."""
    load = by.load
    each = 1 if load.is_decode else -(-load.tokens // load.sequences)
    blocks = (load.past + each) // index.each
    if blocks <= index.most:  # all are seen, which a GPU writes down
        return 0.0 if by.on_host else _elementwise(by, "norm", 1)
    if timed := by.tables.elementwise(by.side, "index", by.rows, blocks * index.heads * index.head):
        return timed
    rows = by.rows * index.heads
    return by.tables.matmul(by.side, "BF16", blocks, index.head, rows) + _elementwise(by, "norm", 4 * blocks)


def _attend_latent(by: OneSide, latent: AttendLatent) -> float:
    """By rows of such attention, which look like others' of one KV head; else by others', whose keys and values lie
    apart: of few new tokens, which wait for cells to be read, half of it."""
    seconds = _attention(by, Attend(*latent.heads))
    each = -(-by.load.tokens // by.load.sequences)
    if by.tables.has_attention(by.side, latent.heads) or each > SMALL_BATCH:
        return seconds
    return seconds / 2
