"""Finds the fastest tiles of a GPU's matmul kernels for few tokens, once: the profile keeps them for every run."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest

from pshard.profile.compile_ahead import Compiled, compile_ahead, count_processes
from pshard.profile.kernels import KernelBench
from pshard.profile.tile_cases import TileCase, calls_of
from pshard.profile.timing import race_seconds
from pshard.runtime.kernels.api import TiledKernels
from pshard.runtime.kernels.tiles import candidate_tiles
from pshard.tiles import Tile, TileChoice

NOISE = 0.03  # a tile must be faster than the default by more than this
TOLERANCE = 0.02  # relative error of a tile's numbers against the default's: both round alike, so it is far less


@dataclass(frozen=True)
class Tuned:
    """The choices, how many tiles were not tried for lack of time, and why others were passed over."""

    choices: tuple[TileChoice, ...]
    untried: int
    failures: tuple[str, ...]


def tune_tiles(bench: KernelBench, kernels: TiledKernels, cases: list[TileCase], seconds: float) -> Tuned:
    """Choose for each case; the bench's kernels use the choices from then on.

    Compiling may take about so many seconds, on all cores; what was compiled before on this machine comes from Triton's
    cache. Every case's likeliest candidates come first. Trying them takes some tenths of a second for each case.
    """
    tiles = {case: candidate_tiles(case.kernel, case.qtype, case.tokens) for case in cases}
    by_rank = zip_longest(*([(case, tile) for tile in some] for case, some in tiles.items()))
    jobs = [job for rank in by_rank for job in rank if job is not None]
    ready = compile_ahead(jobs, count_processes(), seconds) if jobs else Compiled(frozenset(), ())
    trials = [_Trial(bench, kernels, case) for case in cases]
    choices: list[TileChoice] = []
    for trial, (default, *others) in zip(trials, tiles.values()):
        choices += trial.choose([default, *(tile for tile in others if (trial.case, tile) in ready.jobs)])
    kernels.use_tiles(choices)
    failures = [_describe(error) for error in ready.errors] + [f for trial in trials for f in trial.failures]
    return Tuned(tuple(choices), len(jobs) - len(ready.jobs) - len(ready.errors), tuple(failures))


def _describe(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


class _Trial:
    """Tries tiles for one case."""

    def __init__(self, bench: KernelBench, kernels: TiledKernels, case: TileCase) -> None:
        self.bench, self.kernels, self.case = bench, kernels, case
        self.failures: list[str] = []

    def choose(self, tiles: list[Tile]) -> Iterator[TileChoice]:
        """One choice among them, the first being the default, or none where not even that one works."""
        default, totals = tiles[0], dict.fromkeys(tiles, 0.0)
        best = default
        for rows, cols in self.case.matrices:
            seconds = self._race(rows, cols, tiles)
            if default not in seconds:
                return
            totals = {tile: totals[tile] + more for tile, more in seconds.items()}
            faster = [t for t in totals if totals[t] < (1 - NOISE) * totals[default]]
            if not faster:
                best = default
                break
            best = min(faster, key=lambda tile: totals[tile])
            tiles = [default, best]  # on the other matrices it must not lose what it gains on the largest
        yield self.case.choose(best, self.bench.side, totals[best], totals[default])

    def _race(self, rows: int, cols: int, tiles: list[Tile]) -> dict[Tile, float]:
        """Seconds of a call with each tile that works on this matrix and gives the numbers of the first."""
        case, bench = self.case, self.bench
        weights = bench.pool.rotate_weights(case.qtype, rows, cols)
        call, out = calls_of(bench.kernels, case, weights, bench.activations(case.tokens, cols))
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
        times = race_seconds(list(runs.values()), bench.pace, bench.device.type == "cuda")
        return dict(zip(runs, times))

    def _run_with(self, tile: Tile, call: Callable[[int], None], i: int) -> None:
        self.kernels.use_tiles((self.case.choose(tile),))
        call(i)
