"""Why a plan is as it is: what binds each tier, and what more memory or a faster link would bring."""

from dataclasses import dataclass, replace

from pshard.machine import MachineProfile
from pshard.model import ModelSpec
from pshard.plan import Variant
from pshard.planner.make_plan import no_slower, plan_baseline, plan_variant
from pshard.planner.price.host_limits import binds_host
from pshard.planner.price_plan import price_plan
from pshard.planner.remedies.better_machine import (
    double_cores,
    double_disk,
    double_host_memory,
    double_host_rate,
    double_link,
)
from pshard.planner.routing.plan_disk_slots import lives_on_disk, plan_disk_slots
from pshard.predicted_times import decode_rate, round_seconds, tier_seconds
from pshard.routing.followed import under_plan
from pshard.routing.order_experts import order_experts
from pshard.steps.label import label_step
from pshard.times.measurement import Timeline, TimelineEvent
from pshard.workload import MIB, Workload

MORE_MIB = 1024


@dataclass(frozen=True)
class WhatIf:
    """A change of the machine and how many times as fast the plan made for it is predicted to be, by tier and in a
    round, which is what plans minimise: a tier may lose where the round gains. decode_rate: tokens per second then."""

    change: str
    speedups: tuple[tuple[int, float], ...]
    of_round: float
    decode_rate: float = 0.0


def explain_gains(
    spec: ModelSpec,
    profile: MachineProfile,
    workload: Workload,
    variant: Variant,
    strategy: str = "ilp",
    time_limit: float = 5.0,
) -> tuple[WhatIf, ...]:
    """Plan again with 1 GiB more VRAM per device, and with a link, host memory or cores that are twice as good, by the
    strategy that made the variant: "ilp" or a published one's name; where it leaves units on disk, also with 1 GiB more
    host memory and a disk twice as fast. Twice the host memory changes nothing where the plan has all that it could
    use, which needs no planning to say. Slots for experts on disk are chosen anew each time, and compared by what they
    find of experts that are all chosen alike."""
    by_experts = any(cache.is_on_demand for cache in variant.ranks[0].caches)
    is_far = any(rank.beyond_host for rank in variant.ranks)

    def plan(machine: MachineProfile, load: Workload) -> Variant:
        if by_experts and strategy == "ilp":
            ordered = order_experts(spec, variant.popularity)
            found = plan_variant(ordered, machine, load, time_limit, variant.correction)
            return plan_disk_slots(ordered, machine, load, found, None) if lives_on_disk(ordered, found) else found
        if strategy == "ilp":  # with as many slots for experts
            own = under_plan(spec, variant)
            found = plan_variant(own, machine, load, time_limit, variant.correction)
            return no_slower(own, machine, found, variant) if is_far else found
        return plan_baseline(strategy, spec, machine, load, variant.correction)

    budgets = tuple(mib + MORE_MIB for mib in workload.vram_mib)
    more_vram, on_gpu = replace(workload, vram_mib=budgets), profile.accelerators[0].kind == "cuda"
    wider = profile  # without a GPU the budget is a part of --ram
    if profile.ram_bytes and not on_gpu:
        wider = replace(profile, ram_bytes=profile.ram_bytes + MORE_MIB * MIB * len(budgets))
    cases = [("1 GiB more VRAM" if on_gpu else "a budget of 1 GiB more", wider, more_vram)]
    if on_gpu:
        cases.append(("a link twice as fast", double_link(profile), workload))
    cases.append(("host memory twice as fast", double_host_rate(profile), workload))
    cases.append(("twice the cores", double_cores(profile), workload))
    if is_far:
        cases += [("1 GiB more host memory", *_add_host_memory(profile, workload))]
        cases += [("a disk twice as fast", double_disk(profile), workload)]
    variant = plan(profile, workload) if by_experts else variant
    found = [_compare(change, variant, plan(machine, load)) for change, machine, load in cases]
    more = plan(double_host_memory(profile), workload) if binds_host(spec, profile, workload) else variant
    return (*found, _compare("twice the host memory", variant, more))


def _compare(change: str, before: Variant, after: Variant) -> WhatIf:
    after = replace(after, speculation=before.speculation)  # what drafts take beside steps is alike
    after = min(before, after, key=round_seconds)  # what is better may be used as it was
    of_round = round_seconds(before) / round_seconds(after)
    return WhatIf(change, _speedups(before, after), of_round, decode_rate(after))


def _add_host_memory(profile: MachineProfile, workload: Workload) -> tuple[MachineProfile, Workload]:
    """The machine and the workload with MORE_MIB more host memory, which plans may take."""
    host = replace(profile.host, memory_bytes=profile.host.memory_bytes + MORE_MIB * MIB)
    if not profile.ram_bytes:
        return replace(profile, host=host), workload
    more = replace(profile, host=host, ram_bytes=profile.ram_bytes + MORE_MIB * MIB)
    return more, replace(workload, ram_mib=workload.ram_mib + MORE_MIB)


def _speedups(before: Variant, after: Variant) -> tuple[tuple[int, float], ...]:
    pace = tier_seconds(after)
    return tuple((tokens, seconds / pace[tokens]) for tokens, seconds in tier_seconds(before).items() if tokens in pace)


def simulate_timelines(spec: ModelSpec, profile: MachineProfile, variant: Variant) -> tuple[Timeline, ...]:
    """The simulated steps of every tier on the first rank, for `pshard-report` to draw."""
    timelines, budget = [], variant.workload.vram_mib[0]
    for tier in price_plan(spec, profile, variant):
        events = tier.simulate()[0][1].events
        title = f"{spec.name}, {tier.tokens} token{'s' * (tier.tokens > 1)}, {budget} MiB, simulated\n{variant.terms}"
        made = (TimelineEvent(e.lane, e.start, e.end, label_step(e.step)) for e in events)
        timelines.append(Timeline(title, tuple(made)))
    return tuple(timelines)
