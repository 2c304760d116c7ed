"""Why a plan is as it is: what binds each tier, and what more memory or a faster link would bring."""

from dataclasses import dataclass, replace

from pshard.machine import MachineProfile
from pshard.model import ModelSpec
from pshard.plan import Variant
from pshard.planner.make_plan import plan_baseline, plan_variant
from pshard.planner.prepare_ranks import price_tiers
from pshard.planner.price.draft import tier_steps
from pshard.planner.price.page_locks import stage_by
from pshard.planner.price.profile_tables import find_tables
from pshard.planner.price.simulate import simulate_ranks
from pshard.steps.step import (
    AllReduce,
    Compute,
    CopyIn,
    FetchKV,
    Handoff,
    Join,
    Receive,
    Step,
)
from pshard.times.measurement import Timeline, TimelineEvent
from pshard.times.predicted_times import tier_seconds
from pshard.units.moe.followed import under_plan
from pshard.workload import Workload

BINDS = {
    "acc": "compute-bound on the accelerator",
    "cpu": "bound by the CPU",
    "link": "link-bound",
    "vram": "VRAM-bound: link and CPU are both busy",
}
MORE_MIB = 1024


@dataclass(frozen=True)
class WhatIf:
    """A change of the machine and, by tier, how many times as fast the plan made for it is predicted to be."""

    change: str
    speedups: tuple[tuple[int, float], ...]


def explain_gains(
    spec: ModelSpec,
    profile: MachineProfile,
    workload: Workload,
    variant: Variant,
    strategy: str = "ilp",
    time_limit: float = 5.0,
) -> tuple[WhatIf, ...]:
    """Plan again with 1 GiB more VRAM per device, and with a link twice as fast, by the strategy that made the variant:
    "ilp" or a published one's name."""

    def plan(machine: MachineProfile, load: Workload) -> Variant:
        if strategy == "ilp":  # with as many slots for experts
            return plan_variant(under_plan(spec, variant), machine, load, time_limit, variant.correction)
        return plan_baseline(strategy, spec, machine, load, variant.correction)

    budgets = tuple(mib + MORE_MIB for mib in workload.vram_mib)
    cases = (
        ("1 GiB more VRAM", profile, replace(workload, vram_mib=budgets)),
        ("a link twice as fast", double_link(profile), workload),
    )
    return tuple(WhatIf(change, _speedups(variant, plan(machine, load))) for change, machine, load in cases)


def double_link(profile: MachineProfile) -> MachineProfile:
    """The same machine with copies in half the time, as far as host memory can read: beside CPU kernels copies have up
    to half of its rate, and the kernels what is left."""
    both, most = profile.contention, find_tables(profile).shared_rate
    copies = tuple(replace(c, seconds=max(c.seconds / 2, min(c.seconds, c.nbytes / most))) for c in profile.copies)
    link = max(both.link_with_cpu, min(2 * both.link_with_cpu, most / 2))
    faster = replace(
        both,
        link_with_cpu=link,
        cpu_with_link=min(both.cpu_with_link, most - link),
        h2d_with_d2h=2 * both.h2d_with_d2h,
        d2h_with_h2d=2 * both.d2h_with_h2d,
    )
    return replace(profile, copies=copies, contention=faster)


def _speedups(before: Variant, after: Variant) -> tuple[tuple[int, float], ...]:
    pace = tier_seconds(after)
    return tuple((tokens, seconds / pace[tokens]) for tokens, seconds in tier_seconds(before).items() if tokens in pace)


def simulate_timelines(spec: ModelSpec, profile: MachineProfile, variant: Variant) -> tuple[Timeline, ...]:
    """The simulated steps of every tier on the first rank, for `pshard-report` to draw."""
    spec, w = under_plan(spec, variant), variant.workload
    tiers = tuple(t.tokens for t in variant.ranks[0].tiers)
    tasks = price_tiers(spec, find_tables(profile, variant.correction), w, tiers)
    timelines = []
    priced = [stage_by(rank, task.costs) for task, rank in zip(tasks, variant.ranks)]
    for i, tier in enumerate(variant.ranks[0].tiers):
        plans = [(task.room, rank.tiers[i], costs[i]) for task, rank, costs in zip(tasks, variant.ranks, priced)]
        events = simulate_ranks(w.split_mode, [tier_steps(*p) for p in plans], [p[2] for p in plans])[0].events
        title = f"{spec.name}, {tier.tokens} token{'s' * (tier.tokens > 1)}, {w.vram_mib[0]} MiB, simulated"
        title += f"\n{variant.terms}"
        made = (TimelineEvent(e.lane, e.start, e.end, _label(e.step)) for e in events)
        timelines.append(Timeline(title, tuple(made)))
    return tuple(timelines)


def _label(step: Step) -> str:
    if isinstance(step, CopyIn | Compute):
        return f"{step.unit} {step.part}" if isinstance(step, Compute) and step.part else step.unit
    if isinstance(step, Join):
        return f"join {step.unit}"
    if isinstance(step, FetchKV):
        return f"KV {step.unit}"
    if isinstance(step, Handoff):
        return f"to {step.to}"
    if isinstance(step, AllReduce):
        return "all-reduce"
    if isinstance(step, Receive):
        return f"from rank {step.source}"
    return type(step).__name__
