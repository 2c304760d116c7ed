"""What things cost: the only file with formulas. Seconds come from the profile's tables by interpolation.

Curves are interpolated log-log. Below the first point a curve is flat (fixed costs), above the last one it grows in
proportion (rates hold). A matrix that the profile did not time takes the seconds per element of the nearest sizes.
"""

from collections import defaultdict
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import log

from pshard.batch_sizes import SMALL_BATCH, TILE_TOKENS
from pshard.cuts.ffn_rows import split_rows
from pshard.errors import UserError
from pshard.machine import MEMORIES, Contention, MachineProfile
from pshard.model import ModelSpec
from pshard.model_config import ModelConfig
from pshard.plan import NOTHING_LEARNT, Correction
from pshard.planner.price.tier_loads import TierLoad
from pshard.quant import QUANT_TYPES, packed_nbytes
from pshard.steps.graph_runs import LAUNCH_BOUND
from pshard.steps.step import AllReduce, Gather
from pshard.tensor import TensorSpec
from pshard.times.collectives import fastest_collective, wire_type
from pshard.times.curves import Curve, interpolate
from pshard.times.curves import curve_through as _curve
from pshard.units.attention import ATTENTION, count_heads
from pshard.units.ffn import FFN
from pshard.units.unit import Unit
from pshard.workload import Workload

UNHINDERED = 0.95  # of what copies and CPU kernels reach alone: memory has room for both


