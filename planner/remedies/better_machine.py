"""Profiles of machines that are better in one thing: a faster link, host memory or disk, more cores or memory."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from pshard.machine import (
    AttentionTiming,
    CopyTiming,
    DeltaTiming,
    ExpertTiming,
    InPlaceTiming,
    MachineProfile,
    MatmulTiming,
)
from pshard.planner.price.profile_tables import Tables, find_tables
from pshard.quant import packed_nbytes

Rescale = Callable[[float, float, float], float]  # seconds, those of reading and those of computing at best -> seconds


def double_link(profile: MachineProfile) -> MachineProfile:
    """The same machine with copies, and experts read over the link, in half the time, as far as host memory can read:
    beside CPU kernels copies have up to half of its rate, and the kernels what is left."""
    both, most = profile.contention, find_tables(profile).shared_rate

    def halve(row: CopyTiming | InPlaceTiming) -> float:
        return max(row.seconds / 2, min(row.seconds, row.nbytes / most))

    copies = tuple(replace(row, seconds=halve(row)) for row in profile.copies)
    in_place = tuple(replace(row, seconds=halve(row)) for row in profile.in_place)
    link = max(both.link_with_cpu, min(2 * both.link_with_cpu, most / 2))
    faster = replace(
        both,
        link_with_cpu=link,
        cpu_with_link=min(both.cpu_with_link, most - link),
        h2d_with_d2h=2 * both.h2d_with_d2h,
        d2h_with_h2d=2 * both.d2h_with_h2d,
    )
    return replace(profile, copies=copies, in_place=in_place, contention=faster)


def double_host_rate(profile: MachineProfile) -> MachineProfile:
    """The same machine with host memory that reads twice as fast: of what the CPU does, the time that its bytes take at
    the best rate is halved, and nothing is faster than the CPU computes at best. Without a GPU copies are such work;
    with one they stay the link's."""
    tables, both = find_tables(profile), profile.contention
    copies = profile.copies
    if profile.accelerators[0].kind == "cpu":
        copies = tuple(replace(c, seconds=c.seconds / 2) for c in copies)
    beside = replace(
        both,
        link_with_cpu=max(both.link_with_cpu, min(2 * both.link_with_cpu, tables.link_rate)),
        cpu_with_link=2 * both.cpu_with_link,
        cpu_alone=2 * both.cpu_alone,
    )
    reads = tuple(replace(r, rate=2 * r.rate) for r in profile.reads)
    faster = replace(profile, copies=copies, contention=beside, reads=reads)
    return _rescale(faster, tables, lambda now, reading, computing: max(now - min(now, reading) / 2, computing))


def double_cores(profile: MachineProfile) -> MachineProfile:
    """The same machine with twice the cores: what the CPU does takes half the time, but no less than its bytes take at
    the rate of host memory."""
    tables = find_tables(profile)
    return _rescale(profile, tables, lambda now, reading, _: max(now / 2, min(now, reading)))


def double_host_memory(profile: MachineProfile) -> MachineProfile:
    """The same machine with twice as much host memory, of which plans may take twice as much."""
    host = replace(profile.host, memory_bytes=2 * profile.host.memory_bytes)
    return replace(profile, host=host, ram_bytes=2 * profile.ram_bytes)


def double_disk(profile: MachineProfile) -> MachineProfile:
    """The same machine with a disk that brings everything in half the time."""
    return replace(profile, disks=tuple(replace(row, seconds=row.seconds / 2) for row in profile.disks))


def _rescale(profile: MachineProfile, tables: Tables, rescale: Rescale) -> MachineProfile:
    """The profile with what the CPU does rescaled; `tables`: of the machine as it is."""
    cpu = {"host"}
    if profile.accelerators[0].kind == "cpu":
        cpu |= {row.device for row in profile.matmuls}
    peaks: dict[tuple[str, str], float] = {}
    for row in profile.matmuls:
        if row.device in cpu:
            key = row.device, row.qtype
            peaks[key] = max(peaks.get(key, 0.0), row.rows * row.cols * row.tokens / row.seconds)

    def rescaled(rows: tuple[Any, ...]) -> Iterator[Any]:
        for row in rows:
            if row.device not in cpu:
                yield row
                continue
            peak = peaks.get((row.device, getattr(row, "qtype", "")), 0.0)
            products = row.rows * row.cols * row.tokens if isinstance(row, MatmulTiming) else 0
            computing = products / peak if peak else 0.0
            yield replace(row, seconds=rescale(row.seconds, _read_bytes(row) / tables.host_rate, computing))

    return replace(
        profile,
        matmuls=tuple(rescaled(profile.matmuls)),
        attention=tuple(rescaled(profile.attention)),
        experts=tuple(rescaled(profile.experts)),
        deltas=tuple(rescaled(profile.deltas)),
    )


def _read_bytes(row: MatmulTiming | AttentionTiming | ExpertTiming | DeltaTiming) -> float:
    """Bytes of weights, cells or states that what was timed reads, each once."""
    if isinstance(row, MatmulTiming):
        return packed_nbytes(row.qtype, row.rows, row.cols)
    if isinstance(row, AttentionTiming):
        return row.sequences * row.context * row.n_kv_heads * row.head_dim * 4.0
    if isinstance(row, DeltaTiming):
        return row.sequences * row.value_heads * row.head * row.head * 8.0  # float32, read and written
    chosen = row.experts * (1 - (1 - row.used / row.experts) ** row.tokens)
    one = 2 * packed_nbytes(row.gate_qtype, row.d_expert, row.d_model)
    return chosen * (one + packed_nbytes(row.down_qtype, row.d_model, row.d_expert))
