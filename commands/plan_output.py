"""What pshard-plan puts out of the plans that it made: tables, JSON, or arguments for llama.cpp."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from pshard.jsonio import to_json
from pshard.machine import MachineProfile
from pshard.model import ModelSpec
from pshard.plan import PlanSet, Registry, Trial, Variant
from pshard.registries.fingerprint import Inputs, digest
from pshard.workload import Workload

if TYPE_CHECKING:
    from pshard.planner.explain import WhatIf
    from pshard.planner.other_places import WhyThere
    from pshard.planner.serving.promise import Promise
    from pshard.planner.shown.memory_use import MemoryUse
    from pshard.planner.tier_alone import TierAlone
    from pshard.planner.time_steps import TimedSteps
    from pshard.routing.record import RoutingRecord
    from pshard.routing.replay import Replay
    from pshard.times.outlook import Outlook

Gains = Mapping[int, "tuple[WhatIf, ...]"]  # by place of the variant
Alone = Mapping[int, "tuple[TierAlone, ...]"]  # likewise


@dataclass(frozen=True)
class Planned:
    """The variants that one command made, what was tried for each, and what they were made for.

    `asked`: the first workload, as it was asked for; its largest micro-batch may be more than any variant's. `replay`:
    hit rates of the routing `record` that was given; None without one. `skipped`: budgets of a sweep with no plan.
    """

    spec: ModelSpec
    profile: MachineProfile
    inputs: Inputs
    asked: Workload
    variants: tuple[Variant, ...]
    trials: tuple[tuple[Trial, ...], ...]
    replay: "Replay | None" = None
    record: "RoutingRecord | None" = None
    skipped: tuple[tuple[int, ...], ...] = ()


def emit_arguments(planned: Planned, program: str) -> list[str]:
    """Every variant as arguments for a program of llama.cpp. Raises UserError for what they cannot say."""
    from pshard.planner.llama_cpp_arguments import llama_arguments

    return [llama_arguments(variant, planned.spec, program) for variant in planned.variants]


def list_unsaid_of(planned: Planned) -> list[str]:
    """What arguments for llama.cpp cannot say of each variant; a line names its budget where there are several."""
    from pshard.planner.llama_cpp_arguments import list_unsaid

    several = len(planned.variants) > 1
    return [
        f"{variant.workload.vram_mib[0]} MiB: {line}" if several else line
        for variant in planned.variants
        for line in list_unsaid(variant, planned.spec)
    ]


@dataclass(frozen=True)
class Explained:
    """What `--explain` adds to each variant."""

    gains: Gains
    alone: Alone
    outlooks: "tuple[Outlook, ...]"


@dataclass(frozen=True)
class Asked:
    """What `--steps` and `--why` ask of each variant, in the order of variants; () where they were not given."""

    steps: "tuple[tuple[TimedSteps, ...], ...]" = ()
    why: "tuple[tuple[WhyThere, ...], ...]" = ()


NOTHING_ASKED = Asked()


def answer(planned: Planned, steps: int | None, why: str | None) -> Asked:
    """The steps of the tier for so many tokens, and where else the units of a layer could be. Raises UserError for a
    tier or a layer that there is not."""
    spec, profile, variants = planned.spec, planned.profile, planned.variants
    timed: tuple[tuple[TimedSteps, ...], ...] = ()
    others: tuple[tuple[WhyThere, ...], ...] = ()
    if steps:
        from pshard.planner.time_steps import time_steps

        timed = tuple(time_steps(spec, profile, v, steps) for v in variants)
    if why:
        from pshard.planner.other_places import compare_places, find_layer

        units = find_layer(spec, why)
        others = tuple(compare_places(spec, profile, v, units) for v in variants)
    return Asked(timed, others)


def explain_plans(planned: Planned, strategy: str) -> Explained:
    """Work all of it out, under a bar: that plans each variant many times."""
    from pshard.session.planning_bar import stage_bar

    with stage_bar(f"explaining {planned.spec.name}") as begin:
        begin("with a better machine", 0.0)
        gains = explain_all(planned, strategy)
        begin("published strategies", 0.4)
        outlooks = foresee_all(planned)
        begin("tiers alone", 0.6)
        return Explained(gains, compare_all(planned) if strategy == "ilp" else {}, outlooks)


def explain_all(planned: Planned, strategy: str) -> Gains:
    """What a better machine would bring to each variant that needed a plan."""
    from pshard.planner.explain import explain_gains

    return {
        i: explain_gains(
            planned.spec, planned.profile, replace(v.workload, max_ubatch=planned.asked.max_ubatch), v, strategy
        )
        for i, v in enumerate(planned.variants)
        if v.plan_needed
    }


def compare_all(planned: Planned) -> Alone:
    """What tiers of each variant could be alone."""
    from pshard.planner.tier_alone import compare_alone

    asked = planned.asked.max_ubatch
    return {
        i: compare_alone(planned.spec, planned.profile, replace(v.workload, max_ubatch=asked), v)
        for i, v in enumerate(planned.variants)
    }


def foresee_all(planned: Planned) -> "tuple[Outlook, ...]":
    """Every variant beside the published strategies, by prediction."""
    from pshard.planner.foresee import foresee_strategies

    ubatch = planned.asked.max_ubatch
    loads = [replace(v.workload, max_ubatch=ubatch) for v in planned.variants]
    made_for = planned.spec, planned.profile
    return tuple(foresee_strategies(*made_for, w, v, planned.record) for w, v in zip(loads, planned.variants))


def promise_all(planned: Planned) -> "tuple[Promise, ...]":
    """What every variant for a server's load can promise, in the order of variants; () for other workloads."""
    from pshard.planner.serving.promise import promise
    from pshard.routing.followed import under_plan

    loads = [v for v in planned.variants if v.workload.concurrency]
    return tuple(promise(under_plan(planned.spec, v), planned.profile, v) for v in loads)


