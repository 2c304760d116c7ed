"""A snapshot as parts of the page: the same HTML for browsers with scripts and without."""

from collections.abc import Sequence
from html import escape

from pshard.server.page.draw_steps import draw_gaps, draw_rate, draw_timeline, recent_steps
from pshard.server.snapshot import Blocks, Histogram, PlanInForce, Snapshot, StepSeen, TextNow

MOST_ROWS = 64  # of requests that are listed


def show_parts(now: Snapshot) -> dict[str, str]:
    """Id of a place on the page -> its HTML."""
    return {
        "state": show_state(now),
        "figures": show_figures(now),
        "timeline": draw_timeline(now),
        "last-step": show_step(recent_steps(now)),
        "gap": draw_gaps(now),
        "rate": draw_rate(now),
        "blocks": show_blocks(now.blocks),
        "running": show_running(now.running, len(now.waiting)),
        "plan": show_plan(now.plan),
    }


def show_state(now: Snapshot) -> str:
    """One line: what the server is at."""
    reason = f": {escape(now.reason)}" if now.reason else ""
    return f'<strong class="{"good" if now.ready else "bad"}">{escape(now.state)}</strong>{reason}'


def show_figures(now: Snapshot) -> str:
    """What has been done since the start, and how long it took."""
    c, d = now.counters, now.distributions
    ended = sum(n for _, n in c.ended)
    failed = dict(c.ended).get("error", 0)
    rows = [
        ("answers now", f"{now.rate:.1f} tokens/s"),
        ("running, waiting", f"{len(now.running)}, {len(now.waiting)} of {now.queue}"),
        ("requests ended", f"{ended}" + (f", {failed} by an error" if failed else "")),
        ("tokens", f"{c.made_tokens:,} made, {c.prompt_tokens:,} of prompts, {c.cached_tokens:,} from the cache"),
        ("gap, p50 and p99", _quantiles(d.gap)),
        ("first token, p50 and p99", _quantiles(d.first_token)),
        ("over the link", f"{c.link_bytes / 1e9:,.1f} GB in {c.steps:,} steps"),
    ]
    return "<dl>" + "".join(f"<dt>{name}</dt><dd>{escape(value)}</dd>" for name, value in rows) + "</dl>"


def show_step(steps: Sequence[StepSeen]) -> str:
    """The last step in words."""
    if not steps:
        return "No step ran in the last seconds."
    s = steps[-1]
    switch = ", after a switch of tiers" if s.switched else ""
    return (
        f"Step {s.number:,}: {s.decodes} tokens of answers and {s.prompts} of prompts in {1e3 * s.seconds:.0f} ms "
        f"under the tier of {s.tier}{switch}; {s.link_bytes / 1e6:,.0f} MB over the link."
    )


def show_blocks(blocks: Blocks) -> str:
    """A bar of the KV cache's blocks, and the numbers."""
    said = f"{blocks.used:,} used, {blocks.cached:,} cached, {blocks.free:,} free of {blocks.total:,} blocks"
    said += f" of {blocks.cells} tokens"
    at, boxes = 0.0, []
    for name, n in (("used", blocks.used), ("cached", blocks.cached)):
        width = 1000 * n / max(1, blocks.total)
        boxes.append(f'<rect class="{name}" x="{at:.1f}" y="0" width="{width:.1f}" height="24"/>')
        at += width
    bar = f'<rect class="free" x="0" y="0" width="1000" height="24"/>{"".join(boxes)}'
    return (
        f'<svg viewBox="0 0 1000 24" role="img" aria-label="KV cache: {said}" preserveAspectRatio="none">{bar}</svg>'
        f"<p>{said}.</p>"
    )


def show_running(running: Sequence[TextNow], waiting: int) -> str:
    """Requests that run, the oldest first."""
    if not running:
        return f"<p>None runs{f', {waiting} wait' if waiting else ''}.</p>"
    rows = [
        (
            str(text.slot),
            f"prompt, {text.done:,} of {text.prompt:,}" if text.state == "prompt" else "answer",
            f"{text.prompt:,}" + (f" ({text.cached:,} cached)" if text.cached else ""),
            f"{text.made:,} of {text.most:,}",
            f"{text.rate:.1f}",
            f"{text.age:.0f} s" + (f", {text.preempted} x interrupted" if text.preempted else ""),
        )
        for text in sorted(running, key=lambda text: -text.age)[:MOST_ROWS]
    ]
    more = f"<p>{len(running) - MOST_ROWS} more run.</p>" if len(running) > MOST_ROWS else ""
    return _table(("slot", "at", "prompt", "made", "tokens/s", "age"), rows) + more


def show_plan(plan: PlanInForce | None) -> str:
    """The plan in force with its tiers."""
    if plan is None:
        return "<p>No plan is in force yet.</p>"
    others = f" Planned budgets: {', '.join(f'{mib:,}' for mib in plan.budgets)} MiB." if len(plan.budgets) > 1 else ""
    said = f"{plan.way}. A text may have {plan.longest:,} tokens.{others}"
    rows = [
        (f"{t.tokens:,}", f"{t.predicted_ms:.1f}", f"{t.corrected_ms:.1f}" if t.steps else "-", f"{t.steps:,}", t.binds)
        for t in plan.tiers
    ]
    notes = "".join(f"<p>Note: {escape(note)}</p>" for note in plan.notes)
    table = _table(("tier, tokens", "predicted ms", "really ms", "steps", "limited by"), rows)
    return f"<p>{escape(said)}</p>{table}{notes}"


def quantile_of(histogram: Histogram, share: float) -> float | None:
    """The bound of the bucket in which so many of the values lie at most; None without values, inf for the last."""
    wanted = share * histogram.count
    return next((bound for bound, n in histogram.cumulative() if n >= wanted), None) if histogram.count else None


def _quantiles(histogram: Histogram) -> str:
    """The bounds are those of buckets: values are at most that."""
    found = (quantile_of(histogram, 0.5), quantile_of(histogram, 0.99))
    bounds = [
        "-" if s is None else f"over {1e3 * histogram.bounds[-1]:,.0f} ms" if s > histogram.bounds[-1]
        else f"at most {1e3 * s:,.0f} ms"
        for s in found
    ]  # fmt: skip
    return " / ".join(bounds)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in headings)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
