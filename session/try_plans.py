"""Tries plans for real before one is written: runs the tiers that the workload enters, and keeps the fastest plan."""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from pshard.errors import KernelRefused, StepFailed, UserError
from pshard.machine import MachineProfile
from pshard.plan import Prediction, Trial, Variant
from pshard.session.planning_bar import planning_bar
from pshard.times.stolen_time import DISTURBED, disturbed_share, read_core_time
from pshard.workload import Workload

if TYPE_CHECKING:
    from pshard.model import ModelSpec
    from pshard.models import ModelFile
    from pshard.planner.price.tier_loads import TierLoad
    from pshard.planner.rank_task import RankTask
    from pshard.routing.record import RoutingRecord
    from pshard.runtime.engine import Engine

SAMPLES = 3
TRIES = 3  # of as many samples, where others had the cores meanwhile
SAMPLE_SECONDS = 0.05  # short micro-batches are repeated this long in each sample
MOST_REPEATS = 32
LONG = 0.5  # a micro-batch of so many seconds needs one warm-up only
NOISE = 0.01  # the planner's own choice stays unless another plan is measured faster by more than this share
AGAIN = 1.15  # plans within this factor of the fastest are run once more, as machines change their speed
SMALL_MODEL = 1 << 30  # bytes: up to here trying plans takes seconds also without a GPU

UNTRIED_SLOTS = (
    "the plan has slots for experts that follow use, and no time was left to try them; it is predicted to be faster by "
    "the record; see --validate-seconds"
)
SPLIT = "a model split over devices runs in several processes; see pshard-bench"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Timed:
    """Measured seconds of a micro-batch, the share of them that others may have cost, and how far samples were off."""

    seconds: float
    disturbed: float = 0.0
    spread: float = 0.0


def why_not_worthwhile(profile: MachineProfile, packed_nbytes: int) -> str | None:
    """Why plans are not tried unless that is asked for; None where it takes a moment."""
    if profile.accelerators[0].kind == "cpu" and packed_nbytes >= SMALL_MODEL:
        return f"without a GPU a model of {packed_nbytes / SMALL_MODEL:.1f} GiB takes long; --validate does it anyway"
    return None


def why_impossible(profile: MachineProfile, workload: Workload) -> str | None:
    """Why plans cannot be tried here at all: several devices, no torch, or the profile of another machine. What
    -sm auto settles on may be tried when it is one device."""
    if workload.split_mode not in ("none", "auto"):
        return SPLIT
    if find_spec("torch") is None:
        return "torch is not installed"
    try:
        from pshard.session.this_machine import check_machine

        check_machine(profile)
    except UserError as error:
        return str(error)
    except ImportError as error:
        return f"the runtime does not load ({error})"
    return None


def choose_by_trial(
    file: "ModelFile",
    profile: MachineProfile,
    workload: Workload,
    time_limit: float,
    seconds: float,
    say: Say,
    record: "RoutingRecord | None" = None,
) -> tuple[Variant, tuple[Trial, ...]]:
    """The variant that runs the workload fastest, and every plan that was tried, the chosen one first.

    The planner's choice, its next best solution and the best published strategy are loaded one after the other while
    `seconds` last, and those that may still win once more by turns: a slow spell of the machine is no plan's fault.
    Where a prediction is off, the profile's times are fitted to what was measured, the program is solved again, and
    its new choice is tried too. What other programs or machines may have made longer by DISTURBED or more is sampled
    again, TRIES times in all; where that does not help it is kept, marked, but nothing is fitted to it, and no plan is
    preferred to the planner's choice by it. With a routing `record` made-up tokens use the experts that it says, and a
    plan with slots for experts that follow use is tried beside the fastest, where it is predicted faster. `say` hears
    one line for each plan that was not tried, and why, one on measurements that were disturbed, and one where they
    could not tell plans apart. Nothing measured: the planner's choice, as it was predicted; where that is because the
    GPU cannot run a kernel of theirs, KernelRefused.
    """
    from pshard.planner.make_plan import place_ranks, plan_to_try, predict_again, same_placements
    from pshard.planner.prepare_ranks import prepare_ranks, price_tiers
    from pshard.planner.price.fit_correction import fit_correction, is_off, measured_tiers
    from pshard.planner.price.profile_tables import find_tables
    from pshard.planner.remedies.advise import plan_or_advise

    def place(spec: "ModelSpec", asked: Workload) -> object:
        return place_ranks(prepare_ranks(spec, profile, asked), time_limit)

    def plan(spec: "ModelSpec", asked: Workload) -> "tuple[tuple[RankTask, ...], tuple[Variant, ...]]":
        tasks = prepare_ranks(spec, profile, asked)
        return tasks, plan_to_try(tasks[0], find_tables(profile), time_limit)

    deadline = time.monotonic() + seconds
    with planning_bar(f"planning {file.spec.name}"):
        profiled, candidates = plan_or_advise(plan, place, file.spec, profile, workload)
    (task,) = profiled
    tiers = tuple(c.load.tokens for c in task.costs)
    bench = _Bench(file, profile, tiers, workload, deadline, say, record)
    for variant in candidates:
        bench.attempt(variant, task)
    if not bench.trials:
        if bench.refused:  # a plan that this machine cannot run is none
            raise bench.refused
        return candidates[0], ()
    bench.repeat(task)
    if any(is_off(t.variant) for t in bench.trials):
        loads = [c.load for c in task.costs]
        samples = [s for t in bench.trials for s in measured_tiers(t.variant, loads)]
        correction = fit_correction(task.room, profile, samples)
        fitted = find_tables(profile, correction)
        (task,) = price_tiers(file.spec, fitted, workload, tiers)
        with planning_bar(f"planning {file.spec.name} again"):
            again = plan_to_try(task, fitted, time_limit)[0]
        if not any(same_placements(again.ranks[0].tiers, t.variant.ranks[0].tiers) for t in bench.trials):
            bench.attempt(again, task, "refitted")
            bench.repeat(task)
        bench.trials = [
            replace(t, refitted=_keep_profiled(predict_again(t.variant, task), predict_again(t.variant, *profiled)))
            for t in bench.trials
        ]
    bench.tell_disturbed()
    best = choose_trial(bench.trials, say)
    chosen, best = _try_slots(bench, best, time_limit)
    return chosen, (best, *(t for t in bench.trials if t is not best))


