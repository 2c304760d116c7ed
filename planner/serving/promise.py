"""What a plan lets a server promise: requests at once, tokens per second, gaps between tokens, first tokens."""

from dataclasses import dataclass

from pshard.machine import MachineProfile
from pshard.model import ModelSpec
from pshard.plan import Variant
from pshard.planner.serving.step_times import StepTimes, time_steps
from pshard.quant import align
from pshard.times.running_requests import DECODE_WIDTHS
from pshard.units.kv_cells import KV_BLOCK
from pshard.workload import Workload

USUAL_GAP = 1.0  # seconds between tokens that a server promises by itself
BROKEN = 2.0  # times as long as the least step: so long a step with prompts may take where that breaks the gap already


@dataclass(frozen=True)
class Pace:
    """What `requests` that run at once get. Tokens per second, seconds.

    rate: tokens of answers of all together, when each that ends is followed by another with its prompt. gap: between
    tokens of one answer while all decode; longest_gap: while a prompt is computed beside them. first_token: of a
    prompt that comes when the others decode.
    """

    requests: int
    rate: float
    gap: float
    longest_gap: float
    first_token: float


@dataclass(frozen=True)
class Promise:
    """Predicted for one plan. at_once: how many requests of the expected lengths have room in the KV cache, at most the
    plan's sequences. chunk: tokens of the largest step that keeps the gap when all of these run (see `widen_gap` where
    none does); prompts beside decoding come in such steps."""

    vram_mib: tuple[int, ...]
    concurrency: int
    at_once: int
    prompt: int
    generated: int
    chunk: int
    paces: tuple[Pace, ...]


def promise(spec: ModelSpec, profile: MachineProfile, variant: Variant) -> Promise:
    """What a variant for a server's load can promise, by the same times as its tiers, with a gap of USUAL_GAP; spec as
    in `time_steps`."""
    return promise_times(variant.workload, time_steps(spec, profile, variant), USUAL_GAP)


def widen_gap(gap: float, least: float) -> float:
    """Seconds that a step with prompts may take where the least one with a token of a prompt takes so long: where that
    breaks the gap already, twice as long as it. So weights that are read from disk for every step are read for more
    than a few tokens of a prompt."""
    return gap if least <= gap else max(gap, BROKEN * least)


def promise_times(w: Workload, times: StepTimes, gap: float) -> Promise:
    """What steps of such times can promise to a workload, that of a server's load or all its texts; gap: seconds."""
    tiers = [tier.tokens for tier in times.tiers]
    tiers += range(2 * tiers[-1], times.largest + 1, tiers[-1])
    room = w.context // align(w.prompt + w.generated, KV_BLOCK)
    at_once = max(1, min(w.sequences, times.tiers[-1].tokens, room))  # a step has a token of each
    depth = min(w.prompt + w.generated // 2, w.context // at_once)
    wide = [t for t in tiers if t > at_once] or tiers[-1:]
    took = {t: times.seconds(at_once - 1, (at_once - 1) * depth, t - at_once + 1) for t in wide}
    widened = widen_gap(gap, times.seconds(at_once - 1, (at_once - 1) * depth, 1))
    fit = [t for t, seconds in took.items() if seconds <= widened]
    chunk = max(fit, default=wide[0])
    widths = sorted({1, min(w.concurrency or 1, at_once), at_once, *(n for n in DECODE_WIDTHS if n < at_once)})
    paces = tuple(_pace(times, n, depth, (w.prompt, w.generated), chunk) for n in widths)
    return Promise(w.vram_mib, w.concurrency, at_once, w.prompt, w.generated, chunk, paces)


def _pace(times: StepTimes, requests: int, depth: int, lengths: tuple[int, int], chunk: int) -> Pace:
    """depth: cells of each that decodes; lengths of prompt and answer."""
    prompt, generated = lengths
    others = requests - 1
    gap = times.seconds(requests, requests * depth)
    batches, done = list[float](), 0
    largest = chunk - others if others else times.largest  # nobody else waits: as fast as can be
    while done < prompt:
        take = min(max(1, largest), prompt - done)
        batches.append(times.seconds(others, others * depth, take, done))
        done += take
    # every answer of the round gets a token in each of the others' prompts' steps; steps of decoding give the rest
    apart = max(0, generated - others * len(batches))
    seconds = requests * sum(batches) + apart * gap
    longest = max(batches) if others else gap
    return Pace(requests, requests * generated / seconds, gap, max(gap, longest), sum(batches))
