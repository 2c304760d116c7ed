"""Which prompts are launched as CUDA graphs: the rule that the runtime, the profile and the planner share. No torch."""

from collections.abc import Iterable

from pshard.model_config import ModelConfig
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
