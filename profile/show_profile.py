"""A profile as tables for people."""

from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from pshard.machine import MEMORIES, CopyTiming, MachineProfile, MatmulTiming
from pshard.print_table import print_whole, show_size
from pshard.profile.compare_profiles import Change
from pshard.profile.timed.kernel_jobs import side_name
from pshard.quant import packed_nbytes
from pshard.reserve import reserve_mib
from pshard.times.gpu_tiles import TileChoice

SHOWN_SHAPES = 2  # matrices per quant type: the largest that were timed
SHOWN_COUNTS = 7
SHOWN_TILES = 3


def print_profile(profile: MachineProfile, console: Console) -> None:
    """Host, accelerators, DRAM, link, matmuls and attention."""
    for table in (
        _host_table(profile),
        _reads_table(profile),
        *(_link_table(profile, side) for side in dict.fromkeys(c.device for c in profile.copies)),
        *(_matmul_table(profile, side) for side in _sides(profile)),
        _attention_table(profile),
        _expert_table(profile),
        _delta_table(profile),
        _collective_table(profile),
        _share_table(profile),
    ):
        if table.row_count:
            print_whole(table, console)
    for side in dict.fromkeys(choice.device for choice in profile.tiles):
        console.print(_tile_line(profile, side), highlight=False, soft_wrap=True)
    for note in profile.provenance.notes:
        console.print(f"note: {note}", highlight=False, soft_wrap=True)


def _sides(profile: MachineProfile) -> tuple[str, ...]:
    """Sides with figures of their own; the CPU as accelerator runs the host's kernels."""
    own = profile.accelerators and profile.accelerators[0].kind != "cpu"
    return tuple(dict.fromkeys(("host", *(m.device for m in profile.matmuls)))) if own else ("host",)


def print_changes(changes: Sequence[Change], since: str, console: Console) -> None:
    """What changed since the profile of the date `since`."""
    if not changes:
        console.print(f"Nothing moved by more than 10% since {since}.")
        return
    title = f"Changed since {since}"
    table = _table(title, "what", "before", "now")
    table.min_width = len(title)  # a date that is wrapped reads badly
    for change in changes:
        table.add_row(change.what, change.before, change.after)
    print_whole(table, console)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    return table


def _host_table(profile: MachineProfile) -> Table:
    host = profile.host
    table = Table(title="Machine", title_justify="left", show_header=False, box=None, pad_edge=False)
    caches = ", ".join(f"{name} {show_size(nbytes)}" for name, nbytes in host.caches) or "unknown"
    table.add_row("CPU", f"{host.cpu}, {host.cores} cores usable, {host.numa_nodes} NUMA node(s)")
    table.add_row("caches", caches)
    limit = profile.lockable_bytes
    of_it = "" if limit is None else f", of which a run could page-lock {show_size(limit)}"
    table.add_row("memory", show_size(host.memory_bytes) + of_it)
    table.add_row("host kernels", f"{host.kernels}, {host.isa}, {host.threads} threads chosen")
    for acc in profile.accelerators:
        pcie = f", PCIe gen {acc.pcie_generation} x{acc.pcie_width}" if acc.pcie_generation else ""
        driver = f", driver {acc.driver}" if acc.driver else ""
        kept = ""
        if acc.kind == "cuda":
            measured = profile.reserve_of(acc.index)
            how = "assumed" if measured is None else "measured"
            kept = f"; {reserve_mib(measured)} MiB of a budget are kept for torch and kernels ({how})"
        what = f"{acc.kind}: {acc.name}, {show_size(acc.memory_bytes)}{pcie}{driver}{kept}"
        table.add_row(f"accelerator {acc.index}", what)
    table.add_row("torch", profile.provenance.torch)
    return table


def _reads_table(profile: MachineProfile) -> Table:
    table = _table("Host DRAM read", "threads", "GB/s")
    for read in profile.reads:
        chosen = " (chosen)" if read.threads == profile.host.threads else ""
        table.add_row(f"{read.threads}{chosen}", f"{read.rate / 1e9:.1f}")
    return table


def _link_table(profile: MachineProfile, side: str) -> Table:
    there = {(c.direction, c.memory) for c in profile.copies if c.device == side}
    ways = [(d, m) for m in MEMORIES for d in ("h2d", "d2h") if m != "staged" or (d, m) in there]
    table = _table(f"Link, GB/s (h2d: to the {side_name(side)})", "copy", *(" ".join(way) for way in ways))
    by_size: dict[int, dict[tuple[str, str], CopyTiming]] = {}
    for copy in (c for c in profile.copies if c.device == side):
        by_size.setdefault(copy.nbytes, {})[copy.direction, copy.memory] = copy
    for nbytes, found in sorted(by_size.items()):
        cells = [f"{nbytes / found[way].seconds / 1e9:.1f}" if way in found else "-" for way in ways]
        table.add_row(show_size(nbytes), *cells)
    if side != "acc":
        return table
    both = profile.contention
    table.add_section()
    table.add_row("both ways at once", _rate(both.h2d_with_d2h), _rate(both.d2h_with_h2d))
    table.add_row("beside CPU kernels", _rate(both.link_with_cpu))
    table.add_row("they read meanwhile", _rate(both.cpu_with_link))
    if both.cpu_alone:
        table.add_row("and without copies", _rate(both.cpu_alone))
    table.add_row("hand-off", f"{profile.handoff_seconds * 1e6:.0f} µs")
    return table


