"""What a scheduler is doing, as a snapshot tells it."""

from dataclasses import replace

from pshard.runtime.texts.text import BlockCounts
from pshard.server.scheduling.pace import Pace
from pshard.server.scheduling.request import Request
from pshard.server.scheduling.served_machine import PlanFacts
from pshard.server.snapshot import Blocks, PlanInForce, TextNow, WaitingJob
from pshard.units.kv_cells import KV_BLOCK


def show_plan(facts: PlanFacts, pace: Pace | None, budgets: tuple[int, ...]) -> PlanInForce:
    """The plan with what its steps really take, and the budgets that can be moved to by now."""
    if pace is None:
        return replace(facts.shown, budgets=budgets)
    tiers = tuple(
        replace(tier, corrected_ms=1e3 * pace.whole(tier.tokens), steps=pace.steps[tier.tokens])
        for tier in facts.shown.tiers
    )
    return replace(facts.shown, tiers=tiers, budgets=budgets)


def show_running(run: Request, now: float) -> TextNow:
    """A job that runs."""
    prompt = len(run.job.prompt)
    spent = now - run.first
    return TextNow(
        slot=run.slot,
        job=run.job.id,
        state="decode" if run.made else "prompt",
        prompt=prompt,
        done=prompt if run.made else len(run.text.ids) if run.text else 0,
        cached=run.text.cached if run.text else 0,
        made=run.made,
        most=run.job.most,
        rate=(run.made - 1) / spent if run.made > 1 and spent > 0 else 0.0,
        age=now - run.taken,
        preempted=run.preempted,
    )


def show_waiting(run: Request, now: float) -> WaitingJob:
    """A job that waits."""
    return WaitingJob(run.job.id, len(run.job.prompt), now - run.taken)


def show_blocks(counts: BlockCounts) -> Blocks:
    """Blocks of the pool."""
    return Blocks(
        counts.total, counts.used, counts.cached, counts.free, KV_BLOCK, counts.cache_bytes, counts.files_problem
    )
