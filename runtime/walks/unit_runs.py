"""Runs the units of one micro-batch and the sums between them: their kernels, nothing else. What a graph may hold."""

from itertools import zip_longest

import torch

from pshard.batch_sizes import SMALL_BATCH
from pshard.buffers import SUM_NORMS
from pshard.runtime.blocks.block import ALONE, Residual, Side, Work
from pshard.runtime.kernels.api import InnerNorm, PendingSum
from pshard.runtime.ranks.sum_norm import NO_SUM_NORM, SumNorm
from pshard.runtime.residents import Residents
from pshard.runtime.tier_in_force import BoundUnit, RunContext, TierInForce
from pshard.steps.step import AllReduce, Compute
from pshard.units.ports import SQUARES
from pshard.units.rewrites import END_NORMS, LEFT_NORM, SUM_NORM, fuses


class UnitRuns:
    """The units of a micro-batch. `work`: by side, "acc" or "cpu"."""

    def __init__(self, context: RunContext, residents: Residents, tier: TierInForce, work: dict[str, Work]) -> None:
        self._context, self._residents, self._tier, self._work = context, residents, tier, work

    def can_record(self, on: str) -> bool:
        """Whether that side's kernels may be written down, and made again as one call."""
        return self._work[on].side.kernels.recordable

    def bind(self, step: Compute) -> BoundUnit:
        """The step's unit where it lies; found once in a tier."""
        unit = self._tier.bound.get(step)
        if unit is None:
            unit = self._residents.bind(step, self._tier.carved, self._tier.tokens, self._context)
            self._tier.bound[step] = unit
        return unit

    def bind_all(self, steps: tuple[Compute, ...]) -> None:
        """Bind the units of steps whose kernels are one native call, which comes next."""
        for step in steps:
            self.bind(step)
        self._context.meanwhile.begin()

    def run(
        self,
        step: Compute,
        entering: PendingSum | InnerNorm | None = None,
        leaving: PendingSum | None = None,
        following: torch.Tensor | None = None,
        part: torch.Tensor | None = None,
        postpones: bool = False,
    ) -> None:
        """The unit's kernels. entering, leaving, following, postpones: see Residual. part: where a part of a sum goes,
        if not to `branch` as float32."""
        unit = self.bind(step)
        work = self._work[step.on]
        if unit.is_partial:
            part = work.side.space.rows("branch", work.rows.tokens) if part is None else part
            unit.run(work, Residual(entering, part, leaving, unit.begun))
        else:
            alone = entering is None and following is None and not postpones
            unit.run(work, ALONE if alone else Residual(entering, following=following, postpones=postpones))
        picks = self._context.host.picks
        wanted = picks is not None and picks.wants(self._tier.tokens)
        if picks is not None and wanted and self._context.spec.unit(step.unit).kind.routes:
            picks.bring(step.unit, work.side, work.rows, self._context.device)

    def run_all(self, steps: tuple[Compute | AllReduce, ...]) -> None:
        """Steps on the accelerator, or on the CPU without their sums; a sum goes with the norm of the unit that follows
        it where there is a kernel for both, and so do norms by which a unit ends."""
        if self._context.device.kind == "cpu":
            self._context.meanwhile.begin()
        entering: PendingSum | InnerNorm | None = None
        part = None
        for step, following, second in zip_longest(steps, steps[1:], steps[2:]):
            if isinstance(step, Compute):
                summed = isinstance(following, AllReduce) and not following.port
                part = self._find_part(step) if summed else None
                leaving = None if part is None else self._sum_for(second, step.unit, part)
                if leaving is not None and not self._may_leave(leaving.part):
                    leaving = None
                inner = self._inner_norm(step, following)
                self.run(step, entering, leaving, self._norm_after(step, following), part, inner is not None)
                entering = inner
            elif step.port:
                self.sum_on("acc", step)
            else:
                part = self._find_branch() if part is None else part
                entering = self._sum_for(following, step.unit, part)
                if entering is None:
                    self.add_sum("acc", step.unit, part)
                part = None

    def _may_leave(self, part: torch.Tensor) -> bool:
        """Whether what makes a part that a sum takes along may leave some of that to the sum."""
        return part.shape[0] > SMALL_BATCH or self._context.group.pushes(part)

    def _find_branch(self) -> torch.Tensor:
        return self._tier.side.space.rows("branch", self._work["acc"].rows.tokens)

    def _find_part(self, step: Compute) -> torch.Tensor:
        """Where the part of a sum that comes next goes: `branch`, as float32 or as what it is rounded to anyway where
        the unit alone, all at once, makes it."""
        part = self._find_branch()
        if step.on != "acc" or step.is_divided or step.unit in self._context.sum_rows or self.bind(step).begun:
            return part
        dtype = self._context.group.part_dtype(*part.shape)
        return part.flatten().view(dtype)[: part.numel()].view(part.shape)

    def _inner_norm(self, step: Compute, following: Compute | AllReduce | None) -> InnerNorm | None:
        """What `following` is to add of the step's unit as it normalises; None where the unit adds all itself."""
        if not isinstance(following, Compute) or following.on != step.on or not fuses(END_NORMS):
            return None
        work, ends = self._work[step.on], self.bind(step).ends
        if ends is None or not work.side.kernels.fuses_norms or not self.bind(following).opens:
            return None
        return ends(work)

    def _norm_after(self, step: Compute, following: Compute | AllReduce | None) -> torch.Tensor | None:
        """Weights of the norm that the step's last product may leave for the unit that follows."""
        side = self._work[step.on].side
        may = side.kernels.leaves_norms and fuses(LEFT_NORM)
        if not may or not isinstance(following, Compute) or following.on != step.on:
            return None
        return self.bind(following).norm if self.bind(step).leaves else None

    def _sum_for(self, following: Compute | AllReduce | None, unit: str, part: torch.Tensor) -> PendingSum | None:
        """What `following` is to add of the unit's parts as it normalises; None when the sum must be made by itself."""
        side, group = self._tier.side, self._context.group
        if not isinstance(following, Compute) or not side.kernels.fuses_sums:
            return None
        if not fuses(SUM_NORM):
            return None
        exchange = group.row_exchange(*part.shape)
        if exchange is None or not self.bind(following).opens:
            return None
        return PendingSum(exchange, part, group.wire(part), self._sum_norm(side, unit))

    def sum_on(self, on: str, step: AllReduce) -> None:
        """The sum of the ranks' parts on a side: onto the residual stream, or within a port."""
        if step.port:
            work = self._work[on]
            port = work.side.space.rows(step.port, work.rows.tokens)
            self._context.group.all_reduce(port, exact=step.port == SQUARES)
        else:
            self.add_sum(on, step.unit)

    def add_sum(self, on: str, unit: str, part: torch.Tensor | None = None) -> None:
        """The sum of the ranks' parts of a unit onto the residual stream of a side, normalised first where the model
        does so. part: None: `branch`."""
        side, group, n = self._work[on].side, self._context.group, self._work[on].rows.tokens
        hidden, part = side.space.rows("hidden", n), side.space.rows("branch", n) if part is None else part
        weight, factor = self._sum_norm(side, unit)
        if weight is None:
            group.add_sum(hidden, part)
            return
        group.all_reduce(part)
        side.kernels.rms_norm(part, weight, side.config.norm_eps, hidden, accumulate=True, scale=factor)

    def _sum_norm(self, side: Side, unit: str) -> SumNorm:
        row = self._context.sum_rows.get(unit)
        if row is None:
            return NO_SUM_NORM
        weight, factor, _ = side.space.tensors[SUM_NORMS][row].split((side.config.d_model, 1, 3))
        return SumNorm(weight, factor)
