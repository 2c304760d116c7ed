"""The step list of a tier as it is run, with simulated times: `pshard-plan --steps`."""

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass

from pshard.errors import UserError
from pshard.machine import MachineProfile
from pshard.model import ModelSpec
from pshard.plan import Variant
from pshard.planner.price.simulate import Event, Simulation
from pshard.planner.price_plan import price_plan
from pshard.steps.label import label_step
from pshard.steps.move import Move, Weights
from pshard.steps.step import DEMAND, Compute, Free, Step, StepList


@dataclass(frozen=True)
class TimedStep:
    """A step in the order of issue. `lane`, `start`, `end`: where and when it runs, in seconds since the micro-batch
    began; none for one that takes no time. A copy for the next micro-batch may end after this one. `nbytes`: what it
    moves."""

    step: str
    what: str
    source: str
    nbytes: int
    lane: str | None
    start: float | None
    end: float | None


@dataclass(frozen=True)
class TimedSteps:
    """One tier's steps on one rank, and the seconds of a micro-batch."""

    tokens: int
    rank: int
    seconds: float
    steps: tuple[TimedStep, ...]


def time_steps(spec: ModelSpec, profile: MachineProfile, variant: Variant, tokens: int) -> tuple[TimedSteps, ...]:
    """The steps of the tier that covers micro-batches of so many tokens, of each rank; of more tokens those of a sweep
    that has as many of them as it can. Raises UserError when there is neither."""
    for tier in price_plan(spec, profile, variant):
        if tier.tokens >= tokens:
            return tuple(
                TimedSteps(tier.tokens, rank, result.seconds, tuple(_time(steps, result)))
                for rank, (steps, result) in enumerate(tier.simulate())
            )
        if tier.tiers[0].sweep:
            batches = min(tier.tiers[0].sweep.batches, -(-tokens // tier.tokens))
            swept, took = tier.simulate_sweep(batches)
            return (TimedSteps(batches * tier.tokens, 0, took.seconds, tuple(_time(swept, took))),)
    largest = variant.ranks[0].tiers[-1].tokens
    raise UserError(f"--steps {tokens}: no tier covers so many tokens; give at most {largest}")


def _time(steps: StepList, result: Simulation) -> Iterator[TimedStep]:
    """Steps with their events. Equal ones come about in the order in which they are issued."""
    events = defaultdict[Step, deque[Event]](deque)
    for event in result.events:
        events[event.step].append(event)
    for step in steps.flat:
        took = events[step].popleft() if events[step] else None
        lane, start, end = (took.lane, took.start, took.end) if took else (None, None, None)
        yield TimedStep(type(step).__name__, _what(step), _source(step), _nbytes(step), lane, start, end)


def _what(step: Step) -> str:
    if isinstance(step, Free):
        return f"slot {step.slot}"
    return label_step(step) if isinstance(step, Move | Compute) else getattr(step, "unit", "") or label_step(step)


def _source(step: Step) -> str:
    """Where a unit's weights come from, or a copy goes."""
    if isinstance(step, Move) and isinstance(step.portion, Weights):
        return f"{step.origin} to slot {step.slot}"
    if isinstance(step, Compute):
        return f"slot {step.slot}" if step.slot is not None else step.source
    return ""


def _nbytes(step: Step) -> int:
    """What a step moves; of what comes from disk, whole or on demand, what is read of it."""
    if isinstance(step, Compute):
        return step.reads if step.source == DEMAND else 0
    return step.nbytes - step.held if isinstance(step, Move) else getattr(step, "nbytes", 0)
