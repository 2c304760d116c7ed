"""What changed between two profiles of a machine: who it is, and rates that moved by more than a tenth."""

import statistics
from collections import defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, fields

from pshard.machine import MachineProfile

MOVED = 0.10  # less than this is noise
HANDOFF = "hand-off"


@dataclass(frozen=True)
class Change:
    """One difference. `ratio` is new rate / old rate (the median over a table's common rows); None for a name."""

    what: str
    before: str
    after: str
    ratio: float | None = None


def compare_profiles(old: MachineProfile, new: MachineProfile) -> tuple[Change, ...]:
    """Identity fields that differ, then rates whose median moved by more than 10%."""
    return (*_identity_changes(old, new), *_rate_changes(old, new))


def _identity_changes(old: MachineProfile, new: MachineProfile) -> Iterator[Change]:
    before, after = _identity(old), _identity(new)
    for what in sorted(before.keys() | after.keys()):
        if before.get(what) != after.get(what):
            yield Change(what, before.get(what, "none"), after.get(what, "none"))


def _identity(profile: MachineProfile) -> dict[str, str]:
    names = {f"host {f.name}": _text(f.name, getattr(profile.host, f.name)) for f in fields(profile.host)}
    for acc in profile.accelerators:
        names |= {f"accelerator {acc.index} {f.name}": _text(f.name, getattr(acc, f.name)) for f in fields(acc)}
    return names | {f: getattr(profile.provenance, f) for f in ("pshard", "torch", "python", "os")}


def _text(field: str, value: object) -> str:
    """A field's value; memory in MiB, since systems report a few KiB more or less after every boot."""
    return f"{value >> 20} MiB" if field == "memory_bytes" and isinstance(value, int) else str(value)


def _rate_changes(old: MachineProfile, new: MachineProfile) -> Iterator[Change]:
    before, after = dict(_rates(old)), dict(_rates(new))
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for key in before.keys() & after.keys():
        if before[key] > 0 and after[key] > 0:
            groups[key[0]].append((before[key], after[key]))
    for what, pairs in sorted(groups.items()):
        ratio = statistics.median(b / a for a, b in pairs)
        if abs(ratio - 1) > MOVED:
            if len(pairs) > 1:
                yield Change(what, f"{len(pairs)} timings", f"{ratio:.2f}x as fast", ratio)
            else:
                yield Change(what, _show_rate(what, pairs[0][0]), _show_rate(what, pairs[0][1]), ratio)


def _show_rate(what: str, rate: float) -> str:
    return f"{1e6 / rate:.1f} µs" if what == HANDOFF else f"{rate / 1e9:.1f} GB/s"


def _regime(tokens: int) -> str:
    return "few tokens" if tokens <= 16 else "many tokens"


def _rates(profile: MachineProfile) -> Iterator[tuple[tuple[str, Hashable], float]]:
    """((group, row), rate): rows of a group are compared one by one and summed up in one line."""
    for read in profile.reads:
        yield (f"DRAM read, {read.threads} threads", 0), read.rate
    for copy in profile.copies:
        whose = "" if copy.device == "acc" else f" of {copy.device}"
        yield (f"{copy.direction} {copy.memory} copies{whose}", copy.nbytes), copy.nbytes / copy.seconds
    same = ("acc",) if profile.accelerators[0].kind == "cpu" else ()  # the host's rows again
    for m in (m for m in profile.matmuls if m.device not in same):
        yield (f"{m.device} matmul {m.qtype}, {_regime(m.tokens)}", (m.rows, m.cols, m.tokens)), 1 / m.seconds
    for e in (e for e in profile.experts if e.device not in same):
        layer = (e.down_qtype, e.experts, e.used, e.d_expert, e.d_model, e.tokens)
        yield (f"{e.device} experts {e.gate_qtype}, {_regime(e.tokens)}", layer), 1 / e.seconds
    for p in profile.in_place:
        yield (f"{p.device} experts read in place", (p.expert_nbytes, p.tokens)), p.nbytes / p.seconds
    for r in (r for r in profile.routes if r.device not in same):
        yield (f"{r.device} routers", (r.qtype, r.experts, r.used, r.d_model, r.tokens)), 1 / r.seconds
    for d in (d for d in profile.deltas if d.device not in same):
        heads = (d.key_heads, d.value_heads, d.head, d.sequences, d.tokens)
        yield (f"{d.device} delta nets", heads), 1 / d.seconds
    for a in (a for a in profile.attention if a.device not in same):
        key = (a.n_heads, a.n_kv_heads, a.head_dim, a.kv_type, a.sequences, a.tokens, a.context)
        yield (f"{a.device} attention", key), 1 / a.seconds
    for c in profile.collectives:
        yield (f"all-reduce, {c.ranks} ranks", (c.backend, c.nbytes, c.dtype, c.copies)), 1 / c.seconds
    for field in fields(profile.contention):
        yield (f"contention {field.name}", 0), getattr(profile.contention, field.name)
    if profile.handoff_seconds > 0:
        yield (HANDOFF, 0), 1 / profile.handoff_seconds