class Tables:
    """A profile's rows, grouped for look-up. Raises UserError when a table that every plan needs is empty.

    `correction` scales what units and their copies take; look-ups of single rows are as measured.
    """

    def __init__(self, profile: MachineProfile, correction: Correction = NOTHING_LEARNT) -> None:
        self.profile, self.correction = profile, correction
        self.kind = profile.accelerators[0].kind if profile.accelerators else "cpu"
        self.act_bytes = 2 if self.kind == "cuda" else 4
        # up to so many tokens the host's matrices of one input are multiplied in one call
        native, tiles = profile.host.kernels == "native", "amx" in profile.host.isa
        self.vector_tokens = (TILE_TOKENS if tiles else SMALL_BATCH) if native else 0
        self._matmul: dict[tuple[str, str], dict[tuple[int, int], Curve]] = defaultdict(dict)
        rows = defaultdict(list)
        for m in profile.matmuls:
            rows[m.device, m.qtype, m.rows, m.cols].append((m.tokens, m.seconds))
        for (device, qtype, r, c), points in rows.items():
            self._matmul[device, qtype][r, c] = _curve(points)
        self._attention: dict[tuple[str, str], dict[tuple[int, int, int], dict[int, Curve]]] = defaultdict(dict)
        # one token of each of several sequences: by sequences instead of tokens
        self._together: dict[tuple[str, str], dict[tuple[int, int, int], dict[int, Curve]]] = defaultdict(dict)
        cells = defaultdict(list)
        for a in profile.attention:
            shape = (a.n_heads, a.n_kv_heads, a.head_dim)
            cells[a.device, a.kv_type, shape, a.sequences, a.tokens].append((a.context, a.seconds))
        for (device, kv_type, heads, sequences, tokens), points in cells.items():
            by, count = (self._attention, tokens) if sequences == 1 else (self._together, sequences)
            by[device, kv_type].setdefault(heads, {})[count] = _curve(points)
        self._elementwise = _grouped(((e.device, e.what), e.tokens * e.width, e.seconds) for e in profile.elementwise)
        copies = (c for c in profile.copies if c.device == "acc")
        self._copies = _grouped(((c.direction, c.memory), c.nbytes, c.seconds) for c in copies)
        for what, table in (("matmul", rows), ("attention", cells), ("copy", self._copies)):
            if not table:
                raise UserError(f"the machine profile has no {what} timings; run pshard-profile again")
        self._shares = _grouped(
            ((s.ranks, s.what, at_once), s.size, (s.together if at_once else s.alone) / s.whole)
            for s in profile.shares
            for at_once in (True, False)
        )
        self._seen: dict[tuple, float] = {}
        self._others: dict[tuple[str, ...], Tables] = {}

    def corrected(self, correction: Correction) -> "Tables":
        """The same tables (rows and what was looked up are shared) under another correction."""
        other = copy(self)
        other.correction, other._others = correction, {}
        return other

    def of_accelerator(self, index: int) -> "Tables":
        """The tables of accelerator `index`; these ones where it was not timed apart from the first."""
        sources = self.profile.sources(index)
        if sources not in self._others:
            own = self.profile.of_accelerator(index)
            self._others[sources] = self if own is self.profile else Tables(own, self.correction)
        return self._others[sources]

    def matmul(self, device: str, qtype: str, rows: int, cols: int, tokens: int) -> float:
        """Seconds of x[tokens, cols] @ W[rows, cols].T."""
        key = (device, qtype, rows, cols, tokens)
        if key not in self._seen:
            self._seen[key] = self._matmul_seconds(*key)
        return self._seen[key]

    def _matmul_seconds(self, device: str, qtype: str, rows: int, cols: int, tokens: int) -> float:
        timed, scale = self._matmul.get((device, qtype)), 1.0
        if not timed:  # a quant type that was not timed: the one nearest in bytes, scaled where bytes set the time
            weight = packed_nbytes(qtype, 256, 2048)
            others = [q for d, q in self._matmul if d == device]
            if not others:
                raise UserError(f"the machine profile has no matmul timings of the {device}; run pshard-profile again")
            nearest = min(others, key=lambda q: (abs(log(packed_nbytes(q, 256, 2048) / weight)), q))
            timed = self._matmul[device, nearest]
            scale = weight / packed_nbytes(nearest, 256, 2048) if tokens <= SMALL_BATCH else 1.0
        if (rows, cols) in timed:
            return scale * interpolate(timed[rows, cols], tokens)
        rates = _curve((r * c, interpolate(curve, tokens) / (r * c)) for (r, c), curve in timed.items())
        size = min(max(rows * cols, rates[0][0]), rates[-1][0])
        return scale * rows * cols * interpolate(rates, size)

    def attention(self, device: str, config: ModelConfig, kv_type: str, tokens: int, context: int) -> float:
        """Seconds of attention of `tokens` new tokens over `context` cells in all, one layer, all heads."""
        key = (device, config.n_heads, config.n_kv_heads, config.head_dim, kv_type, tokens, context)
        if key not in self._seen:
            self._seen[key] = self._attention_seconds(device, config, kv_type, tokens, context)
        return self._seen[key]

    def _attention_seconds(self, device: str, config: ModelConfig, kv_type: str, tokens: int, context: int) -> float:
        timed = self._attention.get((device, kv_type))
        if not timed:
            timed = next((t for (d, _), t in sorted(self._attention.items()) if d == device), None)
        if not timed:
            raise UserError(f"the machine profile has no attention timings of the {device}; run pshard-profile again")
        heads = _nearest_heads(timed, config)
        small, large = config.n_kv_heads / heads[1], config.n_heads / heads[0]  # cells that are read, or products
        scale = (small if tokens <= SMALL_BATCH else large) * config.head_dim / heads[2]
        # between timed token counts: seconds per pair of new token and cell, at this context
        rates = _curve(
            (t, interpolate(curve, max(context, t)) / _pairs(t, max(context, t))) for t, curve in timed[heads].items()
        )
        at = min(max(tokens, rates[0][0]), rates[-1][0])
        return scale * _pairs(tokens, context) * interpolate(rates, at)

    def decode_attention(self, device: str, config: ModelConfig, kv_type: str, sequences: int, context: int) -> float:
        """Seconds of attention of one new token of each of `sequences` sequences over `context` cells each.

        What reads as many cells in all is looked up: of one sequence, and of each number of them that was timed.
        """
        cells = sequences * context
        alone = self.attention(device, config, kv_type, 1, cells)
        timed = self._together.get((device, kv_type))
        if sequences == 1 or not timed:
            return alone
        heads = _nearest_heads(timed, config)
        scale = config.n_kv_heads * config.head_dim / (heads[1] * heads[2])
        together = [(n, scale * interpolate(curve, cells / n)) for n, curve in timed[heads].items()]
        return interpolate(_curve([(1, alone), *together]), min(sequences, max(timed[heads])))

    def elementwise(self, device: str, what: str, tokens: int, width: int) -> float:
        """Seconds of a norm, residual addition, rotation, product or look-up on [tokens, width]; 0 when not timed."""
        curve = self._elementwise.get((device, what))
        return interpolate(curve, tokens * width) if curve else 0.0

    def copy(self, direction: str, nbytes: int, memory: str = "pinned") -> float:
        """Seconds of one copy ("h2d" or "d2h") from or to `memory`, or the next slower kind that was timed: "pinned"
        (page-locked), "staged", "pageable"; else the fastest that was."""
        if not nbytes:
            return 0.0
        kinds = MEMORIES[MEMORIES.index(memory) :] + MEMORIES
        curve = next((c for kind in kinds if (c := self._copies.get((direction, kind)))), None)
        if not curve:
            raise UserError(f"the machine profile has no {direction} copy timings; run pshard-profile again")
        return interpolate(curve, nbytes)

    def handoff(self, to: str, nbytes: int, vector_bytes: int) -> float:
        """Seconds of moving activations one way. The profile's figure is a round trip of one hidden vector."""
        key = (to, nbytes, vector_bytes)
        if key not in self._seen:
            direction = "h2d" if to == "acc" else "d2h"
            more = self.copy(direction, nbytes) - self.copy(direction, vector_bytes)
            self._seen[key] = self.profile.handoff_seconds / 2 + max(0.0, more)
        return self._seen[key]

    def collective(self, ranks: int, nbytes: int, copies: bool = False, dtype: str = "f32") -> float:
        """Seconds of an all-reduce of `nbytes` of float32, rounded to `dtype`, by the fastest way that was timed.

        copies: while weights are copied to the device.
        """
        if ranks < 2:
            return 0.0
        key = ("collective", ranks, nbytes, copies, dtype)
        if key not in self._seen:
            fastest = fastest_collective(self.profile.collectives, ranks, nbytes, dtype, copies)
            # not timed: every rank's part through host memory and back
            by_host = self.profile.handoff_seconds + ranks * (self.copy("d2h", nbytes) + self.copy("h2d", nbytes))
            self._seen[key] = fastest[1] if fastest else by_host
        return self._seen[key]

    def hand_over(self, nbytes: int, copies: bool = False) -> float:
        """Seconds of handing `nbytes` to the next rank: an all-reduce of two ranks moves that much each way."""
        return self.collective(2, nbytes, copies)

    def share(self, what: str, ranks: int, size: int, at_once: bool) -> float:
        """How many times as long work takes with what one of `ranks` ranks has of the host, all at once or it alone.

        what, size: as in ShareTiming. Where it was not timed: the cores' share of matmuls, and links of their own.
        """
        if ranks < 2:
            return 1.0
        timed = [n for n, kind, _ in self._shares if kind == what]
        if not timed:
            return float(ranks) if what == "matmul" else 1.0
        nearest = min(timed, key=lambda n: (abs(log(n / ranks)), n))
        curve = self._shares[nearest, what, at_once]
        factor = interpolate(curve, min(max(size, curve[0][0]), curve[-1][0]))
        factor *= ranks / nearest if what == "matmul" else 1
        return max(1.0, factor)  # no part of a host is faster than all of it, whatever a busy one measures

    @cached_property
    def link_rate(self) -> float:
        """Bytes per second of large host-to-device copies."""
        return (64 << 20) / self.copy("h2d", 64 << 20)

    @cached_property
    def staged_rate(self) -> float:
        """The same from memory that is not page-locked."""
        return (64 << 20) / self.copy("h2d", 64 << 20, "staged")

    @cached_property
    def host_rate(self) -> float:
        """Bytes per second that the host's threads read from DRAM with nothing else going on."""
        own = [r.rate for r in self.profile.reads if r.threads == self.profile.host.threads]
        return max(own or [r.rate for r in self.profile.reads] or [self.profile.contention.cpu_with_link, 1e9])

    @cached_property
    def shared_rate(self) -> float:
        """Bytes per second of host DRAM when the link and the CPU read together."""
        both = self.profile.contention
        return max(both.link_with_cpu + both.cpu_with_link, self.host_rate)

    def contention(self, links: int) -> Contention:
        """Rates of copies and CPU kernels that run at once, of so many links at once.

        One link was timed. Where it and the CPU got less than each alone, memory gave what it has and each its share of
        what it asked for; more links ask for more. Where they lost nothing, memory is taken to have room for all.
        """
        both = self.profile.contention
        given, asked = both.link_with_cpu + both.cpu_with_link, self.link_rate + both.cpu_alone
        if links < 2 or not both.cpu_alone or given > UNHINDERED * asked:
            return both
        all_links = links * self.link_rate / self.share("copy", links, 0, at_once=True)
        less = min(1.0, asked / (all_links + both.cpu_alone))
        return replace(both, link_with_cpu=less * both.link_with_cpu, cpu_with_link=less * both.cpu_with_link)

    def slowdown(self, read_bytes: int, seconds: float, links: int = 1) -> tuple[float, float]:
        """Speeds (1 = alone) of each of so many links, and of host work that reads `read_bytes` in `seconds`, while all
        run.

        Host work that reads slowly leaves the link its rate. Each byte that it reads takes longer by the same time,
        whatever else it does: products of 16 tokens read half as fast as one token's and lose half as much.
        """
        both = self.contention(links)
        if not both.link_with_cpu or not both.cpu_with_link or seconds <= 0 or not read_bytes:
            return 1.0, 1.0
        demand = read_bytes / seconds
        lost = max(0.0, 1 - both.link_with_cpu / self.link_rate)
        link = 1 - lost * min(1.0, demand / both.cpu_with_link)
        alone = both.cpu_alone or max(demand, both.cpu_with_link)  # not measured: only what reads faster is held up
        return max(link, 0.05), 1 / (1 + demand * max(0.0, 1 / both.cpu_with_link - 1 / alone))


