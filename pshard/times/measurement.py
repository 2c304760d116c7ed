"""Measurement: one benchmark test with its samples, what was predicted, what was used, and where it ran. No torch."""

import statistics
from dataclasses import dataclass

from pshard.times.gpu_tiles import AUTO


@dataclass(frozen=True)
class TimelineEvent:
    """Something that one lane did, in seconds from the start of the step.

    `lane`: "link" (copies to the device), "d2h" (copies from it), "acc" or "cpu".
    """

    lane: str
    start: float
    end: float
    label: str


@dataclass(frozen=True)
class Timeline:
    """What every lane did in one step; `title` says of which model, tier and budget, measured or simulated."""

    title: str
    events: tuple[TimelineEvent, ...]


@dataclass(frozen=True)
class BenchedDrafts:
    """What became of drafts in a test: whose, how many a step at most, steps of all samples, the shares of drafts that
    held where those before them did, by position, and tokens a second of the same test without drafts, in turns with
    them. made_up: the chances at which they were said to hold; the text means nothing then. draft_seconds: that making
    one draft took, in the mean.
    """

    kind: str
    most: int
    steps: int
    held: tuple[float, ...]
    without_ts: float
    made_up: tuple[float, ...] = ()
    draft_seconds: float = 0.0


@dataclass(frozen=True)
class Measurement:
    """One test. Field names follow llama-bench's JSON where the meaning is the same.

    Times are in ns, rates (`*_ts`) in tokens per second over all sequences; tokenising and sampling are not counted.
    n_prompt tokens are prefilled, or n_gen decoded, per sequence, after n_depth cached ones; both set: end to end.
    strategy: "ilp" for the planner's own plan, else the baseline's name ("fit", "accelerate", ...).
    tier: tokens of the tier that most micro-batches ran under; 0 for a baseline without tiers.
    peak_vram_mib, link_bytes: of rank 0; rank_peaks_mib has the peak of every rank. link_bytes: bytes moved host to
        device in one repetition; None when nothing counted them.
    environment: pairs such as ("cpu", ...), ("accelerator", ...), ("torch", ...), ("threads", "8").
    """

    test: str
    n_prompt: int
    n_gen: int
    n_depth: int
    n_sequences: int
    samples_ns: tuple[int, ...]
    samples_ts: tuple[float, ...]
    avg_ns: float
    stddev_ns: float
    avg_ts: float
    stddev_ts: float
    test_time: str  # ISO 8601, UTC
    model: str
    model_bytes: int
    strategy: str
    budget_mib: tuple[int, ...]
    tier: int
    predicted_ts: float | None
    peak_vram_mib: float | None
    link_bytes: int | None
    ranks: int
    type_k: str
    type_v: str
    n_ubatch: int
    kernels: str
    environment: tuple[tuple[str, str], ...]
    command: str
    timeline: tuple[TimelineEvent, ...] = ()
    split_mode: str = ""  # how the model was spread over the ranks; "" in files older than the field
    reduce_dtype: str = ""  # in which type ranks' parts were summed, see pshard.collectives; "" where nothing was
    prompt_math: str = AUTO  # how prompts were multiplied: one of PROMPT_MATHS
    rank_peaks_mib: tuple[float, ...] = ()
    same_as: str = ""  # a strategy of the same bench whose plan does the same work on this machine: one plan, two names
    slot_hits: float | None = None  # share of decoding's choices of experts that were found in slots that follow use
    slot_hits_expected: float | None = None  # the same as the plan expects it; None where it has no slots
    drafts: BenchedDrafts | None = None  # of a test with drafts
    stolen: float = 0.0  # share of the host's core time that went to other machines meanwhile, where that is counted
    disturbed: float = 0.0  # share of the samples' time that other programs and machines may have cost (stolen_time.py)

    @property
    def tokens(self) -> int:
        """Of one repetition, over all sequences."""
        return (self.n_prompt + self.n_gen) * self.n_sequences

    @property
    def seconds(self) -> float:
        """Of one repetition at the mean rate: a report's seconds and rates are one statistic, llama-bench's."""
        return self.tokens / self.avg_ts

    @property
    def seconds_deviation(self) -> float:
        """One standard deviation of the rates, as seconds of that repetition."""
        return self.seconds * self.stddev_ts / self.avg_ts


def test_name(n_prompt: int, n_gen: int, n_depth: int = 0) -> str:
    """Name of a test as llama-bench writes it: "pp512", "tg128", "pp512+tg128", "pp512 @ d4096"."""
    name = "+".join(part for part, n in ((f"pp{n_prompt}", n_prompt), (f"tg{n_gen}", n_gen)) if n)
    return f"{name} @ d{n_depth}" if n_depth else name


def summarise_samples(samples_ns: tuple[int, ...], tokens: int) -> dict:
    """The sample fields of a Measurement from the ns of each repetition, in which `tokens` tokens were processed.

    Standard deviations are those of a sample (n - 1); 0 for one repetition. Raises ValueError without samples.
    """
    if not samples_ns or min(samples_ns) <= 0:
        raise ValueError("a measurement needs at least one repetition, each longer than 0 ns")
    rates = tuple(tokens * 1e9 / ns for ns in samples_ns)
    spread = statistics.stdev if len(samples_ns) > 1 else lambda _: 0.0
    return {
        "samples_ns": samples_ns,
        "samples_ts": rates,
        "avg_ns": statistics.fmean(samples_ns),
        "stddev_ns": float(spread(samples_ns)),
        "avg_ts": statistics.fmean(rates),
        "stddev_ts": float(spread(rates)),
    }
