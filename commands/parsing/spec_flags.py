"""Flags of pshard-run, chat and bench that say who drafts at run time, and how many drafts a step verifies."""

import argparse
from typing import Any

from pshard.commands.command_line import parse_count
from pshard.commands.parsing.draft_flags import add_draft_model, check_draft_count, refuse_without_drafts
from pshard.errors import UserError
from pshard.session.choose_drafts import USUAL_DRAFTS, DraftAsk
from pshard.speculation import AUTO, DRAFT, LOOKUP, MTP, NONE, parse_acceptance

LLAMA_TYPES = {
    "none": NONE, "ngram-simple": LOOKUP, "draft-mtp": MTP, "draft-simple": DRAFT,
}  # fmt: skip


def add_spec_flags(parser: argparse.ArgumentParser, usual: str = NONE) -> None:
    """Add them to a parser; usual: what is done without."""
    group: Any = parser.add_argument_group("drafts (docs/speculation.md)")
    group.add_argument(
        "--spec", choices=(NONE, AUTO, LOOKUP, MTP, DRAFT), default=None,
        help="verify several drafts a step; the text stays the same. mtp: the model's multi-token head drafts. lookup: "
        "draft what followed the last tokens earlier in the text. auto: the head where the plan has it, else lookup "
        "where the plan says that it can pay. draft: the model of -md drafts "
        f"(default: {usual}; with -md: draft)",
    )  # fmt: skip
    add_draft_model(group)
    group.add_argument("--spec-type", metavar="TYPE", help="llama.cpp's name of it: ngram-simple is lookup")
    group.add_argument(
        "--spec-draft-n-max", "--spec-n", dest="spec_n", type=parse_count, metavar="K",
        help=f"drafts a step at most (default: the plan's, else {USUAL_DRAFTS}); fewer where they do not pay",
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
        if args.spec_type not in LLAMA_TYPES:
            known = ", ".join(LLAMA_TYPES)
            raise UserError(f"--spec-type {args.spec_type}: not here; there are {known}; ngram-simple is --spec lookup")
        if kind not in (None, LLAMA_TYPES[args.spec_type]):
            raise UserError(f"--spec {kind} and --spec-type {args.spec_type} exclude each other; give one")
        kind = LLAMA_TYPES[args.spec_type]
    if kind is None and args.draft_model is not None:
        kind = DRAFT
    made_up = None
    if args.spec_synth_rates is not None:
        made_up = parse_acceptance(args.spec_synth_rates, "--spec-synth-rates")
    if kind in (None, NONE):
        given = {"--spec-draft-n-max": args.spec_n, "--spec-synth-rates": made_up}
        refuse_without_drafts(given, "there are none", f"add --spec {LOOKUP}")
    check_draft_count("--spec-draft-n-max", args.spec_n)
    return DraftAsk(kind or NONE, args.spec_n, made_up)
