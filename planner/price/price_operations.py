"""What operations cost: one formula for each noun of `pshard.units.operations`, from the profile's tables."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum

from pshard.batch_sizes import SMALL_BATCH
from pshard.planner.price.profile_tables import Tables, count_pairs, runs_on_host
from pshard.planner.price.tier_loads import TierLoad
from pshard.quant import QUANT_TYPES
from pshard.routing.expert_uses import Uses, chosen_share, used_experts
from pshard.tensor import TensorSpec
from pshard.units.operations import (
    AddGrams,
    AddRows,
    Attend,
    AttendLatent,
    Bend,
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
)

# tokens of a prompt whose cells are read together: rows of GPU tiles (runtime/kernels/gpu/tiles/attention_tiles.py);
# plain torch takes as many as a window of 128 has
ATTENDED_AT_ONCE = 128


@dataclass(frozen=True)
class OneSide:
    """Who computes what: "acc" or "host" by the tables, `rows` of the micro-batch `load` over keys of `kv_type`, of
    experts by their `uses`, as so many unrelated tokens (`distinct`; None: the
    rows) use them."""

    side: str
    tables: Tables
    load: TierLoad
    rows: int
    kv_type: str
    uses: Uses = ()
    distinct: float | None = None

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
    """Seconds of operations in turn."""
    terms = [term for operation in operations for term in price_operation(operation, by)]
    seconds = 0.0
    for kind in (Order.PRODUCT, Order.SAVED, Order.NORM, Order.RESIDUAL):
        seconds += sum(s for k, s in terms if k is kind)
    for kind, s in terms:
        seconds += s if kind is Order.OTHER else 0.0
    return seconds


def price_operation(operation: Operation, by: OneSide) -> list[Term]:
    """Seconds that one operation is made of. Raises TypeError for one that has no formula."""
    match operation:
        case LookUp(table, each=each):
            return [(Order.OTHER, _elementwise(by, "embed", each * table.cols))]
        case Norm(width=width, adds=adds, count=count):
            added = [(Order.RESIDUAL, _elementwise(by, "residual", count * width))] if adds else []
            seconds = _elementwise(by, "norm", count * width)
            return [(Order.NORM, 2 * seconds if operation.centred else seconds), *added]
        case Take(width=width):  # as much as a norm, but where products take the port as it is
            return [] if by.on_host else [(Order.NORM, _elementwise(by, "norm", width))]
        case PlaceRows(width) | AddRows(width):  # reads and writes as much as a norm
            return [(Order.RESIDUAL, _elementwise(by, "norm", width))]
        case Product(matrix):
            added = [(Order.RESIDUAL, _elementwise(by, "residual", matrix.rows))] if operation.adds else []
            return [*_products(by, (matrix,)), *added]
        case ProductGroup(matrices):
            return [*_products(by, matrices), (Order.SAVED, -_saved_by_one_launch(by, matrices))]
        case GatedProduct(gate, up):
            together = not by.on_host and _in_one_launch(by, (gate, up))
            saved = [(Order.SAVED, -_saved_by_one_launch(by, (gate, up)))] if together else []
            # without biases the product of both is made in that launch too
            gating = [(Order.OTHER, _elementwise(by, "silu_mul", up.rows))] if operation.biased or not together else []
            return [*_products(by, (gate, up)), *saved, *gating]
        case Bend() | NormHeads() | NormWide() | SumSquares() | ResizeHeads():  # reads and writes as much as a norm
            return [(Order.OTHER, _elementwise(by, "norm", operation.width))]
        case Convolve():  # reads three numbers for each, where the gate of an FFN reads two
            return [(Order.OTHER, _elementwise(by, "silu_mul", 3 * operation.channels // 2))]
        case GateRows(width) | TimesRows(width):  # reads and writes as much as the gate of an FFN
            return [(Order.OTHER, _elementwise(by, "silu_mul", width))]
        case Rotate():
            # a GPU normalises heads while their rows are rotated
            norms = (
                [(Order.OTHER, _elementwise(by, "norm", operation.width))] if operation.normed and by.on_host else []
            )
            return [(Order.OTHER, _elementwise(by, "rope", operation.width)), *norms]
        case Attend():
            return [(Order.OTHER, _attention(by, operation))]
        case HeadProducts(stack):  # as many bytes and products as of one matrix as tall as all heads' together
            return _products(by, (stack,))
        case StoreLatent():  # which normalises the latent as it goes
            return [(Order.OTHER, _elementwise(by, "rope", operation.width))]
        case AttendLatent():
            return [(Order.OTHER, _attend_latent(by, operation))]
        case DeltaNet():
            timed = by.tables.deltas.seconds(by.side, operation, by.load.tokens, by.load.sequences)
            return [(Order.OTHER, _untimed_delta(by, operation) if timed is None else timed)]
        case Route(router):
            timed = by.tables.routed.route(by.side, operation, by.rows)
            return [(Order.OTHER, _untimed_route(by, router) if timed is None else timed)]
        case ExpertProducts():
            by = by if len(by.uses) in (0, operation.of) else replace(by, uses=())  # which say nothing of chunks
            timed = by.tables.routed.experts(by.side, operation, by.apart, by.uses)
            return [(Order.OTHER, _untimed_experts(by, operation) if timed is None else timed)]
    return _price_streams(operation, by)


def _price_streams(operation: Operation, by: OneSide) -> list[Term]:
    """The same of what models of several streams have. Raises TypeError for another operation."""
    match operation:
        case NormStreams():  # timed with what goes into the streams before
            seconds = _elementwise(by, "streams", operation.width) or _elementwise(by, "norm", operation.width)
        case StoreIndex():
            seconds = _elementwise(by, "norm", operation.width)
        case SpreadStream() | InjectStream():
            width = operation.count * operation.width
            seconds = 0.0 if _elementwise(by, "streams", width) else _elementwise(by, "silu_mul", width)
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


def _products(by: OneSide, matrices: tuple[TensorSpec, ...]) -> list[Term]:
    return [(Order.PRODUCT, _matmul(by, matrix)) for matrix in matrices]


def _matmul(by: OneSide, matrix: TensorSpec) -> float:
    return by.tables.matmul(by.side, matrix.qtype, matrix.rows, matrix.cols, by.rows)


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
    if blocks <= index.most:
        return 0.0
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