def _nearest_heads(timed: Iterable[tuple[int, int, int]], config: ModelConfig) -> tuple[int, int, int]:
    """The timed (heads, KV heads, head size) nearest to the model's in products and in what is read."""
    work, read = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    return min(timed, key=lambda h: (abs(log(h[0] * h[2] / work)) + abs(log(h[1] * h[2] / read)), h))


def _pairs(tokens: int, context: int) -> float:
    """Pairs of a new token and a cell that it attends to (causal), `context` cells in all."""
    return tokens * max(0, context - tokens) + tokens * (tokens + 1) / 2


def _grouped(rows) -> dict:
    groups = defaultdict(list)
    for key, x, seconds in rows:
        groups[key].append((x, seconds))
    return {key: _curve(points) for key, points in groups.items()}


@dataclass(frozen=True)
class UnitCost:
    """One unit in one tier. Seconds, bytes. `link`: the unit's blob over the link; `staged`: the same were it not
    page-locked. `kv_*`: its layer's KV cache."""

    acc: float
    cpu: float
    nbytes: int
    link: float
    cpu_reads: int  # bytes that the CPU reads when it computes the unit
    kv_fetch: float = 0.0
    kv_fetch_bytes: int = 0
    kv_write: float = 0.0
    issue: float = 0.0  # host seconds to issue the unit on an accelerator that works on its own
    staged: float = 0.0