def _try_slots(bench: "_Bench", best: Trial, time_limit: float) -> tuple[Variant, Trial]:
    """The plan to keep and the trial that counts: those of `best`, or of a plan with slots that is predicted faster by
    the record and measured so. What there is no time to measure is kept by its prediction."""
    from pshard.planner.prepare_ranks import price_tiers
    from pshard.planner.price.profile_tables import find_tables
    from pshard.planner.routing.plan_slots import plan_slots, why_no_slots

    spec, own = bench.file.spec, best.refitted
    if bench.record and (why := why_no_slots(own)):
        bench.say(why)
    with planning_bar(f"planning {spec.name} with slots"):
        found = plan_slots(spec, bench.profile, bench.asked_of(own), own, bench.record, time_limit)
    (rank,) = found.ranks
    if not rank.caches:
        return own, best
    if bench.spent:
        bench.say(UNTRIED_SLOTS)
        return found, best
    tables, tiers = find_tables(bench.profile, found.correction), tuple(tier.tokens for tier in rank.tiers)
    (task,) = price_tiers(replace(spec, caches=rank.caches), tables, found.workload, tiers)
    tried = len(bench.trials)
    bench.attempt(found, task, "with slots")
    slots = bench.trials[tried:]
    # from disk whole layers take several times as long: then slots are the planner's choice, also on a busy machine
    by_experts = any(cache.is_on_demand for cache in rank.caches)
    best = choose_trial([*slots, best] if by_experts else [best, *slots], bench.say)
    return best.refitted, best


def choose_trial(trials: Sequence[Trial], say: Say) -> Trial:
    """The fastest of several trials if it is surely faster than the first, the planner's choice; else that one.

    What others disturbed says that a plan is no slower than measured, not how fast it is. So the planner's choice gives
    way only where its own time is undisturbed, and beyond the spread of both. `say` hears where that was not so.
    """
    own = trials[0]
    faster = sorted((t for t in trials if t.seconds <= own.seconds * (1 - NOISE)), key=lambda t: t.seconds)
    surely = [t for t in faster if not own.variant.disturbed and t.seconds + t.spread < own.seconds - own.spread]
    if surely:
        return surely[0]
    if faster:
        why = "others had cores meanwhile" if own.variant.disturbed else "their samples overlap"
        say(
            f"the machine was too busy to tell if {faster[0].name} is faster than {own.name}: a round took "
            f"{faster[0].seconds:.3g} s and {own.seconds:.3g} s, but {why}. The planner's choice is kept: plan again "
            "when the machine is idle"
        )
    return own


