"""What of weights and states lies in VRAM now: how it comes there and back, and where a unit finds its own."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from pshard.errors import UserError
from pshard.model import ModelSpec
from pshard.plan import TierPlan
from pshard.runtime.blocks.block import ALONE, Block, Laid, Residual, Work
from pshard.runtime.blocks.find_block import find_block
from pshard.runtime.kernels.api import OpenNet
from pshard.runtime.memory.arena import Arena, Carved
from pshard.runtime.memory.host_side import HostSide
from pshard.runtime.memory.states import Reach, pair_runs
from pshard.runtime.memory.transfers import Transfers
from pshard.runtime.memory.weights import HostWeights, LentWeights, UnitWeights, view_brought, view_portion
from pshard.runtime.memory.workspace import Workspace
from pshard.runtime.tier_in_force import BoundUnit, RunContext, StagedState
from pshard.steps.move import Move, Pins
from pshard.steps.step import AFTER, BEFORE, DEMAND, Compute
from pshard.units.divide_unit import Portion, divide_operations, divide_unit, find_brought, find_portion, joined_width
from pshard.units.operations import halve
from pshard.units.state import State, StateShape

Snapshot = dict[str, tuple[torch.Tensor, ...]]  # the parts of one sequence's states, on the host, by unit


class Residents:
    """Pins and states of one rank. Each tier holds a prefix of the plan's orders, so that none of them moves. Pins that
    every tier has may be there before the first is in force.

    Attributes:
        fixed: units whose states do not grow; written: unit -> event of its state's last write-back.
    """

    def __init__(
        self,
        spec: ModelSpec,
        shape: StateShape,
        arena: Arena,
        host: HostSide,
        weights: HostWeights | LentWeights,
        transfers: Transfers,
        lent: Mapping[str, UnitWeights],
    ) -> None:
        """lent: weights of other programs' units, by the names of those that compute with them."""
        self._lent = lent
        self._spec, self._shape, self._arena, self._host = spec, shape, arena, host
        self._weights, self._transfers = weights, transfers
        self._pins: tuple[str, ...] = ()
        self._states: tuple[str, ...] = ()
        self._on_host = {name: self._view(name, memory) for name, memory in host.states.items()}
        self.fixed = tuple(name for name, law in spec.states(shape).items() if not law.grows)
        self.written: dict[str, Any] = {}

    def load_pins(self, names: Iterable[str], blobs: Callable[[str], torch.Tensor]) -> None:
        """Bring pins that every tier has into the arena, from anything that maps a name to a blob (also what is not
        kept on the host)."""
        for name in names:
            self._arena.pinned(name).copy_(blobs(name))
            self.hold_pins((name,))

    def hold_pins(self, names: Iterable[str]) -> None:
        """Pins that every tier has are in the arena."""
        self._pins += tuple(names)

    # --- switching tiers ----------------------------------------------------------------------------------------

    def leave(self, tier: TierPlan, reach: Reach) -> None:
        """Start to copy to the host the states for which a tier has no room, as far as they are in use."""
        for unit in self._states[len(self._arena.state_units(tier)) :]:
            if unit in self._on_host:
                self._transfers.take_back(self._pair(unit, reach, to_host=True))

    def settle(self, tier: TierPlan) -> tuple[set[str], set[str]]:
        """From now on the tier's pins and states are those in VRAM; returns those of either that are to be brought."""
        pins, states = self._arena.pinned_units(tier), self._arena.state_units(tier)
        new = set(pins) - set(self._pins), set(states[len(self._states) :])
        self._pins, self._states = pins, states
        return new

    def bring(self, step: Move, reach: Reach) -> Any:
        """Start to copy a unit's weights, or as much of its state as is in use; returns the event of the end, or None
        when there was nothing to copy."""
        if isinstance(step.portion, Pins):
            portions, place = divide_unit(self._spec.unit(step.unit), step.share), self._arena.pinned(step.unit)
            copies = self._transfers.cut_portion(place, portions.kept or portions.brought, step.origin)
            return self._transfers.bring_weights(step.unit, copies, home=step.origin)
        if step.unit not in self._on_host:
            return None
        return self._transfers.bring(self._pair(step.unit, reach, to_host=False))

    def _pair(self, unit: str, reach: Reach, to_host: bool) -> Any:
        block = self._block(unit)
        here, there = (block.state_parts(s) for s in (self._on_host[unit], self._view(unit, self._arena.state(unit))))
        runs = reach.entries(self._law(unit))
        return pair_runs(there, here, runs) if to_host else pair_runs(here, there, runs)

    # --- where a unit finds its own -----------------------------------------------------------------------------

    def state_now(self, unit: str) -> Any:
        """Where a unit's state stands now."""
        in_vram = unit in self._states or unit not in self._on_host
        return self._view(unit, self._arena.state(unit)) if in_vram else self._on_host[unit]

    def open_net(self, unit: str, space: Workspace) -> OpenNet:
        """A unit's state that cannot be cut, with where a side with that scratch leaves open rows of it."""
        found = self._spec.unit(unit)
        return self._block(unit).open_net(found, self._spec.config, self.state_now(unit), space)

    def begin_states(self, sequences: Sequence[int]) -> None:
        """Make the states that do not grow all zeros, of sequences that begin, wherever they are. Nothing may be under
        way that reads or writes them."""
        for unit in self.fixed:
            for part in self._block(unit).state_parts(self.state_now(unit)):
                for number in sequences:
                    part[number].zero_()

    @property
    def fixed_nbytes(self) -> int:
        """Bytes that states which do not grow have of one sequence."""
        parts = (part for unit in self.fixed for part in self._block(unit).state_parts(self.state_now(unit)))
        return sum(part[0].nbytes for part in parts if part.numel())

    def read_fixed(self, number: int, units: Collection[str] | None = None) -> Snapshot:
        """A copy of a sequence's states that do not grow, of all units or of these, where nothing is under way that
        writes them."""
        return {
            unit: tuple(
                part[number].to("cpu", copy=True) for part in self._block(unit).state_parts(self.state_now(unit))
            )
            for unit in self.fixed
            if units is None or unit in units
        }

    def write_fixed(self, number: int, states: Snapshot) -> None:
        """Make them those of a copy."""
        for unit, parts in states.items():
            for part, saved in zip(self._block(unit).state_parts(self.state_now(unit)), parts, strict=True):
                part[number].copy_(saved)

    def stage_state(self, unit: str, carved: Carved) -> StagedState:
        """A state on the host, with its place in the stage."""
        parts = self._block(unit).state_parts
        there = parts(self._view(unit, carved.state_stage))
        return StagedState(self._law(unit), there, parts(self._on_host[unit]))

    def bind(self, step: Compute, carved: Carved, tokens: int, context: RunContext) -> BoundUnit:
        """The unit of a step with its weights and state where they are in the tier for so many tokens."""
        unit, block = self._spec.unit(step.unit), self._block(step.unit)
        is_partial = context.sums and unit.ports.adds
        begun = is_partial and step.unit in self._spec.onto_parts
        begins, ports = step.part == BEFORE, unit.summed
        if begins:  # nothing of it is added yet
            is_partial, begun, ports = False, False, (unit.ports.between,)
        if not unit.is_here:
            return BoundUnit(partial(_clear_ports, ports) if ports else block.contribute_nothing, is_partial, begun)
        device = torch.device("cpu") if step.on == "cpu" else self._arena.memory.device
        whole = divide_operations(unit, step.share, self._spec.config)
        here = whole.after if step.part == "rest" else whole.on_acc
        if step.is_divided and step.on == "cpu":
            here = whole.on_cpu
        elif step.part and not step.is_divided:
            here = halve(whole.on_acc)[0 if begins else 1]
        weights = block.prepare(Laid(unit, self._spec.config, self.weights_of(step, carved), device, here, step.wave))
        weights, opens = context.slots.attach(tokens, step, weights), unit.opens_with_norm(self._spec.config)
        opens = opens and step.part != AFTER
        ends = None if is_partial or begins else lambda work: block.inner_norm(work, weights)
        if not step.is_divided:
            state = self._state_of(step, carved)
            norm = block.first_norm(weights) if opens else None
            leaves = block.ends_in_product(weights) and not (is_partial or begins)
            return BoundUnit(
                lambda work, residual: block.run(work, weights, state, residual),
                *(is_partial, begun, opens, norm, leaves, ends),
            )
        stage = self._host.rows if step.on == "cpu" else carved.row_stage
        width = joined_width(unit, step.share, self._spec.config)
        if step.part == "rest":
            return BoundUnit(
                lambda work, residual: block.run_rest(
                    work, weights, residual, view_rows(stage, work.rows.tokens, width)
                ),
                is_partial,
                begun,
                ends=ends,
            )
        if step.on == "acc":
            return BoundUnit(
                lambda work, residual: block.run_share(work, weights, residual, None), is_partial, begun, opens
            )
        return BoundUnit(
            lambda work, _: block.run_share(work, weights, ALONE, view_rows(stage, work.rows.tokens, width)),
            is_partial,
        )

    def weights_of(self, step: Compute, carved: Carved) -> UnitWeights:
        """The weights of a step's unit where they are, those that it is lent too."""
        own = self._own_weights(step, carved)
        if lent := self._spec.unit(step.unit).lent:
            theirs = self._lent[step.unit].matrices
            return replace(own, matrices=own.matrices | {tensor.role: theirs[tensor.role] for tensor in lent})
        return own

    def _own_weights(self, step: Compute, carved: Carved) -> UnitWeights:
        portions = divide_unit(self._spec.unit(step.unit), step.share)
        if step.on == "cpu" and portions.on_cpu:
            return view_portion(self._find(portions.on_cpu), self._weights.blob(step.unit))
        if step.source == "link":
            brought = view_portion(self._find(portions.brought), self._readable(step.unit))
        elif step.source == DEMAND:
            return self._transfers.disk.view(step.unit)
        elif step.source == "arena":
            brought = view_brought(portions.brought, self._arena.pinned(step.unit))
        elif step.source == "slot":
            assert step.slot is not None
            portion = find_brought(self._spec.unit(step.unit), step.share, step.wave)
            brought = view_brought(portion, carved.slots[step.slot])
        else:
            brought = view_brought(portions.brought, self._weights.blob(step.unit))
        if portions.kept is None:
            return brought
        return replace(view_brought(portions.kept, self._arena.pinned(step.unit)), last=brought)

    def _find(self, portion: Portion) -> Portion:
        return find_portion(portion, self._weights.held[portion.unit.name])

    def _readable(self, unit: str) -> torch.Tensor:
        """A unit's bytes in host memory that the accelerator's kernels may read. Raises UserError where they cannot."""
        if self._arena.memory.device.type != "cpu" and not self._weights.is_locked(unit):
            raise UserError(
                f"the plan has the GPU read {unit} in host memory, which the system would not page-lock; "
                "plan again: the limit is remembered"
            )
        return self._weights.blob(unit)

    def _state_of(self, step: Compute, carved: Carved) -> Any:
        unit = self._spec.unit(step.unit)
        if unit.borrows or unit.kind.stands:
            owner = unit.borrows.unit if unit.borrows else unit.name
            return self._view(owner, self._arena.state(owner))
        if step.state is None:
            return None
        if step.on == "cpu":
            return self._on_host[step.unit]
        return self._view(step.unit, self._arena.state(step.unit) if step.state == "vram" else carved.state_stage)

    def _view(self, name: str, memory: torch.Tensor) -> Any:
        unit, config = self._spec.unit(name), self._spec.config
        own = memory[: unit.state_nbytes(config, self._shape)]
        return self._block(name).view_state(unit, config, self._shape, own)

    def _block(self, unit: str) -> Block:
        return find_block(self._spec.unit(unit).kind)

    def _law(self, unit: str) -> State:
        law = self._spec.unit(unit).state(self._spec.config, self._shape)
        assert law is not None
        return law


def _clear_ports(ports: tuple[str, ...], work: Work, residual: Residual) -> None:
    """The part of a rank that holds nothing of a unit, in the ports where ranks sum their parts."""
    for port in ports:
        work.side.space.rows(port, work.rows.tokens).zero_()


def view_rows(stage: torch.Tensor, tokens: int, rows: int) -> torch.Tensor:
    """float32 [tokens, rows] at the beginning of a row stage."""
    return stage[: tokens * rows].view(tokens, rows)
