"""Rotary grouped-query attention: norm, q, k and v, rotation, attention over the KV cache, output, residual.

Three kinds: attention over all cells of a sequence, over the last `ModelConfig.sliding_window` ones, and over all cells
with heads that are not rotated. Of the first two there are also those whose cells other layers read, which stand in
VRAM, and these others, which have queries alone. Some models have a mapping in place of attention: one product.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from math import lcm

from pshard.batch_sizes import SMALL_BATCH
from pshard.model_config import ModelConfig, Rope
from pshard.quant import QUANT_TYPES
from pshard.units.enter import bias_of, enter, entered_buffers, leave, order
from pshard.units.kv_cells import KV_BLOCK, longest_sequence
from pshard.units.operands import Rows
from pshard.units.operations import (
    Attend,
    Bend,
    ChooseCells,
    GateRows,
    NormHeads,
    NormWide,
    Operation,
    Product,
    ProductGroup,
    ResizeHeads,
    Rotate,
    StoreIndex,
    SumSquares,
)
from pshard.units.ports import MAPS, SQUARES
from pshard.units.ranges import Targets, place_heads, place_rows
from pshard.units.scratch import Buffer
from pshard.units.state import CellState, StateShape
from pshard.units.unit import ANYWHERE_WITH_STATE, ON_ACCELERATOR, Cut, Tensors, UnitKind, keep_whole

NORM, OUT, OUT_BIAS = "attn_norm.weight", "attn_output.weight", "attn_output.bias"
QKV = tuple(f"attn_{part}.weight" for part in "qkv")
HEAD_NORMS = ("attn_q_norm.weight", "attn_k_norm.weight")
EACH = ("attn_q_norms.weight", "attn_k_norms.weight")  # of every head its own, by itself or over all heads at once
STRETCH = "attn_q_stretch.weight"  # what each head's query is multiplied by once it is rotated
GATE = "attn_q_gate.weight"  # of a model with gated attention: one number for each that a head gives
HEAD_GATE = "attn_head_gate.weight"  # the same of one number for each head
# of an index by which cells are chosen (Selection)
INDEX = INDEX_QUERY, INDEX_KEY = "indexer.q_proj.weight", "indexer.k_proj.weight"
INDEX_NORMS = ("indexer.q_norm.weight", "indexer.k_norm.weight")
SEEN, SCORES = "seen", "index_scores"  # scratch: which cells count, a word for each block of the cache; scores
SINKS = "attn_sinks.weight"  # a logit of each head, which takes part in the softmax and gives nothing
SLOPES = "attn_slopes.weight"  # what scores of each head lose for a cell that they lie back: ALiBi (arXiv 2108.12409)
IN_ORDER, OUT_ORDER = "attn_order.weight", "attn_output_order.weight"  # of columns: of q, k and v, and of the output
AFTER = "post_attention_norm.weight"  # of what is added to the residual stream
ROPES = ("rope", "window_rope", "still_rope")  # scratch: sines and cosines, by position
PRODUCTS, MIXED = "qkv", "mixed"  # scratch: q, k and v, and what heads give
NARROWED = "narrowed"  # scratch: the same of heads whose values are not as long as keys
TEMPERATURE = "temperature"  # scratch: what queries are multiplied by, by their position
ATTENTION_PIECES = 64  # most pieces that one decode attention is cut into along the context
SCORED_ROWS = 64  # rows whose blocks are scored at once
DECODE_PROGRAMS = 1024  # a decode attention is cut until about this many programs run


def decode_pieces(tokens: int, n_kv_heads: int) -> int:
    """Most pieces along the context that the decode attention of so many rows is cut into."""
    return min(ATTENTION_PIECES, max(1, DECODE_PROGRAMS // (tokens * max(1, n_kv_heads))))


def count_heads(tensors: Tensors, config: ModelConfig) -> tuple[int, int]:
    """(q heads, KV heads) that a unit computes, from its tensors: a rank's slice has some; (0, 0) without tensors."""
    q, k, _ = (tensors[role].rows if role in tensors else 0 for role in QKV)
    return q // config.head_dim, k // config.head_dim


def group_roles(tensors: Collection[str], config: ModelConfig, borrows: bool = False) -> tuple[str, ...]:
    """The matrices that take a unit's input, in the order in which their products lie. v comes first where values are
    not as long as keys: what it becomes stands behind these, see `_scratch`."""
    q, k, v = QKV
    if borrows:
        return (q,)
    if config.value_dim:
        return v, q, k
    return *QKV, *(role for role in (GATE, HEAD_GATE, *INDEX) if role in tensors)


