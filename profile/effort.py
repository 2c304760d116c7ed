"""How much to measure: sizes, token counts and times of a short, a quick and a full profile."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

from pshard.batch_sizes import SMALL_BATCH
from pshard.model import ModelSpec
from pshard.model_config import Experts, ModelConfig
from pshard.profile.timed.collective_times import SIZES
from pshard.profile.timed.operands import rotation_bytes
from pshard.profile.timed.time_links import COPY_SIZES
from pshard.profile.timing_loop import Pace
from pshard.quant import QUANT_TYPES, packed_nbytes
from pshard.units.moe.routed import scratch_of
from pshard.units.operations import (
    Attend,
    AttendLatent,
    ChooseCells,
    DeltaNet,
    ExpertProducts,
    GatedProduct,
    LookUp,
    NormStreams,
    Operation,
    Route,
    matrices_of,
)
from pshard.units.unit import Unit

COMMON_QTYPES = ("Q4_0", "Q8_0", "Q4_K", "Q6_K", "BF16")
OTHER_QTYPES = tuple(q for q in QUANT_TYPES if q not in COMMON_QTYPES)
MANY_SMALL = Experts(128, 8, 768)
WHOLE_TYPES = 4  # of a model, whose shapes are all timed
MOST_PAIRS = 6  # of a model's types of gates and of downs, that are timed as they are
SHORT_SECONDS, COMPILE_SECONDS = 8.0, 30.0  # of a first run's profile
SHORT_GPU_SECONDS = 16.0  # of one of a GPU, whose pool, link and graphs are made first
FEW_LARGE = Experts(32, 4, 2880, "chosen", normed=False, activation="clamped", biases=True)
TYPICAL = (  # experts and routers of the grid
    (("Q4_0", "Q4_0", 2048, MANY_SMALL), ("MXFP4", "MXFP4", 2880, FEW_LARGE)),
    (("F32", 2048, MANY_SMALL), ("F32", 2880, FEW_LARGE)),
)


@dataclass(frozen=True)
class Shapes:
    """What a model, or a range of models, is made of. `matmuls` and `heads` are (quant type, rows, cols).

    `heads` are output matrices, which never meet more than LOGIT_ROWS tokens.
    """

    matmuls: tuple[tuple[str, int, int], ...]
    heads: tuple[tuple[str, int, int], ...]
    attention: tuple[Attend, ...]
    widths: tuple[tuple[int, int], ...]  # (d_model, d_ffn)
    embedding: tuple[tuple[str, int], ...]  # (quant type, d_model)
    context: int
    experts: tuple[tuple[str, str, int, Experts], ...] = ()  # (type of gate and up, type of down, d_model, their rule)
    routers: tuple[tuple[str, int, Experts], ...] = ()  # (quant type, d_model, the rule)
    latent: tuple[AttendLatent, ...] = ()
    delta: tuple[DeltaNet, ...] = ()  # one of each shape
    streams: tuple[tuple[int, int], ...] = ()  # how many residual streams, and elements of each
    index: tuple[ChooseCells, ...] = ()  # one of each rule


@dataclass(frozen=True)
class Effort:
    """Sizes and times of a run. `limit` seconds after the start, what is left of the general grid is skipped."""

    quick: bool
    pace: Pace
    slow: float
    rotation: int
    limit: float
    grid: Shapes
    host_tokens: tuple[int, ...]
    acc_tokens: tuple[int, ...]
    copy_sizes: tuple[int, ...]
    contention_seconds: float
    sums: tuple[int, ...]  # bytes of all-reduces; none: no ranks are started
    share_seconds: float = 0.1  # of each timing of what ranks have of the host
    tile_tokens: tuple[int, ...] = ()  # batches, powers of two, that tiles of matmul kernels are chosen for on a GPU
    tile_matrices: int = 1  # on which they are tried: the largest of a kernel and type
    tile_seconds: float = 0.0  # that compiling candidates may take, of each unlike GPU
    compile_seconds: float = 300.0  # that compiling what is timed may take, of each unlike GPU
    short: bool = False  # the limit holds for all but one timing of each sort and side


def short_effort(cache_bytes: int, memory_bytes: int) -> Effort:
    """Within SHORT_SECONDS once kernels are compiled, for a first run: a model's own shapes alone, few sizes, nothing
    that several ranks need."""
    rotation = rotation_bytes(cache_bytes // 8, memory_bytes, quick=True)
    return Effort(
        quick=True,
        pace=Pace(0.01),
        slow=0.1,
        rotation=rotation,
        limit=SHORT_SECONDS - 1.5,  # what is under way then ends, and the profile is written
        grid=Shapes((("Q4_0", 4096, 4096),), (), (Attend(32, 8, 128),), ((4096, 14336),), (("Q4_0", 4096),), 4096),
        host_tokens=(1, 4, 16, 128, 512),
        acc_tokens=(1, 4, 16, 128, 512, 4096),
        copy_sizes=(64 << 10, 1 << 20, 16 << 20, 64 << 20),
        contention_seconds=0.15,
        sums=(),
        compile_seconds=COMPILE_SECONDS,
        short=True,
    )


def quick_effort(cache_bytes: int, memory_bytes: int) -> Effort:
    """Within 60 s on two cores."""
    few = ((4096, 4096), (14336, 4096), (512, 512))
    matmuls = [(q, r, c) for r, c in few for q in COMMON_QTYPES] + [(q, 4096, 4096) for q in OTHER_QTYPES]
    grid = Shapes(tuple(matmuls), (), (Attend(32, 8, 128),), ((4096, 14336),), (("Q4_0", 4096),), 4096, *TYPICAL)
    return Effort(
        quick=True,
        pace=Pace(0.03),
        slow=0.25,
        rotation=rotation_bytes(cache_bytes, memory_bytes, quick=True),
        limit=22.0,
        grid=grid,
        host_tokens=(1, 4, 16, 64, 128, 512),
        acc_tokens=(1, 4, 8, 16, 64, 128, 512, 2048, 4096),
        copy_sizes=COPY_SIZES,
        contention_seconds=0.4,
        sums=(*SIZES[:3], *SIZES[4::2]),  # decode's, and a few large ones
        tile_tokens=(1, 8, 16),
        tile_seconds=8.0,
    )


def full_effort(cache_bytes: int, memory_bytes: int) -> Effort:
    """Some minutes: more shapes and token counts, every quant type, longer contexts."""
    many = ((4096, 4096), (14336, 4096), (512, 512), (25600, 5120), (5120, 25600), (2048, 2048), (1024, 4096))
    matmuls = [(q, r, c) for r, c in many for q in COMMON_QTYPES]
    matmuls += [(q, r, c) for q in OTHER_QTYPES for r, c in ((4096, 4096), (14336, 4096))]
    heads, widths = (Attend(32, 8, 128), Attend(64, 8, 128)), ((4096, 14336), (5120, 25600))
    grid = Shapes(tuple(matmuls), (), heads, widths, (("Q4_0", 4096), ("Q6_K", 5120)), 32768, *TYPICAL)
    return Effort(
        quick=False,
        pace=Pace(0.2, least=5),
        slow=2.0,
        rotation=rotation_bytes(cache_bytes, memory_bytes, quick=False),
        limit=600.0,
        grid=grid,
        host_tokens=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048),
        acc_tokens=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192),
        copy_sizes=COPY_SIZES,
        contention_seconds=2.0,
        sums=SIZES,
        share_seconds=0.5,
        tile_tokens=(1, 2, 4, 8, 16, 32, 64),
        tile_matrices=3,
        tile_seconds=180.0,
    )


def largest_case(shapes: Shapes, tokens: int) -> int:
    """Bytes of activations and scratch, in bfloat16 and float32, of the largest case of so many tokens on a GPU: an
    operand pool and the tile of dequantised weights come besides."""
    plain = [2 * (rows + cols) for _, rows, cols in shapes.matmuls]
    gates = [2 * (2 * d_ffn + d_model) for d_model, d_ffn in shapes.widths]
    attended = [a.heads for a in shapes.attention] + [a.heads for a in shapes.latent]
    heads = [2 * d * (2 * n + 2 * groups) for n, groups, d in attended]
    streams = [3 * 4 * count * width for count, width in shapes.streams]
    delta = [2 * (n.channels + 2 * n.value_heads * n.head) for n in shapes.delta]
    experts = [
        6 * d_model * tokens + sum(b.nbytes(2) for b in scratch_of(rule, d_model, tokens))
        for _, _, d_model, rule in shapes.experts
    ]
    return max((*(tokens * each for each in (*plain, *gates, *heads, *streams, *delta)), *experts), default=0)


def fit_card(effort: Effort, model: Shapes | None, free: int) -> tuple[Effort, tuple[str, ...]]:
    """The effort on a GPU with so many free bytes, and a note of what it leaves out: batches whose largest case takes
    more than a half of them. A planner goes on above the largest batch that was timed, in proportion."""
    most = max(effort.acc_tokens)
    shapes = [effort.grid, *((model,) if model else ())]
    fits = [t for t in effort.acc_tokens if t <= SMALL_BATCH or max(largest_case(s, t) for s in shapes) <= free // 2]
    if fits[-1] == most:
        return effort, ()
    left_out = f"GPU batches of more than {fits[-1]} tokens were not timed: {free >> 20} MiB of VRAM were free"
    return replace(effort, acc_tokens=tuple(fits)), (left_out,)


def shapes_to_tune(effort: Effort, model: Shapes | None) -> Shapes:
    """Whose tiles are chosen: the model's; without one, those of the grid's common types, for which a quick profile has
    no time."""
    if model is not None:
        return model
    if effort.quick:
        return replace(effort.grid, matmuls=(), attention=(), experts=())
    return replace(effort.grid, matmuls=tuple(m for m in effort.grid.matmuls if m[0] in COMMON_QTYPES))


def model_shapes(spec: ModelSpec, ranks: int = 1) -> Shapes:
    """The shapes and quant types of one model, so that a plan for it needs no interpolation between shapes: those of
    the operations that its units declare. ranks: so many may share it, and each then has some rows of every expert."""
    config = spec.config
    inside = [o for unit in spec.units if not unit.kind.gives_logits for o in unit.operations(config)]
    heads = {shape for unit in spec.units if unit.kind.gives_logits for shape in _shapes_of(unit.operations(config))}
    matmuls = _thin_types(inside)
    attention = dict.fromkeys(Attend(*o.heads) for o in inside if isinstance(o, Attend))  # windows take their share
    widest = max((o.up.rows for o in inside if isinstance(o, GatedProduct)), default=config.d_ffn or config.d_model)
    tables = {(o.table.qtype, o.table.cols) for o in inside if isinstance(o, LookUp)}
    rule, d_model = config.experts, config.d_model
    experts = {
        (qtype, o.down.qtype, rows)
        for unit, *_ in spec.alike
        if unit.kind.parts
        for rows in _slice_rows(unit, config, ranks)
        for o in unit.operations(config)
        if isinstance(o, ExpertProducts)
        for qtype in (o.gate.qtype, o.up.qtype)
    }
    routers = {o.router.qtype for o in inside if isinstance(o, Route)}
    return Shapes(
        matmuls,
        tuple(sorted(heads - {*matmuls})),
        tuple(attention),
        ((config.d_model, widest),),
        tuple(sorted(tables)),
        min(config.context, 16384),
        tuple(
            (gate, down, d_model, replace(rule, d_expert=n))
            for gate, down, n in sorted(_thin_pairs(experts, d_model))
            if rule
        ),
        routers=tuple((qtype, d_model, rule) for qtype in sorted(routers) if rule),
        latent=tuple(
            dict.fromkeys(AttendLatent(o.n_heads, o.rank, o.rope) for o in inside if isinstance(o, AttendLatent))
        ),
        delta=tuple({o.shape: o for o in inside if isinstance(o, DeltaNet)}.values()),
        streams=tuple(dict.fromkeys((o.count, o.width // o.count) for o in inside if isinstance(o, NormStreams))),
        index=tuple(dict.fromkeys(o for o in inside if isinstance(o, ChooseCells))),
    )


def join_shapes(models: Sequence[Shapes]) -> Shapes:
    """What several models are made of, each shape once, so that one profile serves them all. models: one or more."""
    joined = {
        field.name: tuple(dict.fromkeys(shape for model in models for shape in getattr(model, field.name)))
        for field in fields(Shapes)
        if field.name != "context"
    }
    return Shapes(**joined, context=max(model.context for model in models))


def _slice_rows(unit: Unit, config: ModelConfig, ranks: int) -> set[int]:
    """Rows of an expert, and of its slices where 2, 4... or all of so many ranks share it equally."""
    counts = {1, ranks, *(2**i for i in range(1, ranks.bit_length()))}
    cut = unit.kind.cut
    assert cut is not None
    rows = cut.length(config, unit.by_role)
    return {cut.bounds(config, unit.by_role, (rows / n,) * n)[1] for n in counts} - {0}


def _thin_types(operations: list[Operation]) -> tuple[tuple[str, int, int], ...]:
    """The shapes of plain products: all of the WHOLE_TYPES types with most bytes, and of each other type the one with
    most. A mix of fifteen types would else take fifteen times as long; other shapes' times follow from that one. Those
    of most bytes come first: from the others' times it would not follow what these take."""
    weighed: Counter[tuple[str, int, int]] = Counter()
    for operation in operations:
        for shape in _shapes_of([operation]):
            weighed[shape] += packed_nbytes(*shape)
    by_type: Counter[str] = Counter()
    for shape, nbytes in weighed.items():
        by_type[shape[0]] += nbytes
    whole = {qtype for qtype, _ in by_type.most_common(WHOLE_TYPES)}
    heaviest = {max((w, s) for s, w in weighed.items() if s[0] == qtype)[1] for qtype in by_type}
    ranked = sorted(weighed, key=lambda shape: (-weighed[shape], shape))
    return tuple(shape for shape in ranked if shape[0] in whole or shape in heaviest)


def _thin_pairs(experts: set[tuple[str, str, int]], d_model: int) -> set[tuple[str, str, int]]:
    """Types of gates and of downs with an expert's rows: all that occur; where they are many, each type with itself,
    from which `ExpertTables` puts pairs together, if that is fewer. A mix of eight types has twenty pairs. Pairs stay
    where an expert of one of their types alone would end within a block."""
    if len({pair[:2] for pair in experts}) <= MOST_PAIRS:
        return experts
    thin = set[tuple[str, str, int]]()
    for gate, down, rows in experts:
        fits = all(n % QUANT_TYPES[qtype].block == 0 for n in (rows, d_model) for qtype in (gate, down))
        thin |= {(gate, gate, rows), (down, down, rows)} if fits else {(gate, down, rows)}
    return min(thin, experts, key=len)


def _shapes_of(operations: Iterable[Operation]) -> set[tuple[str, int, int]]:
    """Of plain products; routers and stacks of experts have kernels of their own."""
    plain = [o for o in operations if not isinstance(o, Route | ExpertProducts)]
    return {(m.qtype, m.rows, m.cols) for operation in plain for m in matrices_of(operation)}