def measure_uses(planned: Planned) -> "tuple[MemoryUse, ...]":
    """How much memory every variant takes."""
    from pshard.planner.shown.memory_use import measure_use

    return tuple(measure_use(planned.spec, planned.profile, variant) for variant in planned.variants)


def list_tight(planned: Planned, free: int | None) -> list[str]:
    """A line for each variant that host memory may be too small for; a line names its budget where there are several.
    free: bytes of it that are free now, where the plans are for this machine."""
    from pshard.planner.shown.memory_use import describe_tight

    several, found = len(planned.variants) > 1, list[str]()
    for variant, use in zip(planned.variants, measure_uses(planned)):
        if line := describe_tight(use, free):
            found.append(f"{variant.workload.vram_mib[0]} MiB: {line}" if several else line)
    return found


def print_plans(planned: Planned, explained: Explained | None, asked: Asked = NOTHING_ASKED) -> None:
    """Tables of trials and plans; of those that are `explained` also where every unit is and what binds, what tiers
    could be alone, the published strategies beside them, and what a server can promise. Last what was `asked`."""
    from rich.console import Console

    from pshard.planner.price.prompt_math import describe_math
    from pshard.planner.routing.show_routing import print_replay
    from pshard.planner.serving.show_promise import print_promises
    from pshard.planner.show_plan import print_explanation, print_outlook, print_trials, print_variant
    from pshard.planner.shown.machine_words import words_for
    from pshard.planner.shown.show_drafts import print_drafts, tabulate_drafts
    from pshard.planner.shown.show_steps import print_steps, print_why
    from pshard.planner.shown.show_summary import print_budgets, print_summary
    from pshard.routing.expert_map import map_experts

    out, words, uses = Console(), words_for(planned.profile), measure_uses(planned)
    for i, (variant, trials) in enumerate(zip(planned.variants, planned.trials)):
        print_summary(planned.spec, variant, uses[i], words, out)
        print_trials(trials, out, words)
        print_variant(variant, out, words)
        if math := describe_math(planned.spec, planned.profile):
            said = f"{math} (--prompt-math {variant.workload.prompt_math})"
            out.print(f"Prompts are multiplied {said}.", highlight=False, soft_wrap=True)
        if explained:
            gains, alone = explained.gains.get(i, ()), explained.alone.get(i, ())
            print_explanation(variant, gains, alone, out, map_experts(planned.spec, variant), words)
            print_outlook(explained.outlooks[i], out, variant.ranks[0].tiers[0].solve.strategy)
            if drafts := tabulate_drafts(planned.spec, variant):
                print_drafts(drafts, out)
        for timed in asked.steps[i : i + 1]:
            print_steps(timed, out, words)
        for others in asked.why[i : i + 1]:
            print_why(others, out, words)
    if planned.replay:
        print_replay(planned.replay, out)
    if explained:
        print_promises(promise_all(planned), out)
    if len(planned.variants) + len(planned.skipped) > 1:
        print_budgets(planned.variants, uses, planned.skipped, out)


def print_arguments(planned: Planned, emitted: list[str]) -> None:
    """A line for each variant, which names its budget where there are several."""
    for variant, arguments in zip(planned.variants, emitted):
        print(arguments if len(emitted) == 1 else f"{variant.workload.vram_mib[0]} MiB: {arguments}")


def as_json(planned: Planned, explained: Explained | None, asked: Asked) -> dict[str, Any]:
    """The registry of these variants, the simulated timelines of the last one, what was explained and `asked`."""
    from pshard.planner.explain import simulate_timelines
    from pshard.planner.shown.show_drafts import tabulate_drafts
    from pshard.routing.expert_map import map_experts

    created = datetime.now(UTC).isoformat(timespec="seconds")
    variants, inputs = planned.variants, planned.inputs
    explained = explained or Explained({}, {}, ())
    made = PlanSet(digest(inputs), tuple(inputs), planned.spec.name, created, variants)
    return {
        "registry": to_json(Registry((made,))),
        "timelines": to_json(simulate_timelines(planned.spec, planned.profile, variants[-1])),
        "gains": to_json(
            [{"vram_mib": variants[i].workload.vram_mib, "what_if": g} for i, g in explained.gains.items()]
        ),
        "alone": to_json(
            [{"vram_mib": variants[i].workload.vram_mib, "tiers": tiers} for i, tiers in explained.alone.items()]
        ),
        "outlooks": to_json(explained.outlooks),
        "experts": to_json([of_rank for v in variants for of_rank in map_experts(planned.spec, v)]),
        "routing": to_json(planned.replay),
        "promises": to_json(promise_all(planned)),
        "memory": to_json(measure_uses(planned)),
        "drafts": to_json([tabulate_drafts(planned.spec, variant) for variant in variants]),
        "steps": to_json(asked.steps),
        "why": to_json(asked.why),
    }
