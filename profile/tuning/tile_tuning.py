"""Finds the fastest tiles of a GPU's matmul kernels for few tokens, once: the profile keeps them for every run."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import torch

from pshard.errors import KernelRefused
from pshard.profile.timed.time_kernels import KernelBench
from pshard.profile.timing_loop import race_seconds
from pshard.profile.tuning.attention_cases import calls_of_attention, calls_of_experts, calls_of_latents
from pshard.profile.tuning.compile_ahead import Request, compile_ahead, count_processes, requests_of
from pshard.profile.tuning.tile_cases import TileCase, calls_of
from pshard.runtime.kernels.api import TiledKernels
from pshard.times.gpu_tiles import AUTO, INT8_EXPERTS, INT8_KERNELS, Tile, TileChoice, settle_math

NOISE = 0.03  # a tile must be faster than the default by more than this
NO_ROOM = KernelRefused, torch.OutOfMemoryError  # of a card that has no tile, or no memory, for a case
TOLERANCE = 0.02  # relative error of a tile's numbers against the default's: both round alike, so it is far less


@dataclass(frozen=True)
class Tuned:
    """The choices, how many tiles were not tried for lack of time, and why others were passed over."""

    choices: tuple[TileChoice, ...]
    untried: int
    failures: tuple[str, ...]


def tune_tiles(bench: KernelBench, kernels: TiledKernels, cases: list[TileCase], seconds: float) -> Tuned:
    """Choose for each case that has two tiles to choose from; the bench's kernels use the choices from then on.

    Compiling may take about so many seconds, on all cores; what was compiled before on this machine comes from Triton's
    cache. Every case's likeliest candidates come first. Trying them takes some tenths of a second for each case.
    """
    trials = [_Trial(bench, kernels, case) for case in cases]
    needs = {trial.case: trial.needs() for trial in trials}
    by_rank = zip_longest(*(some.values() for some in needs.values()))
    requests = dict.fromkeys(r for rank in by_rank for needed in rank if needed is not None for r in needed)
    compiled = compile_ahead(list(requests), count_processes(), seconds)
    choices: list[TileChoice] = []
    untried = 0
    for trial in trials:
        if not needs[trial.case]:
            continue
        default, *others = needs[trial.case]
        broken = any(compiled.get(r) is not None for r in needs[trial.case][default])
        reached = [tile for tile in others if all(r in compiled for r in needs[trial.case][tile])]
        ready = [tile for tile in reached if all(compiled[r] is None for r in needs[trial.case][tile])]
        untried += len(others) - len(reached)
        choices += trial.choose(ready if broken else [default, *ready]) if ready else []
    kernels.use_tiles(settle_math(choices, AUTO))
    failures = [_describe(error) for error in compiled.values() if error is not None]
    return Tuned(tuple(choices), untried, tuple(failures + [f for trial in trials for f in trial.failures]))


def _describe(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


class _Trial:
    """Tries tiles for one case."""

    def __init__(self, bench: KernelBench, kernels: TiledKernels, case: TileCase) -> None:
        self.bench, self.kernels, self.case = bench, kernels, case
        self.failures: list[str] = []

    def needs(self) -> dict[Tile, tuple[Request, ...]]:
        """The candidates for the largest matrix, the default first, and what must be compiled for each; without those
        that cannot be."""
        found: dict[Tile, tuple[Request, ...]] = {}
        try:
            call, _ = self._calls(self.case.matrices[0])
            self.kernels.use_tiles(())
            if self.case.is_listed_by_call:
                requests_of(partial(call, 0))
            tiles = self.kernels.tiles_of(self.case.kernel, self.case.qtype, self.case.tokens)
        except NO_ROOM as error:
            self.failures.append(_describe(error))
            return found
        for tile in tiles:
            try:
                found[tile] = requests_of(partial(self._run_with, tile, call, 0))
            except Exception as error:  # of Triton, which cannot even begin to compile it for this GPU
                self.failures.append(_describe(error))
        self.kernels.forget()  # activations that were not quantised, as nothing was started
        return found

    def choose(self, tiles: list[Tile]) -> Iterator[TileChoice]:
        """One choice among them, of which the first that works is what is used where nothing is chosen; none where not
        one works."""
        totals = dict.fromkeys(tiles, 0.0)
        for on in self.case.matrices:
            seconds = self._race(on, tiles)
            if not seconds:
                return
            default = best = next(iter(seconds))
            totals = {tile: totals[tile] + more for tile, more in seconds.items()}
            faster = [t for t in totals if totals[t] < (1 - NOISE) * totals[default]]
            if self.case.kernel in INT8_KERNELS:  # the times of both ways are kept, whichever is faster
                faster = [t for t in totals if t != default]
            if not faster:
                break
            best = min(faster, key=lambda tile: totals[tile])
            tiles = [default, best]  # on the other matrices it must not lose what it gains on the largest
        yield self.case.choose(best, self.bench.side, totals[best], totals[default])

    def _race(self, on: tuple[Any, ...], tiles: list[Tile]) -> dict[Tile, float]:
        """Seconds of a call with each tile that works on this matrix and gives the numbers of the first."""
        try:
            call, out = self._calls(on)
        except NO_ROOM as error:
            self.failures.append(_describe(error))
            return {}
        runs: dict[Tile, Callable[[int], None]] = {}
        expected = None
        for tile in tiles:
            run = partial(self._run_with, tile, call)
            out.fill_(float("nan"))
            try:
                run(0)
                result = out.float().clone()
                difference = 0.0 if expected is None else float((result - expected).norm() / expected.norm())
            except Exception as error:  # of the compiler, the assembler or the driver: another tile may do
                self.failures.append(_describe(error))
                continue
            expected = result if expected is None else expected
            if difference <= TOLERANCE:
                runs[tile] = run
            else:
                self.failures.append(f"wrong numbers with {tile}")
        times = race_seconds(list(runs.values()), self.bench.pace, self.bench.device.type == "cuda")
        return dict(zip(runs, times))

    def _calls(self, on: tuple[Any, ...]) -> tuple[Callable[[int], None], torch.Tensor]:
        if self.case.kernel.startswith("grouped") or self.case.kernel == INT8_EXPERTS:
            return calls_of_experts(self.bench, *on)
        if self.case.kernel.startswith("latent"):
            return calls_of_latents(self.bench, *on)
        if self.case.kernel.startswith(("prompt", "decode")):
            return calls_of_attention(self.bench, *on)
        rows, cols = on
        weights = self.bench.pool.rotate_weights(self.case.qtype, rows, cols)
        return calls_of(self.bench.kernels, self.case, weights, self.bench.activations(self.case.tokens, cols))

    def _run_with(self, tile: Tile, call: Callable[[int], None], i: int) -> None:
        self.kernels.try_tile(self.case.choose(tile))
        call(i)
