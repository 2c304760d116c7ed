"""A report in three sentences: what the machine can do, what the plan does, what that brings."""

from collections.abc import Sequence
from dataclasses import dataclass

from pshard.homes import DIVIDED, ON_CPU, ON_DEMAND, ON_DISK, PINNED, STREAMED, list_sorts
from pshard.machine import MachineProfile
from pshard.plan import TierPlan, Variant
from pshard.predicted_times import decode_rate, first_token_seconds
from pshard.reports.figures.style import OWN_STRATEGY, format_number, name_strategy
from pshard.reports.inputs import ReportInputs
from pshard.times.measurement import Measurement
from pshard.times.stolen_time import DISTURBED, TOO_LOW

WHERE = {
    PINNED: "in VRAM",
    STREAMED: STREAMED,
    ON_CPU: "on the CPU",
    ON_DISK: "on disk",
    ON_DEMAND: "on disk, read as it is used",
    DIVIDED: "divided between both",
}


def name_sort(sort: str) -> str:
    """Where units of a sort are, in words."""
    return WHERE.get(sort, f"in {sort}")


@dataclass(frozen=True)
class Gain:
    """The plan beside the best alternative that was measured in the same test, budget and machine."""

    own: Measurement
    best: Measurement

    @property
    def is_prompt(self) -> bool:
        """Whether prompts were timed, and not answers."""
        return not self.own.n_gen

    @property
    def times(self) -> float:
        """How many times as fast the plan is, by the mean rates."""
        return self.own.avg_ts / self.best.avg_ts

    @property
    def span(self) -> tuple[float, float]:
        """The same at the least and at the most: the slowest repeat of one beside the fastest of the other."""
        own, best = self.own.samples_ts, self.best.samples_ts
        return min(own) / max(best), max(own) / min(best)

    def in_words(self) -> str:
        """As the summary says it."""
        what = f"prompts of {self.own.n_prompt} tokens run" if self.is_prompt else "answers are written"
        repeats = min(len(self.own.samples_ns), len(self.best.samples_ns))
        low, high = self.span
        span = f"{low:.2f} to {high:.2f} by the repeats" if repeats > 1 else "one run each"
        return f"{what} {self.times:.2f} times as fast ({span}) as with {name_strategy(self.best.strategy)}"


def summarise(inputs: ReportInputs) -> tuple[str, ...]:
    """Up to three sentences, and one on what other programs may have cost; fewer where the files hold no profile, plan
    or measurement."""
    gains = find_gains(inputs.measurements)
    plan = choose_plan(inputs, gains)
    return tuple(
        sentence
        for sentence in (
            _describe_machine(inputs.profiles[0]) if inputs.profiles else "",
            _describe_plan(*plan) if plan else "",
            _describe_gains(gains, inputs.measurements),
            _describe_disturbed(inputs.measurements),
        )
        if sentence
    )


def find_gains(measurements: Sequence[Measurement]) -> tuple[Gain, ...]:
    """For prompts and for answers the plan beside its best alternative: in the test of the longest prompt, and of the
    most tokens after the fewest; of several budgets the smallest, where plans matter most."""
    tests: dict[tuple, list[Measurement]] = {}
    for m in measurements:
        if bool(m.n_prompt) != bool(m.n_gen):  # end to end is neither
            key = (m.model, m.budget_mib, m.n_sequences, m.n_prompt, m.n_gen, m.n_depth, machine_of(m))
            tests.setdefault(key, []).append(m)
    gains = []
    for runs in tests.values():
        own = [m for m in runs if m.strategy == OWN_STRATEGY]
        others = [m for m in runs if m.strategy != OWN_STRATEGY and m.same_as != OWN_STRATEGY]
        if own and others:
            gains.append(Gain(max(own, key=lambda m: m.avg_ts), max(others, key=lambda m: m.avg_ts)))
    prompts = sorted(
        (g for g in gains if g.is_prompt), key=lambda g: (g.own.n_depth, -g.own.n_prompt, g.own.budget_mib)
    )
    answers = sorted(
        (g for g in gains if not g.is_prompt), key=lambda g: (g.own.n_depth, -g.own.n_gen, g.own.budget_mib)
    )
    return (*prompts[:1], *answers[:1])