class _Bench:
    """Loads and measures plans one at a time, while its time lasts."""

    def __init__(
        self,
        file: "ModelFile",
        profile: MachineProfile,
        tiers: tuple[int, ...],
        workload: Workload,
        deadline: float,
        say: Say,
        record: "RoutingRecord | None",
    ) -> None:
        from pshard.planner.price.tier_loads import tier_loads

        self.file, self.profile, self.deadline, self.say, self.record = file, profile, deadline, say, record
        self._asked = workload.max_ubatch
        workload = replace(workload, max_ubatch=tiers[-1])
        self.loads = tuple(load for load in tier_loads(workload, tiers) if load.weight > 0)
        self.trials: list[Trial] = []
        self.refused: KernelRefused | None = None  # why the last plan that the GPU cannot run was not tried
        self._found: list[dict[int, Timed]] = []  # of each trial
        self._longest = 0.0  # seconds that one trial took

    def attempt(self, variant: Variant, task: "RankTask", label: str = "") -> None:
        """Measure a variant; a line says why when it cannot be run or no time is left."""
        name = " ".join((variant.ranks[0].tiers[0].solve.strategy, label)).strip()
        name += " 2" if any(t.name == name for t in self.trials) else ""
        if self.trials and self.spent:
            self.say(f"{name} was not tried: the time for validation is spent; see --validate-seconds")
            return
        found = self._run_if_possible(variant, f"{name} was left out, it does not run")
        if found is None:
            return
        self.trials.append(self._make_trial(name, variant, found, task))
        self._found.append(found)

    def repeat(self, task: "RankTask") -> None:
        """Run those that may be the fastest once more, one after the other. The faster time of a tier counts, an
        undisturbed one first: what else a machine does only slows a plan down."""
        fastest = min(t.seconds for t in self.trials)
        contenders = [t for t in self.trials if t is self.trials[0] or t.seconds <= fastest * AGAIN]
        for trial in contenders if len(contenders) > 1 else ():
            if self.spent:
                self.say(f"{trial.name} was run only once: the time for validation is spent; see --validate-seconds")
                continue
            timed = self._run_if_possible(trial.variant, f"{trial.name} was run only once, it does not run again")
            if timed is None:
                continue
            nth = self.trials.index(trial)
            self._found[nth] = {n: _best([self._found[nth][n], now]) for n, now in timed.items()}
            self.trials[nth] = self._make_trial(trial.name, trial.variant, self._found[nth], task)

    def asked_of(self, variant: Variant) -> Workload:
        """A variant's workload, with the largest micro-batch that was asked for."""
        return replace(variant.workload, max_ubatch=self._asked)

    @property
    def spent(self) -> bool:
        """Whether one more trial would take too long."""
        return time.monotonic() + self._longest > self.deadline

    def tell_disturbed(self) -> None:
        """Say of which plans times were measured while too much else ran, if of any."""
        worst = {t.name: max(tier.prediction.disturbed for tier in t.variant.ranks[0].tiers) for t in self.trials}
        which = ", ".join(f"{name} ({share:.0%})" for name, share in worst.items() if share >= DISTURBED)
        if which:
            self.say(
                f"other programs or machines had core time while plans were run: {which}; such times are kept, but no "
                "predictions are fitted to them: plan again when the machine is idle"
            )

    def _run_if_possible(self, variant: Variant, otherwise: str) -> dict[int, Timed] | None:
        """What `_run` measures; None, and a line that says `otherwise` and why, when it does not run."""
        import torch

        try:
            return self._run(variant)
        except (UserError, StepFailed, torch.OutOfMemoryError, MemoryError) as error:
            self.refused = error if isinstance(error, KernelRefused) else self.refused
            self.say(f"{otherwise}: {error}")
            return None

    def _run(self, variant: Variant) -> dict[int, Timed]:
        """Seconds of every tier that the workload enters. Raises what loading and running raise."""
        import torch

        from pshard.session.open_plan import Opened
        from pshard.session.start_engine import start_engine

        started = time.monotonic()
        try:
            opened = Opened(self.file, self.profile, variant, Path())
            with start_engine(opened, variant, checkpoints=False, plays=self.record) as engine:
                return measure_tiers(engine, self.loads, self.deadline)
        finally:
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self._longest = max(self._longest, time.monotonic() - started)

    def _make_trial(self, name: str, variant: Variant, found: dict[int, Timed], task: "RankTask") -> Trial:
        """With one round of the workload: the measured micro-batches, and switches as they are priced."""
        from pshard.planner.search.round_times import switch_seconds

        variant = _with_measured(variant, found)
        seconds = sum(load.weight * found[load.tokens].seconds for load in self.loads)
        spread = sum(load.weight * found[load.tokens].spread for load in self.loads)
        switches = switch_seconds(task.room, variant.ranks[0].tiers, task.costs)
        return Trial(name, variant, variant, seconds + switches, spread)