def _matmul_table(profile: MachineProfile, side: str) -> Table:
    timings = [m for m in profile.matmuls if m.device == side]
    counts = _spread(sorted({m.tokens for m in timings}), SHOWN_COUNTS)
    header = ["1 (GB/s)" if t == 1 else str(t) for t in counts]
    title = f"Matmuls on the {side_name(side)} by tokens: GB/s of weights at one, then TFLOP/s"
    table = _table(title, "weights", *header)
    for qtype, rows, cols in _shown(timings):
        found = {m.tokens: m for m in timings if (m.qtype, m.rows, m.cols) == (qtype, rows, cols)}
        cells = [_matmul_rate(found[t]) if t in found else "-" for t in counts]
        table.add_row(f"{qtype} {rows}x{cols}", *cells)
    return table


def _tile_line(profile: MachineProfile, side: str) -> str:
    """How many tiles are others than the defaults, and what they gain; those that gain most by name."""
    choices = [choice for choice in profile.tiles if choice.device == side]
    others = sorted((c for c in choices if c.gain > 1), key=lambda c: -c.gain)
    line = f"Tiles on the {side_name(side)}: {len(others)} of {len(choices)} differ from the defaults"
    best = (f"{_name_case(c)}: {c.gain:.2f} times as fast" for c in others[:SHOWN_TILES])
    return f"{line} ({'; '.join(best)})" if others else line


def _name_case(choice: TileChoice) -> str:
    """What a tile was chosen for."""
    many = "pairs" if choice.kernel.startswith("grouped") else "tokens"
    size = f", {choice.tokens} {many}" if choice.is_of_a_batch else ""
    return f"{choice.kernel} {choice.qtype}{size}"


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
        return f"{packed_nbytes(m.qtype, m.rows, m.cols) / m.seconds / 1e9:.1f}"
    flops = 2 * m.tokens * m.rows * m.cols / m.seconds
    return f"{flops / 1e12:.3g}"


def _attention_table(profile: MachineProfile) -> Table:
    sides = _sides(profile)
    table = _table("Attention of one layer, ms", "heads", "new tokens", "context", *(side_name(side) for side in sides))
    cells: dict[tuple, dict[str, float]] = {}
    for a in profile.attention:
        key = (a.n_heads, a.n_kv_heads, a.head_dim, a.sequences, a.tokens, a.context)
        cells.setdefault(key, {})[a.device] = a.seconds
    for (heads, kv, dim, sequences, tokens, context), found in sorted(cells.items()):
        times = [f"{found[side] * 1e3:.3g}" if side in found else "-" for side in sides]
        new = str(tokens) if sequences == 1 else f"{sequences} x {tokens}"
        table.add_row(f"{heads}/{kv} x {dim}", new, str(context), *times)
    return table


def _expert_table(profile: MachineProfile) -> Table:
    """Where some were timed, one row for each kind of layer and side."""
    sides = _sides(profile)
    counts = _spread(sorted({e.tokens for e in profile.experts}), SHOWN_COUNTS)
    table = _table("Routed experts of one layer by tokens, ms", "experts", *(str(n) for n in counts))
    found: dict[tuple[str, str], dict[int, float]] = {}
    for e in profile.experts:
        types = e.gate_qtype if e.gate_qtype == e.down_qtype else f"{e.gate_qtype}/{e.down_qtype}"
        name = f"{types}, {e.used} of {e.experts}, {e.d_expert}x{e.d_model}"
        found.setdefault((name, e.device), {})[e.tokens] = e.seconds
    for (name, device), times in found.items():
        if device in sides:
            cells = [f"{times[n] * 1e3:.3g}" if n in times else "-" for n in counts]
            table.add_row(f"{name}, {side_name(device)}", *cells)
    return table


def _delta_table(profile: MachineProfile) -> Table:
    sides = _sides(profile)
    table = _table("Gated delta net of one layer, ms", "heads", "new tokens", *(side_name(side) for side in sides))
    cells: dict[tuple, dict[str, float]] = {}
    for d in profile.deltas:
        key = (d.key_heads, d.value_heads, d.head, d.sequences, d.tokens)
        cells.setdefault(key, {})[d.device] = d.seconds
    for (keys, values, dim, sequences, tokens), found in sorted(cells.items()):
        times = [f"{found[side] * 1e3:.3g}" if side in found else "-" for side in sides]
        new = str(tokens) if sequences == 1 else f"{sequences} x {tokens}"
        table.add_row(f"{values}/{keys} x {dim}", new, *times)
    return table


def _collective_table(profile: MachineProfile) -> Table:
    sizes = sorted({c.nbytes for c in profile.collectives})
    table = _table("All-reduce, µs", "ranks", *(show_size(nbytes) for nbytes in sizes))
    rows = sorted({(c.ranks, c.backend, c.dtype, c.copies) for c in profile.collectives})
    for ranks, backend, dtype, copies in rows:
        key = (ranks, backend, dtype, copies)
        found = {c.nbytes: c.seconds for c in profile.collectives if (c.ranks, c.backend, c.dtype, c.copies) == key}
        name = f"{ranks} ({backend}{'' if dtype == 'f32' else f', {dtype}'}{', copies running' if copies else ''})"
        table.add_row(name, *(f"{found[n] * 1e6:.1f}" if n in found else "-" for n in sizes))
    return table


def _share_table(profile: MachineProfile) -> Table:
    table = _table("Ranks of this host: times as long as with all of it", "ranks", "work", "one alone", "all at once")
    for s in sorted(profile.shares, key=lambda s: (s.ranks, s.what, s.size)):
        work = f"CPU matmul, tokens: {s.size}" if s.what == "matmul" else f"copy, {show_size(s.size)}"
        table.add_row(str(s.ranks), work, f"{s.alone / s.whole:.2f}", f"{s.together / s.whole:.2f}")
    return table


def _spread(values: list[int], most: int) -> list[int]:
    """At most so many of the values, first and last among them, evenly spaced."""
    if len(values) <= most:
        return values
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]


def _rate(value: float) -> str:
    return f"{value / 1e9:.1f}" if value else "-"
