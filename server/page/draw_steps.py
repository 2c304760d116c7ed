"""Pictures of the last steps as SVG: what each resource did, gaps between tokens against the promise, tokens a second.

Classes only, as the page's security policy allows no style in the text; each picture says in words what it shows.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace
from html import escape
from itertools import pairwise

from pshard.server.snapshot import Snapshot, StepSeen

WINDOW = 15.0  # seconds that a picture shows
MOST_BARS = 250  # in a picture: more are thinner than a pixel
LANES = (("link", "link"), ("acc", "accelerator"), ("cpu", "CPU"))
_LEFT, _WIDTH, _ROW = 90.0, 900.0, 26.0
_MARGIN, _ACROSS, _HIGH = 62.0, 400.0, 110.0  # of a chart, two of which are beside each other


def draw_timeline(now: Snapshot) -> str:
    """A bar for each step, and how busy link, accelerator and CPU were in it: the higher the busier. Short steps in a
    row are one bar."""
    known = recent_steps(now)
    steps, begin = join_short(known), now.now - WINDOW
    rows = [_label(0, "steps")]
    decoding = [s for s in steps if not s.prompts]
    rows += [_path("decode", (_bar(s, begin, 0, 1.0) for s in decoding))]
    rows += [_path("prompt", (_bar(s, begin, 0, 1.0) for s in steps if s.prompts))]
    for row, (lane, name) in enumerate(LANES, 1):
        rows.append(_label(row, name))
        shares = [(s, share) for s in steps if (share := busy_share(s, lane)) is not None]
        rows.append(_path(lane, (_bar(s, begin, row, share) for s, share in shares if share)))
    said = f"Steps of the last {WINDOW:.0f} seconds. {describe_steps(known)}"
    return _svg(_LEFT + _WIDTH, _ROW * (1 + len(LANES)), said, rows)


def draw_gaps(now: Snapshot) -> str:
    """Milliseconds between tokens of those who decode, step by step, and the promise as a line."""
    gaps = [(at, 1e3 * gap) for at, gap in gaps_of(recent_steps(now))]
    said = f"Gap between tokens: {describe_gaps([ms for _, ms in gaps])}; promised are {now.gap_ms:.0f} ms."
    points = keep_longest(gaps)
    top = 1.1 * max(now.gap_ms, max((ms for _, ms in points), default=0.0))
    promise = _HIGH * (1 - now.gap_ms / top)
    line = f'<path class="promise" d="M{_MARGIN:.0f} {promise:.1f}h{_ACROSS:.0f}"/>'
    return _chart(said, [_scale(top, "ms"), line, _line("gap", points, now.now, top)])


def draw_rate(now: Snapshot) -> str:
    """Tokens of answers per second, in bins of half a second."""
    points = rates_of(recent_steps(now), now.now)
    top = 1.1 * max(1.0, max((rate for _, rate in points), default=0.0))
    said = f"Answers: {now.rate:.1f} tokens per second over the last ten seconds."
    return _chart(said, [_scale(top, "t/s"), _line("rate", points, now.now, top)])


def recent_steps(now: Snapshot) -> list[StepSeen]:
    """Those that end in the window, the oldest first."""
    at = bisect_right(now.steps, now.now - WINDOW, key=lambda s: s.start + s.seconds)
    return list(now.steps[at:])


def join_short(steps: Sequence[StepSeen]) -> list[StepSeen]:
    """Neighbours that together are narrower than a bar may be as one step: from the start of the first to the end of
    the last, as busy as all of them."""
    groups: list[list[StepSeen]] = []
    for step in steps:
        if groups and step.start + step.seconds - groups[-1][0].start < WINDOW / MOST_BARS:
            groups[-1].append(step)
        else:
            groups.append([step])
    return [_join(group) if len(group) > 1 else group[0] for group in groups]


def _join(steps: Sequence[StepSeen]) -> StepSeen:
    first, last = steps[0], steps[-1]
    busy = dict[str, float]()
    for step in steps:
        for name, seconds in step.busy:
            busy[name] = busy.get(name, 0.0) + seconds
    decodes, prompts = sum(s.decodes for s in steps), sum(s.prompts for s in steps)
    seconds = last.start + last.seconds - first.start
    return replace(first, seconds=seconds, decodes=decodes, prompts=prompts, busy=tuple(busy.items()))


def keep_longest(gaps: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of (moment, gap) that fall into the same small part of the window the longest."""
    found: dict[int, tuple[float, float]] = {}
    for at, gap in gaps:
        part = int(at * MOST_BARS / WINDOW)
        if part not in found or gap > found[part][1]:
            found[part] = (at, gap)
    return list(found.values())


