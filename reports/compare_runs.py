"""Measurements side by side: the same test under the planner's plan and under baselines."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import hypot
from statistics import fmean, stdev

from pshard.reports.figures.style import OWN_STRATEGY, name_strategy
from pshard.times.measurement import Measurement, test_name

Test = tuple[int, int, int]  # prompt, generated, depth

REFERENCES = ("fit", "accelerate")  # bars are relative to the first of these that was measured


@dataclass(frozen=True)
class Comparison:
    """One test, on one model within one budget: seconds of one repetition at the mean rate by strategy, and the
    standard deviation of the rates as a share of it.

    `quantity`: "prefill", "decode" or "end to end". `tokens` are those processed in the seconds. `summed` says that
    the seconds are a prefill's and a decode's measured apart, added up. `same` are strategies that are the planner's
    plan under another name: their samples are among its own.
    """

    quantity: str
    test: str
    model: str
    budget_mib: tuple[int, ...]
    tokens: int
    seconds: tuple[tuple[str, float], ...]
    spreads: tuple[tuple[str, float], ...]
    summed: bool = False
    same: tuple[str, ...] = ()

    @property
    def reference(self) -> str:
        """What the others are compared with: a baseline, or the plan where that is the baseline too."""
        names = [*self.same, *(name for name, _ in self.seconds if name != OWN_STRATEGY)]
        found = next((r for r in REFERENCES if r in names), names[0])
        return OWN_STRATEGY if found in self.same else found

    def name(self, strategy: str) -> str:
        """The strategy for readers, with what else it is called."""
        return " = ".join([name_strategy(strategy), *(self.same if strategy == OWN_STRATEGY else ())])

    def speedup(self, strategy: str) -> float:
        """How many times as fast as the reference."""
        return dict(self.seconds)[self.reference] / dict(self.seconds)[strategy]


def compare_strategies(measurements: Sequence[Measurement]) -> list[Comparison]:
    """Tests that were run under the planner's plan and under at least one baseline, in the order of the input.

    Where a strategy ran a test several times (other ubatches, say) its fastest run counts. End-to-end times are taken
    from tests with prompt and generation, else summed from the longest prefill and the decode that follows it best.
    """
    settings: dict[tuple, dict[Test, dict[str, Measurement]]] = {}
    for m in measurements:
        tests = settings.setdefault((m.model, m.budget_mib, m.n_sequences), {})
        best = tests.setdefault((m.n_prompt, m.n_gen, m.n_depth), {})
        if m.strategy not in best or m.avg_ts > best[m.strategy].avg_ts:
            best[m.strategy] = m
    found = []
    for tests in settings.values():
        found += [_compare(best) for best in tests.values()]
        if not any(n_prompt and n_gen for n_prompt, n_gen, _ in tests):
            found += _sum_end_to_end(tests)
    return [c for c in found if len(c.seconds) + len(c.same) > 1 and OWN_STRATEGY in dict(c.seconds)]


def _compare(best: dict[str, Measurement]) -> Comparison:
    m = next(iter(best.values()))
    quantity = "end to end" if m.n_prompt and m.n_gen else "prefill" if m.n_prompt else "decode"
    times, same = _join_same(best)
    return Comparison(quantity, m.test, m.model, m.budget_mib, m.tokens, *_part(times), same=same)


Times = dict[str, tuple[float, float]]  # by strategy: seconds of one repetition, and their standard deviation


def _join_same(best: dict[str, Measurement]) -> tuple[Times, tuple[str, ...]]:
    """The times of each strategy, and the strategies that are the plan itself, whose samples joined the plan's."""
    same = tuple(name for name, run in best.items() if run.same_as == OWN_STRATEGY and OWN_STRATEGY in best)
    times = {name: (run.seconds, run.seconds_deviation) for name, run in best.items() if name not in same}
    if same:
        own = best[OWN_STRATEGY]
        rates = tuple(rate for name in (OWN_STRATEGY, *same) for rate in best[name].samples_ts)
        joined = replace(own, avg_ts=fmean(rates), stddev_ts=stdev(rates))
        times[OWN_STRATEGY] = joined.seconds, joined.seconds_deviation
    return times, same


def _part(times: Times) -> tuple[tuple[tuple[str, float], ...], tuple[tuple[str, float], ...]]:
    """Seconds by strategy, and how much of them one standard deviation is."""
    seconds = tuple((name, mean) for name, (mean, _) in times.items())
    return seconds, tuple((name, deviation / mean) for name, (mean, deviation) in times.items())


def _sum_end_to_end(tests: dict[Test, dict[str, Measurement]]) -> list[Comparison]:
    prefills = [key for key in tests if key[0] and not key[1] and not key[2]]
    decodes = [key for key in tests if key[1] and not key[0]]
    if not prefills or not decodes:
        return []
    prefill = max(prefills)
    decode = min(decodes, key=lambda key: (abs(key[2] - prefill[0]), -key[1]))
    first, then = tests[prefill], tests[decode]
    (prompts, same), (answers, also) = _join_same(first), _join_same(then)
    times = {s: (prompts[s][0] + answers[s][0], hypot(prompts[s][1], answers[s][1])) for s in prompts if s in answers}
    m = next(iter(first.values()))
    tokens = (prefill[0] + decode[1]) * m.n_sequences
    name = f"{test_name(prefill[0], 0)} + {test_name(0, decode[1], decode[2])}"
    name += f" x{m.n_sequences}" if m.n_sequences > 1 else ""
    same = tuple(s for s in same if s in also)
    return [Comparison("end to end", name, m.model, m.budget_mib, tokens, *_part(times), summed=True, same=same)]
