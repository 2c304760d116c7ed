"""Which steps one CUDA graph may hold: the rule that the runtime, the profile and the planner share. No torch."""

from collections.abc import Iterable, Iterator, Sequence

from pshard.model_config import ModelConfig
from pshard.steps.move import Activations, Move, UnitState
from pshard.steps.step import AllReduce, Compute, Step
from pshard.units.unit import Unit

# tokens up to which a prompt's kernels may take less time than launching them: those of a unit take a slow host 0.5 ms,
# and a layer of small experts that two devices share 1.4 ms for 4096
LAUNCH_BOUND = 4096
ALWAYS_BOUND = 1024  # tokens up to which that holds for units of any size
SMALL_PRODUCT = 1.5e11  # tokens times a unit's numbers: up to there fast GPUs take less than 0.5 ms


def is_launch_bound(units: Iterable[Unit], config: ModelConfig, tokens: int) -> bool:
    """Whether launching the kernels of such units may take longer than computing them for so many tokens."""
    if not ALWAYS_BOUND < tokens <= LAUNCH_BOUND:
        return tokens <= LAUNCH_BOUND
    used = [_count_used(unit, config) for unit in units]
    return tokens * sum(used) <= SMALL_PRODUCT * len(used)


def _count_used(unit: Unit, config: ModelConfig) -> float:
    """Numbers of a unit's matrices that a token meets: of experts those that it chooses."""
    chosen, of = unit.kind.parts(config) if unit.kind.parts else (1, 1)
    return sum(t.rows * t.cols * (chosen / of if t.parts else 1) for t in unit.matrices)


def find_runs(body: Sequence[Step]) -> Iterator[tuple[int, int]]:
    """(begin, end) of the runs of units on the accelerator, and of their sums, that nothing interrupts.

    A unit that waits for a copy of its weights or keys and values begins a new run, and so may a sum that follows a
    hand-off to the accelerator.
    """
    with_host_kv = {step.unit for step in body if type(step) is Move and step.takes_back(UnitState)}
    begin = -1
    for i, step in enumerate(body):
        if type(step) is Compute and step.on == "acc":
            if begin >= 0 and (step.slot is not None or step.unit in with_host_kv):
                yield begin, i
                begin = i
        elif not (type(step) is AllReduce and (begin >= 0 or enters(body, i))):
            if begin >= 0:
                yield begin, i
            begin = -1
            continue
        begin = begin if begin >= 0 else i
    if begin >= 0:
        yield begin, len(body)


def enters(body: Sequence[Step], begin: int) -> bool:
    """Whether activations come from the host right before step `begin`."""
    before = body[begin - 1] if begin else None
    return isinstance(before, Move) and before.brings(Activations)
