"""A tier's steps as they are launched, compiled in one pass: what one graph holds, what is recorded as a native call,
and what the thread that launches does itself. Printed, it is a line for each. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import TypeGuard

from pshard.homes import ACC, CPU
from pshard.steps.label import label_step
from pshard.steps.move import Activations, Move, Part, UnitState, Weights
from pshard.steps.step import DEMAND, AllReduce, Compute, Free, Step


@dataclass(frozen=True)
class Units:
    """Units on one side that nothing interrupts, and between those on the accelerator the sums of ranks. Where the CPU
    computes them, each of `calls` is one native call in small batches."""

    steps: tuple[Compute | AllReduce, ...]

    @cached_property
    def name(self) -> str:
        """What tells it from a tier's others, in words."""
        return ", ".join(map(_name, self.steps))

    @cached_property
    def on(self) -> str:
        """The side that computes them."""
        return self.computes[0].on if self.computes else ACC

    @cached_property
    def computes(self) -> tuple[Compute, ...]:
        """The units, without sums."""
        return tuple(step for step in self.steps if isinstance(step, Compute))

    @cached_property
    def gives_logits(self) -> bool:
        """Whether its last unit is the model's."""
        return _find_position(self.steps[-1]) == "last"

    @cached_property
    def calls(self) -> "tuple[Units, ...]":
        """What may be recorded apart: the first unit, which looks ids up and may do more than may be written down, by
        itself; sums, and the last unit, whose logits are read, not at all."""
        groups = tuple(Units(tuple(steps)) for _, steps in groupby(self.steps, _find_position))
        return groups if len(groups) > 1 else (self,)

    @cached_property
    def is_recorded(self) -> bool:
        """Whether one of `calls` may be a native call."""
        return _find_position(self.steps[-1]) in ("first", "layer")


@dataclass(frozen=True)
class Tell:
    """The accelerator asks for a run on the CPU, by its number."""

    run: int


@dataclass(frozen=True)
class Await:
    """The accelerator waits until the CPU has done a run."""

    run: int


@dataclass(frozen=True)
class Stretch:
    """What the accelerator does without a word of the thread that launches: one CUDA graph in small batches. As nodes
    of the graph, moves of activations cost the host no launch of their own.

    `leaves`: activations that the host takes next: where there is a graph, it brings them too.
    """

    parts: tuple[Units | Move | Tell | Await, ...]
    leaves: tuple[str, ...] = ()

    @cached_property
    def name(self) -> str:
        """What tells it from a tier's others, in words."""
        leaves = (f"{', '.join(self.leaves)} to {CPU}",) if self.leaves else ()
        return "; ".join((*map(_name, self.parts), *leaves))

    @cached_property
    def steps(self) -> tuple[Compute | AllReduce, ...]:
        """Its units and sums; only the first of them may wait for a copy."""
        return tuple(step for part in self.parts if isinstance(part, Units) for step in part.steps)

    @cached_property
    def waits_for(self) -> Compute | None:
        """The unit whose weights or state a copy brings, for which no graph can wait."""
        return next((step for step in self.steps[:1] if _waits(step) and isinstance(step, Compute)), None)

    @cached_property
    def computes(self) -> tuple[Compute, ...]:
        """Its units."""
        return tuple(step for step in self.steps if isinstance(step, Compute))

    @cached_property
    def brings(self) -> tuple[Move, ...]:
        """What comes from the host."""
        return tuple(part for part in self.parts if isinstance(part, Move) and part.is_to_acc)

    @cached_property
    def reading(self) -> tuple[Compute, ...]:
        """Its units whose kernels read weights over the link."""
        return tuple(step for step in self.computes if step.source == "link" and step.reads)

    @cached_property
    def gives_logits(self) -> bool:
        """Whether the model's last unit is among its own."""
        return any(isinstance(part, Units) and part.gives_logits for part in self.parts)


@dataclass(frozen=True)
class Program:
    """One micro-batch after the other. runs: of a program that runs ahead, what the CPU computes after the first
    stretch, in the order in which it is asked. entering: what comes to VRAM as the tier is entered, in the order of
    need."""

    body: tuple[Step | Stretch | Units, ...]
    runs: tuple[Units, ...] = ()
    entering: tuple[Move, ...] = ()

    def __str__(self) -> str:
        """A line for each that is launched: by whom, and what."""
        return "\n".join([*map(_print_line, self.body), *(f"run {i}: {run.name}" for i, run in enumerate(self.runs))])


def compile_steps(body: Sequence[Step], entering: tuple[Move, ...] = ()) -> Program:
    """The program whose hand-offs go through the thread that launches."""
    compiler = _Compiler(body, ahead=False)
    return Program(compiler.compile(), entering=entering)


def compile_ahead(body: Sequence[Step]) -> Program | None:
    """The program for an accelerator that runs ahead of the thread that launches: another thread computes what is left
    to the CPU, and both sides tell each other when they are done.

    None where nothing is handed to the CPU, where it has a run that nothing is handed to (all units are on the CPU), or
    where something on the CPU must be done by the thread that launches (sums of ranks without accelerators, logits).
    """
    compiler = _Compiler(body, ahead=True)
    found, runs = compiler.compile(), compiler.runs
    fits = runs and compiler.asked == list(range(len(runs))) and not compiler.lacks_thread
    return Program(found, tuple(runs)) if fits else None