def busy_share(step: StepSeen, lane: str) -> float | None:
    """How much of a step a resource worked, 0 to 1; None where the plan does not know."""
    busy = dict(step.busy)
    return min(1.0, busy.get(lane, 0.0) / step.seconds) if busy and step.seconds > 0 else None


def gaps_of(steps: Sequence[StepSeen]) -> list[tuple[float, float]]:
    """(moment, seconds since the tokens before) of steps that decode right after others that did."""
    ends = [(s.start + s.seconds, s.number) for s in steps if s.decodes]
    return [(b, b - a) for (a, _), (b, _) in pairwise(ends)]


def rates_of(steps: Sequence[StepSeen], now: float, bin_seconds: float = 0.5) -> list[tuple[float, float]]:
    """(moment, tokens of answers per second), a point for each bin of the window since the first known step."""
    bins = [0] * round(WINDOW / bin_seconds)
    for step in steps:
        at = int((step.start + step.seconds - (now - WINDOW)) / bin_seconds)
        bins[min(max(at, 0), len(bins) - 1)] += step.decodes
    points = [(now - WINDOW + (i + 0.5) * bin_seconds, n / bin_seconds) for i, n in enumerate(bins)]
    return [(at, rate) for at, rate in points if steps and at + bin_seconds > steps[0].start]


def describe_steps(steps: Sequence[StepSeen]) -> str:
    """How many, and how busy each resource was."""
    if not steps:
        return "None ran."
    seconds = sum(s.seconds for s in steps)
    busy = ""
    if known := [s for s in steps if s.busy and s.seconds > 0]:
        worked = dict.fromkeys((lane for lane, _ in LANES), 0.0)
        for step in known:
            for lane, spent in step.busy:
                worked[lane] = worked.get(lane, 0.0) + min(spent, step.seconds)
        whole = sum(s.seconds for s in known)
        busy = f"; busy in them: {', '.join(f'{name} {worked[lane] / whole:.0%}' for lane, name in LANES)}"
    return f"{len(steps)} steps in {seconds:.1f} s, {sum(bool(s.prompts) for s in steps)} with prompts{busy}."


def describe_gaps(gaps_ms: Sequence[float]) -> str:
    """The middle and the longest."""
    if not gaps_ms:
        return "none yet"
    ordered = sorted(gaps_ms)
    return f"{ordered[len(ordered) // 2]:.0f} ms, the longest {ordered[-1]:.0f} ms"


def _bar(step: StepSeen, begin: float, row: int, share: float) -> str:
    """A box of a path: as wide as the step was long, as high as its resource was busy."""
    start = max(0.0, (step.start - begin) / WINDOW)
    width = max(0.5, _WIDTH * (min(1.0, (step.start + step.seconds - begin) / WINDOW) - start) - 0.5)
    height = (_ROW - 6) * share
    return f"M{_LEFT + _WIDTH * start:.1f} {(row + 1) * _ROW - 3:.1f}v{-height:.1f}h{width:.1f}v{height:.1f}z"


def _path(name: str, parts: Iterable[str]) -> str:
    d = "".join(parts)
    return f'<path class="{name}" d="{d}"/>' if d else ""


def _line(name: str, points: Sequence[tuple[float, float]], now: float, top: float) -> str:
    if not points:
        return ""
    at = (f"{_MARGIN + _ACROSS * (1 - (now - x) / WINDOW):.1f} {_HIGH * (1 - y / top):.1f}" for x, y in points)
    return f'<path class="{name}" d="M{"L".join(at)}"/>'


def _label(row: int, name: str) -> str:
    return f'<text x="0" y="{row * _ROW + 18:.0f}">{escape(name)}</text>'


def _scale(top: float, unit: str) -> str:
    return f'<text x="0" y="12">{top:.0f} {unit}</text><text x="0" y="{_HIGH - 3:.0f}">0</text>'


def _chart(said: str, parts: Sequence[str]) -> str:
    return _svg(_MARGIN + _ACROSS, _HIGH, said, parts)


def _svg(width: float, height: float, said: str, parts: Sequence[str]) -> str:
    box = f"0 0 {width:.0f} {height:.0f}"
    return f'<svg viewBox="{box}" role="img" aria-label="{escape(said)}">{"".join(parts)}</svg>'
