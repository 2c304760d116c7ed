"""A tier's steps as they are walked: runs of units on the accelerator are put together, each one launch. No torch."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import TypeVar

from pshard.steps.graph_runs import enters, find_runs
from pshard.steps.move import Activations, Move, UnitState, Weights
from pshard.steps.step import AllReduce, Compute, Free, Step, StepList

S = TypeVar("S")


@dataclass(frozen=True)
class Launch:
    """Units on the accelerator, and their all-reduces, that nothing interrupts: one CUDA graph in small batches.

    `enters`: activations that come from the host first; `leaves`: those that the next unit wants there. As nodes of the
    graph these transfers cost the host no launch of their own.
    """

    steps: tuple[Compute | AllReduce, ...]
    enters: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()

    @cached_property
    def name(self) -> tuple:
        """What tells it from the other launches of a tier."""
        first, last = self.steps[0], self.steps[-1]
        return type(first), first.unit, getattr(first, "part", ""), last.unit

    @cached_property
    def units(self) -> tuple[str, ...]:
        """Those that it computes."""
        return tuple(step.unit for step in self.steps if isinstance(step, Compute))

    @cached_property
    def brought(self) -> tuple[str, ...]:
        """What comes from the host at its beginning: of `enters` only the part of a sum, where the CPU has made one."""
        return ("branch",) if self.enters and isinstance(self.steps[0], AllReduce) else self.enters

    @cached_property
    def on_cpu(self) -> "tuple[Compute | AllReduce | HostRun, ...]":
        """Its steps where the accelerator is the CPU."""
        return tuple(group_on_host(self.steps, "acc"))

    @cached_property
    def reading(self) -> tuple[Compute, ...]:
        """Its units whose kernels read weights over the link."""
        return tuple(step for step in self.steps if isinstance(step, Compute) and step.reads)

    @cached_property
    def gives_logits(self) -> bool:
        """Whether its last unit is the model's."""
        return isinstance(self.steps[-1], Compute) and self.steps[-1].position == "last"


@dataclass(frozen=True)
class HostRun:
    """Units on the CPU that follow each other: one native call in small batches, where their kernels are all that they
    compute."""

    steps: tuple[Compute, ...]

    @cached_property
    def name(self) -> tuple:
        """What tells it from the other runs of a tier."""
        return tuple((step.on, step.unit, step.part, step.slot) for step in self.steps)


@dataclass(frozen=True)
class WalkProgram:
    """What a tier brings to VRAM when it is entered, in the order of need, and one micro-batch after the other."""

    entering: tuple[Move, ...]
    body: tuple[Step | Launch | HostRun, ...]


def make_program(residents: tuple[Move, ...], steps: StepList, order: tuple[str, ...]) -> WalkProgram:
    """The program of a tier. order: names of the units as they run."""
    number = {name: i for i, name in enumerate(order)}
    entering = [*residents, *steps.enter]
    entering.sort(key=lambda step: number[step.unit])
    return WalkProgram(tuple(entering), tuple(group_on_host(group_launches(steps.body), "cpu")))


def group_launches(body: tuple[Step, ...]) -> tuple[Step | Launch, ...]:
    """The body with its runs of accelerator units put together, and the hand-offs that begin them."""
    program: list[Step | Launch] = []
    at = 0
    for begin, end in find_runs(body):
        before = body[begin - 1] if enters(body, begin) else None
        program += body[at : begin - (before is not None)]
        steps = tuple(step for step in body[begin:end] if isinstance(step, Compute | AllReduce))
        program.append(Launch(steps, enters=_names_of(before)))
        at = end
    return tuple(_mark_leaving([*program, *body[at:]]))


def group_on_host(program: Iterable[S], on: str) -> Iterator[S | HostRun]:
    """The program with its runs of units on a side that is the CPU put together; the first unit, which looks ids up and
    may do more than may be written down, by itself, and the last, whose logits are read, not at all."""
    for position, steps in groupby(program, lambda step: _find_position(step, on)):
        if position in ("first", "layer"):
            yield HostRun(tuple(step for step in steps if isinstance(step, Compute)))
        else:
            yield from steps


def _find_position(step: object, on: str) -> str:
    return step.position if isinstance(step, Compute) and step.on == on else ""


def _mark_leaving(program: list[Step | Launch]) -> Iterator[Step | Launch]:
    """Launches whose hidden states the host takes next, after steps that don't touch them."""
    for i, step in enumerate(program):
        following = next((s for s in program[i + 1 :] if not _leaves_rows_alone(s)), None)
        if isinstance(step, Launch) and not step.gives_logits:
            taken = isinstance(following, Move) and following.takes_back(Activations)
            step = replace(step, leaves=_names_of(following) if taken else ())
        yield step


def _leaves_rows_alone(step: Step | Launch) -> bool:
    """Whether it does not touch the micro-batch's rows."""
    return isinstance(step, Free) or (isinstance(step, Move) and isinstance(step.portion, Weights | UnitState))


def _names_of(step: Step | Launch | None) -> tuple[str, ...]:
    """The buffers whose rows a step hands over."""
    return step.activations if isinstance(step, Move) else ()