def pick_rope(config: ModelConfig, kind: str) -> tuple[str, Rope]:
    """The scratch buffer that holds the sines and cosines of a kind of attention, and what they are made of."""
    if kind == "still attention":
        return "still_rope", config.still_rope
    if kind == "windowed attention" and config.window_rope:
        return "window_rope", config.window_rope
    return "rope", config.rope


def _operations(
    tensors: Tensors, config: ModelConfig, kind: str = "attention", window: int = 0, borrows: bool = False
) -> tuple[Operation, ...]:
    if OUT not in tensors:  # a rank without heads, which needs what it takes for its part of others
        return enter(tensors, NORM, config)
    n_heads, n_kv_heads = count_heads(tensors, config)
    heads, made = (n_heads, n_kv_heads, config.head_dim), 0 if borrows else n_kv_heads
    norms = tuple(tensors[role] for role in HEAD_NORMS if role in tensors)
    group = tuple(tensors[role] for role in group_roles(tensors, config, borrows))
    q, kv = tensors[QKV[0]].rows, tensors[QKV[1]].rows
    heads_at, mixed = Rows(PRODUCTS, n_kv_heads * config.value_dim), Rows(MIXED, 0, q)
    biases = tuple(tensors.get(bias_of(matrix.role)) for matrix in group)
    multiply = ProductGroup(group, biases, out=Rows(PRODUCTS))
    widen, narrow = _resize_values(config, heads, multiply.writes[0], heads_at.beside(q, kv, kv)[2], mixed)
    given = narrow[0].out if narrow else mixed
    chosen, others = _choose(tensors, config, multiply.writes[3:])
    rotate = Rotate(
        n_heads,
        made,
        config.head_dim,
        norms,
        bool(norms),
        heads_at,
        rope=pick_rope(config, kind)[0],
        windowed=window > 0,
        warms=_warms(config, kind),
        values=config.values_normed and not borrows,
    )
    return (
        *enter(tensors, NORM, config),
        *order(tensors, IN_ORDER),
        multiply,
        *_bend_products(tensors, config, multiply.writes[:3]),
        *widen,
        rotate,
        *((Bend("times", q, tensors[STRETCH], x=rotate.writes[0]),) if STRETCH in tensors else ()),
        *chosen,
        Attend(
            *heads,
            window,
            tensors.get(SINKS),
            heads_at,
            mixed,
            config.score_cap,
            slopes=tensors.get(SLOPES),
            chunked=config.chunked and window > 0,
            borrows=borrows,
            seen=chosen[-1].writes[0] if chosen else None,
            chosen=config.selection.cells if config.selection else 0,
        ),
        *(GateRows(q, mixed, gate, config.gate_curve) for gate in others),
        *narrow,
        *order(tensors, OUT_ORDER, given),
        *leave(tensors[OUT], tensors.get(OUT_BIAS), tensors.get(AFTER), given),
    )


def _choose(
    tensors: Tensors, config: ModelConfig, products: tuple[Rows, ...]
) -> tuple[tuple[Operation, ...], tuple[Rows, ...]]:
    """How cells are chosen by the last two of these products, where the model does so; and the others."""
    rule = config.selection
    if rule is None:
        return (), products
    *others, query, key = products
    norms = tensors[INDEX_NORMS[0]], tensors[INDEX_NORMS[1]]
    stored = StoreIndex(norms, rule.heads, rule.head, rule.each, query, key, "rope")
    return (stored, ChooseCells(rule.heads, rule.head, rule.each, rule.most, query, Rows(SEEN))), tuple(others)


