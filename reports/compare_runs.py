"""Measurements side by side: the same test under the planner's plan and under baselines."""

from collections.abc import Sequence
from dataclasses import dataclass

from pshard.reports.figures.style import OWN_STRATEGY
from pshard.times.measurement import Measurement, test_name

Test = tuple[int, int, int]  # prompt, generated, depth

REFERENCES = ("fit", "accelerate")  # bars are relative to the first of these that was measured


@dataclass(frozen=True)
class Comparison:
    """One test, on one model within one budget: seconds of one repetition by strategy.

    `quantity`: "prefill", "decode" or "end to end". `tokens` are those processed in the seconds. `summed` says that
    the seconds are a prefill's and a decode's measured apart, added up.
    """

    quantity: str
    test: str
    model: str
    budget_mib: tuple[int, ...]
    tokens: int
    seconds: tuple[tuple[str, float], ...]
    summed: bool = False

    @property
    def reference(self) -> str:
        """The baseline that the others are compared with."""
        names = [name for name, _ in self.seconds if name != OWN_STRATEGY]
        return next((r for r in REFERENCES if r in names), names[0])

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
        if m.strategy not in best or m.avg_ns < best[m.strategy].avg_ns:
            best[m.strategy] = m
    found = []
    for tests in settings.values():
        found += [_compare(best) for best in tests.values()]
        if not any(n_prompt and n_gen for n_prompt, n_gen, _ in tests):
            found += _sum_end_to_end(tests)
    return [c for c in found if len(c.seconds) > 1 and OWN_STRATEGY in dict(c.seconds)]


def _compare(best: dict[str, Measurement]) -> Comparison:
    m = next(iter(best.values()))
    quantity = "end to end" if m.n_prompt and m.n_gen else "prefill" if m.n_prompt else "decode"
    tokens = (m.n_prompt + m.n_gen) * m.n_sequences
    seconds = tuple((name, run.avg_ns / 1e9) for name, run in best.items())
    return Comparison(quantity, m.test, m.model, m.budget_mib, tokens, seconds)


def _sum_end_to_end(tests: dict[Test, dict[str, Measurement]]) -> list[Comparison]:
    prefills = [key for key in tests if key[0] and not key[1] and not key[2]]
    decodes = [key for key in tests if key[1] and not key[0]]
    if not prefills or not decodes:
        return []
    prefill = max(prefills)
    decode = min(decodes, key=lambda key: (abs(key[2] - prefill[0]), -key[1]))
    first, then = tests[prefill], tests[decode]
    seconds = tuple((s, (first[s].avg_ns + then[s].avg_ns) / 1e9) for s in first if s in then)
    m = next(iter(first.values()))
    tokens = (prefill[0] + decode[1]) * m.n_sequences
    name = f"{test_name(prefill[0], 0)} + {test_name(0, decode[1], decode[2])}"
    name += f" x{m.n_sequences}" if m.n_sequences > 1 else ""
    return [Comparison("end to end", name, m.model, m.budget_mib, tokens, seconds, summed=True)]
