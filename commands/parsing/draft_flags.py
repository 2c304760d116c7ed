"""Flags of pshard-plan that say who drafts, how many drafts a step has, and how likely they are accepted."""

import argparse
from typing import Any

from pshard.commands.command_line import parse_count
from pshard.errors import UserError
from pshard.speculation import (
    ASSUMED_ACCEPTANCE,
    LOOKUP,
    MOST_DRAFTS,
    NONE,
    PLANNED_DRAFTS,
    Acceptance,
    DraftQuestion,
    parse_acceptance,
)

AUTO = "auto"


def add_draft_flags(group: Any) -> None:
    """Add them to a parser or a group of it."""
    group.add_argument(
        "--spec", choices=(NONE, AUTO, LOOKUP), default=NONE,
        help="plan steps that verify drafts: lookup drafts what followed the last tokens earlier in the text, auto "
        "does so where that is predicted faster (default: none)",
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


def read_draft_flags(args: argparse.Namespace) -> Acceptance | None:
    """The acceptance that is given, if any. Raises UserError for flags that do not go together, or say nothing."""
    if args.spec == NONE:
        for flag, given in (("--spec-n", args.spec_n), ("--spec-rates", args.spec_rates)):
            if given is not None:
                raise UserError(f"{flag} is about drafts, and none are planned; add --spec {LOOKUP} or {AUTO}")
        return None
    if args.strategy != "ilp":
        raise UserError("--spec and --strategy exclude each other: published strategies have no drafts; leave one out")
    if args.spec_n is not None and args.spec_n > MOST_DRAFTS:
        raise UserError(f"--spec-n {args.spec_n}: a step has up to {MOST_DRAFTS} drafts; give fewer")
    return None if args.spec_rates is None else parse_acceptance(args.spec_rates, "--spec-rates")


def ask_drafts(args: argparse.Namespace, recorded: Acceptance | None) -> DraftQuestion | None:
    """What is to be chosen, by the acceptance that is given, else recorded, else assumed; None where no drafts are
    asked for."""
    if args.spec == NONE:
        return None
    given = read_draft_flags(args)
    counts = (args.spec_n,) if args.spec_n else (*([0] if args.spec == AUTO else []), *PLANNED_DRAFTS)
    return DraftQuestion(LOOKUP, given or recorded or ASSUMED_ACCEPTANCE[LOOKUP], counts)
