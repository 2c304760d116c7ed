"""What a micro-batch copies beside its units: weights to slots, experts that follow use, states through the stage."""

from functools import cached_property
from typing import Any

from pshard.runtime.kernels.api import Segment
from pshard.runtime.memory.states import Copies, Reach, pair_runs, reach_new, reach_old
from pshard.runtime.residents import Residents
from pshard.runtime.tier_in_force import RunContext, TierInForce
from pshard.steps.move import Move, NewExperts, UnitState
from pshard.steps.step import Compute
from pshard.units.divide_unit import find_brought


class CopiesBeside:
    """The copies of one micro-batch, and the events by which they and the compute lane wait for each other."""

    def __init__(
        self, context: RunContext, residents: Residents, tier: TierInForce, segments: tuple[Segment, ...]
    ) -> None:
        self._context, self._residents, self._tier, self._segments = context, residents, tier, segments
        self._device, self._freed = context.device, None

    def start(self, step: Move, tokens: int) -> None:
        """Start to copy; tokens: of the micro-batch."""
        if isinstance(step.portion, NewExperts):
            self._context.slots.begin(self._tier.tokens, tokens)
        elif not isinstance(step.portion, UnitState):
            if self._freed is None:  # a copy that had to wait for this micro-batch
                self.free()
            bring_weights(self._context, self._tier, step, (self._freed,))
        elif step.is_to_acc:
            self._fetch_state(step)
        else:
            self._write_state(step)

    def free(self) -> None:
        """A slot's unit was given to the compute lane: copies that start now wait for it."""
        self._freed = self._device.mark()

    def await_inputs(self, step: Compute) -> None:
        """The compute lane goes on when the weights and the state are there that copies bring for a unit."""
        tier = self._tier
        if step.slot is not None:
            self._device.wait(tier.arrived[step.slot])
        if step.state == "host":
            for event in tier.stage_ready:
                self._device.wait(event)
            tier.stage_ready.clear()

    @cached_property
    def _old(self) -> Reach:
        return reach_old(self._segments, self._context.join_cells)

    @cached_property
    def _new(self) -> Reach:
        return reach_new(self._segments, self._context.join_cells)

    def _decide(self, step: Move) -> Copies:
        """What a step copies whose bytes are decided now."""
        staged = self._tier.staged.get(step.unit)
        if staged is None:
            staged = self._tier.staged[step.unit] = self._residents.stage_state(step.unit, self._tier.carved)
        if step.is_to_acc:
            return pair_runs(staged.here, staged.there, self._old.entries(staged.law))
        return pair_runs(staged.there, staged.here, self._new.entries(staged.law))

    def _fetch_state(self, step: Move) -> None:
        tier, written = self._tier, self._residents.written
        after = (*tier.stage_free, written[step.unit]) if step.unit in written else tier.stage_free
        done = self._context.transfers.bring(self._decide(step), after)
        if done is not None:
            tier.stage_ready.append(done)

    def _write_state(self, step: Move) -> None:
        """Start to copy what has changed of a unit's state to where it lives."""
        tier = self._tier
        tier.stage_free = [self._device.mark()]  # the unit over it was the last thing given to the compute lane
        done = self._context.transfers.take_back(self._decide(step), tier.stage_free)
        if done is None:  # another rank holds all of this unit's state
            return
        self._residents.written[step.unit] = done
        tier.stage_ready.append(done)  # what the next unit changes goes where this is read from
        tier.stage_free.append(done)  # and so may what it had, where a rank's layers differ in width


def bring_weights(context: RunContext, tier: TierInForce, step: Move, after: tuple[Any, ...]) -> None:
    """Start to copy what is streamed of a unit to its slot."""
    copies = tier.copies.get(step)
    assert step.slot is not None
    if copies is None:
        unit, slot = context.spec.unit(step.unit), tier.carved.slots[step.slot]
        brought = find_brought(unit, step.share, step.wave)
        copies = tier.copies[step] = context.transfers.cut_portion(slot, brought, step.origin)
    tier.arrived[step.slot] = context.transfers.bring_weights(step.unit, copies, after, step.origin)
