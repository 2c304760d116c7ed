"""Counters, gauges and histograms as Prometheus reads them, in its text format (version 0.0.4)."""

from collections.abc import Iterable, Mapping
from math import inf

from pshard.server.snapshot import STATES, Histogram, Snapshot

Labelled = Iterable[tuple[Mapping[str, object], float]]


def write_metrics(now: Snapshot) -> str:
    """All metrics of a moment. Names have no colon, which is for recording rules; no prompts are in them."""
    c, b, d = now.counters, now.blocks, now.distributions
    lines: list[str] = []

    def tell(kind: str, name: str, about: str, values: Labelled) -> None:
        lines.extend(write_family(kind, f"pshard_{name}", about, values))

    def count(name: str, about: str, value: float) -> None:
        tell("counter", f"{name}_total", about, [({}, value)])

    def gauge(name: str, about: str, value: float) -> None:
        tell("gauge", name, about, [({}, value)])

    count("prompt_tokens", "Tokens of prompts that were computed.", c.prompt_tokens)
    count("cached_tokens", "Tokens of prompts that were adopted from earlier texts.", c.cached_tokens)
    count("generated_tokens", "Tokens that were made.", c.made_tokens)
    count("jobs", "Answers that were asked for.", c.submitted)
    tell("counter", "jobs_ended_total", "Answers by how they ended.", [({"reason": r}, n) for r, n in c.ended])
    tell("counter", "jobs_refused_total", "Answers that were not taken.", [({"status": s}, n) for s, n in c.refused])
    count("steps", "Micro-batches that ran.", c.steps)
    seconds = [({"tier": tier}, taken) for tier, taken in c.step_seconds]
    tell("counter", "step_seconds_total", "Seconds of steps by the tokens of their tier.", seconds)
    for name, about, counts in (
        ("drafts_verified", "Drafts that steps verified, by their position.", c.drafted),
        ("drafts_accepted", "Drafts that held, by their position.", c.accepted),
    ):
        tell("counter", f"{name}_total", about, [({"position": place}, n) for place, n in counts])
    count("link_bytes", "Bytes copied from host to device.", c.link_bytes)
    count("tier_switches", "Times that a tier gave way to another.", c.tier_switches)
    count("preemptions", "Texts that gave their blocks away.", c.preemptions)
    count("restarts", "Times that the model was loaded again after a failure.", c.restarts)
    count("budget_moves", "Moves to another planned budget.", c.budget_moves)
    tell("gauge", "state", "1 for the state that the server is in.", [({"state": s}, s == now.state) for s in STATES])
    gauge("requests_running", "Answers that are made.", len(now.running))
    gauge("requests_waiting", "Answers in the queue.", len(now.waiting))
    gauge("queue_size", "Answers that may wait.", now.queue)
    blocks = [({"use": use}, n) for use, n in (("used", b.used), ("cached", b.cached), ("free", b.free))]
    tell("gauge", "kv_blocks", "Blocks of the KV cache by use.", blocks)
    gauge("kv_block_cells", "Tokens of a block.", b.cells)
    gauge("prefix_cache_failing", "1: prefixes of texts cannot be written to files.", b.files_problem != "")
    gauge("tokens_per_second", "Tokens made per second, over the last ten.", now.rate)
    gauge("promised_gap_seconds", "Longest time between tokens that is promised.", now.gap_ms / 1000)
    if now.plan:
        budgets = [({"rank": i}, mib << 20) for i, mib in enumerate(now.plan.vram_mib)]
        tell("gauge", "plan_vram_bytes", "Budget of the plan in force.", budgets)
        tiers = [({"tier": t.tokens}, t.predicted_ms / 1000) for t in now.plan.tiers]
        tell("gauge", "tier_predicted_seconds", "Seconds of a step, as planned.", tiers)
        tiers = [({"tier": t.tokens}, t.corrected_ms / 1000) for t in now.plan.tiers]
        tell("gauge", "tier_corrected_seconds", "Seconds of a step, as they really are.", tiers)
    for name, about, histogram in (
        ("first_token_seconds", "From a request to its first token.", d.first_token),
        ("token_gap_seconds", "Between tokens of an answer.", d.gap),
        ("queue_seconds", "From a request to its first step.", d.queue),
        ("request_seconds", "From a request to its end.", d.whole),
        ("step_tokens", "Tokens of a step.", d.step_tokens),
    ):
        lines.extend(write_histogram(f"pshard_{name}", about, histogram))
    return "\n".join(lines) + "\n"


def write_family(kind: str, name: str, about: str, values: Labelled) -> list[str]:
    """Lines of one metric, with a sample for each set of labels."""
    samples = [f"{name}{_write_labels(labels)} {_write_number(value)}" for labels, value in values]
    return [f"# HELP {name} {about}", f"# TYPE {name} {kind}", *samples]


def write_histogram(name: str, about: str, histogram: Histogram) -> list[str]:
    """Lines of a histogram: buckets that add up, their sum and count."""
    buckets = [f'{name}_bucket{{le="{_write_number(bound)}"}} {n}' for bound, n in histogram.cumulative()]
    ends = [f"{name}_sum {_write_number(histogram.total)}", f"{name}_count {histogram.count}"]
    return [f"# HELP {name} {about}", f"# TYPE {name} histogram", *buckets, *ends]


def _write_labels(labels: Mapping[str, object]) -> str:
    def escape(value: object) -> str:
        return str(value).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

    return "{" + ",".join(f'{key}="{escape(value)}"' for key, value in labels.items()) + "}" if labels else ""


def _write_number(value: float) -> str:
    return "+Inf" if value == inf else repr(float(value)) if isinstance(value, float) else str(int(value))
