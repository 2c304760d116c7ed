"""What a server tells about itself: nouns for /health, /props, /slots, /metrics and the page. No prompts in them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pshard.models.text.tokenizer import Tokenizer
    from pshard.planner.serving.promise import Promise

STATES = ("loading", "ready", "sleeping", "moving", "restarting", "draining", "failed")
TAKING = ("ready", "sleeping", "moving")  # states in which jobs are taken: those that come while it sleeps wake it


@dataclass(frozen=True)
class ServedModel:
    """The model that is served, known before its weights are loaded.

    name: as clients name it. created: whole seconds since 1970, of the server's start. context: tokens that a text can
    have, prompt and answer together. trained: the context that the model was made for (0: not known). tokenizer: None
    for a file without one, which takes token ids only. template: the chat template, None without one.
    """

    name: str
    created: int
    context: int
    trained: int
    vocab: int
    tokenizer: "Tokenizer | None"
    template: str | None
    file: str = ""  # the model file's name, without its folder
    nbytes: int = 0  # of the weights
    family: str = ""  # the architecture, as the file names it
    weights: int = 0
    quant: str = ""  # the type that most weights have
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of the template, where a request says none


@dataclass(frozen=True)
class TierNow:
    """A tier of the plan in force. predicted_ms: of a micro-batch, as planned; corrected_ms: what steps really take,
    as a running mean of `steps` of them (the predicted time while there were none)."""

    tokens: int
    predicted_ms: float
    corrected_ms: float
    steps: int
    binds: str  # the resource that limits it, as the plan says


@dataclass(frozen=True)
class BudgetRate:
    """What the plan of a budget is predicted to give to one request alone: the first token of a prompt of that many
    tokens after `first` seconds, then `answer` tokens per second."""

    vram_mib: int
    prompt: int
    first: float
    answer: float


@dataclass(frozen=True)
class PlanInForce:
    """The plan that the engine runs. vram_mib: a budget for each rank. budgets: those that POST /budget can move to,
    each a sum over ranks; rates: what these promise, of those that were there when the plan was loaded. notes: one line
    for every fallback in use. promise: what the plan is
    predicted to give to the load that it is for. drafter: who drafts; drafts: of a text's step at most."""

    vram_mib: tuple[int, ...]
    context: int  # cells of the KV cache, of all texts together
    longest: int  # tokens that one text can have
    sequences: int
    type_k: str
    type_v: str
    split_mode: str
    way: str  # the plan in a few words
    tiers: tuple[TierNow, ...]
    budgets: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    promise: "Promise | None" = None
    rates: tuple[BudgetRate, ...] = ()
    drafter: str = "none"
    drafts: int = 0


@dataclass(frozen=True)
class TextNow:
    """A request's text that is running. prompt and done: tokens of the prompt, and those of them that are computed;
    cached: those that were there before. made: tokens of the answer. rate: tokens of the answer per second so far.
    age: seconds since it was submitted. preempted: how often it gave its blocks away."""

    slot: int
    job: str
    state: str  # "prompt", "decode"
    prompt: int
    done: int
    cached: int
    made: int
    most: int
    rate: float
    age: float
    preempted: int = 0


@dataclass(frozen=True)
class WaitingJob:
    """A job in the queue. age: seconds since it was submitted."""

    job: str
    prompt: int
    age: float


@dataclass(frozen=True)
class Blocks:
    """Blocks of the KV cache: `used` by running texts, `cached` of texts that ended, which are dropped when room is
    needed, and `free`. cells: of each block. cache_bytes: of host memory that shared prefixes take beside them.
    files_problem: why prefixes cannot be written to files, "" where they can or are not to be."""

    total: int = 0
    used: int = 0
    cached: int = 0
    free: int = 0
    cells: int = 64
    cache_bytes: int = 0
    files_problem: str = ""


@dataclass(frozen=True)
class Histogram:
    """bounds: the largest value of each bucket but the last, which takes the rest; counts: one more than bounds, each
    bucket's own (not cumulative); total: the sum of all values."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        return sum(self.counts)

    def cumulative(self) -> tuple[tuple[float, int], ...]:
        """Buckets as Prometheus wants them: (largest value, how many values are at most that), the last up to inf."""
        sums, so_far = [], 0
        for bound, n in zip((*self.bounds, inf), self.counts):
            so_far += n
            sums.append((bound, so_far))
        return tuple(sums)


@dataclass(frozen=True)
class Counters:
    """What only grows, since the server's start.

    prompt_tokens: computed ones; cached_tokens: those that were adopted instead. ended: jobs by how they ended ("stop",
    "length", "cancelled", "error"); refused: those that were not taken, by HTTP status. step_seconds: by the tokens of
    the tier. drafted and accepted: drafts that were verified, and those that held, by their position.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    made_tokens: int = 0
    submitted: int = 0
    ended: tuple[tuple[str, int], ...] = ()
    refused: tuple[tuple[int, int], ...] = ()
    steps: int = 0
    step_seconds: tuple[tuple[int, float], ...] = ()
    link_bytes: int = 0
    tier_switches: int = 0
    preemptions: int = 0
    restarts: int = 0
    budget_moves: int = 0
    drafted: tuple[tuple[int, int], ...] = ()
    accepted: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Distributions:
    """Seconds, except step_tokens (tokens of a step). first_token: from submit to the first token; gap: between tokens
    of a text; queue: from submit to its first step; whole: from submit to the end."""

    first_token: Histogram
    gap: Histogram
    queue: Histogram
    whole: Histogram
    step_tokens: Histogram


@dataclass(frozen=True)
class StepSeen:
    """A step of the timeline. start: seconds since the server's start; `number` counts steps and never repeats. busy:
    seconds that each resource is predicted to have worked in it ("acc", "cpu", "link", "dram"), scaled to `seconds`
    when the plan knows them, else empty; link_bytes: measured."""

    number: int
    start: float
    seconds: float
    tier: int
    decodes: int  # tokens of texts that decode, drafts among them
    prompts: int  # tokens of prompts
    link_bytes: int = 0
    busy: tuple[tuple[str, float], ...] = ()
    switched: bool = False  # another tier was in force before


@dataclass(frozen=True)
class Snapshot:
    """The server at a moment. state: one of STATES; reason: a line for those who ask why it is not ready.

    gap_ms: the promise (`--max-gap`). queue: how many may wait. plan: None while none is loaded. steps: the most recent
    ones, the oldest first. rate: tokens made per second over the last ten seconds; now: seconds since the start.
    """

    state: str
    reason: str
    now: float
    gap_ms: float
    queue: int
    plan: PlanInForce | None
    running: tuple[TextNow, ...]
    waiting: tuple[WaitingJob, ...]
    blocks: Blocks
    counters: Counters
    distributions: Distributions
    steps: tuple[StepSeen, ...]
    rate: float = 0.0

    @property
    def ready(self) -> bool:
        """Whether jobs are taken."""
        return self.state in TAKING
