"""`-sm auto`: one device, whole layers on each, or slices of every unit, whichever is predicted to take least time."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from pshard.errors import NoPlan
from pshard.machine import MachineProfile
from pshard.model import ModelSpec
from pshard.plan import Considered, Variant
from pshard.planner.choose_ratios import choose_ratios, describe_way, plan_ratios
from pshard.planner.make_plan import RoughPlan, plan_roughly, plan_variant
from pshard.planner.prepare_ranks import may_choose_apart, price_tiers
from pshard.planner.price.draft import tier_steps
from pshard.planner.price.profile_tables import Tables, find_tables
from pshard.planner.remedies.advise import plan_or_advise
from pshard.planner.shown.machine_words import words_for
from pshard.predicted_times import decode_seconds, rank_seconds, round_seconds
from pshard.steps.step import AllReduce, Gather
from pshard.workload import Split, Workload, binding_limits

MORE_DEVICES_SHARE = 0.99  # of the simpler way's round: what more devices, or a finer split, must stay below


def plan_split(
    spec: ModelSpec, profile: MachineProfile, workload: Workload, auto_ratios: bool, time_limit: float = 10.0
) -> Variant:
    """The variant of a workload whose split mode ("auto"), ratios or both may be left to the planner. auto_ratios:
    whether ratios are, of several devices.

    Raises as `plan_mode`, `plan_ratios` and `plan_variant` do.
    """
    if workload.split_mode == "auto":
        return plan_mode(spec, profile, workload, auto_ratios, time_limit)
    chooses = auto_ratios and workload.split_mode != "none"
    return (plan_ratios if chooses else plan_variant)(spec, profile, workload, time_limit)


def plan_mode(
    spec: ModelSpec, profile: MachineProfile, workload: Workload, auto_ratios: bool, time_limit: float = 10.0
) -> Variant:
    """The variant with the shortest predicted round over all budgets' devices; `considered` lists all ways.

    workload: `max_tp` is for tensors, and so is `tensor_split` for both splits unless `auto_ratios`. Raises as
    `plan_variant` does when nothing fits.
    """

    def plan(spec: ModelSpec, workload: Workload) -> Variant:
        return _plan_fastest_way(spec, profile, workload, auto_ratios, time_limit)

    def try_one(spec: ModelSpec, workload: Workload) -> RoughPlan:
        device = next(_unlike_devices(profile, workload.vram_mib))
        return plan_roughly(spec, profile, alone_on(workload, device), time_limit / 4)

    return plan_or_advise(plan, try_one, spec, profile, workload)


def _plan_fastest_way(
    spec: ModelSpec, profile: MachineProfile, workload: Workload, auto_ratios: bool, time_limit: float
) -> Variant:
    """The same, without what may work where nothing fits.

    Every way is planned and simulated: each device alone (like ones once), layers, tensors over all devices and, as
    sums take longer the more ranks take part, over the first 2, 4, 8... of them; of ways within 1% the simplest. Those
    that no refinement could bring there are not refined unit by unit. Raises Shortage when nothing fits.
    """
    tables, made, ways = find_tables(profile), [], []
    refused: NoPlan | None = None
    drafts: list[tuple[RoughPlan, tuple[Considered, ...]]] = []
    for way, draft in _ways(spec, profile, workload, auto_ratios, time_limit / 4):
        try:
            drafts.append(draft())
        except NoPlan as error:
            refused = refused or error
            ways.append(Considered(way, None))
    least = min((round_seconds(rough.variant) for rough, _ in drafts), default=0.0)
    for rough, beside in drafts:
        made.append(rough.refine() if rough.bound * MORE_DEVICES_SHARE <= least else rough.variant)
        ways += [replace(describe_way(made[-1]), why=explain_pace(spec, tables, made[-1])), *beside]
    if not made:
        assert refused is not None
        raise refused
    fastest = min(map(round_seconds, made))
    best = next(v for v in made if round_seconds(v) * MORE_DEVICES_SHARE <= fastest)
    chosen = next(w for w in ways if w.way == describe_way(best).way)
    others = sorted((w for w in ways if w is not chosen), key=lambda w: w.seconds or float("inf"))
    return replace(best, considered=(chosen, *others))


def _ways(
    spec: ModelSpec, profile: MachineProfile, workload: Workload, auto_ratios: bool, time_limit: float
) -> Iterator[tuple[str, Callable[[], tuple[RoughPlan, tuple[Considered, ...]]]]]:
    """What to call each way, and what plans it roughly; the simplest first."""

    def plan_one(workload: Workload) -> tuple[RoughPlan, tuple[Considered, ...]]:
        return plan_roughly(spec, profile, workload, time_limit), ()

    def plan_best(workload: Workload) -> tuple[RoughPlan, tuple[Considered, ...]]:
        return choose_ratios(spec, profile, workload, time_limit)

    for device in _unlike_devices(profile, workload.vram_mib):
        yield f"-sm none, device {device}", partial(plan_one, alone_on(workload, device))
    plan, every = plan_best if auto_ratios else plan_one, len(workload.vram_mib)
    if every > 1:
        yield "-sm layer", partial(plan, workload.under(Split("layer", workload.tensor_split)))
    can_cut = all(unit.kind.cut for unit in spec.units)
    for count in _group_sizes(every) if can_cut else ():
        if may_choose_apart(spec, profile, count):
            continue
        if count == every or not workload.tensor_split:
            limits = binding_limits(workload.max_tp, count)
            cut = workload.under(Split("tensor", workload.tensor_split, limits))
            some = f" over {count} devices" if count < every else ""
            yield f"-sm tensor{some}", partial(plan, replace(cut, vram_mib=workload.vram_mib[:count]))


def _group_sizes(devices: int) -> Iterator[int]:
    """Over how many of several devices tensors may be cut: 2, 4, 8... and all."""
    count = 2
    while count < devices:
        yield count
        count *= 2
    if devices > 1:
        yield devices


def alone_on(workload: Workload, device: int) -> Workload:
    """The same for one of its devices."""
    return replace(
        workload, vram_mib=(workload.vram_mib[device],), split_mode="none", tensor_split=(), max_tp=(), device=device
    )


def _unlike_devices(profile: MachineProfile, budgets: tuple[int, ...]) -> Iterator[int]:
    """Devices that may do best alone: of those with the same timings the one with the largest budget."""
    best: dict[tuple[str, ...], int] = {}
    for device, mib in enumerate(budgets):
        key = profile.sources(device)
        if key not in best or mib > budgets[best[key]]:
            best[key] = device
    yield from sorted(best.values())


def explain_pace(spec: ModelSpec, tables: Tables, variant: Variant) -> str:
    """What a decode step of this way spends its time on, as predicted."""
    seconds = decode_seconds(variant)
    tier = variant.ranks[0].covering(variant.workload.answer_rows)
    if variant.workload.split_mode == "layer":
        turns = " + ".join(f"{s * 1e3:.3g}" for s in rank_seconds(variant)[tier.tokens])
        return f"ranks take turns in a decode step: {turns} ms"
    if variant.workload.split_mode == "none":
        return f"decode is {words_for(tables.profile).binds[tier.prediction.binds]}"
    task = price_tiers(spec, tables, variant.workload, (tier.tokens,))[0]
    steps = [s for s in tier_steps(task.room, tier, task.costs[0]).body if isinstance(s, AllReduce | Gather)]
    sums = sum(task.costs[0].meeting(s) for s in steps)
    return f"{len(steps)} sums take {sums * 1e3:.3g} of a decode step's {seconds * 1e3:.3g} ms"
