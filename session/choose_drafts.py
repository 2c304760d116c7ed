"""Whether a run drafts, and how many drafts its steps may have: what is asked for, beside what the plan says."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pshard.errors import UserError
from pshard.plan import Variant
from pshard.predicted_times import seconds_covering, tier_seconds
from pshard.speculation import (
    ASSUMED_ACCEPTANCE,
    AUTO,
    DRAFT,
    LOOKUP,
    MTP,
    NONE,
    PROGRAMS,
    Acceptance,
    AcceptanceRecord,
    best_drafts,
    looks_first,
)

if TYPE_CHECKING:
    from pshard.runtime.speculation.speculator import DraftSettings

PLANNED = "planned"  # whoever the plan says drafts, if anybody
USUAL_DRAFTS = 7  # of a step at most, where neither the plan nor a flag says it


@dataclass(frozen=True)
class DraftAsk:
    """kind: who drafts, a drafter, "auto" or PLANNED. most: drafts of a step at most; None: not said. made_up: chances
    at which drafts are said to hold."""

    kind: str = NONE
    most: int | None = None
    made_up: Acceptance | None = None
    p_min: float = 0.0  # see DraftSettings


def choose_drafts(ask: DraftAsk, variant: Variant, ranks: bool = False) -> "tuple[DraftSettings | None, str]":
    """What a run under a plan does: None for no drafts; and a line that says why, "" where nothing is to be said.
    ranks: whether several ranks may draft, as they draw in step or one draws for all. Raises UserError for more drafts
    than the plan has rows."""
    if ask.kind == NONE or (ask.kind == PLANNED and not variant.workload.drafting.drafts):
        return None, ""
    rows = variant.ranks[0].tiers[-1].tokens
    if ask.most is not None and ask.most >= rows:
        raise UserError(
            f"--spec-draft-n-max {ask.most}: the plan's largest step has {rows} tokens, a draft less at most; "
            "give fewer, or plan a larger -ub"
        )
    if len(variant.ranks) > 1 and not ranks:
        if ask.kind not in (AUTO, PLANNED):
            raise UserError("several ranks have no drafts in a chat, or with -r; leave out --spec")
        return None, "no drafts: several ranks have none in a chat, or with -r"
    made = variant.workload.drafting
    if program := PROGRAMS.get(ask.kind):
        if variant.drafter is None or PROGRAMS.get(made.kind) != program:
            what = {MTP: "multi-token head", DRAFT: "draft model"}[program]
            raise UserError(
                f"the plan has no {what}; plan again with pshard plan --spec {ask.kind}, or give --spec lookup"
            )
        kind = ask.kind
    else:
        kind = made.kind if variant.drafter and ask.kind != LOOKUP else LOOKUP
    if ask.p_min and kind == LOOKUP:
        raise UserError(
            "--spec-draft-p-min is about how likely a drafter finds its tokens, and lookup does not know that; leave "
            "it out, or give --spec mtp or draft"
        )
    planned = made.drafts
    most = min(ask.most or planned or USUAL_DRAFTS, rows - 1)
    if ask.kind == AUTO and not planned and not find_paying(variant, most, ask.made_up or ASSUMED_ACCEPTANCE[LOOKUP]):
        brings = "drafts of these chances bring" if ask.made_up else "lookup brings"
        return None, f"no drafts: the plan says that steps of several rows cost more than {brings}"
    from pshard.runtime.speculation.speculator import DraftSettings

    why = "acceptance is made up: the text means nothing" if ask.made_up else ""
    record = AcceptanceRecord(kind)
    return DraftSettings(kind, most, ask.made_up is not None, ask.made_up, record, p_min=ask.p_min), why


def find_paying(variant: Variant, most: int, acceptance: Acceptance) -> int:
    """How many drafts that take no time to make pay by the plan's tiers; 0: none."""
    seconds = tier_seconds(variant)
    times = {k: seconds_covering(seconds, k + 1) for k in range(most + 1)}
    return best_drafts(acceptance, times)


def describe_drafts(settings: "DraftSettings") -> str:
    """What became of the drafts of a run, for its last lines."""
    record = settings.record
    tried, held = sum(record.tried), sum(record.held)
    shares = " ".join(f"{share:.2f}" for share in record.shares)
    each = f", by position {shares}" if shares else ""
    made_up = "; made up, the text means nothing" if settings.made_up else ""
    spent, steps = settings.spent, settings.steps
    took = ""
    if settings.kind in PROGRAMS and spent.drafts:
        took = f"; a draft took {1e3 * spent.seconds / spent.drafts:.2f} ms"
    if looks_first(settings.kind):
        took += f"; lookup made {spent.looked_up} of {spent.looked_up + spent.drafts} drafts"
    return (
        f"drafts of {settings.kind}, at most {settings.most} a step: {steps + held} tokens in {steps} steps; "
        f"{held} of the {tried} that were compared held{each}{took}{made_up}"
    )
