"""A profile as tables for people."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from pshard.machine import CopyTiming, MachineProfile, MatmulTiming
from pshard.profile.compare import Change
from pshard.quant import packed_nbytes

SHOWN_SHAPES = 3  # matrices per quant type: the largest that were timed


def print_profile(profile: MachineProfile, console: Console) -> None:
    """Host, accelerators, DRAM, link, matmuls and attention."""
    for table in (
        _host_table(profile),
        _reads_table(profile),
        _link_table(profile),
        *(_matmul_table(profile, side) for side in ("host", "acc")),
        _attention_table(profile),
    ):
        if table.row_count:
            console.print(table)
    for note in profile.provenance.notes:
        console.print(f"note: {note}")


def print_changes(changes: Sequence[Change], since: str, console: Console) -> None:
    """What changed since the profile of the date `since`."""
    if not changes:
        console.print(f"Nothing moved by more than 10% since {since}.")
        return
    table = Table("", "before", "now", title=f"Changed since {since}", title_justify="left")
    for change in changes:
        table.add_row(change.what, change.before, change.after)
    console.print(table)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    return table


def _host_table(profile: MachineProfile) -> Table:
    host = profile.host
    table = Table(title="Machine", title_justify="left", show_header=False)
    caches = ", ".join(f"{name} {_size(nbytes)}" for name, nbytes in host.caches) or "unknown"
    table.add_row("CPU", f"{host.cpu}, {host.cores} cores usable, {host.numa_nodes} NUMA node(s)")
    table.add_row("caches", caches)
    table.add_row("memory", _size(host.memory_bytes))
    table.add_row("host kernels", f"{host.kernels}, {host.isa}, {host.threads} threads chosen")
    for acc in profile.accelerators:
        pcie = f", PCIe gen {acc.pcie_generation} x{acc.pcie_width}" if acc.pcie_generation else ""
        driver = f", driver {acc.driver}" if acc.driver else ""
        table.add_row(f"accelerator {acc.index}", f"{acc.kind}: {acc.name}, {_size(acc.memory_bytes)}{pcie}{driver}")
    table.add_row("torch", profile.provenance.torch)
    return table


def _reads_table(profile: MachineProfile) -> Table:
    table = _table("Host DRAM read", "threads", "GB/s")
    for read in profile.reads:
        chosen = " (chosen)" if read.threads == profile.host.threads else ""
        table.add_row(f"{read.threads}{chosen}", f"{read.rate / 1e9:.1f}")
    return table


def _link_table(profile: MachineProfile) -> Table:
    table = _table(
        "Link, GB/s", "copy", "to device, pinned", "to host, pinned", "to device, pageable", "to host, pageable"
    )
    by_size: dict[int, dict[tuple[str, str], CopyTiming]] = {}
    for copy in profile.copies:
        by_size.setdefault(copy.nbytes, {})[copy.direction, copy.memory] = copy
    for nbytes, found in sorted(by_size.items()):
        cells = []
        for memory in ("pinned", "pageable"):
            for direction in ("h2d", "d2h"):
                timing = found.get((direction, memory))
                cells.append(f"{nbytes / timing.seconds / 1e9:.1f}" if timing else "-")
        table.add_row(_size(nbytes), *cells)
    both = profile.contention
    table.add_section()
    table.add_row("both ways at once", _rate(both.h2d_with_d2h), _rate(both.d2h_with_h2d))
    table.add_row("under CPU kernels", _rate(both.link_with_cpu))
    table.add_row("CPU kernels read meanwhile", _rate(both.cpu_with_link))
    table.add_row("hand-off of one hidden vector", f"{profile.handoff_seconds * 1e6:.0f} µs")
    return table


def _matmul_table(profile: MachineProfile, side: str) -> Table:
    timings = [m for m in profile.matmuls if m.device == side]
    counts = _spread(sorted({m.tokens for m in timings}), 6)
    name = {"host": "CPU", "acc": "accelerator"}[side]
    header = [f"{t} token{'s' * (t > 1)}" for t in counts]
    table = _table(f"Matmuls on the {name}: GB/s of weights at one token, then TFLOP/s", "weights", *header)
    for qtype, rows, cols in _shown(timings):
        found = {m.tokens: m for m in timings if (m.qtype, m.rows, m.cols) == (qtype, rows, cols)}
        cells = [_matmul_rate(found[t]) if t in found else "-" for t in counts]
        table.add_row(f"{qtype} {rows}x{cols}", *cells)
    return table


def _shown(timings: Iterable[MatmulTiming]) -> list[tuple[str, int, int]]:
    by_type: dict[str, set[tuple[int, int]]] = {}
    for m in timings:
        by_type.setdefault(m.qtype, set()).add((m.rows, m.cols))
    shown = []
    for qtype, shapes in by_type.items():
        largest = sorted(shapes, key=lambda s: (-s[0] * s[1], s))[:SHOWN_SHAPES]
        shown += [(qtype, rows, cols) for rows, cols in largest]
    return shown


def _matmul_rate(m: MatmulTiming) -> str:
    if m.tokens == 1:
        return f"{packed_nbytes(m.qtype, m.rows, m.cols) / m.seconds / 1e9:.1f} GB/s"
    flops = 2 * m.tokens * m.rows * m.cols / m.seconds
    return f"{flops / 1e12:.3g}"


def _attention_table(profile: MachineProfile) -> Table:
    table = _table("Attention of one layer, ms", "heads", "new tokens", "context", "CPU", "accelerator")
    cells: dict[tuple, dict[str, float]] = {}
    for a in profile.attention:
        key = (a.n_heads, a.n_kv_heads, a.head_dim, a.tokens, a.context)
        cells.setdefault(key, {})[a.device] = a.seconds
    for (heads, kv, dim, tokens, context), found in sorted(cells.items()):
        times = [f"{found[side] * 1e3:.3g}" if side in found else "-" for side in ("host", "acc")]
        table.add_row(f"{heads}/{kv} x {dim}", str(tokens), str(context), *times)
    return table


def _spread(values: list[int], most: int) -> list[int]:
    """At most so many of the values, first and last among them, evenly spaced."""
    if len(values) <= most:
        return values
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]


def _rate(value: float) -> str:
    return f"{value / 1e9:.1f}" if value else "-"


def _size(nbytes: int) -> str:
    for suffix, unit in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {suffix}"
    return f"{nbytes} B"