class _Compiler:
    """One pass over the steps. ahead: see `compile_ahead`.

    Attributes:
        runs, asked: what the CPU computes when it is asked, and the runs that it is asked for.
        lacks_thread: whether the thread that launches would have to do something on the CPU meanwhile.
    """

    def __init__(self, body: Sequence[Step], ahead: bool) -> None:
        self._body, self._ahead = body, ahead
        self._found: list[Step | Stretch | Units] = []
        self._parts: list[Units | Move | Tell | Await] = []  # of the stretch that is open
        self._begun = False  # whether the accelerator has computed a unit
        self._last = -1  # the stretch that made the rows as they are
        self.runs, self.asked, self.lacks_thread = list[Units](), list[int](), False

    def compile(self) -> tuple[Step | Stretch | Units, ...]:
        """What the steps become."""
        on_acc = False  # whether the step before is the accelerator's
        for i, step in enumerate(self._body):
            entered = i > 0 and _enters(self._body[i - 1])
            if _is_on(step, ACC) or (isinstance(step, AllReduce) and (on_acc or entered)):
                self._add_unit(step, entered, on_acc)
                on_acc = True
                continue
            on_acc = False
            if isinstance(step, Compute):
                self._add_on_cpu(step, i > 0 and _is_on(self._body[i - 1], CPU))
            elif isinstance(step, Move) and isinstance(step.portion, Activations | Part):
                self._cross(step, i)
            else:
                self._add_by_thread(step)
        self._close()
        return tuple(self._found)

    def _add_unit(self, step: Compute | AllReduce, entered: bool, follows: bool) -> None:
        if _waits(step) and not entered:
            self._close()
        before = self._parts[-1] if self._parts and follows else None
        if isinstance(before, Units):
            self._parts[-1] = Units((*before.steps, step))
        else:
            self._parts.append(Units((step,)))
        self._begun = True

    def _add_on_cpu(self, step: Compute, follows: bool) -> None:
        ahead = self._ahead and self._begun
        if not ahead:
            self._close()
        elif step.position == "last" or step.source == DEMAND:  # a display's GPU ends kernels that wait for a slow disk
            self.lacks_thread = True
        found = self.runs if ahead else self._found
        before = found[-1] if follows else None
        if isinstance(before, Units):
            found[-1] = Units((*before.steps, step))
        else:
            found.append(Units((step,)))
        self._last = -1

    def _cross(self, step: Move, at: int) -> None:
        """Activations, or a part of a unit, that come to the other side."""
        following = self._body[at + 1] if at + 1 < len(self._body) else None
        enters = _enters(step) and (isinstance(following, AllReduce) or _is_on(following, ACC))
        if enters and (not self._ahead or _waits(following)):
            self._close()
        if enters and isinstance(following, AllReduce) and not following.port:  # of which the CPU has made a part
            step = replace(step, portion=Activations(("branch",)))
        if not step.is_to_acc:
            self._take_to_host(step, at)
        elif self._ahead and self.runs:
            self._parts += [Await(len(self.runs) - 1), step]
        elif enters:
            self._parts.append(step)
        else:
            self._add_by_thread(step)

    def _take_to_host(self, step: Move, at: int) -> None:
        if not self._ahead:
            self._close()
            made = self._found[self._last] if self._last >= 0 else None
            if isinstance(made, Stretch) and not made.gives_logits:
                self._found[self._last] = replace(made, leaves=step.activations)
            self._add_by_thread(step)
        elif any(_is_on(later, CPU) for later in self._body[at + 1 :]):  # else the last one, of logits
            self._parts.append(step)
            if _is_asked(self._body[at + 1 :]):
                self._parts.append(Tell(len(self.runs)))
                self.asked.append(len(self.runs))

    def _add_by_thread(self, step: Step) -> None:
        self._close()
        self._found.append(step)
        lasts = isinstance(step, Free) or (isinstance(step, Move) and isinstance(step.portion, Weights | UnitState))
        self._last = self._last if lasts else -1
        crosses = isinstance(step, Move) and isinstance(step.portion, Activations | Part)
        self.lacks_thread = self.lacks_thread or crosses or isinstance(step, AllReduce)

    def _close(self) -> None:
        """End the stretch that is open."""
        if self._parts:
            self._last = len(self._found)
            self._found.append(Stretch(tuple(self._parts)))
            self._parts.clear()


def _is_on(step: Step | None, side: str) -> TypeGuard[Compute]:
    return isinstance(step, Compute) and step.on == side


def _waits(step: Step | None) -> bool:
    """Whether it waits for a copy of its weights or state."""
    return isinstance(step, Compute) and step.on == ACC and (step.slot is not None or step.state == "host")


def _enters(step: Step) -> bool:
    """Whether it brings activations to the accelerator."""
    return isinstance(step, Move) and step.brings(Activations)


def _is_asked(following: Sequence[Step]) -> bool:
    """Whether the CPU computes something before the next hand-off."""
    for step in following:
        if _is_on(step, CPU):
            return True
        if isinstance(step, Move) and isinstance(step.portion, Activations):
            return False
    return False


def _find_position(step: Compute | AllReduce) -> str:
    return step.position if isinstance(step, Compute) else ""


def _name(part: Step | Units | Stretch | Tell | Await) -> str:
    match part:
        case Units() | Stretch():
            return part.name
        case Tell(run):
            return f"ask for run {run}"
        case Await(run):
            return f"await run {run}"
        case AllReduce(unit):
            return f"sum of {unit}"
        case Compute(slot=int(slot)):
            return f"{label_step(part)} from slot {slot}"
        case Free(slot):
            return f"free slot {slot}"
        case Move(Weights(unit)):
            return f"{unit} to slot {part.slot}"
        case Move(Activations(names)):
            return f"{', '.join(names)} {label_step(part)}"
    return label_step(part)


def _print_line(item: Step | Stretch | Units) -> str:
    doer = "graph" if isinstance(item, Stretch) else "CPU" if isinstance(item, Units) else "thread"
    return f"{doer}: {_name(item)}"
