"""What drafts cost beside units: a small model goes on by kernels that do nothing, with drafts that always hold and
without."""

import statistics
import time

from pshard.homes import PINNED
from pshard.machine import ElementwiseTiming
from pshard.profile.timed.step_cost import NoKernels, make_engine, make_small_model, open_executor
from pshard.runtime.devices.device import Device
from pshard.runtime.engine import Engine
from pshard.runtime.kernels.api import Kernels
from pshard.runtime.sampling import Sampling
from pshard.runtime.speculation.speculator import DraftSettings
from pshard.speculation import DRAFT, LOOKUP, NONE

MANY = 7  # drafts of a step
ROWS = 8  # of a micro-batch that holds them
TOKENS = 40  # of a text
TEXTS, WARM_UPS = 6, 2


def time_drafts(side: str, device: Device, fast: tuple[Kernels, Kernels], step: float) -> tuple[ElementwiseTiming, ...]:
    """Seconds by which a step that verifies takes longer than one without drafts ("verify"), and that its first draft
    ("draft") and each further one ("follow") of another program take beside their units. A GPU makes further ones
    without the host, so there nothing follows.

    fast: as in `time_steps`. step: of a unit, which is in those of a side that computes what the host issues.
    """
    spec, kernels = make_small_model(1), (NoKernels(fast[0]), NoKernels(fast[1]))
    with (
        open_executor(PINNED, ROWS, device, kernels, spec) as model,
        open_executor(PINNED, ROWS, device, kernels, spec) as draft,
    ):
        for executor in (model, draft):
            executor.arena.memory.zero_()  # logits that are numbers, all alike: what is drafted holds
        engine = make_engine(model, ROWS, draft)
        alone, looked_up, one = (_time_step(engine, *way) for way in ((NONE, 0), (LOOKUP, 1), (DRAFT, 1)))
        found = {"verify": looked_up - alone, "draft": one - looked_up}
        if device.kind == "cpu":
            units = step * len(spec.units)
            many = _time_step(engine, DRAFT, MANY)
            found |= {"draft": found["draft"] - units, "follow": (many - one) / (MANY - 1) - units}
    return tuple(ElementwiseTiming(side, what, 1, 1, max(0.0, seconds)) for what, seconds in found.items())


def _time_step(engine: Engine, kind: str, most: int) -> float:
    """Seconds of a step with so many drafts."""
    samples = list[float]()
    for _ in range(TEXTS):
        engine.reset()
        wanted = DraftSettings(kind, most, fixed=True)
        made = engine.generate([0], TOKENS, Sampling(temperature=0), False, None, wanted)
        next(made)
        start = time.perf_counter()
        told = sum(1 for _ in made)
        samples.append((time.perf_counter() - start) / (wanted.steps or told))
    return statistics.median(samples[WARM_UPS:])