def machine_of(m: Measurement) -> tuple[str, ...]:
    """What tells machines apart: only what ran on the same one is compared."""
    environment = dict(m.environment)
    return tuple(environment.get(name, "") for name in ("cpu", "accelerator", "threads"))


def choose_plan(inputs: ReportInputs, gains: Sequence[Gain]) -> tuple[str, Variant] | None:
    """The plan to tell of: the one that was compared, else the one of the smallest budget that needed a plan."""
    for gain in gains:
        for name, variant in inputs.plans:
            if (name, variant.workload.vram_mib) == (gain.own.model, gain.own.budget_mib):
                return name, variant
    by_budget = sorted(inputs.plans, key=lambda plan: (not plan[1].plan_needed, plan[1].workload.vram_mib))
    return by_budget[0] if by_budget else None


def rates_of(profile: MachineProfile) -> tuple[tuple[str, float], ...]:
    """What the machine moves in GB/s: over the link, and out of host memory; nothing that was not timed."""
    copies = [c for c in profile.copies if (c.device, c.direction, c.memory) == ("acc", "h2d", "pinned")]
    link = max((c.nbytes / c.seconds / 1e9 for c in copies), default=0.0)
    reads = max((r.rate / 1e9 for r in profile.reads), default=0.0)
    return tuple((name, rate) for name, rate in (("link to the device", link), ("host memory", reads)) if rate)


def count_places(tier: TierPlan) -> dict[str, int]:
    """How many units are where, in a tier."""
    sorts = [place.sort for place in tier.placements]
    return {sort: sorts.count(sort) for sort in list_sorts(sorts) if sort in sorts}


def _describe_machine(profile: MachineProfile) -> str:
    acc = profile.accelerators[0]
    cpu = f"{profile.host.cpu} with {profile.host.threads} thread{'s' * (profile.host.threads > 1)}"
    what = f"{cpu}, which is the accelerator too" if acc.kind == "cpu" else (
        f"{acc.name} with {acc.memory_bytes / 2**30:.0f} GiB, beside {cpu}"
    )  # fmt: skip
    ways = {"link to the device": "in copies" if acc.kind == "cpu" else "over the link to the device"}
    rates = " and ".join(f"{rate:.0f} GB/s {ways.get(name, f'from {name}')}" for name, rate in rates_of(profile))
    source = "measured" if profile.provenance.source == "measured" else "by its data sheet"
    return f"The machine is {what}" + (f"; it moves {rates}, {source}." if rates else ".")


def _describe_plan(model: str, variant: Variant) -> str:
    rank = variant.ranks[0]
    budget = " + ".join(f"{mib} MiB" for mib in variant.workload.vram_mib)
    promise = (
        f"the first token is predicted after {format_number(first_token_seconds(variant))} s, then "
        f"{format_number(decode_rate(variant))} tokens a second"
    )
    if not variant.plan_needed:
        return f"All of {model}{variant.but_for} fits into {budget}: {promise}."
    places = count_places(rank.covering(variant.workload.answer_rows))
    where = ", ".join(f"{count} {name_sort(sort)}" for sort, count in places.items())
    units = f"of the {sum(places.values())} units of {model}"
    return f"Within {budget} the plan has, while decoding, {units} {where}; {promise}."


def _describe_gains(gains: Sequence[Gain], measurements: Sequence[Measurement]) -> str:
    if gains:
        said = ", and ".join(gain.in_words() for gain in gains)
        return f"Measured on this machine, {said}: the best alternative that was measured within the same budget."
    same = dict.fromkeys(name_strategy(m.strategy) for m in measurements if m.same_as == OWN_STRATEGY)
    if same:
        names = " and ".join(filter(None, (", ".join([*same][:-1]), [*same][-1])))
        return (
            f"Beside {names} the plan brings nothing here: the same kernels run on the same weights, copies included."
        )
    if any(m.strategy == OWN_STRATEGY for m in measurements):
        return "Nothing else was measured beside the plan; pshard bench --baseline fit does that."
    return ""


def _describe_disturbed(measurements: Sequence[Measurement]) -> str:
    """Empty where the machine was quiet."""
    shares = [m.disturbed for m in measurements if m.disturbed >= DISTURBED]
    if not shares:
        return ""
    which = f"{len(shares)} of {len(measurements)} tests ran, for up to {max(shares):.0%} of their time"
    return f"Other programs or machines had cores while {which}: {TOO_LOW}."
