"""What each number of drafts a step would bring, as a table and as data."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pshard.model import ModelSpec
from pshard.plan import Variant
from pshard.planner.serving.show_promise import show_rate
from pshard.predicted_times import decode_rate
from pshard.print_table import new_table, print_whole
from pshard.routing.expert_uses import count_apart, used_experts
from pshard.speculation import ASSUMED, DRAFT, MTP, PROGRAMS, RECORDED, Acceptance, Drafting, Speculation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

ALIKE = 0.005  # rates that differ by less are shown as one


@dataclass(frozen=True)
class DraftRow:
    """A number of drafts. tokens: that a step brings to a text; seconds: of a step of all texts, what drafts take
    `beside` it, and by how much more than its bound it is; rates: tokens a second of all texts, by acceptance;
    break_even: the chance of a draft from which on it pays, None where it never does; experts: of a layer that a text's
    rows use; round_seconds: of a round of prompts and answers."""

    drafts: int
    tokens: float
    seconds: float
    beside: float
    gap: float
    rates: tuple[float, ...]
    break_even: float | None
    experts: float | None
    round_seconds: float


@dataclass(frozen=True)
class DraftTable:
    """All of them, and the number that was chosen. acceptances: those of the rates, `own` the place of the one that was
    planned by; its source and share of steps that have drafts are in it. rate: of the plan, in which plans that were
    run may have changed predictions since. overlap: of a token's experts, the share that
    the one before it used too, where it was recorded."""

    kind: str
    chosen: int
    acceptances: tuple[Acceptance, ...]
    own: int
    rows: tuple[DraftRow, ...]
    overlap: float | None
    rate: float


def tabulate_drafts(spec: ModelSpec, variant: Variant) -> DraftTable | None:
    """The table of a plan for which drafts were asked for; None of others."""
    said = variant.speculation
    if said is None:
        return None
    compared, known = said.compared(), variant.popularity
    return DraftTable(
        said.kind,
        variant.workload.drafting.drafts,
        compared,
        compared.index(said.acceptance),
        tuple(_make_rows(spec, variant, said, compared)),
        known.overlap if known else None,
        decode_rate(variant),
    )


def _make_rows(
    spec: ModelSpec, variant: Variant, said: Speculation, compared: "Sequence[Acceptance]"
) -> Iterator[DraftRow]:
    rule = next((unit.kind.parts(spec.config) for unit in spec.units if unit.kind.parts), None)
    known = variant.popularity
    for planned in said.planned:
        used = None
        if rule:
            uses, overlaps = (known.uses, known.overlaps) if known else ((), ())
            apart = count_apart(planned.drafts + 1, *rule, uses, overlaps)
            used = used_experts(range(rule[1]), *rule, apart, uses)
        rates = tuple(said.rate(planned, acceptance) for acceptance in compared)
        tokens, gap = said.acceptance.mean_tokens(planned.drafts), planned.step / planned.bound - 1
        even = said.break_even(planned) if planned.drafts else None
        yield DraftRow(
            planned.drafts,
            tokens,
            seconds=planned.step,
            beside=planned.beside,
            gap=gap,
            rates=rates,
            break_even=even,
            experts=used,
            round_seconds=planned.round_seconds,
        )


def print_drafts(table: DraftTable, out: "Console") -> None:
    """The table, and under it what it was made by."""
    at = [f"tok/s at {acceptance}" for acceptance in table.acceptances]
    experts = ("experts used",) * any(row.experts is not None for row in table.rows)
    more = ("more ms",) * any(row.beside for row in table.rows)
    columns = ("drafts", "tokens a step", "ms", *more, "gap", *at, "round s", "pays from", *experts)
    shown = new_table(f"\nDrafts of {table.kind}, each number with a plan of its own, the chosen one marked", columns)
    for row in table.rows:
        even = "never" if row.break_even is None else f"{row.break_even:.2f}"
        cells = [
            f"{row.drafts}{' *' * (row.drafts == table.chosen)}",
            f"{row.tokens:.2f}",
            show_rate(row.seconds * 1e3),
        ]
        cells += [show_rate(row.beside * 1e3) if row.beside else "" for _ in more]
        cells += [f"{row.gap:.0%}", *map(show_rate, row.rates), f"{row.round_seconds:.4g}", even if row.drafts else ""]
        shown.add_row(*cells, *(f"{row.experts:.3g}" for _ in experts if row.experts is not None))
    print_whole(shown, out)
    for line in describe_drafts(table):
        out.print(line, highlight=False, soft_wrap=True)


def describe_drafts(table: DraftTable) -> Iterator[str]:
    """What the table was made by, and what it says to do."""
    own = table.acceptances[table.own]
    sources = {ASSUMED: "assumed for such drafts", RECORDED: f"recorded, with drafts in {own.share:.0%} of steps"}
    source = sources.get(own.source, "given")
    yield f"Planned by {own}: chances that the first, the first two, ... drafts are all accepted; {source}."
    if any(row.experts is not None for row in table.rows):
        by = "by chance, as no record says how alike neighbours choose"
        if table.overlap is not None:
            by = f"as a token shares {table.overlap:.0%} of its experts with the one before it, by the record"
        yield f"Experts: of a layer, that a text's rows use, {by}."
    if any(row.beside for row in table.rows):
        who = {MTP: "the head makes the drafts", DRAFT: "the draft model drafts"}.get(PROGRAMS.get(table.kind, ""))
        yield f"More: {f'{who}; ' if who else ''}rows are compared, and go into states that cannot be cut back."
    chosen = next(row for row in table.rows if row.drafts == table.chosen)
    if abs(chosen.rates[table.own] / table.rate - 1) > ALIKE:
        yield (
            f"The table is of before plans were run: by what was measured the plan has {show_rate(table.rate)} tok/s, "
            f"not {show_rate(chosen.rates[table.own])}."
        )
    if not table.chosen:
        yield "No drafts: no number of them gives a shorter round, which has the prompt too."


def describe_choice(variant: Variant) -> str | None:
    """Why a plan for which drafts were asked for has none, or what those bring that it has; None of other plans."""
    said = variant.speculation
    if said is None:
        return None
    none, *others = said.planned
    drafts, without = variant.workload.drafting.drafts, show_rate(said.rate(none, said.acceptance))
    if drafts:
        own = next(planned for planned in others if planned.drafts == drafts)
        which = "without them" if own.round_seconds <= none.round_seconds else "none would be faster:"
        return f"{which} {without} tok/s, a round in {none.round_seconds:.4g} s, not {own.round_seconds:.4g} s"
    if not others:
        return "none: there is no room for them"
    nearest = min(others, key=lambda planned: planned.round_seconds)
    rate, drafting = show_rate(said.rate(nearest, said.acceptance)), Drafting(said.kind, nearest.drafts)
    shortest = f"none, for the shortest round of prompts and answers, {none.round_seconds:.4g} s"
    return f"{shortest}; with {drafting} a step {rate} tok/s and {nearest.round_seconds:.4g} s"