def _best(times: "Sequence[Timed]") -> Timed:
    """Of several measurements of a tier an undisturbed one, and the fastest: what else a machine does slows it down."""
    return min(times, key=lambda t: (t.disturbed >= DISTURBED, t.seconds))


def _with_measured(variant: Variant, found: dict[int, Timed]) -> Variant:
    def fill(prediction: Prediction, timed: Timed | None) -> Prediction:
        return replace(prediction, measured_seconds=timed.seconds, disturbed=timed.disturbed) if timed else prediction

    (rank,) = variant.ranks
    tiers = tuple(replace(tier, prediction=fill(tier.prediction, found.get(tier.tokens))) for tier in rank.tiers)
    return replace(variant, ranks=(replace(rank, tiers=tiers),))


def _keep_profiled(fitted: Variant, profiled: Variant) -> Variant:
    """A variant of one device by fitted times, with what the profile's own times predict beside it."""
    (rank,), (other,) = fitted.ranks, profiled.ranks
    tiers = tuple(
        replace(tier, prediction=replace(tier.prediction, profile_seconds=plain.prediction.seconds))
        for tier, plain in zip(rank.tiers, other.tiers, strict=True)
    )
    return replace(fitted, ranks=(replace(rank, tiers=tiers),))


def measure_tiers(engine: "Engine", loads: "Sequence[TierLoad]", deadline: float) -> dict[int, Timed]:
    """Times of each load's micro-batch by its tokens: the median of a few samples after a warm-up, taken again where
    others had the cores meanwhile.

    `deadline` (time.monotonic) ends sampling early; every load gets one sample. Raises UserError as `forward` does.
    """
    found = {}
    for load in sorted(loads, key=lambda load: (load.past, -load.tokens)):  # what one leaves cached, the next needs
        new = _new_tokens(engine, load)
        _fill(engine, load)
        repeats = _warm_up(engine, new, load.past)
        tries = [_sample(engine, new, load.past, repeats, deadline)]
        while tries[-1].disturbed >= DISTURBED and len(tries) < TRIES and time.monotonic() < deadline:
            tries.append(_sample(engine, new, load.past, repeats, deadline))
        found[load.tokens] = _best(tries)
    return found


def _warm_up(engine: "Engine", new: list[list[int]], past: int) -> int:
    """How many runs a sample has, by what the last warm-up took with the way back to the past."""
    whole = 0.0
    for _ in range(2):
        began = time.perf_counter()
        seconds = _time_runs(engine, new, past, 1)
        whole = time.perf_counter() - began
        if seconds >= LONG:
            break
    return max(1, min(MOST_REPEATS, int(SAMPLE_SECONDS / whole)))


def _sample(engine: "Engine", new: list[list[int]], past: int, repeats: int, deadline: float) -> Timed:
    """The median of a few samples, or of those until `deadline`."""
    began = read_core_time()
    samples = [_time_runs(engine, new, past, repeats)]
    while len(samples) < SAMPLES and time.monotonic() < deadline:
        samples.append(_time_runs(engine, new, past, repeats))
    middle = median(samples)
    spread = max(max(samples) - middle, middle - min(samples))
    return Timed(middle, round(disturbed_share(began, read_core_time()), 4), spread)


def _new_tokens(engine: "Engine", load: "TierLoad") -> list[list[int]]:
    """The load's token ids, spread over its sequences."""
    sizes = [span.tokens for span in load.batch.spans for _ in range(span.texts)]
    return [_ids(engine, n, s) for s, n in enumerate(sizes)]


def _fill(engine: "Engine", load: "TierLoad") -> None:
    """Cache what the load's sequences have behind them."""
    engine.reset(length=load.past)
    missing = [load.past - used for used in engine.lengths[: load.sequences]]
    if any(missing):
        engine.forward([_ids(engine, n, s) for s, n in enumerate(missing)])


def _time_runs(engine: "Engine", new: list[list[int]], past: int, repeats: int) -> float:
    """Mean seconds of one run, each from the same past, which a state that cannot be cut back is computed again for."""
    seconds = 0.0
    for _ in range(repeats):
        engine.reset(length=past)
        started = time.perf_counter()
        engine.forward(new)
        seconds += time.perf_counter() - started
    return seconds / repeats


def _ids(engine: "Engine", n: int, seed: int) -> list[int]:
    from pshard.session.bench_engine import TOKEN_STRIDE

    return [(seed + 1 + i) * TOKEN_STRIDE % engine.vocab for i in range(n)]
