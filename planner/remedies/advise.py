"""What may work where nothing fits: a budget, a shorter context, a smaller file. What is named was planned first."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from pshard.errors import BudgetTooSmall, NoPlan, Shortage, UserError
from pshard.machine import MachineProfile
from pshard.model import ModelSpec
from pshard.quant import QUANT_TYPES
from pshard.tensor import TensorSpec
from pshard.workload import MIB, Workload

STEP_MIB = 16  # budgets nearer to each other are alike
LEAST_CONTEXT = 512  # cells of each sequence: fewer are no use
GIB = 1 << 30
# Quantisations that files usually have, and types for layers by turns that take no fewer bytes than theirs do.
USUAL = {
    "Q8_0": ("Q8_0",),
    "Q6_K": ("Q6_K",),
    "Q5_K_M": ("Q6_K", "Q5_K"),
    "Q4_K_M": ("Q5_K", "Q4_K"),
    "Q3_K_M": ("Q4_K", "Q3_K"),
    "IQ3_XXS": ("IQ3_S",),
    "Q2_K": ("Q3_K", "Q2_K"),
    "IQ2_M": ("IQ3_XXS", "IQ2_S"),
    "IQ2_XXS": ("IQ2_S", "IQ2_XXS"),
    "IQ1_M": ("IQ2_XXS", "IQ1_M"),
}

_Made = TypeVar("_Made")
Plan = Callable[[ModelSpec, Workload], _Made]


def plan_or_advise(
    plan: Plan[_Made], tries: Plan[object], spec: ModelSpec, profile: MachineProfile, workload: Workload
) -> _Made:
    """What `plan` makes of the model and the workload. tries: raises UserError where `plan` would, as quickly as can
    be.

    Where it lacks memory, the error says what may work, of which each was planned: raises BudgetTooSmall that has the
    budget, NoPlan where no budget of the machine is enough, UserError where no budget at all would be.
    """
    try:
        return plan(spec, workload)
    except Shortage as shortage:
        raise _Advisor(tries, spec, profile, workload, shortage).advise() from None


class _Advisor:
    """Tries what may work."""

    def __init__(
        self, tries: Plan[object], spec: ModelSpec, profile: MachineProfile, workload: Workload, shortage: Shortage
    ) -> None:
        self._tries, self._spec, self._workload, self._shortage = tries, spec, workload, shortage
        self._most = min(a.memory_bytes for a in profile.accelerators) // MIB

    def advise(self) -> UserError:
        """The error that names what works."""
        why, least = self._shortage.why, self._shortage.smallest_mib
        on_host = self._shortage.missing > 0
        budget = None if least is None else self._find_budget(least, self._most if on_host else max(self._most, least))
        if not on_host and budget is not None:
            return BudgetTooSmall(f"{why}; the smallest budget that works is {budget} MiB", budget)
        ways = [f"--vram {budget}"] if budget is not None else []
        ways += filter(None, (self._find_context(), self._find_file()))
        remedies = "what may work: " + ", or ".join(ways) if ways else "a smaller model is needed, or a larger machine"
        if budget is not None:
            return BudgetTooSmall(f"{why}; {remedies}", budget)
        return (UserError if least is None else NoPlan)(f"{why}; {remedies}")

    def _works(self, workload: Workload, spec: ModelSpec | None = None) -> bool:
        try:
            self._tries(spec or self._spec, workload)
        except UserError:
            return False
        return True

    def _find_budget(self, least: int, most: int) -> int | None:
        """The smallest budget of each device that works, or one up to STEP_MIB above it, from `least` to `most`; None
        where none does. Units are not divisible at will: it may be more than `least`."""

        def works(mib: int) -> bool:
            return self._works(replace(self._workload, vram_mib=(mib,) * len(self._workload.vram_mib)))

        low, more = least - 1, 0
        budget = least
        while budget < most and not works(budget):
            low, more = budget, max(STEP_MIB, 2 * more)
            budget = least + more
        if budget >= most:  # the last one there is
            if low >= most or not works(most):
                return None
            budget = most
        while budget - low > STEP_MIB:
            middle = (low + budget) // 2
            low, budget = (low, middle) if works(middle) else (middle, budget)
        return budget

    def _find_context(self) -> str | None:
        """The largest half, quarter... of the context that works, with texts as long as fit into it."""
        work, context = self._workload, self._workload.context // 2
        while context >= LEAST_CONTEXT * work.sequences:
            share = context // work.sequences
            prompt = work.prompt if work.prompt + work.generated <= share else min(work.prompt, share // 2)
            generated = min(work.generated, share - prompt)
            if self._works(replace(work, context=context, prompt=prompt, generated=generated)):
                return f"-c {context}" + (f" for prompts of {prompt}" if prompt < work.prompt else "")
            context //= 2
        return None

    def _find_file(self) -> str | None:
        """The largest usual quantisation with which it works."""
        for name, small in self._list_smaller():
            if self._works(self._workload, small):
                nbytes = sum(t.file_nbytes for u in small.units for t in u.tensors)
                return f"a file of at most {nbytes / GIB:.1f} GiB, as {name} makes"
        return None

    def _list_smaller(self) -> Iterator[tuple[str, ModelSpec]]:
        """Usual quantisations that save what is missing, the largest first, and the model as they make it."""
        for name, qtypes in USUAL.items():
            small = requantise(self._spec, qtypes)
            if self._spec.packed_nbytes - small.packed_nbytes >= max(1, self._shortage.missing):
                yield name, small


def requantise(spec: ModelSpec, qtypes: Sequence[str]) -> ModelSpec:
    """The model with the matrices of its layers in these types by turns, those that take more bytes and have whole
    blocks of it; outside layers in the first type."""

    def shrink(tensor: TensorSpec, qtype: str) -> TensorSpec:
        small = replace(tensor, qtype=qtype)
        fits = len(tensor.shape) == 2 and tensor.cols % QUANT_TYPES[qtype].block == 0
        return small if fits and small.packed_nbytes < tensor.packed_nbytes else tensor

    units = []
    for unit in spec.units:
        qtype = qtypes[max(0, unit.layer) % len(qtypes)]
        units.append(replace(unit, tensors=tuple(shrink(t, qtype) for t in unit.tensors)))
    return replace(spec, units=tuple(units))
