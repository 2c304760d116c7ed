"""Flags of pshard-plan that say who drafts, how many drafts a step has, and how likely they are accepted."""

import argparse
from pathlib import Path
from typing import Any

from pshard.commands.command_line import parse_count
from pshard.errors import UserError
from pshard.speculation import (
    ASSUMED_ACCEPTANCE,
    AUTO,
    DRAFT,
    LOOKUP,
    MOST_DRAFTS,
    NONE,
    PLANNED_DRAFTS,
    PROGRAMS,
    Acceptance,
    DraftQuestion,
    parse_acceptance,
)

SPEC_CHOICES = (NONE, AUTO, LOOKUP, *PROGRAMS)


def add_draft_flags(group: Any) -> None:
    """Add them to a parser or a group of it."""
    add_draft_model(group)
    group.add_argument(
        "--spec", choices=SPEC_CHOICES, default=NONE, metavar="WHO",
        help="plan steps that verify drafts: mtp has the model's multi-token head draft, lookup drafts what followed "
        "the last tokens earlier in the text, draft has the model of -md draft; lookup,mtp and lookup,draft ask lookup "
        "first. auto takes lookup and that model, else lookup and the head, else lookup, where that is predicted "
        "faster (default: none)",
    )  # fmt: skip
    group.add_argument(
        "--spec-n", "--spec-draft-n-max", dest="spec_n", type=parse_count, metavar="K",
        help=f"with --spec: drafts a step, 1 to {MOST_DRAFTS} (default: the number with the shortest predicted round)",
    )  # fmt: skip
    group.add_argument(
        "--spec-rates", metavar="U1,U2,...",
        help="with --spec: chances that the first, the first two, ... drafts are all accepted, .8,.64,.51; a shorter "
        "list goes on by its last ratio (default: as recorded by pshard-run --record-acceptance, else assumed)",
    )  # fmt: skip


def add_draft_model(group: Any) -> None:
    """The flag that names a draft model."""
    group.add_argument(
        "-md", "--model-draft", "-hfd", "--hf-repo-draft", dest="draft_model", metavar="MODEL",
        help="a small model of the same vocabulary that drafts: a file, a folder, or org/repo:Q4_K_M of the Hub",
    )  # fmt: skip


def find_draft_model(args: argparse.Namespace, kind: str) -> Path | None:
    """The draft model that is named, where it is to draft. Raises UserError for one that is named and does not, and
    where none is."""
    from pshard.session.find_model import resolve_model

    if args.draft_model is None:
        if PROGRAMS.get(kind) == DRAFT:
            raise UserError(f"--spec {kind} needs a draft model; add -md MODEL")
        return None
    if kind != AUTO and PROGRAMS.get(kind) != DRAFT:
        raise UserError(f"-md names a model that drafts, and --spec {kind} has none; give --spec {DRAFT}, or no -md")
    return resolve_model(args.draft_model)


def read_draft_flags(args: argparse.Namespace) -> Acceptance | None:
    """The acceptance that is given, if any. Raises UserError for flags that do not go together, or say nothing."""
    if args.spec == NONE and args.draft_model is not None:
        args.spec = DRAFT
    if args.spec == NONE:
        given = {"--spec-n": args.spec_n, "--spec-rates": args.spec_rates}
        refuse_without_drafts(given, "none are planned", f"add --spec {LOOKUP} or {AUTO}")
        return None
    if args.strategy != "ilp":
        raise UserError("--spec and --strategy exclude each other: published strategies have no drafts; leave one out")
    check_draft_count("--spec-n", args.spec_n)
    return None if args.spec_rates is None else parse_acceptance(args.spec_rates, "--spec-rates")


def refuse_without_drafts(given: dict[str, object], why: str, advice: str) -> None:
    """Raise UserError where a flag about drafts has a value (None: not given). why: what lacks."""
    for flag, value in given.items():
        if value is not None:
            raise UserError(f"{flag} is about drafts, and {why}; {advice}")


def check_draft_count(flag: str, drafts: int | None) -> None:
    """Raise UserError for more drafts than a step may have; None: not given."""
    if drafts is not None and drafts > MOST_DRAFTS:
        raise UserError(f"{flag} {drafts}: a step has up to {MOST_DRAFTS} drafts; give fewer")


def ask_drafts(args: argparse.Namespace, kind: str, recorded: Acceptance | None) -> DraftQuestion:
    """What is to be chosen where drafts of a kind are asked for, by the acceptance that is given, else recorded, else
    assumed."""
    given = read_draft_flags(args)
    counts = (args.spec_n,) if args.spec_n else (*([0] if args.spec == AUTO else []), *PLANNED_DRAFTS)
    return DraftQuestion(kind, given or recorded or ASSUMED_ACCEPTANCE[kind], counts)