def unit_cost(
    unit: Unit, spec: ModelSpec, tables: Tables, load: TierLoad, workload: Workload, ranks: int = 1
) -> UnitCost:
    """Cost of `unit` for the micro-batch `load`, on either side. `ranks` share the cores and DRAM that were timed."""
    on_host, copying = _share_of_rank(tables, load, workload, ranks)
    config, rows = spec.config, load.logit_rows if unit.kind.gives_logits else load.tokens
    if not unit.tensors:  # another rank holds all of it
        return UnitCost(0.0, 0.0, 0, 0.0, 0)
    heads, kv_heads = count_heads(unit.by_role, config)
    if heads:  # a rank's layers may differ in them
        config = replace(config, n_heads=heads, n_kv_heads=kv_heads)
    seconds = {}
    for side in ("acc", "host"):
        s = 0.0
        if unit.kind.is_looked_up:
            s += tables.elementwise(side, "embed", load.tokens, config.d_model)
        else:
            s += sum(tables.matmul(side, m.qtype, m.rows, m.cols, rows) for m in unit.matrices)
            s -= _saved_by_one_launch(tables, side, unit, rows)
            s += tables.elementwise(side, "norm", rows, config.d_model)
        if unit.kind.adds:
            s += tables.elementwise(side, "residual", rows, config.d_model)
        if unit.kind.divided:
            width = max((m.rows for m in unit.matrices if m.role == "ffn_up.weight"), default=config.d_ffn)
            if side == "host" or not _launched_together(tables, side, unit, rows):  # else with gate and up
                s += tables.elementwise(side, "silu_mul", rows, width)
        if heads:
            width = (config.n_heads + config.n_kv_heads) * config.head_dim
            s += tables.elementwise(side, "rope", rows, width)
            if config.qk_norm and (side == "host" or tables.kind == "cpu"):  # CUDA: while the rows are rotated
                s += tables.elementwise(side, "norm", rows, width)
            s += _attention_of(tables, side, config, load, workload.type_k)
        seconds[side] = s * (on_host if side == "host" or tables.kind == "cpu" else 1)
    step = tables.elementwise("acc", "step", 1, 1)
    waits = tables.kind == "cpu"  # the CPU as accelerator computes where it is issued
    reads = load.tokens * config.d_model * 4 if unit.kind.is_looked_up else unit.packed_nbytes
    fetch = write = 0
    if unit.kind.state:
        law = unit.state(spec.config, workload.state_shape)
        assert law is not None
        fetch = law.fetched(load.sequences * load.past, load.sequences)
        write = law.written(load.tokens, load.sequences)
        reads += fetch
    acc, host = (tables.correction.of(side, unit.kind.name, load.tokens) for side in ("acc", "host"))
    link = copying * tables.correction.of("link", "", load.tokens)
    return UnitCost(
        acc * (seconds["acc"] + (step if waits else 0.0)),
        host * (seconds["host"] + tables.elementwise("host", "step", 1, 1)),
        unit.packed_nbytes,
        link * tables.copy("h2d", unit.packed_nbytes),
        reads,
        link * tables.copy("h2d", fetch),
        fetch,
        copying * tables.copy("d2h", write),
        0.0 if waits else acc * step,
        link * tables.copy("h2d", unit.packed_nbytes, "staged"),
    )


