"""What plans are predicted to reach on a machine: nothing of it was run."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Forecast:
    """Of one plan. `first_token`: seconds to prefill the expected prompts. `rate`: tokens per second of all sequences
    while decoding. `round_seconds`: of prompts and answers together."""

    strategy: str
    first_token: float
    rate: float
    round_seconds: float


@dataclass(frozen=True)
class LeftOut:
    """A published strategy that there is no plan of, and why."""

    strategy: str
    why: str


@dataclass(frozen=True)
class Outlook:
    """A plan and the published strategies for the same model, budget and workload (`terms`) on one machine.

    `forecasts`: the plan first, as "ilp", then the strategies that fit, the fastest round first; `left_out`: the
    others. `machine` says what it is and whether it was measured.
    """

    model: str
    machine: str
    vram_mib: tuple[int, ...]
    terms: str
    forecasts: tuple[Forecast, ...]
    left_out: tuple[LeftOut, ...] = ()
