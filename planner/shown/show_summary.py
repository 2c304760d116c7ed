"""What a user asked a plan for: how fast it answers, and how much memory it takes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pshard.plan import Variant
from pshard.planner.serving.show_promise import show_rate
from pshard.planner.shown.machine_words import Words
from pshard.planner.shown.memory_use import MemoryUse, show_bytes
from pshard.planner.shown.show_drafts import describe_choice
from pshard.predicted_times import decode_rate, first_token_seconds
from pshard.print_table import new_table, print_whole
from pshard.speculation import MTP, PROGRAMS
from pshard.workload import Workload

if TYPE_CHECKING:
    from rich.console import Console

    from pshard.model import ModelSpec


def print_summary(spec: "ModelSpec", variant: Variant, use: MemoryUse, words: Words, out: "Console") -> None:
    """A few lines, the first of a plan: rate, drafts, budget, host memory, and what stays on disk."""
    w = variant.workload
    budget = ", ".join(f"{used} of {mib}" for used, mib in zip(use.vram_mib, w.vram_mib))
    arena = words.arena[0].upper() + words.arena[1:]
    drafts = [("Drafts", said)] if (said := describe_choice(variant)) else []
    reads = describe_reads(variant, routes=any(unit.kind.routes for unit in spec.units))
    far = [("Disk", f"{show_bytes(use.disk_bytes)} stay there; {reads}")] * bool(use.disk_bytes)
    lines = (
        ("Predicted", f"{show_rate(decode_rate(variant))} tok/s{of_all(w)}{_with_drafts(w)}"),
        ("", f"time to first token {first_token_seconds(variant):.3g} s for {w.prompt} tokens"),
        *drafts,
        (arena, f"{budget} MiB"),
        ("Host memory", use.host + use.own),
        *far,
    )
    for name, text in lines:
        out.print(f"{name:<12} {text}", highlight=False, soft_wrap=True)


def describe_reads(variant: Variant, routes: bool = False) -> str:
    """How often the expected prompt reads what is on disk, and of a model that `routes` in which runs it does so more
    often."""
    w, tier = variant.workload, variant.ranks[0].tiers[-1]
    batches = -(-w.prompt_tokens // tier.tokens)
    passes, prompt = -(-batches // tier.most_swept), f"a prompt of {w.prompt} tokens reads them"
    often = f"{prompt} once"
    if passes > 1 and tier.sweep:
        swept = f"in sweeps of {tier.sweep.batches} micro-batches, as many as there is room for"
        often = f"{prompt} {passes} times, {swept}"
    elif passes > 1:
        often = f"{prompt} {passes} times, for every {tier.tokens} tokens{_why_apart(w)}"
    if any(cache.is_on_demand for cache in variant.ranks[0].caches):
        often += ", but for what lies in slots then"
    return often + (f"; {batches} times where routing is recorded or played" if tier.sweep and routes else "")


def _why_apart(w: Workload) -> str:
    """Why micro-batches of a prompt cannot go through the model together; empty where they can."""
    if w.drafting.kind in PROGRAMS:
        return f", as the {'head' if PROGRAMS[w.drafting.kind] == MTP else 'draft model'} follows each micro-batch"
    return ""


def print_budgets(
    variants: Sequence[Variant], uses: Sequence[MemoryUse], skipped: Sequence[tuple[int, ...]], out: "Console"
) -> None:
    """The plans of a sweep, a line for each budget, those for which there is none first: they are the smallest."""
    table = new_table("\nIn short, by budget", ("MiB", "tok/s", "first token s", "host GiB"))
    for budgets in skipped:
        table.add_row(",".join(map(str, budgets)), "-", "-", "-")
    for variant, use in zip(variants, uses):
        budget = ",".join(map(str, variant.workload.vram_mib))
        first = f"{first_token_seconds(variant):.3g}"
        table.add_row(
            budget, show_rate(decode_rate(variant)), first, f"{(use.host_bytes + use.own_bytes) / (1 << 30):.1f}"
        )
    print_whole(table, out)


def of_all(workload: Workload) -> str:
    """What a rate is of."""
    n = workload.concurrency
    return f" of all with {n} request{'s' * (n > 1)} running on average" if n else ""


def _with_drafts(workload: Workload) -> str:
    return f" with {workload.drafting} a step" if workload.drafting.drafts else ""
