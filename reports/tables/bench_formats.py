"""Measurements as text: a table for people (Markdown), CSV, JSON and JSON lines, as llama-bench's `-o` offers."""

import csv
import io
import json
from collections.abc import Callable, Sequence

from pshard.jsonio import to_json
from pshard.reports.tables.batched_table import format_batched
from pshard.reports.tables.markdown_table import draw_table
from pshard.times.gpu_tiles import AUTO
from pshard.times.measurement import Measurement

FORMATS = ("md", "batched", "csv", "json", "jsonl")

# (heading, text of a row, aligned right)
Column = tuple[str, Callable[[Measurement], str], bool]


def format_measurements(measurements: Sequence[Measurement], form: str) -> str:
    """Text of the measurements, ending in a newline. `form`: "md", "batched", "csv", "json" or "jsonl".

    JSON holds every field; CSV all but samples and timeline; Markdown shows KV types, ubatch, sequences, ranks and
    split mode only where they differ between rows, and the type of sums where ranks summed. Raises ValueError for
    another format.
    """
    if form == "md":
        return format_table(measurements)
    if form == "batched":
        return format_batched(measurements)
    if form == "csv":
        return _format_csv(measurements)
    if form == "json":
        return json.dumps([to_json(m) for m in measurements], indent=1) + "\n"
    if form == "jsonl":
        return "".join(json.dumps(to_json(m)) + "\n" for m in measurements)
    raise ValueError(f"{form!r} is not one of {', '.join(FORMATS)}")


def format_table(measurements: Sequence[Measurement]) -> str:
    """A Markdown table, one row per measurement."""
    columns = table_columns(measurements)
    rows = [[text(m) for _, text, _ in columns] for m in measurements]
    return draw_table([heading for heading, _, _ in columns], rows, [is_right for _, _, is_right in columns])


def table_columns(measurements: Sequence[Measurement]) -> list[Column]:
    """Columns of the table: the fixed ones, those whose values differ between these measurements, and what ranks'
    parts were summed in where any were."""
    optional: list[Column] = [
        ("ranks", lambda m: str(m.ranks), True),
        ("split", lambda m: m.split_mode or "-", False),
        ("seqs", lambda m: str(m.n_sequences), True),
        ("ubatch", lambda m: str(m.n_ubatch), True),
        ("kv", lambda m: f"{m.type_k}/{m.type_v}", False),
    ]
    slots: list[Column] = [("in slots", _describe_hits, True)]
    sums: list[Column] = [("sums", lambda m: m.reduce_dtype or "-", False)]
    math: list[Column] = [("prompts in", lambda m: m.prompt_math, False)]
    drafts: list[Column] = [("drafts", describe_drafts, False)]
    return [
        ("model", lambda m: m.model, False),
        ("size", lambda m: format_bytes(m.model_bytes), True),
        ("plan", lambda m: m.strategy, False),
        ("budget MiB", lambda m: ",".join(map(str, m.budget_mib)), True),
        *(column for column in optional if len({column[1](m) for m in measurements}) > 1),
        *(slots if any(m.slot_hits is not None for m in measurements) else []),
        *(sums if any(m.reduce_dtype for m in measurements) else []),
        *(math if any(m.prompt_math != AUTO for m in measurements) else []),
        ("test", lambda m: m.test, False),
        ("t/s", lambda m: f"{m.avg_ts:.2f} ± {m.stddev_ts:.2f}", True),
        *(drafts if any(m.drafts for m in measurements) else []),
        ("predicted t/s", lambda m: _or_dash(m.predicted_ts, "{:.2f}"), True),
        ("peak VRAM MiB", _peaks, True),
        ("link GB", lambda m: _or_dash(None if m.link_bytes is None else m.link_bytes / 1e9, "{:.3f}"), True),
    ]


def format_bytes(nbytes: float) -> str:
    """Bytes in GiB, or in MiB below one GiB."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 1 << 30 else f"{nbytes / 2**20:.2f} MiB"


def _describe_hits(m: Measurement) -> str:
    """Choices of experts that were found in slots, and as many as were expected."""
    return f"{_or_dash(m.slot_hits, '{:.1%}')} ({_or_dash(m.slot_hits_expected, '{:.1%}')} expected)"


def describe_drafts(m: Measurement) -> str:
    """Steps that drafts saved, which of them held by position, and how many times the rate without, in turns."""
    if m.drafts is None:
        return "-"
    d, tokens = m.drafts, m.n_gen * len(m.samples_ns)
    held = " ".join(f"{share:.2f}" for share in d.held) or "none"
    beside = f"{m.avg_ts / d.without_ts:.2f}x of {d.without_ts:.2f} t/s without (in turns)"
    return f"{tokens / max(1, d.steps):.2f} tokens a step, held {held}, {beside}"


def _peaks(m: Measurement) -> str:
    """Of every rank, as budgets are."""
    return ",".join(f"{mib:.0f}" for mib in m.rank_peaks_mib) or _or_dash(m.peak_vram_mib, "{:.0f}")


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _format_csv(measurements: Sequence[Measurement]) -> str:
    rows = []
    for m in measurements:
        row = to_json(m)
        for left_out in ("samples_ns", "samples_ts", "timeline"):
            del row[left_out]
        if found := row.pop("drafts"):
            row.update({f"drafts_{name}": value for name, value in found.items()})
        row["budget_mib"] = ",".join(map(str, m.budget_mib))
        row.update({f"env_{name}": value for name, value in row.pop("environment")})
        rows.append(row)
    names = list(dict.fromkeys(name for row in rows for name in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, names, restval="", quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
