"""Runs bench tests on an engine: prompt processing, decoding and perplexity, after a depth of cached tokens."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from pshard.errors import UserError
from pshard.quant import align
from pshard.routing.follow_use import join_hits
from pshard.session.lead_ranks import lead
from pshard.times.measurement import Measurement, summarise_samples, test_name
from pshard.times.stolen_time import lost_since, read_core_time
from pshard.units.kv_cells import KV_BLOCK, kv_blocks

if TYPE_CHECKING:
    from pshard.planner.price.predict_published import Predictor
    from pshard.runtime.engine import Engine

WARM_SECONDS = 0.5
TOKEN_STRIDE = 7919  # a prime: test prompts walk through the vocabulary


@dataclass(frozen=True)
class BenchTest:
    """Prefill n_prompt or decode n_gen tokens (both: end to end) of each of n_sequences, after n_depth cached ones."""

    n_prompt: int
    n_gen: int
    n_depth: int = 0
    n_sequences: int = 1

    @property
    def name(self) -> str:
        base = test_name(self.n_prompt, self.n_gen, self.n_depth)
        return base if self.n_sequences == 1 else f"{base} x{self.n_sequences}"

    @property
    def cells(self) -> int:
        """Context that one sequence needs."""
        return self.n_prompt + self.n_gen + self.n_depth


@dataclass(frozen=True)
class BenchSetting:
    """What all measurements of one engine share; `same_as`: see Measurement."""

    model: str
    model_bytes: int
    strategy: str
    environment: tuple[tuple[str, str], ...]
    command: str
    same_as: str = ""


def run_test(
    engine: "Engine",
    predictor: "Predictor | None",
    test: BenchTest,
    repetitions: int,
    setting: BenchSetting,
    progress: Callable[[], None] = lambda: None,
) -> Measurement:
    """Measure one test: a warm-up, then `repetitions` samples. Tokenising and sampling are not part of it. engine: of
    rank 0, which leads the other ranks."""
    plan, w = engine.plan, engine.plan.workload
    needed, there = test.n_sequences * align(test.cells, KV_BLOCK), kv_blocks(w.context, w.sequences) * KV_BLOCK
    if needed > there or test.n_sequences > w.sequences:
        raise UserError(
            f"test {test.name} needs {needed} cells and {test.n_sequences} sequences; the plan has {there} and "
            f"{w.sequences}: plan with -c {needed} -np {test.n_sequences}"
        )
    lead(engine, _prepare, test)
    samples, link, hits, began = [], 0, lead(engine, "hits_by_rank"), read_core_time()
    for nanoseconds, moved in lead(engine, _take_samples, test, repetitions):
        samples.append(nanoseconds)
        link += moved
        progress()
    lost, link = lost_since(began, len(plan.ranks)), link // repetitions
    slots = join_hits([after.since(before) for after, before in zip(lead(engine, "hits_by_rank"), hits)])
    peaks = tuple(rank.accelerator / (1 << 20) for rank in lead(engine, "memory_by_rank"))
    tokens = (test.n_prompt + test.n_gen) * test.n_sequences
    step = test.n_prompt * test.n_sequences if test.n_prompt else test.n_sequences
    largest = engine.rank_plan.tiers[-1].tokens
    return Measurement(
        test=test.name,
        n_prompt=test.n_prompt,
        n_gen=test.n_gen,
        n_depth=test.n_depth,
        n_sequences=test.n_sequences,
        **summarise_samples(tuple(samples), tokens),
        test_time=datetime.now(UTC).isoformat(timespec="seconds"),
        model=setting.model,
        model_bytes=setting.model_bytes,
        strategy=setting.strategy,
        budget_mib=w.vram_mib,
        tier=engine.rank_plan.covering(min(step, largest)).tokens,
        predicted_ts=tokens / predict_seconds(predictor, test) if predictor else None,
        peak_vram_mib=peaks[0],
        link_bytes=link,
        ranks=len(plan.ranks),
        type_k=w.type_k,
        type_v=w.type_v,
        n_ubatch=w.max_ubatch,
        kernels="; ".join(engine.notes) or "fast",
        environment=setting.environment,
        command=setting.command,
        split_mode=w.split_mode,
        reduce_dtype=w.reduce_dtype if w.split_mode == "tensor" else "",
        prompt_math=w.prompt_math,
        rank_peaks_mib=peaks,
        same_as=setting.same_as,
        slot_hits=slots.found.share if slots.found.chosen else None,
        slot_hits_expected=slots.expected if slots.found.chosen else None,
        stolen=lost.stolen,
        disturbed=lost.disturbed,
    )


def warm_up(run: Callable[[], object], agree: Callable[[bool], bool] = lambda goes_on: goes_on) -> None:
    """Run at least twice and for WARM_SECONDS: a process's first half second was 15% slower than the rest, and what
    comes a second time is captured then.

    agree: rank 0's answer on all ranks, as their clocks differ and all must run equally often.
    """
    end = time.perf_counter() + WARM_SECONDS
    run()
    run()
    while agree(time.perf_counter() < end):
        run()


def _take_samples(engine: "Engine", test: BenchTest, repetitions: int) -> Iterator[tuple[int, int]]:
    """Nanoseconds and bytes over the link of each repetition. All ranks compute them in step."""
    for _ in range(repetitions):
        _continue(engine, test)
        start, before = time.perf_counter_ns(), engine.link_bytes
        _run_once(engine, test)
        yield time.perf_counter_ns() - start, engine.link_bytes - before


def predict_seconds(predictor: "Predictor", test: BenchTest) -> float:
    """Predicted seconds of one repetition."""
    seconds = 0.0
    if test.n_prompt:
        seconds += predictor.prefill(test.n_prompt, test.n_sequences, test.n_depth)
    if test.n_gen:
        seconds += predictor.decode(test.n_gen, test.n_sequences, test.n_depth + test.n_prompt)
    return seconds


def count_ids(engine: "Engine", n: int, seed: int) -> list[int]:
    """Token ids of a test, the same every time."""
    return [(seed + 1 + i) * TOKEN_STRIDE % engine.vocab for i in range(n)]


def _prepare(engine: "Engine", test: BenchTest) -> None:
    """Compute what comes before the test, and run the test until it is warm."""
    engine.reset()
    if test.n_depth:
        engine.forward([count_ids(engine, test.n_depth, s) for s in range(test.n_sequences)])
    warm_up(lambda: deque(_take_samples(engine, test, 1), 0), engine.agree)


def _continue(engine: "Engine", test: BenchTest) -> None:
    """Be at the test's depth. Before decoding the last cached token is decoded: what a window or a state has to compute
    again, and the switch from a prompt's tier, are not part of the test."""
    cached = max(0, test.n_depth - (test.n_prompt == 0))
    engine.reset(length=cached)
    if cached < test.n_depth:
        engine.forward([count_ids(engine, test.n_depth, s)[-1:] for s in range(test.n_sequences)])


def _run_once(engine: "Engine", test: BenchTest) -> None:
    if test.n_prompt:
        engine.forward([count_ids(engine, test.n_prompt, s) for s in range(test.n_sequences)])
    for i in range(test.n_gen):
        engine.forward([count_ids(engine, 1, s + i) for s in range(test.n_sequences)])


def measure_perplexity(engine: "Engine", ids: Sequence[int], window: int) -> float:
    """Perplexity per token of `ids` in windows of `window` tokens without overlap; every token but a window's first
    is scored. Raises UserError when there is no whole pair of tokens."""
    import torch

    total, count = 0.0, 0
    for start in range(0, len(ids), window):
        part = list(ids[start : start + window])
        if len(part) < 2:
            break
        engine.reset()
        logits = engine.forward(part, all_logits=True)
        assert isinstance(logits, torch.Tensor)
        chances = torch.log_softmax(logits[:-1].double(), -1)
        total -= chances[torch.arange(len(part) - 1), torch.tensor(part[1:])].sum().item()
        count += len(part) - 1
    if count == 0:
        raise UserError("the perplexity text has fewer than two tokens; give a longer one")
    return math.exp(total / count)
