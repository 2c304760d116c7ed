"""Which cores and which memory of a host with several NUMA nodes belong to a rank."""

import ctypes
import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

NODES = Path("/sys/devices/system/node")
PROCESSORS = Path("/sys/devices/system/cpu")
PCI = Path("/sys/bus/pci/devices")
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # system call numbers; the C library has no function for it
_BIND = 2  # MPOL_BIND: only from the given nodes
_PREFER = 5  # MPOL_PREFERRED_MANY, since Linux 5.15: from others when these are full
_MASK_BITS = 1024


@dataclass(frozen=True)
class Place:
    """Where a rank runs: its `cores`, and the NUMA `nodes` that they belong to (none where the system tells none)."""

    cores: tuple[int, ...]
    nodes: tuple[int, ...]


def read_nodes(folder: Path = NODES) -> dict[int, tuple[int, ...]]:
    """NUMA node -> its processors, for nodes that have some; empty where the system does not tell."""
    lists = {int(p.parent.name[4:]): p.read_text() for p in folder.glob("node[0-9]*/cpulist")}
    nodes = {node: _parse_list(text) for node, text in sorted(lists.items())}
    return {node: cpus for node, cpus in nodes.items() if cpus}


def _parse_list(text: str) -> tuple[int, ...]:
    """Numbers of a list as the kernel writes it: 0-3,8."""
    spans = [part.split("-") for part in text.strip().split(",") if part]
    return tuple(n for span in spans for n in range(int(span[0]), int(span[-1]) + 1))


def format_list(numbers: Sequence[int]) -> str:
    """As the kernel writes it: 0-3,8."""
    words, rest = [], sorted(numbers)
    while rest:
        first = last = rest.pop(0)
        while rest and rest[0] == last + 1:
            last = rest.pop(0)
        words.append(f"{first}-{last}" if last > first else str(first))
    return ",".join(words)


def read_siblings(folder: Path = PROCESSORS) -> dict[int, int]:
    """Processor -> the first processor of its physical core; empty where the system does not tell."""
    lists = {int(p.parents[1].name[3:]): p.read_text() for p in folder.glob("cpu[0-9]*/topology/thread_siblings_list")}
    return {cpu: min(_parse_list(text), default=cpu) for cpu, text in lists.items()}


def order_by_core(cpus: Sequence[int], siblings: Mapping[int, int]) -> list[int]:
    """The processors with those of one physical core side by side."""
    return sorted(cpus, key=lambda cpu: (siblings.get(cpu, cpu), cpu))


def spread_over_cores(cpus: Sequence[int], siblings: Mapping[int, int]) -> list[int]:
    """The processors, first one of each physical core, then the second ones, and so on."""
    seen: Counter[int] = Counter()
    turns: list[tuple[int, int]] = []
    for cpu in order_by_core(cpus, siblings):
        core = siblings.get(cpu, cpu)
        turns.append((seen[core], cpu))
        seen[core] += 1
    return [cpu for _, cpu in sorted(turns)]


def place_rank(
    rank: int,
    ranks: int,
    usable: Sequence[int],
    nodes: Mapping[int, Sequence[int]],
    siblings: Mapping[int, int],
    near: Sequence[int] = (),
) -> Place:
    """The share of the `usable` processors that rank `rank` of `ranks` on this host gets.

    No share crosses a node when there are at least as many ranks as nodes; ranks of one node divide its cores, and
    share a physical core (`siblings`, see `read_siblings`) only where these do not come out even. With fewer ranks than
    nodes each gets whole nodes. Ranks share a processor only where there are not enough. near: each rank's GPU's node,
    whose cores it gets; empty, or one without usable processors among them: nothing of that kind is known.
    """
    ordered = order_by_core(usable, siblings)
    local = {node: [c for c in ordered if c in set(cpus)] for node, cpus in nodes.items()}
    local = {node: cores for node, cores in local.items() if cores}
    if sum(map(len, local.values())) != len(usable):
        local = {-1: ordered}  # the system tells no nodes, or not all of them
    names = list(local)
    if near and set(near) <= set(names):
        mine, beside = [near[rank]], [r for r in range(ranks) if near[r] == near[rank]]
        cores = _share(local[near[rank]], beside.index(rank), len(beside))
    elif ranks < len(names):
        mine = names[rank * len(names) // ranks : (rank + 1) * len(names) // ranks]
        cores = [core for node in mine for core in local[node]]
    else:
        node = rank * len(names) // ranks
        beside = [r for r in range(ranks) if r * len(names) // ranks == node]
        mine, cores = [names[node]], _share(local[names[node]], beside.index(rank), len(beside))
    return Place(tuple(cores), tuple(n for n in mine if n >= 0))


def _share(cores: list[int], index: int, count: int) -> list[int]:
    each = len(cores) // count
    return cores[index * each : (index + 1) * each] or [cores[index % len(cores)]]


def read_pci_node(address: str, folder: Path = PCI) -> int:
    """NUMA node of a PCI device by its address (0000:8a:00.0; NVML writes more digits, and capitals); -1 where the
    system does not tell, or has one node only."""
    try:
        return int((folder / address.lower()[-len("0000:8a:00.0") :] / "numa_node").read_text())
    except (OSError, ValueError):
        return -1


def bind_memory(nodes: Sequence[int], spill: bool) -> str | None:
    """Take all memory that this thread, and threads it starts, touch from now on, from these nodes.

    spill: from others when these are full, where the system can; else it ends a process that needs more.
    Returns why that cannot be, or None. Call it before weights and caches are allocated.
    """
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None or platform.system() != "Linux":
        return f"no way known on {platform.system()} {platform.machine()}"
    word = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (_MASK_BITS // word))()
    for node in nodes:
        mask[node // word] |= 1 << node % word
    libc = ctypes.CDLL(None, use_errno=True)
    for policy in (_PREFER, _BIND) if spill else (_BIND,):
        if libc.syscall(ctypes.c_long(number), policy, mask, ctypes.c_ulong(_MASK_BITS + 1)) == 0:
            return None
    return os.strerror(ctypes.get_errno())
