"""A profile's rows, grouped for look-up: seconds of one operation, copy or sum, by interpolation.

Curves are interpolated log-log. Below the first point a curve is flat (fixed costs), above the last one it grows in
proportion (rates hold). A matrix that the profile did not time takes the seconds per element of the nearest sizes.
"""

from collections import defaultdict
from collections.abc import Iterable
from copy import copy
from dataclasses import replace
from functools import cached_property, lru_cache
from math import log

from pshard.batch_sizes import SMALL_BATCH, TILE_TOKENS
from pshard.collectives import fastest_collective
from pshard.errors import UserError
from pshard.homes import READ, Home
from pshard.machine import MEMORIES, CollectiveTiming, Contention, MachineProfile
from pshard.plan import NOTHING_LEARNT, Correction
from pshard.planner.price.delta_tables import DeltaTables
from pshard.planner.price.experts.expert_tables import ExpertTables
from pshard.planner.price.prompt_math import price_math, uses_int8
from pshard.planner.price.scattered_reads import ScatteredReads
from pshard.quant import packed_nbytes
from pshard.times.curves import Curve, interpolate, interpolate_evenly
from pshard.times.curves import curve_through as _curve
from pshard.times.gpu_tiles import BF16
from pshard.units.operations import Attend

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
        rows, own = defaultdict(list), price_math(profile)
        for m in own.matmuls:
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
        self.routed, self.deltas, self.scattered = ExpertTables(own), DeltaTables(profile), ScatteredReads(profile)
        self._elementwise = _grouped(((e.device, e.what), e.tokens * e.width, e.seconds) for e in profile.elementwise)
        self._copies = _group_copies(profile)
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
        self.divided: dict[tuple, dict] = {}  # what `TierCosts` has worked out of divided units, by what they run in

    def corrected(self, correction: Correction) -> "Tables":
        """The same tables (rows and what was looked up are shared) under another correction."""
        other = copy(self)
        other.correction, other._others, other.divided = correction, {}, {}
        return other

    @cached_property
    def in_bf16(self) -> "Tables | None":
        """By these products take what they do in bfloat16, under all corrections; None where none is in int8."""
        return Tables(replace(self.profile, prompt_math=BF16)) if uses_int8(self.profile) else None

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

    def has_attention(self, device: str, heads: tuple[int, int, int]) -> bool:
        """Whether attention of such heads was timed."""
        return any(side == device and heads in timed for (side, _), timed in self._attention.items())

    def attention(self, device: str, heads: Attend, kv_type: str, tokens: int, context: int) -> float:
        """Seconds of attention of `tokens` new tokens over `context` cells in all, one layer, all heads."""
        key = (device, heads.n_heads, heads.n_kv_heads, heads.head_dim, kv_type, tokens, context)
        if key not in self._seen:
            self._seen[key] = self._attention_seconds(device, heads, kv_type, tokens, context)
        return self._seen[key]

    def _attention_seconds(self, device: str, heads: Attend, kv_type: str, tokens: int, context: int) -> float:
        timed = self._attention.get((device, kv_type))
        if not timed:
            timed = next((t for (d, _), t in sorted(self._attention.items()) if d == device), None)
        if not timed:
            raise UserError(f"the machine profile has no attention timings of the {device}; run pshard-profile again")
        near = _nearest_heads(timed, heads)
        if tokens == 1 and 1 in timed[near]:
            return _read_cells(timed[near][1], _read_alike(near, heads), context, runs_on_host(device, self.kind))
        products = heads.n_heads * heads.head_dim / (near[0] * near[2])
        scale = _read_alike(near, heads) if tokens <= SMALL_BATCH else products
        # between timed token counts: seconds per pair of new token and cell, at this context
        rates = _curve(
            (t, interpolate(curve, max(context, t)) / count_pairs(t, max(context, t)))
            for t, curve in timed[near].items()
        )
        at = min(max(tokens, rates[0][0]), rates[-1][0])
        return scale * count_pairs(tokens, context) * interpolate(rates, at)

    def decode_attention(self, device: str, heads: Attend, kv_type: str, sequences: int, context: int) -> float:
        """Seconds of attention of one new token of each of `sequences` sequences over `context` cells each.

        What reads as many cells in all is looked up: of one sequence, and of each number of them that was timed.
        """
        cells = sequences * context
        alone = self.attention(device, heads, kv_type, 1, cells)
        timed = self._together.get((device, kv_type))
        if sequences == 1 or not timed:
            return alone
        near = _nearest_heads(timed, heads)
        alike, on_host = _read_alike(near, heads), runs_on_host(device, self.kind)
        together = [(n, _read_cells(curve, alike, cells / n, on_host)) for n, curve in timed[near].items()]
        return interpolate(_curve([(1, alone), *together]), min(sequences, max(timed[near])))

    def elementwise(self, device: str, what: str, tokens: int, width: int) -> float:
        """Seconds of a norm, residual addition, rotation, product or look-up on [tokens, width]; 0 when not timed."""
        curve = self._elementwise.get((device, what))
        return interpolate(curve, tokens * width) if curve else 0.0

    def copy(self, direction: str, nbytes: int, memory: str = "pinned") -> float:
        """Seconds of one copy in a lane, which is timed as `direction`, from or to `memory`, or the next slower kind
        that was timed: "pinned" (page-locked), "staged", "pageable"; else the fastest that was."""
        if not nbytes:
            return 0.0
        kinds = MEMORIES[MEMORIES.index(memory) :] + MEMORIES
        curve = next((c for kind in kinds if (c := self._copies.get((direction, kind)))), None)
        if not curve:
            raise UserError(f"the machine profile has no {direction} copy timings; run pshard-profile again")
        return (interpolate_evenly if direction == READ.timed else interpolate)(curve, nbytes)

    def handoff(self, to: str, nbytes: int, vector_bytes: int, copies: int = 1) -> float:
        """Seconds of moving activations one way, `nbytes` in so many copies. The profile's figure is a round trip of
        one hidden vector; each copy after the first is one more small kernel behind it, as a norm is."""
        key = (to, nbytes, vector_bytes, copies)
        if key not in self._seen:
            direction = "h2d" if to == "acc" else "d2h"
            more = self.copy(direction, nbytes) - self.copy(direction, vector_bytes)
            kernels = (copies - 1) * self.elementwise("acc", "norm", 1, vector_bytes // 4)
            self._seen[key] = self.profile.handoff_seconds / 2 + max(0.0, more) + kernels
        return self._seen[key]

    def collective(self, ranks: int, nbytes: int, copies: bool = False, dtype: str = "f32") -> float:
        """Seconds of an all-reduce of `nbytes` of float32, rounded to `dtype`, by the fastest way that was timed: on
        one host or, where the ranks are on several, between them.

        copies: while weights are copied to the device.
        """
        if ranks < 2:
            return 0.0
        key = ("collective", ranks, nbytes, copies, dtype)
        if key not in self._seen:
            fastest = fastest_collective(list_sums(self.profile, ranks), ranks, nbytes, dtype, copies)
            # not timed: every rank's part through host memory and back
            by_host = self.profile.handoff_seconds + ranks * (self.copy("d2h", nbytes) + self.copy("h2d", nbytes))
            self._seen[key] = fastest[1] if fastest else by_host
        return self._seen[key]

    def hand_over(self, ranks: int, nbytes: int, copies: bool = False) -> float:
        """Seconds of handing `nbytes` to the next of `ranks` ranks: an all-reduce of two moves that much each way.

        Ranks of several hosts: an all-reduce of them all, which moves no less over the link between two hosts.
        """
        several = self.profile.ranks_here(ranks) < ranks
        return self.collective(ranks if several else 2, nbytes, copies)

    def share(self, what: str, ranks: int, size: int, at_once: bool) -> float:
        """How many times as long work takes with what one of `ranks` ranks has of its host, all at once or it alone.

        what, size: as in ShareTiming. Where it was not timed: the cores' share of matmuls, and links of their own.
        """
        ranks = self.profile.ranks_here(ranks)
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


def seconds_from(tables: Tables, home: Home, nbytes: int) -> float:
    """Seconds of the slowest lane by which so many bytes come from a home."""
    return max(tables.copy(lane.timed, nbytes) for lane in home.way_in)


def runs_on_host(side: str, accelerator: str) -> bool:
    """Whether a side's kernels are the host's: on the host, or with the CPU as accelerator (its kind)."""
    return side == "host" or accelerator == "cpu"


def _nearest_heads(timed: Iterable[tuple[int, int, int]], heads: Attend) -> tuple[int, int, int]:
    """The timed (heads, KV heads, head size) nearest to the model's in products and in what is read."""
    work, read = heads.n_heads * heads.head_dim, heads.n_kv_heads * heads.head_dim
    return min(timed, key=lambda h: (abs(log(h[0] * h[2] / work)) + abs(log(h[1] * h[2] / read)), h))


def _read_alike(timed: tuple[int, int, int], heads: Attend) -> float:
    """How many cells of the timed heads are as many bytes as one of the model's."""
    return heads.n_kv_heads * heads.head_dim / (timed[1] * timed[2])


def _read_cells(curve: Curve, alike: float, cells: float, on_host: bool) -> float:
    """Seconds of attention over cells of which each is as many bytes as `alike` of those that were timed. A GPU's
    launches take as long over few of them."""
    return alike * interpolate(curve, cells) if on_host else interpolate(curve, alike * cells)


def count_pairs(tokens: int, context: int) -> float:
    """Pairs of a new token and a cell that it attends to (causal), `context` cells in all."""
    return tokens * max(0, context - tokens) + tokens * (tokens + 1) / 2


def _group_copies(profile: MachineProfile) -> dict:
    copies = (c for c in profile.copies if c.device == "acc")
    timed = [((c.direction, c.memory), c.nbytes, c.seconds) for c in copies]
    timed += [((READ.timed, "pinned"), d.nbytes, d.seconds) for d in profile.unit_reads]
    return _grouped(timed)


def _grouped(rows) -> dict:
    groups = defaultdict(list)
    for key, x, seconds in rows:
        groups[key].append((x, seconds))
    return {key: _curve(points) for key, points in groups.items()}


@lru_cache(8)
def find_tables(profile: MachineProfile, correction: Correction = NOTHING_LEARNT) -> Tables:
    """The same tables for all that is planned by a profile: what one plan has looked up, the next one knows."""
    return Tables(profile, correction)


def list_sums(profile: MachineProfile, ranks: int) -> list[CollectiveTiming]:
    """What was timed on one host or, where so many ranks are on several, between them."""
    here = profile.ranks_here
    return [c for c in profile.collectives if (here(c.ranks) < c.ranks) == (here(ranks) < ranks)]
