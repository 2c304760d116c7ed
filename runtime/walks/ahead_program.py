"""A tier's steps for an accelerator that runs ahead of the thread that launches: a thread of its own computes what the
plan leaves to the CPU, and both sides tell each other when they are done. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeGuard

from pshard.homes import ACC
from pshard.runtime.walks.walk_program import HostRun, Launch
from pshard.steps.move import Activations, Move, NewExperts, Part, UnitState, Weights, hand_over
from pshard.steps.step import Compute, Free, Gather, Receive, Send, Step

# what the thread that launches does itself: what it queues beside units, and what it does with the other ranks
MOVES_BY_THREAD = (Weights, NewExperts, UnitState)
BY_THREAD = (Free, Receive, Send, Gather)


@dataclass(frozen=True)
class Tell:
    """The accelerator brings activations to the host, and asks for a run on the CPU, by its number."""

    run: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class Await:
    """The accelerator waits until the CPU has done a run, and takes what that made: activations or a unit's part."""

    run: int
    taken: Move


@dataclass(frozen=True)
class Stretch:
    """What the accelerator does without a word of the thread that launches: one CUDA graph."""

    parts: tuple[Launch | Tell | Await, ...]

    @cached_property
    def launches(self) -> tuple[Launch, ...]:
        """Its units."""
        return tuple(part for part in self.parts if isinstance(part, Launch))

    @cached_property
    def name(self) -> tuple:
        """What tells it from the other stretches of a tier."""
        return tuple(part.name if isinstance(part, Launch) else (type(part), part.run) for part in self.parts)


@dataclass(frozen=True)
class AheadProgram:
    """One micro-batch after the other, and in their order the CPU's runs but for those before the first launch."""

    body: tuple[Step | Stretch | HostRun, ...]
    runs: tuple[HostRun, ...]


def make_ahead(body: Sequence[Step | Launch | HostRun]) -> AheadProgram | None:
    """The same as a `WalkProgram.body`; None where nothing is handed to the CPU, where it has a run that nothing is
    handed to (all units are on the CPU), or where something on the CPU must be done by the thread that launches (sums
    of ranks without accelerators, logits, a model's last unit)."""
    program, parts, runs = list[Step | Stretch | HostRun](), list[Launch | Tell | Await](), list[HostRun]()
    begun, told = False, list[int]()

    def flush() -> None:
        if parts:
            program.append(Stretch(tuple(parts)))
            parts.clear()

    for i, step in enumerate(body):
        if isinstance(step, HostRun) and begun:
            runs.append(step)
        elif isinstance(step, Move) and step.takes_back(Activations):
            if _next_run(body, i) is not None:
                parts.append(Tell(len(runs), step.activations))
                told.append(len(runs))
        elif runs and isinstance(step, Move) and step.brings(Part, Activations):
            parts.append(Await(len(runs) - 1, step))
        elif isinstance(step, Launch):
            if _waits(step):
                flush()
            if step.enters and runs:
                parts.append(Await(len(runs) - 1, hand_over(ACC, 0, step.brought)))
                step = Launch(step.steps)
            parts.append(Launch(step.steps, step.enters))
            begun = True
        elif _is_by_thread(step) or (not begun and isinstance(step, Compute | HostRun)):
            flush()
            program.append(step)
        else:
            return None
    flush()
    return AheadProgram(tuple(program), tuple(runs)) if runs and told == list(range(len(runs))) else None


def _next_run(body: Sequence[Step | Launch | HostRun], at: int) -> HostRun | None:
    """What the CPU computes after a hand-off to it, before the next one."""
    for step in body[at + 1 :]:
        if isinstance(step, HostRun):
            return step
        if isinstance(step, Move) and isinstance(step.portion, Activations):
            return None
    return None


def _is_by_thread(step: Step | Launch | HostRun) -> TypeGuard[Step]:
    """Whether it is among what the thread that launches does itself."""
    return isinstance(step, BY_THREAD) or (isinstance(step, Move) and isinstance(step.portion, MOVES_BY_THREAD))


def _waits(launch: Launch) -> bool:
    """Whether it waits for a copy, which no graph can."""
    first = launch.steps[0]
    return isinstance(first, Compute) and (first.slot is not None or first.state == "host")