def _share_of_rank(tables: Tables, load: TierLoad, workload: Workload, ranks: int) -> tuple[float, float]:
    """How many times as long (CPU work, copies) of a rank take as with the whole host.

    Ranks with slices work at the same time. Those with layers take turns at a decode step, but stream at once.
    """
    at_once = not (workload.split_mode == "layer" and load.is_decode)
    return tables.share("matmul", ranks, load.tokens, at_once), tables.share("copy", ranks, 0, True)


def _launched_together(tables: Tables, side: str, unit: Unit, rows: int) -> tuple[TensorSpec, ...]:
    """Matrices of one type and one input that are multiplied in one launch in small batches: q, k and v, and on CUDA
    gate and up (on the host the figures of each are of a call for both)."""
    on_host = side == "host" or tables.kind == "cpu"
    if rows > (tables.vector_tokens if on_host else SMALL_BATCH):
        return ()
    roles = {ATTENTION: ("attn_q", "attn_k", "attn_v"), FFN: () if on_host else ("ffn_gate", "ffn_up")}
    group = tuple(m for m in unit.matrices if m.role.removesuffix(".weight") in roles.get(unit.kind, ()))
    alike = len({m.qtype for m in group}) == 1 and bool(QUANT_TYPES[group[0].qtype].planes)
    return group if alike and len(group) == len(roles[unit.kind]) else ()


def _saved_by_one_launch(tables: Tables, side: str, unit: Unit, rows: int) -> float:
    """Seconds by which one product as tall as those launched together is faster than they are in turn."""
    group = _launched_together(tables, side, unit, rows)
    if not group:
        return 0.0
    qtype, cols = group[0].qtype, group[0].cols
    in_turn = sum(tables.matmul(side, qtype, m.rows, cols, rows) for m in group)
    return max(0.0, in_turn - tables.matmul(side, qtype, sum(m.rows for m in group), cols, rows))