def _index_buffers(config: ModelConfig, tokens: int, longest: int) -> tuple[Buffer, ...]:
    """Scratch of a choice of cells, in sequences of so many."""
    rule = config.selection
    if rule is None:
        return ()
    return (
        Buffer(SEEN, (tokens, -(-longest // KV_BLOCK)), "f32"),
        Buffer(SCORES, (min(tokens, SCORED_ROWS), -(-longest // rule.each)), "f32"),
    )


def _resize_values(
    config: ModelConfig, heads: tuple[int, int, int], made: Rows, kept: Rows, mixed: Rows
) -> tuple[tuple[ResizeHeads, ...], tuple[ResizeHeads, ...]]:
    """How values that are not as long as keys become so, and what heads give of them shorter again."""
    if not config.value_dim:
        return (), ()
    out = Rows(NARROWED, 0, heads[0] * config.value_dim)
    return (ResizeHeads(heads[1], made, kept),), (ResizeHeads(heads[0], mixed, out, config.value_scale),)


def _warms(config: ModelConfig, kind: str) -> bool:
    """Whether a kind of attention multiplies queries by a temperature."""
    temperature = config.temperature
    return temperature is not None and (kind == "still attention" or not temperature.still)


def _bend_products(tensors: Tensors, config: ModelConfig, products: tuple[Rows, ...]) -> tuple[Operation, ...]:
    """What becomes of the products of q, k and v before anything else."""
    clamps = tuple(Bend("clamp", x.width, limit=config.clamp, x=x) for x in products) if config.clamp else ()
    if config.wide_qk_norm:
        return *clamps, *_norm_wide(tensors, config, *products[:2])
    norms = (NormHeads(tensors[r], config.head_dim, config.centred, x) for r, x in zip(EACH, products) if r in tensors)
    return *clamps, *norms


def _norm_wide(tensors: Tensors, config: ModelConfig, q: Rows, k: Rows) -> tuple[Operation, ...]:
    """Norms of q and k over all heads at once, of which other ranks may have some."""
    weights, sums = (tensors[EACH[0]], tensors[EACH[1]]), Rows(SQUARES)
    heads, kv = config.normed_heads or (config.n_heads, config.n_kv_heads)
    return SumSquares(q, k, sums), NormWide(weights, (heads * config.head_dim, kv * config.head_dim), q, k, sums)


def _widths(tensors: Tensors, config: ModelConfig) -> dict[str, int]:
    return dict(zip(("n_heads", "n_kv_heads"), count_heads(tensors, config)))


def _state(config: ModelConfig, shape: StateShape, window: int = 0) -> CellState:
    """Every layer's cells are as wide as the widest layer's of this rank."""
    index = config.selection.head if config.selection else 0
    return CellState(config.n_kv_heads * config.head_dim, shape.type_k, shape.type_v, window, index)


def _scratch(config: ModelConfig, tokens: int, shape: StateShape, kind: str) -> tuple[Buffer, ...]:
    heads, kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    longest, (table, rope) = longest_sequence(config, shape.context), pick_rope(config, kind)
    warmth = config.temperature if _warms(config, kind) else None
    differs = warmth is not None and longest + warmth.counts > warmth.span  # else all are multiplied by 1
    # every tier may be given few tokens: those attend in pieces along the context
    most = max(n * decode_pieces(n, config.n_kv_heads) for n in range(1, min(tokens, SMALL_BATCH) + 1))
    gates = (heads if config.gated else 0) + (config.n_heads if config.heads_gated else 0)
    rule, raw = config.selection, config.n_kv_heads * config.value_dim
    more = gates + ((rule.heads + 1) * rule.head if rule else 0)
    width = raw + heads + 2 * kv + more
    return (
        Buffer(PRODUCTS, (tokens, width), "act"),
        Buffer(MIXED, (tokens, heads), "act"),
        *((Buffer(NARROWED, (tokens, config.n_heads * config.value_dim), "act"),) if config.value_dim else ()),
        *entered_buffers(config, tokens),
        Buffer(table, (2, longest, rope.dims // 2), "f32"),
        *((Buffer(TEMPERATURE, (longest,), "f32"),) if differs else ()),
        *((Buffer(SQUARES, (tokens, 2), "f32"),) if config.wide_qk_norm else ()),
        Buffer("partial", (most, config.n_heads, config.head_dim + 2), "f32"),
        *_index_buffers(config, tokens, longest),
    )


def _scratch_of(kind: str) -> Callable[[ModelConfig, int, StateShape], tuple[Buffer, ...]]:
    return lambda config, tokens, shape: _scratch(config, tokens, shape, kind)


def _bounds(config: ModelConfig, tensors: Tensors, targets: Targets) -> tuple[int, ...]:
    if OUT_ORDER in tensors:  # over all heads: one rank has them, of the next layer another one
        return place_rows(config.n_heads, config.n_heads, targets)
    block = QUANT_TYPES[tensors[OUT].qtype].block if OUT in tensors else 1
    each = config.value_dim or config.head_dim
    step, group = lcm(each, block) // each, config.n_heads // config.n_kv_heads
    if config.wide_qk_norm:  # no two ranks have a KV head, whose squares would be summed twice
        step = lcm(step, group)
    return place_heads(config.n_heads, group, step, targets)


def _layout(role: str, config: ModelConfig) -> tuple[int, int]:
    """Rows or columns of a head."""
    if role in (SINKS, SLOPES, HEAD_GATE):
        return 1, 1
    return 1, config.value_dim if config.value_dim and role in (_V, bias_of(_V), OUT) else config.head_dim


_Q, _K, _V = QKV
ATTENTION = UnitKind(
    "attention",
    position="layer",
    places=ANYWHERE_WITH_STATE,
    operations=_operations,
    cut=Cut(
        {
            **dict.fromkeys((NORM, bias_of(NORM)), ("none", "all")),
            _Q: ("rows", "cut"),
            GATE: ("rows", "cut"),
            "attn_q.bias": ("rows", "cut"),
            _K: ("rows", "kv"),
            "attn_k.bias": ("rows", "kv"),
            _V: ("rows", "kv"),
            "attn_v.bias": ("rows", "kv"),
            **dict.fromkeys((*HEAD_NORMS, STRETCH, IN_ORDER, OUT_ORDER, *INDEX, *INDEX_NORMS), ("none", "all")),
            EACH[0]: ("rows", "cut"),
            EACH[1]: ("rows", "kv"),
            **dict.fromkeys((SINKS, SLOPES, HEAD_GATE), ("rows", "each")),
            OUT: ("cols", "cut"),
            OUT_BIAS: ("rows", "first"),
            AFTER: ("sum", "all"),
        },
        length=lambda config, tensors: config.n_heads,
        bounds=_bounds,
        layout=_layout,
        flag="attn",
    ),
    widths=_widths,
    state=_state,
    scratch=_scratch_of("attention"),
    leads=True,
    llama_cpp="(attn_|indexer).*",
    strategy="first",
    contends="state",
    phase=0.35,
    lock_order=1,
)

WINDOWED_ATTENTION = replace(
    ATTENTION,
    name="windowed attention",
    operations=lambda tensors, config: _operations(tensors, config, "windowed attention", config.window),
    widths=lambda tensors, config: {
        own if getattr(config, own) else name: size
        for (name, size), own in zip(_widths(tensors, config.windowed).items(), ("window_heads", "window_kv_heads"))
    },
    state=lambda config, shape: _state(config, shape, config.window),
    scratch=_scratch_of("windowed attention"),
    sees=lambda config: config.windowed,
)
STILL_ATTENTION = replace(
    ATTENTION,
    name="still attention",
    operations=lambda tensors, config: _operations(tensors, config, "still attention"),
    scratch=_scratch_of("still attention"),
)


MAPPING = UnitKind(
    "mapping",
    position="layer",
    places=ON_ACCELERATOR,
    operations=lambda tensors, config: (*enter(tensors, NORM, config), Product(tensors[OUT], adds=True)),
    cut=keep_whole(NORM, OUT),
    ports=MAPS,
    leads=True,
    llama_cpp="attn_.*",
    strategy="first",
    contends="weights",
    phase=0.35,
    lock_order=1,
    listed=True,
)


def _lend(kind: UnitKind) -> UnitKind:
    """The kind of units whose cells others read: these stand in VRAM."""
    return replace(kind, name=f"lending {kind.name}", places=ON_ACCELERATOR, state=None, stands=kind.state, contends="")


def _borrow(kind: UnitKind, windowed: bool) -> UnitKind:
    """The kind of units that read others' cells."""
    rope = "windowed attention" if windowed else "attention"

    def operations(tensors: Tensors, config: ModelConfig) -> tuple[Operation, ...]:
        return _operations(tensors, config, rope, config.window if windowed else 0, True)

    return replace(
        kind, name=f"borrowing {kind.name}", places=ON_ACCELERATOR, operations=operations, state=None, contends=""
    )


LENDING_ATTENTION, BORROWING_ATTENTION = _lend(ATTENTION), _borrow(ATTENTION, False)
LENDING_WINDOWED, BORROWING_WINDOWED = _lend(WINDOWED_ATTENTION), _borrow(WINDOWED_ATTENTION, True)
ATTENTIONS = (
    *(ATTENTION, WINDOWED_ATTENTION, STILL_ATTENTION),
    *(LENDING_ATTENTION, LENDING_WINDOWED, BORROWING_ATTENTION, BORROWING_WINDOWED),
)
