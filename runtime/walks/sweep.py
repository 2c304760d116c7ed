"""One sweep: micro-batches of a prompt that go through the units together, so that what is streamed is brought once."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from pshard.runtime.devices.device import Device
from pshard.runtime.memory.transfers import Transfers
from pshard.runtime.walks.program import Program, compile_steps
from pshard.runtime.walks.ready_walk import ReadyWalk
from pshard.runtime.walks.walk import ACTS, Walk
from pshard.steps.move import Move, WaitingRows
from pshard.steps.step import Compute, Step, StepList, Turns
from pshard.steps.sweep import INDEX

AHEAD = 2  # rounds that the host's thread may have launched and that are not computed yet: an interrupt waits for them

# what each micro-batch does in its turn, before the next unit comes to a slot; and steps that all have together
Rounds = tuple[tuple[Program | Step, frozenset[str]], ...]


def compile_sweep(steps: StepList) -> Rounds:
    """A sweep's steps as they are launched, each round with the names of its units."""
    return tuple(_compile(step) for step in steps.body)


def _compile(step: Step) -> tuple[Program | Step, frozenset[str]]:
    if not isinstance(step, Turns):
        return step, frozenset()
    units = frozenset(one.unit for one in step.steps if isinstance(one, Compute))
    return compile_steps(step.steps), units


@dataclass(frozen=True)
class Turn:
    """One micro-batch of a sweep: its walk, which begins anew in each round, its token ids and their rows of a table of
    n-grams, and where its rows wait."""

    ready: ReadyWalk
    ids: Sequence[int]
    waiting: Mapping[str, torch.Tensor]
    grams: np.ndarray | None = None

    @property
    def walk(self) -> Walk:
        """Its walk."""
        return self.ready.walk

    def put_aside(self, portion: WaitingRows) -> None:
        """Let its rows, and the index that says where they stand, wait; or take them up again."""
        side, filled = self.ready.tier.side, self.walk.batch.acc_rows.tokens
        for name in (INDEX, *portion.names):
            rows = side.space.tensors[INDEX] if name == INDEX else side.space.rows(name, filled)
            place = self.waiting[name][: rows.nbytes].view(rows.dtype).view(rows.shape)
            (rows.copy_(place) if portion.returns else place.copy_(rows))
        side.kernels.forget()


def make_turn(
    ready: ReadyWalk, ids: Sequence[int], waiting: Mapping[str, torch.Tensor], grams: np.ndarray | None = None
) -> Turn:
    """A turn whose index stays as it was written while others are."""
    written, place = ready.index
    kept = replace(written, memory=written.memory.clone())
    return Turn(replace(ready, index=(kept, place)), ids, waiting, grams)


def sweep(
    turns: Sequence[Turn],
    rounds: Rounds,
    device: Device,
    transfers: Transfers,
    passed: Callable[[int, frozenset[str]], None],
    given_up: Callable[[], bool] = lambda: False,
) -> bool:
    """Compute micro-batches in one sweep, in `computing()`; whether they were. passed: told of a turn, by its number,
    and of units that have been computed in it. given_up: asked before each round whether nobody waits for the sweep any
    more; it ends there then, with anything in the slots. Raises RuntimeError where something could not be brought from
    beyond host memory."""
    marks, sends = list[object](), False
    for item, units in rounds:
        if given_up():
            return False
        if not isinstance(item, Program):
            ACTS[type(item)](turns[-1].walk, item)
            continue
        for number, turn in enumerate(turns):
            if sends:  # the turn before, the last one of the first round too, sends the same buffers of the host
                device.host_wait(device.mark())
            sends = bool(turn.walk.batch.unsent)
            turn.ready.begin(turn.ids, turn.grams)
            for one in item.body:
                if isinstance(one, Move) and isinstance(one.portion, WaitingRows):
                    turn.put_aside(one.portion)
                else:
                    ACTS[type(one)](turn.walk, one)
            passed(number, units)
        marks.append(device.mark())
        if len(marks) > AHEAD:
            device.host_wait(marks.pop(0))
        transfers.check()
    return True