def _attention_of(tables: Tables, side: str, config: ModelConfig, load: TierLoad, kv_type: str) -> float:
    """Attention of all sequences of the micro-batch."""
    if load.is_decode:
        return tables.decode_attention(side, config, kv_type, load.sequences, load.past + 1)
    each = -(-load.tokens // load.sequences)
    return load.sequences * tables.attention(side, config, kv_type, each, load.past + each)


@dataclass(frozen=True)
class SplitCost:
    """An FFN whose rows are cut, in one tier. Seconds, bytes.

    `acc_rows` and `cpu`: either side's rows of the gated product; `join`: the CPU's to the accelerator; `down`: the
    rest, there. `link` (`staged` when not page-locked) and `nbytes`: the accelerator's part. `issue`: host seconds for
    each of its two launches.
    """

    acc_rows: float
    cpu: float
    join: float
    down: float
    link: float
    nbytes: int
    cpu_reads: int
    issue: float
    staged: float


def split_cost(
    unit: Unit, cpu_rows: int, spec: ModelSpec, tables: Tables, load: TierLoad, workload: Workload, ranks: int = 1
) -> SplitCost:
    """Cost of an FFN of which the CPU computes `cpu_rows` rows of gate and up; see `unit_cost`."""
    on_host, copying = _share_of_rank(tables, load, workload, ranks)
    cut, tokens, d_model = split_rows(unit, cpu_rows), load.tokens, spec.config.d_model
    seconds = {}
    for side, part in (("acc", cut.on_acc), ("host", cut.on_cpu)):
        rows = [m for m in part.matrices if m.role in unit.kind.divided]
        s = sum(tables.matmul(side, m.qtype, m.rows, m.cols, tokens) for m in rows)
        s -= _saved_by_one_launch(tables, side, part, tokens)
        s += tables.elementwise(side, "norm", tokens, d_model)
        if side == "host" or not _launched_together(tables, side, part, tokens):
            s += tables.elementwise(side, "silu_mul", tokens, rows[0].rows)
        seconds[side] = s * (on_host if side == "host" or tables.kind == "cpu" else 1)
    down = sum(
        tables.matmul("acc", m.qtype, m.rows, m.cols, tokens) for m in unit.matrices if m.role not in unit.kind.divided
    )
    down += tables.elementwise("acc", "residual", tokens, d_model) + tables.elementwise("acc", "norm", tokens, cpu_rows)
    down *= on_host if tables.kind == "cpu" else 1
    acc, host = (tables.correction.of(side, unit.kind.name, tokens) for side in ("acc", "host"))
    step, waits = tables.elementwise("acc", "step", 1, 1), tables.kind == "cpu"
    link = copying * tables.correction.of("link", "", tokens)
    return SplitCost(
        acc * (seconds["acc"] + (step if waits else 0.0)),
        host * (seconds["host"] + tables.elementwise("host", "step", 1, 1)),
        tables.handoff("acc", 4 * tokens * cpu_rows, 4 * d_model),
        acc * (down + (step if waits else 0.0)),
        link * sum(tables.copy("h2d", p.nbytes) for p in cut.pieces),
        cut.on_acc.packed_nbytes,
        cut.on_cpu.packed_nbytes,
        0.0 if waits else acc * step,
        link * sum(tables.copy("h2d", p.nbytes, "staged") for p in cut.pieces),
    )


@dataclass(frozen=True)
class TierCosts:
    """Everything that simulating or solving one tier needs to know about time.

    staged: units in host memory that is not page-locked, whose `link` is their `staged`.
    """

    load: TierLoad
    units: dict[str, UnitCost]
    tables: Tables
    spec: ModelSpec
    workload: Workload
    ranks: int = 1
    staged: frozenset[str] = frozenset()
    _splits: dict[tuple, SplitCost] = field(default_factory=dict, compare=False, repr=False)
    _split_speeds: dict[tuple[str, int], tuple[float, float]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )
    searched: dict[tuple[int, ...], tuple] = field(default_factory=dict, init=False, compare=False, repr=False)
    acts: dict[int, tuple] = field(default_factory=dict, init=False, compare=False, repr=False)  # of `simulate`

    @property
    def vector_bytes(self) -> int:
        return 4 * self.spec.config.d_model

    def split(self, name: str, cpu_rows: int) -> SplitCost:
        """Cost of the FFN of that name with so many rows of gate and up on the CPU."""
        if (name, cpu_rows) not in self._splits:
            unit = self.spec.unit(name)
            if (unit.likeness, cpu_rows) not in self._splits:
                cost = split_cost(unit, cpu_rows, self.spec, self.tables, self.load, self.workload, self.ranks)
                self._splits[unit.likeness, cpu_rows] = cost
            cost = self._splits[unit.likeness, cpu_rows]
            self._splits[name, cpu_rows] = replace(cost, link=cost.staged) if name in self.staged else cost
        return self._splits[name, cpu_rows]

    def split_speeds(self, name: str, cpu_rows: int) -> tuple[float, float]:
        """Speeds of (link, CPU) while the CPU computes its rows of that unit and a copy runs."""
        if (name, cpu_rows) not in self._split_speeds:
            cost = self.split(name, cpu_rows)
            self._split_speeds[name, cpu_rows] = self._slowdown(cost.cpu_reads, cost.cpu)
        return self._split_speeds[name, cpu_rows]

    def handoff(self, to: str, nbytes: int) -> float:
        return self.tables.handoff(to, nbytes, self.vector_bytes)

    def all_reduce(self, nbytes: int, copies: bool = False) -> float:
        """Seconds of summing the ranks' parts, `nbytes` of float32 each, in the type in which the run will."""
        dtype = wire_type(self.workload.reduce_dtype, self.load.tokens, self.tables.kind != "cpu")
        return self.tables.collective(self.ranks, nbytes, copies, dtype)

    def meeting(self, step: AllReduce | Gather, copies: bool = False) -> float:
        """Seconds of a step in which all ranks take part; logits are gathered in float32."""
        if isinstance(step, AllReduce):
            return self.all_reduce(step.nbytes, copies)
        return self.tables.collective(self.ranks, step.nbytes, copies)

    @cached_property
    def copy_issue(self) -> float:
        """Host seconds to start a copy: events, queue and call; where it was not timed, what issuing a unit takes."""
        return self.tables.elementwise("acc", "copy", 1, 1) or self.tables.elementwise("acc", "step", 1, 1)

    @cached_property
    def run_issue(self) -> float:
        """Host seconds to begin a run of units (see graph_runs.py); what begins one after a hand-off is in that."""
        return 0.0 if self.tables.kind == "cpu" else self.tables.elementwise("acc", "run", 1, 1)

    @cached_property
    def launch(self) -> float:
        """Host seconds to launch a unit's kernels one by one where the runtime captures none (prompts of several
        sequences), though their own times are those in a graph; else 0."""
        captured = self.load.sequences == 1 or not SMALL_BATCH < self.load.tokens <= LAUNCH_BOUND
        if self.tables.kind == "cpu" or captured:
            return 0.0
        return self.tables.elementwise("acc", "launch", 1, 1)

    @cached_property
    def contended(self) -> dict[str, tuple[float, float]]:
        """Unit -> speeds of (link, CPU) while the CPU computes it and a copy runs."""
        return self._slowdowns([(c.cpu_reads, c.cpu) for c in self.units.values()])

    @cached_property
    def acc_contended(self) -> dict[str, tuple[float, float]] | None:
        """The same for units on the accelerator when that is the CPU, which reads the DRAM that copies use."""
        if self.tables.kind != "cpu":
            return None
        return self._slowdowns([(c.cpu_reads, c.acc) for c in self.units.values()])

    def _slowdowns(self, work: list[tuple[int, float]]) -> dict[str, tuple[float, float]]:
        """By unit, for its bytes read and seconds; units that are alike are looked up once."""
        speeds = {w: self._slowdown(*w) for w in set(work)}
        return {name: speeds[w] for name, w in zip(self.units, work)}

    def _slowdown(self, reads: int, seconds: float) -> tuple[float, float]:
        """Speeds of (link, CPU) while this rank's CPU reads so much and all ranks copy: those with layers take turns to
        compute, not to stream."""
        return self.tables.slowdown(self.ranks * reads, seconds, self.ranks)


def tier_costs(
    spec: ModelSpec,
    tables: Tables,
    load: TierLoad,
    workload: Workload,
    ranks: int = 1,
    staged: frozenset[str] = frozenset(),
) -> TierCosts:
    """Costs of every unit of the model for one tier's load; copies of units in `staged` are not from page-locked
    memory."""
    by_likeness: dict[tuple, UnitCost] = {}
    units = {}
    for unit in spec.units:
        key = unit.likeness, unit.name in staged
        if key not in by_likeness:
            cost = unit_cost(unit, spec, tables, load, workload, ranks)
            by_likeness[key] = replace(cost, link=cost.staged) if unit.name in staged else cost
        units[unit.name] = by_likeness[key]
    return TierCosts(load, units, tables, spec, workload, ranks, staged)


def restage(costs: TierCosts, staged: frozenset[str]) -> TierCosts:
    """The same tier with other units in host memory that is not page-locked."""
    if costs.staged == staged:
        return costs
    return tier_costs(costs.spec, costs.tables, costs.load, costs.workload, costs.ranks, staged)
