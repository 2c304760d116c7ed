"""Flags of pshard-run, chat and bench that say who drafts at run time, and how many drafts a step verifies."""

import argparse
from typing import Any

from pshard.commands.command_line import parse_count
from pshard.commands.parsing.draft_flags import SPEC_CHOICES, add_draft_model, check_draft_count, refuse_without_drafts
from pshard.errors import UserError
from pshard.session.choose_drafts import USUAL_DRAFTS, DraftAsk
from pshard.speculation import AUTO, DRAFT, DRAFTERS, LOOKUP, MTP, NONE, parse_acceptance

LLAMA_TYPES = {
    "none": NONE, "ngram-simple": LOOKUP, "draft-mtp": MTP, "draft-simple": DRAFT,
}  # fmt: skip


def add_spec_flags(parser: argparse.ArgumentParser, usual: str = NONE) -> None:
    """Add them to a parser; usual: what is done without."""
    group: Any = parser.add_argument_group("drafts (docs/speculation.md)")
    group.add_argument(
        "--spec", choices=SPEC_CHOICES, default=None, metavar="WHO",
        help="verify several drafts a step; the text stays the same. mtp: the model's multi-token head drafts. lookup: "
        "draft what followed the last tokens earlier in the text. draft: the model of -md drafts. lookup,mtp and "
        "lookup,draft: lookup where it finds a long match, else the other. auto: whoever the plan has, else lookup "
        "where the plan says that it can pay "
        f"(default: {usual}; with -md: draft)",
    )  # fmt: skip
    add_draft_model(group)
    group.add_argument("--spec-type", metavar="TYPE", help="llama.cpp's name of it: ngram-simple is lookup; a list too")
    group.add_argument(
        "--spec-draft-n-max", "--spec-n", dest="spec_n", type=parse_count, metavar="K",
        help=f"drafts a step at most (default: the plan's, else {USUAL_DRAFTS}); fewer where they do not pay",
    )  # fmt: skip
    group.add_argument(
        "--spec-draft-p-min", "--draft-p-min", dest="spec_p_min", type=parse_chance, metavar="P",
        help="a head's or a model's draft ends before a token that it finds less likely than this (default: 0)",
    )  # fmt: skip
    group.add_argument(
        "--spec-synth-rates", metavar="U1,U2,...",
        help="make up which drafts hold: the chances that the first, the first two, ... do (.8,.64,.51), with as many "
        "drafts in every step as there may be. For random weights; the text means nothing",
    )  # fmt: skip


def read_spec_flags(args: argparse.Namespace) -> DraftAsk:
    """What is asked for. Raises UserError for flags that do not go together, name what is not there, or say nothing."""
    kind = args.spec
    if args.spec_type is not None:
        named = _read_types(args.spec_type)
        if kind not in (None, named):
            raise UserError(f"--spec {kind} and --spec-type {args.spec_type} exclude each other; give one")
        kind = named
    if kind is None and args.draft_model is not None:
        kind = DRAFT
    made_up = None
    if args.spec_synth_rates is not None:
        made_up = parse_acceptance(args.spec_synth_rates, "--spec-synth-rates")
    if kind in (None, NONE):
        given = {
            "--spec-draft-n-max": args.spec_n, "--spec-synth-rates": made_up, "--spec-draft-p-min": args.spec_p_min,
        }  # fmt: skip
        refuse_without_drafts(given, "there are none", f"add --spec {AUTO}")
    check_draft_count("--spec-draft-n-max", args.spec_n)
    if args.spec_p_min and made_up:
        raise UserError(
            "--spec-draft-p-min ends drafts early, and steps with --spec-synth-rates have all that there may be; leave "
            "out one"
        )
    return DraftAsk(kind or NONE, args.spec_n, made_up, args.spec_p_min or 0.0)


def _read_types(text: str) -> str:
    """The drafter that llama.cpp's names say, in any order: lookup goes first there too. Raises UserError for one that
    is not here, or those that do not draft together."""
    named = text.split(",")
    if unknown := next((one for one in named if one not in LLAMA_TYPES), None):
        known = ", ".join(LLAMA_TYPES)
        raise UserError(f"--spec-type {unknown}: not here; there are {known}; ngram-simple is --spec lookup")
    kind = ",".join(sorted({LLAMA_TYPES[one] for one in named}, key=DRAFTERS.index))
    if kind not in DRAFTERS:
        raise UserError(
            f"--spec-type {text}: these do not draft together; give one of them, and ngram-simple beside it"
        )
    return kind


def parse_chance(text: str) -> float:
    """A flag's number from 0 to 1."""
    try:
        chance = float(text)
    except ValueError:
        chance = -1.0
    if not 0 <= chance <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 to 1")
    return chance
