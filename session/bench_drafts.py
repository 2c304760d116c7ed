"""Benches decoding with drafts beside decoding without, in turns in one process."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from pshard.errors import UserError
from pshard.session.bench_engine import BenchTest, count_ids, warm_up
from pshard.session.lead_ranks import lead
from pshard.speculation import AcceptanceRecord
from pshard.times.measurement import BenchedDrafts, Measurement, summarise_samples
from pshard.times.stolen_time import lost_since, read_core_time

if TYPE_CHECKING:
    from pshard.planner.price.predict_published import Predictor
    from pshard.runtime.engine import Engine
    from pshard.runtime.speculation.speculator import DraftSettings


def check_drafted(test: BenchTest) -> bool:
    """Whether a test is run with drafts too: one that decodes. Raises UserError for several sequences."""
    if test.n_gen and test.n_sequences > 1:
        raise UserError("--spec benches one sequence; leave out -npl, or bench a server with --serve")
    return test.n_gen > 0


def run_drafted(
    engine: "Engine",
    predictor: "Predictor",
    test: BenchTest,
    repetitions: int,
    settings: "DraftSettings",
    alone: Measurement,
    progress: Callable[[], None] = lambda: None,
) -> Measurement:
    """Measure greedy decoding of a test with drafts, and in turns with it without. alone: what `run_test` measured of
    it, whose other fields hold here too. Sampling is part of both. Called on rank 0, which leads the other ranks."""
    from pshard.runtime.speculation.speculator import DraftSeconds

    warm_up(lambda: lead(engine, _take_turns, test, settings))
    counted = replace(settings, record=AcceptanceRecord(settings.kind), spent=DraftSeconds())
    samples, without = list[int](), list[int]()
    link, began = 0, read_core_time()
    for _ in range(repetitions):
        without.append(lead(engine, _time_text, test, None))
        before = engine.link_bytes
        samples.append(lead(engine, _time_text, test, counted))
        link += engine.link_bytes - before
        progress()
    lost = lost_since(began, len(engine.plan.ranks))
    each = counted.spent.seconds / max(1, counted.spent.drafts)
    made_up = settings.made_up.rates if settings.made_up else ()
    base = summarise_samples(tuple(without), test.n_gen)["avg_ts"]
    return replace(
        alone,
        test=f"{test.name} {settings.kind} {settings.most}{' made up' if made_up else ''}",
        **summarise_samples(tuple(samples), test.n_gen),
        predicted_ts=_predict(engine, predictor, test, settings),
        link_bytes=link // repetitions,
        stolen=lost.stolen,
        disturbed=lost.disturbed,
        drafts=BenchedDrafts(counted.kind, counted.most, counted.steps, counted.record.shares, base, made_up, each),
    )


def _take_turns(engine: "Engine", test: BenchTest, settings: "DraftSettings") -> None:
    for each in (None, settings):
        _time_text(engine, test, each)


def _time_text(engine: "Engine", test: BenchTest, settings: "DraftSettings | None") -> int:
    """Nanoseconds of so many tokens after the first one, which the prompt gives."""
    from pshard.runtime.sampling import Sampling

    depth = max(1, test.n_depth)
    engine.reset(length=0)
    made = engine.generate(count_ids(engine, depth, 0), test.n_gen + 1, Sampling(temperature=0), False, None, settings)
    next(made)
    start = time.perf_counter_ns()
    told = sum(1 for _ in made)
    seconds = time.perf_counter_ns() - start
    if told < test.n_gen:
        raise UserError(
            f"the model ended its text after {told} of {test.n_gen} tokens, which leaves nothing to compare; "
            "give a smaller -n, or another -d"
        )
    return seconds


def _predict(engine: "Engine", predictor: "Predictor", test: BenchTest, settings: "DraftSettings") -> float | None:
    """Tokens a second by the plan at the test's depth, where the acceptance is known beforehand."""
    if settings.made_up is None:
        return None
    depth = max(1, test.n_depth)
    alone = predictor.decode(test.n_gen, 1, depth) / test.n_gen
    step = predictor.verify(settings.most + 1, test.n_gen, depth)
    said = engine.plan.speculation
    return settings.made_up.rate(settings.most, alone, step, said.beside(settings.most) if said else 0.0)
