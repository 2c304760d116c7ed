"""What a machine profile's timings must obey beyond their types: work takes time, and more of it more. No torch."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations

from pshard.machine import MachineProfile
from pshard.quant import QUANT_TYPES

LEAST_SECONDS = 1e-8  # nothing that is started takes less
MOST_BYTES, MOST_FLOPS = 1e14, 1e17  # per second: machines of 2026 reach about 1e13 and 1e16
MOST_CORES = 1 << 14  # of a host, and threads and ranks on it
UNLIKELY = 16.0  # times too slow beside another size; with idle cores the worst row of measured profiles is at 4.2
STALL = 1.0  # seconds that others may add all the same: 0.16 were seen where programs kept the cores busy


@dataclass(frozen=True)
class Point:
    """Seconds of work of a size, and the field that says so."""

    size: int
    seconds: float
    field: str


def check_timings(profile: MachineProfile) -> None:
    """Raise ValueError that names the field whose timing no machine has.

    Other programs make timings longer, on a busy machine hundreds of times, and never shorter. So what is too fast is
    refused by what no machine comes near. What is too slow is refused along the curves that the planner reads, of one
    operation by its size: beside each other row it may take UNLIKELY times what that takes, or what that grows to in
    proportion, and STALL seconds. Element-wise work may take no time, as some of it is a difference of two timings.
    """
    for field, value, least in _amounts(profile):
        if not value >= least:
            raise ValueError(f"MachineProfile.{field} is {value:g}; on every machine it is {least:g} or more")
    for field, rate, most in _rates(profile):
        if rate > most:
            raise ValueError(f"MachineProfile.{field} would be {rate:.3g} a second; no machine comes near {most:g}")
    _check_host(profile)
    _check_experts(profile)
    for points in _curves(profile):
        for fast, slow in permutations(points, 2):
            if slow.seconds > UNLIKELY * fast.seconds * max(1.0, slow.size / fast.size) + STALL:
                raise ValueError(
                    f"MachineProfile.{slow.field} is {slow.seconds:g} for a size of {slow.size}, which does not go "
                    f"with {fast.seconds:g} for {fast.size} ({fast.field})"
                )


def _check_host(profile: MachineProfile) -> None:
    """Raise ValueError for numbers of cores, threads or ranks that no host has: a run takes them as they are."""
    cores, ranks = profile.host.cores, max(1, profile.ranks_per_host)
    for field, count, most in (
        ("host.cores", cores, MOST_CORES),
        ("host.threads", profile.host.threads, cores),
        ("ranks_per_host", ranks, MOST_CORES),
    ):
        if not 1 <= count <= most:
            raise ValueError(f"MachineProfile.{field} is {count}, not a number from 1 to {most}")


def _check_experts(profile: MachineProfile) -> None:
    """Raise ValueError for experts that no model has."""
    for table in ("experts", "routes"):
        for i, row in enumerate(getattr(profile, table)):
            if row.used > row.experts:
                raise ValueError(f"MachineProfile.{table}[{i}].used is {row.used}, more than its {row.experts} experts")
    for i, e in enumerate(profile.experts):  # prices go by the bytes of a type
        for name in ("gate_qtype", "down_qtype"):
            if (value := getattr(e, name)) not in QUANT_TYPES:
                raise ValueError(f"MachineProfile.experts[{i}].{name} is {value!r}, which is no type of weights")


def _amounts(profile: MachineProfile) -> Iterator[tuple[str, float, float]]:
    """Fields that are above 0, by name, and the least that they are."""
    for table in ("matmuls", "attention", "experts", "routes", "deltas", "in_place", "copies", "collectives", "disks"):
        for i, row in enumerate(getattr(profile, table)):
            yield f"{table}[{i}].seconds", row.seconds, LEAST_SECONDS
    for i, share in enumerate(profile.shares):
        for name in ("whole", "alone", "together"):
            yield f"shares[{i}].{name}", getattr(share, name), LEAST_SECONDS
    for i, read in enumerate(profile.reads):
        yield f"reads[{i}].rate", read.rate, 1.0
    for i, accelerator in enumerate(profile.accelerators):
        yield f"accelerators[{i}].memory_bytes", accelerator.memory_bytes, 1.0


def _rates(profile: MachineProfile) -> Iterator[tuple[str, float, float]]:
    """Bytes or floating-point operations per second by the field that says so, and the most that they are."""
    for i, m in enumerate(profile.matmuls):
        yield f"matmuls[{i}].seconds", 2.0 * m.rows * m.cols * m.tokens / m.seconds, MOST_FLOPS
    for i, a in enumerate(profile.attention):  # at least half of the pairs of a token and a cell
        pairs = a.sequences * a.tokens * a.context / 2
        yield f"attention[{i}].seconds", 4.0 * a.n_heads * a.head_dim * pairs / a.seconds, MOST_FLOPS
    for i, e in enumerate(profile.experts):
        yield f"experts[{i}].seconds", 6.0 * e.used * e.d_expert * e.d_model * e.tokens / e.seconds, MOST_FLOPS
    for i, r in enumerate(profile.routes):
        yield f"routes[{i}].seconds", 2.0 * r.experts * r.d_model * r.tokens / r.seconds, MOST_FLOPS
    for i, d in enumerate(profile.deltas):
        flops = 6.0 * d.value_heads * d.head**2 * d.tokens * d.sequences
        yield f"deltas[{i}].seconds", flops / d.seconds, MOST_FLOPS
    for table in ("in_place", "copies", "collectives", "disks"):
        for i, row in enumerate(getattr(profile, table)):
            yield f"{table}[{i}].seconds", row.nbytes / row.seconds, MOST_BYTES
    for i, read in enumerate(profile.reads):
        yield f"reads[{i}].rate", read.rate, MOST_BYTES
    for name, rate in vars(profile.contention).items():
        yield f"contention.{name}", rate, MOST_BYTES


def _curves(profile: MachineProfile) -> Iterator[list[Point]]:
    """Timings of the same work by how much of it there is."""
    curves: dict[tuple, list[Point]] = defaultdict(list)

    def add(table: str, place: int, key: tuple, size: int, seconds: float) -> None:
        curves[(table, *key)].append(Point(size, seconds, f"{table}[{place}].seconds"))

    for i, m in enumerate(profile.matmuls):
        add("matmuls", i, (m.device, m.qtype, m.rows, m.cols), m.tokens, m.seconds)
    for i, a in enumerate(profile.attention):
        heads = (a.n_heads, a.n_kv_heads, a.head_dim)
        add("attention", i, (a.device, heads, a.kv_type, a.tokens, a.sequences), a.context, a.seconds)
    for i, e in enumerate(profile.experts):
        shape = (e.gate_qtype, e.down_qtype, e.experts, e.used, e.d_expert, e.d_model)
        add("experts", i, (e.device, *shape), e.tokens, e.seconds)
    for i, r in enumerate(profile.routes):
        add("routes", i, (r.device, r.qtype, r.experts, r.used, r.d_model), r.tokens, r.seconds)
    for i, d in enumerate(profile.deltas):
        add("deltas", i, (d.device, d.key_heads, d.value_heads, d.head, d.sequences), d.tokens, d.seconds)
    for i, p in enumerate(profile.in_place):
        add("in_place", i, (p.device, p.expert_nbytes), p.tokens, p.seconds)
    for i, c in enumerate(profile.copies):
        add("copies", i, (c.device, c.direction, c.memory), c.nbytes, c.seconds)
    for i, s in enumerate(profile.collectives):
        add("collectives", i, (s.backend, s.ranks, s.dtype, s.copies), s.nbytes, s.seconds)
    yield from curves.values()
