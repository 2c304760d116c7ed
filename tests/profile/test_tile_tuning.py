"""Which tiles are tried, which one is chosen, how a profile keeps the choices and how runs come by them."""

import io
import json
import signal
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from registry_samples import make_profile
from rich.console import Console

from pshard.errors import KernelRefused
from pshard.jsonio import from_json, to_json
from pshard.machine import AcceleratorInfo, MachineProfile, MatmulTiming
from pshard.model_config import Experts
from pshard.profile import measure
from pshard.profile.effort import Shapes, full_effort, quick_effort, shapes_to_tune
from pshard.profile.show_profile import print_profile
from pshard.profile.timed.kernel_jobs import Job, list_jobs
from pshard.profile.timed.operands import OperandPool
from pshard.profile.timed.time_kernels import KernelBench
from pshard.profile.timing_loop import Pace, race_seconds
from pshard.profile.tuning import compile_ahead, tile_tuning
from pshard.profile.tuning import compile_jobs as compile_jobs_module
from pshard.profile.tuning.attention_cases import attention_cases
from pshard.profile.tuning.compile_ahead import Request
from pshard.profile.tuning.compile_jobs import compile_jobs, list_requests
from pshard.profile.tuning.tile_cases import INT8_TOKENS, TileCase, calls_of, int8_cases, tile_cases
from pshard.profile.tuning.tile_tuning import tune_tiles
from pshard.quant import QUANT_TYPES
from pshard.registries.fingerprint import digest, fingerprint_inputs
from pshard.registries.profile_store import load_profile, save_profile
from pshard.runtime.kernels.api import Packed, TiledKernels
from pshard.runtime.kernels.gpu.card_limits import KNOWN_CARDS
from pshard.runtime.kernels.gpu.default_tiles import INT8_TILES, TUNING, candidate_tiles, default_tile, grouped_tiles
from pshard.runtime.kernels.gpu.tiles.pick_tiles import TilePicker
from pshard.runtime.kernels.plain import PlainKernels
from pshard.session.open_plan import Opened
from pshard.session.start_engine import start_engine
from pshard.times.gpu_tiles import (
    ANY_BATCH,
    INT8_EXPERTS,
    INT8_GATED,
    INT8_KERNEL,
    LIBRARY,
    Tile,
    TileChoice,
    settle_math,
)
from pshard.units.operations import Attend, AttendLatent
from pshard.workload import Workload

PLANED = [name for name, q in QUANT_TYPES.items() if q.planes]
BUCKETS = (1, 2, 4, 8, 16, 32, 64)
CASE = TileCase("matvec", "Q4_0", 8, ((64, 32), (32, 32)))
H100 = KNOWN_CARDS[90]


@pytest.mark.parametrize("kernel", ["matvec", "gated", "gated few"])
@pytest.mark.parametrize("qtype", PLANED)
def test_every_candidate_fits_its_kernel(kernel: str, qtype: str) -> None:
    for tokens in BUCKETS if kernel != "gated few" else (1,):
        tiles = candidate_tiles(kernel, qtype, tokens, H100)
        assert tiles[0] == default_tile(kernel, qtype, tokens, H100) and 4 <= len(set(tiles)) == len(tiles) <= 15
        assert tokens > 8 or {tile.rows for tile in tiles} == {16, 32} or kernel != "matvec"
        for tile in tiles:
            assert tile.rows in (16, 32) and tile.stages <= 1 + (tile.rows == 32) and tile.tokens >= min(tokens, 4)
            assert tile.rows == 16 or tile.depth == 8 * tile.warps
            assert 32 * tile.warps * (tile.registers or 255) <= 65536
            if kernel != "matvec":  # what hands its results over quantised has whole chunks, and all tokens of 16 rows
                assert tile.programs == 1 and (tile.rows == 32 or tile.tokens >= tokens)


def test_both_ways_of_multiplying_are_tried_for_few_tokens() -> None:
    for kernel in ("matvec", "gated"):
        for tokens in (1, 2, 4):
            assert {t.rows for q in PLANED for t in candidate_tiles(kernel, q, tokens, H100)[1:]} == {16, 32}


def test_cases_are_the_models_kernels_types_and_batches() -> None:
    matmuls = (("Q4_0", 25600, 5120), ("Q4_0", 5120, 25600), ("Q4_0", 1024, 5120), ("Q4_0", 5120, 8192),
               ("Q4_0", 8192, 5120), ("BF16", 5120, 5120))  # fmt: skip
    heads = (("Q6_K", 151936, 5120), ("Q4_0", 151936, 5120))
    shapes = Shapes(matmuls, heads, (), ((5120, 25600),), (), 64)
    assert tile_cases(shapes, (8, 1), 3) == [
        TileCase("matvec", "Q6_K", 1, ((151936, 5120),)),
        TileCase("gated", "Q4_0", 1, ((25600, 5120),)),
        TileCase("matvec", "Q4_0", 1, ((5120, 25600), (5120, 8192), (8192, 5120))),
        TileCase("matvec", "Q6_K", 8, ((151936, 5120),)),
        TileCase("gated", "Q4_0", 8, ((25600, 5120),)),
        TileCase("matvec", "Q4_0", 8, ((5120, 25600), (5120, 8192), (8192, 5120))),
    ]
    few = tile_cases(Shapes((("Q4_0", 14336, 4096),), (), (), ((4096, 14336),), (), 64), (1, 2), 1)
    assert [case.kernel for case in few] == ["gated few", "gated"]


def test_a_quick_profile_tunes_for_a_model_only_and_a_full_one_the_common_types() -> None:
    quick, full = quick_effort(1 << 20, 1 << 30), full_effort(1 << 20, 1 << 30)
    model = Shapes((("Q5_0", 64, 64),), (), (), (), (), 64)
    assert shapes_to_tune(quick, model) == shapes_to_tune(full, model) == model
    assert tile_cases(shapes_to_tune(quick, None), quick.tile_tokens, 1) == []
    assert {c.qtype for c in tile_cases(shapes_to_tune(full, None), full.tile_tokens, 1)} == {
        "Q4_0",
        "Q8_0",
        "Q4_K",
        "Q6_K",
    }


class FakeKernels(PlainKernels):
    """Plain kernels that have tiles, of which some fail and some give wrong numbers."""

    def __init__(self, broken: Tile | None = None, wrong: Tile | None = None) -> None:
        self.broken, self.wrong = broken, wrong
        self.used: tuple[TileChoice, ...] = ()
        self.limits, self.passed_over = H100, ()

    def tiles_of(self, kernel: str, qtype: str, tokens: int) -> tuple[Tile, ...]:
        if kernel == INT8_KERNEL:
            return LIBRARY, *INT8_TILES
        return candidate_tiles(kernel, qtype, tokens, H100)

    def try_tile(self, choice: TileChoice) -> None:
        self.used = (choice,)

    def use_tiles(self, choices: Iterable[TileChoice]) -> None:
        self.used = tuple(choices)

    def linear(self, x, weight, out, tile, bias=None, accumulate=False) -> None:
        super().linear(x, weight, out, tile, bias, accumulate)
        if self.used[0].tile == self.broken:
            raise RuntimeError("out of resources\nand more")
        if self.used[0].tile == self.wrong:
            out *= 1.1


@pytest.fixture
def tune(monkeypatch: pytest.MonkeyPatch):
    """Tunes CASE with made-up times: `seconds`: (tile, rows) -> seconds; `late`: what was not compiled in time."""

    def run(kernels: FakeKernels, seconds, late: tuple[Tile, ...] = (), failing: tuple[Tile, ...] = (), case=CASE):
        errors = [RuntimeError("no kernel") for _ in failing]

        def request(call):
            with suppress(RuntimeError):
                call()
            return (str(kernels.used[0].tile),)

        def compile_some(requests, processes, limit):
            failed = dict(zip((str(tile) for tile in failing), errors))
            return {r: failed.get(r) for r in requests if r not in map(str, late)}

        def race(runs, pace, cuda):
            times = []
            for one in runs:
                one(0)
                times.append(seconds(kernels.used[0].tile, bench_rows[-1]))
            return times

        bench_rows: list[int] = []
        pool = OperandPool(1 << 20, torch.device("cpu"))
        rotate = pool.rotate_weights

        def note_rows(qtype, rows, cols):
            bench_rows.append(rows)
            return rotate(qtype, rows, cols)

        pool.rotate_weights = note_rows  # type: ignore[method-assign]
        monkeypatch.setattr(tile_tuning, "compile_ahead", compile_some)
        monkeypatch.setattr(tile_tuning, "requests_of", request)
        monkeypatch.setattr(tile_tuning, "race_seconds", race)
        bench = KernelBench("acc1", kernels, torch.device("cpu"), pool, Pace(0.01), 1.0)
        return tune_tiles(bench, kernels, [case], 1.0), bench_rows

    return run


DEFAULT, SECOND, THIRD, *_ = candidate_tiles(CASE.kernel, CASE.qtype, CASE.tokens, H100)


def test_the_fastest_tile_is_chosen_and_used(tune) -> None:
    kernels = FakeKernels()
    tuned, rows = tune(kernels, lambda tile, rows: {SECOND: 0.9, THIRD: 0.8}.get(tile, 1.0))
    assert tuned.choices == (TileChoice("acc1", "matvec", "Q4_0", 8, THIRD, 1.6, 2.0),)
    assert kernels.used == tuned.choices and rows == [64, 64, 32]
    assert tuned.choices[0].gain == pytest.approx(1.25)


def test_the_default_stays_within_noise(tune) -> None:
    tuned, rows = tune(FakeKernels(), lambda tile, rows: 1.0 if tile == DEFAULT else 0.98)
    assert tuned.choices == (TileChoice("acc1", "matvec", "Q4_0", 8, DEFAULT, 1.0, 1.0),)
    assert rows == [64, 64]  # nothing was left to try on the other matrix


def test_a_tile_must_not_lose_on_other_matrices_what_it_gains(tune) -> None:
    tuned, _ = tune(FakeKernels(), lambda tile, rows: 1.0 if tile == DEFAULT else 0.9 if rows == 64 else 1.1)
    assert tuned.choices[0].tile == DEFAULT and tuned.choices[0].gain == 1


def test_tiles_that_fail_or_are_wrong_or_late_are_passed_over(tune) -> None:
    tuned, _ = tune(FakeKernels(SECOND, THIRD), lambda tile, rows: 0.5 if tile in (SECOND, THIRD) else 1.0)
    assert tuned.choices[0].tile == DEFAULT and tuned.untried == 0
    assert tuned.failures[0] == "RuntimeError: out of resources" and "wrong numbers" in tuned.failures[1]
    tuned, _ = tune(FakeKernels(), lambda tile, rows: 0.5 if tile == SECOND else 1.0, late=(SECOND, THIRD))
    assert tuned.choices[0].tile == DEFAULT and tuned.untried == 2 and not tuned.failures
    tuned, _ = tune(FakeKernels(), lambda tile, rows: 0.5 if tile == SECOND else 1.0, failing=(SECOND, THIRD))
    assert tuned.choices[0].tile == DEFAULT and tuned.failures == ("RuntimeError: no kernel",) * 2


@pytest.mark.parametrize("gain", [1.5, 1.0, 0.6])
def test_times_of_products_in_int8_are_kept_beside_the_librarys_and_the_faster_way_is_used(tune, gain: float) -> None:
    case = TileCase(INT8_KERNEL, "Q4_0", 512, ((64, 64), (32, 64)))
    best = INT8_TILES[2]
    seconds = {LIBRARY: 1.0, best: 1 / gain}
    tuned, _ = tune(FakeKernels(), lambda tile, rows: seconds.get(tile, 3.0), case=case)
    assert [(c.kernel, c.tokens, c.tile) for c in tuned.choices] == [(INT8_KERNEL, 512, best)]
    assert tuned.choices[0].gain == pytest.approx(gain)
    picker = TilePicker(H100, settle_math(tuned.choices, "auto"))
    for tokens in (65, 512, 4096):
        ways = picker.many_rows("Q4_0", tokens)[1]
        assert ways == ((best, LIBRARY) if gain > 1.1 else (LIBRARY,))
    assert picker.many_rows("Q8_0", 512)[1] == (LIBRARY,)


def test_numbers_of_rows_have_ways_of_their_own() -> None:
    choices = [
        TileChoice("acc", INT8_KERNEL, "Q4_0", n, INT8_TILES[0], 1.0, gain) for n, gain in ((128, 0.8), (512, 2))
    ]
    picker = TilePicker(H100, settle_math(choices, "auto"))
    ways = {n: picker.many_rows("Q4_0", n)[1][0] for n in (65, 200, 511, 512, 9000)}
    assert ways == {65: LIBRARY, 200: LIBRARY, 511: LIBRARY, 512: INT8_TILES[0], 9000: INT8_TILES[0]}


def test_products_in_int8_are_tried_for_the_types_that_have_them() -> None:
    matmuls = (("Q4_0", 64, 64), ("Q4_0", 128, 64), ("BF16", 64, 64), ("IQ2_S", 64, 256), ("MXFP4", 64, 64))
    cases = int8_cases(Shapes(matmuls, (("Q6_K", 999, 256),), (), ((64, 64),), (), 64), 1)
    found = {(c.kernel, c.qtype, c.matrices) for c in cases}
    square = ((64, 64),)
    assert found == {
        (INT8_KERNEL, "MXFP4", square), (INT8_KERNEL, "Q4_0", ((128, 64),)), (INT8_GATED, "MXFP4", square),
        (INT8_GATED, "Q4_0", square),
    }  # fmt: skip
    assert len(cases) == len(found) * len(INT8_TOKENS) and {c.tokens for c in cases} == set(INT8_TOKENS)


def test_without_time_for_other_tiles_nothing_is_chosen(tune) -> None:
    tiles = candidate_tiles(CASE.kernel, CASE.qtype, CASE.tokens, H100)
    tuned, rows = tune(FakeKernels(), lambda tile, rows: 1.0, late=tiles)
    assert tuned == tile_tuning.Tuned((), len(tiles) - 1, ()) and rows == [64]  # and nothing was timed


def test_a_default_that_does_not_work_is_passed_over_like_any_other(tune) -> None:
    tuned, _ = tune(FakeKernels(broken=DEFAULT), lambda tile, rows: 1.0)
    assert tuned.choices == (TileChoice("acc1", "matvec", "Q4_0", 8, SECOND, 1.0, 1.0),)
    assert tuned.failures == ("RuntimeError: out of resources",)
    tuned, _ = tune(FakeKernels(), lambda tile, rows: 0.9 if tile == THIRD else 1.0, failing=(DEFAULT, SECOND))
    assert {choice.tile for choice in tuned.choices} == {THIRD} and tuned.failures == ("RuntimeError: no kernel",) * 2


def test_where_no_tile_works_nothing_is_chosen(tune) -> None:
    tiles = candidate_tiles(CASE.kernel, CASE.qtype, CASE.tokens, H100)
    tuned, _ = tune(FakeKernels(broken=DEFAULT), lambda tile, rows: 1.0, failing=tiles[1:])
    assert tuned.choices == ()


def test_what_was_left_out_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = quick_effort(1 << 20, 1 << 30)
    request = measure.ProfileRequest(
        "cuda", quick, Shapes((("Q4_0", 64, 64),), (), (), (), (), 64), None, "pshard-profile"
    )
    bench = KernelBench("acc", FakeKernels(), torch.device("cpu"), OperandPool(4096, torch.device("cpu")), Pace(1), 1)
    tuned = tile_tuning.Tuned((CASE.choose(SECOND),), 3, ("RuntimeError: no", "RuntimeError: never"))
    monkeypatch.setattr(measure, "tune_tiles", lambda *_: tuned)
    notes: list[str] = []
    assert measure.choose_tiles(request, bench, notes) == tuned.choices
    assert "3 tiles" in notes[0] and "lack of time" in notes[0]
    assert "2 tiles" in notes[1] and "RuntimeError: no" in notes[1]
    assert isinstance(bench.kernels, TiledKernels) and not isinstance(PlainKernels(), TiledKernels)
    plain = replace(bench, kernels=PlainKernels())
    assert measure.choose_tiles(request, plain, notes) == measure.choose_tiles(request, None, notes) == ()
    assert len(notes) == 2


def test_no_more_processes_compile_than_there_are_cores_and_memory_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, gib, count in ((16, 128, 16), (128, 512, 32), (16, 16, 4), (8, 2, 1)):
        monkeypatch.setattr(compile_ahead, "count_cores", lambda n=cores: n)
        monkeypatch.setattr(compile_ahead, "usable_memory", lambda n=gib: n << 30)
        assert compile_ahead.count_processes() == count


def test_a_race_takes_turns() -> None:
    order: list[str] = []
    times = race_seconds([lambda i, n=n: order.append(n) for n in "ab"], Pace(0.01), cuda=False)  # type: ignore[misc]
    assert order == list("abba" * 3 + "ab") and len(times) == 2 and all(t >= 0 for t in times)


def profile_with(*tiles: TileChoice) -> MachineProfile:
    gpus = tuple(AcceleratorInfo("cuda", i, name, 1 << 30) for i, name in enumerate(("A", "A", "B")))
    rows = tuple(MatmulTiming(device, "Q4_0", 64, 64, 1, 1e-6) for device in ("acc", "acc2"))
    return replace(make_profile(), accelerators=gpus, matmuls=rows, tiles=tiles)


def test_a_profile_keeps_the_choices_of_each_unlike_gpu() -> None:
    first, other = CASE.choose(SECOND), CASE.choose(THIRD, "acc2", 0.5, 1.0)
    profile = profile_with(first, other)
    assert from_json(MachineProfile, json.loads(json.dumps(to_json(profile)))) == profile
    assert [profile.tiles_of(i) for i in range(3)] == [(first,), (first,), (other,)]
    # the rows that stand for the third GPU were measured with the defaults, so it runs with them
    assert profile_with(first).tiles_of(2) == ()


def test_profiles_of_before_load_and_have_no_choices() -> None:
    data = json.loads(json.dumps(to_json(profile_with())))
    del data["tiles"]
    assert from_json(MachineProfile, data).tiles == ()


def test_other_tiles_make_plans_stale() -> None:
    before, after = (digest(fingerprint_inputs((), profile_with(CASE.choose(tile)))) for tile in (SECOND, THIRD))
    assert before != after


def test_a_run_takes_the_tiles_of_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    first, other = CASE.choose(SECOND), CASE.choose(THIRD, "acc2")
    given = []
    memory = SimpleNamespace(host_locked=0, page_locked=True)
    engine = SimpleNamespace(memory=lambda: memory, notes=(), close=lambda: None)
    monkeypatch.setattr(
        "pshard.runtime.build_engine.build_engine", lambda *_, tiles, **__: given.append(tiles) or engine
    )
    monkeypatch.setattr("pshard.registries.profile_store.note_page_locks", lambda *_: False)
    monkeypatch.setattr(
        "pshard.runtime.devices.device.open_device", lambda kind, index: SimpleNamespace(kind=kind, locks=True)
    )
    monkeypatch.setattr("pshard.runtime.devices.threads.use_threads", lambda count: None)
    file = SimpleNamespace(spec=SimpleNamespace(name="m", packed_nbytes=1))
    for device in (0, 2):
        variant = SimpleNamespace(workload=Workload((1,), device=device), ranks=())
        opened = Opened(file, profile_with(first, other), variant, None)  # type: ignore[arg-type]
        start_engine(opened, variant)  # type: ignore[arg-type]
        group = SimpleNamespace(local_rank=device, local_size=3, size=3)
        start_engine(opened, variant, group=group)  # type: ignore[arg-type]
    assert given == [(first,), (first,), (other,), (other,)]


def test_the_profiles_table_says_what_tuning_gained() -> None:
    console = Console(record=True, width=160, file=io.StringIO())
    print_profile(profile_with(CASE.choose(SECOND, "acc", 1.0, 1.2), CASE.choose(DEFAULT)), console)
    text = console.export_text()
    assert (
        "Tiles on the accelerator: 1 of 2 differ from the defaults (matvec Q4_0, 8 tokens: 1.20 times as fast)" in text
    )


def test_the_table_of_defaults_has_every_bucket() -> None:
    for qtype in PLANED:
        for kernel in ("matvec", "gated"):
            assert all(isinstance(default_tile(kernel, qtype, tokens, H100), Tile) for tokens in BUCKETS)
    assert TUNING["gated few", 1].rows == 32


def test_ctrl_c_ends_compiling_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the processes that compile ignore it."""
    pytest.importorskip("triton", reason="Triton is installed with the CUDA build of torch only")
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    heard = list[object]()

    def interrupt(*_: object) -> None:
        heard.append(signal.getsignal(signal.SIGINT))
        raise KeyboardInterrupt

    monkeypatch.setattr(driver, "_active", compile_ahead.OnlyTarget(GPUTarget("cuda", 90, 32)))
    monkeypatch.setattr(compile_ahead, "wait", interrupt)
    monkeypatch.setattr(compile_ahead, "ProcessPoolExecutor", lambda processes, _: ThreadPoolExecutor(processes))
    monkeypatch.setattr(compile_ahead, "_compile", lambda target, request: heard.append(request))
    with pytest.raises(KeyboardInterrupt):
        compile_ahead.compile_ahead([Request("module", "kernel", "words")], 1, 300.0)
    assert signal.SIG_IGN not in heard and len(heard) == 2


@pytest.mark.slow
def test_kernels_are_compiled_ahead_in_other_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is installed with the CUDA build of torch only")
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from pshard.runtime.kernels.gpu.cuda import CudaKernels
    from pshard.runtime.kernels.gpu.products.triton_matvec import matvec_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    target = GPUTarget("cuda", 90, 32)
    monkeypatch.setattr(driver, "_active", compile_ahead.OnlyTarget(target))
    kernels = CudaKernels("cpu", 64)
    weight = Packed(torch.zeros(1 << 16, dtype=torch.uint8), "Q4_0", 64, 32)
    call, _ = calls_of(kernels, CASE, [weight], torch.zeros(8, 32, dtype=torch.bfloat16))

    def request(tile: Tile) -> compile_ahead.Request:
        kernels.use_tiles([CASE.choose(tile)])
        found = {r.kernel: r for r in compile_ahead.requests_of(lambda: call(0))}
        assert list(found) == ["quantise_kernel", "matvec_kernel"]
        return found["matvec_kernel"]

    try:
        first, second = request(DEFAULT), request(THIRD)
        assert first != second and not list(tmp_path.rglob("*"))
        broken = first._replace(words=first.words.replace('"num_warps": 2', '"num_warps": 3'))
        compiled = compile_ahead.compile_ahead([first, broken, second], 2, 120.0)
        assert compiled[first] is None and compiled[second] is None and compiled[broken] is not None
        there = sorted(tmp_path.rglob("*"))
        assert sum(path.suffix == ".cubin" for path in there) == 2
        for tile in (DEFAULT, THIRD):
            kernels.use_tiles([CASE.choose(tile)])
            with pytest.raises(AttributeError, match="launcher_cls"):  # compiled, or found, but there is no GPU
                call(0)
        cubins = {path for path in tmp_path.rglob("*.cubin") if path.name.startswith("matvec")}
        assert cubins == {path for path in there if path.suffix == ".cubin"}  # both came from the cache
        many = [first._replace(words=first.words.replace('"TOKENS"', f'"TOKENS"{" " * n}')) for n in range(8)]
        assert len(compile_ahead.compile_ahead(many, 1, 0.0)) < len(many)  # what no process had begun was left out
    finally:
        matvec_kernel.device_caches.clear()


def test_a_profile_in_seconds_times_nothing_optional_that_it_would_have_to_compile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of four kernels two are compiled in time, the first first; one cannot be compiled elsewhere."""
    jobs = [Job("acc", name, 0.1, name != "must", lambda bench, name=name: [name]) for name in ("must", "a", "b", "c")]
    jobs += [Job("host", "of the host", 0.1, True, lambda bench: [])]
    asked: list[str] = []

    def compile_some(requests: list, processes: int, seconds: float) -> dict:
        asked.extend(request.kernel for request in requests)
        return {requests[1]: None, requests[2]: OSError("no compiler")}

    monkeypatch.setattr(compile_jobs_module, "compile_ahead", compile_some)
    monkeypatch.setattr(
        compile_jobs_module, "list_requests",
        lambda jobs, bench: {j: [Request("", j.label, "")] for j in jobs if j.side == "acc"},
    )  # fmt: skip
    bench: Any = SimpleNamespace(device=torch.device("cuda"), side="acc")
    kept = compile_jobs(jobs, bench, 3.0, in_time=True)
    assert asked == ["must", "a", "b", "c"] and [job.label for job in kept] == ["must", "a", "of the host"]
    asked.clear()
    monkeypatch.setattr(compile_jobs_module, "compile_ahead", lambda found, *_: asked.extend(found) or {})
    assert compile_jobs(jobs, bench, 30.0) == jobs and len(asked) == 1  # with time, what is not reached is timed too


@pytest.mark.slow
def test_processes_that_compile_do_not_run_a_script_that_has_no_guard_again(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from triton.backends.compiler import GPUTarget\n"
        "from triton.runtime import driver\n"
        "from pshard.profile.tuning.compile_ahead import OnlyTarget, Request, compile_ahead\n"
        "driver.set_active(OnlyTarget(GPUTarget('cuda', 90, 32)))\n"
        "found = compile_ahead([Request('no_such_module', 'kernel', '')], 1, 60.0)\n"
        "print(*(type(error).__name__ for error in found.values()))\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("ModuleNotFoundError\n", 0), done.stderr


def test_what_is_timed_is_compiled_before_without_being_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="Triton is installed with the CUDA build of torch only")
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from pshard.runtime.kernels.gpu.cuda import CudaKernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    target = GPUTarget("cuda", 90, 32)
    monkeypatch.setattr(driver, "_active", compile_ahead.OnlyTarget(target))
    cpu = torch.device("cpu")
    bench = KernelBench("acc", CudaKernels("cpu", 64), cpu, OperandPool(1 << 22, cpu), Pace(0.01), 0.1)
    effort = replace(quick_effort(1 << 20, 1 << 30), acc_tokens=(1, 128))
    shapes = Shapes(
        (("Q4_0", 256, 128),), (), (Attend(2, 1, 64),), ((128, 256),), (("Q4_0", 128),), 128,
        (("MXFP4", "MXFP4", 128, Experts(4, 2, 64)),), (("F32", 128, Experts(4, 2, 64)),),
    )  # fmt: skip
    jobs = list_jobs("acc", replace(effort, grid=replace(shapes, matmuls=())), shapes)
    by_job = list_requests(jobs, bench)
    requests = list(dict.fromkeys(r for found in by_job.values() for r in found))
    assert not list(tmp_path.rglob("*"))
    kernels = {r.kernel for r in requests}
    assert {"matvec_kernel", "dequantise_kernel", "route_kernel"} <= kernels, kernels
    # norms hand over what products take, but where the quantising is what is timed
    asking = {job.label for job, found in by_job.items() if "quantise_kernel" in {r.kernel for r in found}}
    assert asking == {"accelerator norm, rope, activation"}, asking
    each = list({r.kernel: r for r in requests}.values())
    found = compile_ahead.compile_ahead(each, 1, 300.0)
    assert [error for error in found.values() if error is not None] == [] and len(found) == len(each)


def test_cases_of_attention_latents_and_experts_are_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = Experts(64, 4, 64)
    shapes = Shapes(
        (), (), (Attend(32, 8, 128), Attend(64, 8, 128), Attend(32, 1, 80)), (), (), 64,
        (("MXFP4", "Q8_0", 128, rule),), latent=(AttendLatent(16, 512, 64),),
    )  # fmt: skip
    cases = attention_cases(shapes)
    assert [(c.kernel, c.qtype, c.tokens) for c in cases] == [
        ("prompt 128", "bf16", ANY_BATCH), ("decode 128x16", "bf16", ANY_BATCH), ("decode 128x32", "bf16", ANY_BATCH),
        ("latent prompt 512", "bf16", ANY_BATCH), ("latent decode 512", "bf16", ANY_BATCH),
        *((f"grouped {part}", kind, n) for n in (16, 64, 128) for part, kind in (("gate", "MXFP4"), ("down", "Q8_0"))),
        (INT8_EXPERTS, "MXFP4+Q8_0", 128),
    ]  # fmt: skip
    assert cases[0].matrices == ((Attend(32, 8, 128), 2048, 4096), (Attend(32, 8, 128), 512, 512))


def test_a_profile_with_a_tile_of_every_case_is_read_back(tmp_path: Path) -> None:
    shapes = Shapes(
        (("Q4_0", 64, 64),), (), (Attend(32, 8, 128),), (), (), 64, (("MXFP4", "Q8_0", 128, Experts(64, 4, 64)),),
        latent=(AttendLatent(16, 512, 64),),
    )  # fmt: skip
    cases = [*tile_cases(shapes, BUCKETS, 1), *attention_cases(shapes)]
    choices = [case.choose(Tile(16, 64, 4, 2), "acc", 1.0, 1.5) for case in cases]
    profile = profile_with(*choices)
    assert {c.kernel.split()[0] for c in choices} == {"matvec", "prompt", "decode", "latent", "grouped", "int8"}
    assert load_profile(save_profile(profile, tmp_path / "profile.json")) == profile
    console = Console(record=True, width=160, file=io.StringIO())
    print_profile(profile_with(choices[len(cases) - 2], cases[-8].choose(DEFAULT, "acc", 1.0, 1.2)), console)
    text = " ".join(console.export_text().split())
    assert "(grouped down Q8_0, 128 pairs: 1.50 times as fast; latent decode 512 bf16: 1.20 times as fast)" in text


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory. Tried"), KernelRefused("no tile of prompt 512 fits")]
)
def test_a_case_that_the_card_has_no_room_for_is_passed_over(
    tune, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(tile_tuning, "calls_of", refuse)
    tuned, _ = tune(FakeKernels(), lambda tile, rows: 1.0)
    assert tuned.choices == () and tuned.failures == (f"{type(error).__name__}: {error}",)


def test_what_was_compiled_before_is_not_started_by_asking_what_must_be_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else products of pairs, compiled when tiles were raced, would read tiles that no sorting has written."""
    pytest.importorskip("triton", reason="needs Triton")
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from pshard.runtime.kernels.gpu.cuda import CudaKernels
    from pshard.runtime.kernels.gpu.triton_rows import gate_mul_kernel as kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", compile_ahead.OnlyTarget(GPUTarget("cuda", 86, 32)))
    kernel.device_caches.clear()
    kernels, cpu = CudaKernels("cpu", 128, limits=KNOWN_CARDS[86]), torch.device("cpu")
    x, weight = torch.zeros(2, 64, dtype=torch.bfloat16), Packed(torch.zeros(64 * 64 * 4).byte(), "F32", 64, 64)
    out, both = x.clone(), torch.zeros(2, 128, dtype=torch.bfloat16)

    def call() -> None:
        kernels.gate_up(x, weight, weight, out, both, torch.empty(0, dtype=torch.uint8, device=cpu))

    try:
        found = compile_ahead.requests_of(call)
        assert [request.kernel for request in found] == ["rows_kernel", "gate_mul_kernel"]
        kernel.preload(found[-1].words)
        again = compile_ahead.requests_of(call)  # that there is no GPU to start it on would end this
        assert [request.kernel for request in again] == ["rows_kernel"]
    finally:
        kernel.device_caches.clear()


def test_a_kernel_is_asked_for_once_for_arguments_that_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="needs Triton")
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from pshard.runtime.kernels.gpu import triton_copy

    monkeypatch.setattr(driver, "_active", compile_ahead.OnlyTarget(GPUTarget("cuda", 86, 32)))
    triton_copy.copy_words_kernel.device_caches.clear()
    words = torch.zeros(4096, dtype=torch.int32)

    def call() -> None:
        for first, count in ((0, 64), (64, 64), (0, 128), (1, 64), (0, 65)):  # the last two begin, and count, otherwise
            triton_copy.copy_words(words[first : first + count], words[2048 : 2048 + count])

    found = compile_ahead.requests_of(call)
    triton_copy.copy_words_kernel.device_caches.clear()
    assert len(found) == 4 and len(set(found)) == 3


@pytest.mark.slow
def test_tiles_that_fit_a_geforce_are_raced_for_attention_latents_and_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which are tried on a card that is not there: those that it has room for, each compiled under its own name."""
    pytest.importorskip("triton", reason="needs Triton")
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from pshard.profile.tuning.tile_tuning import _Trial
    from pshard.runtime.kernels.gpu.cuda import CudaKernels
    from pshard.runtime.kernels.gpu.tiles.attention_tiles import decode_tiles, latent_prompt_tiles, prompt_tiles

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", compile_ahead.OnlyTarget(GPUTarget("cuda", 86, 32)))
    card, cpu = KNOWN_CARDS[86], torch.device("cpu")
    kernels = CudaKernels(cpu, 4096, limits=card)
    bench = KernelBench("acc", kernels, cpu, OperandPool(1 << 22, cpu), Pace(0.01), 0.1)
    shapes = Shapes(
        (), (), (Attend(8, 4, 128),), (), (), 64, (("Q4_0", "Q4_0", 128, Experts(16, 4, 64)),),
        latent=(AttendLatent(4, 512, 64),),
    )  # fmt: skip
    cases = attention_cases(shapes)
    tried = {(case.kernel, case.tokens): tuple(_Trial(bench, kernels, case).needs()) for case in cases}
    needs = {case.kernel: _Trial(bench, kernels, case).needs() for case in cases if case.tokens <= 16}
    assert tuple(needs["prompt 128"]) == prompt_tiles(card, 128, 4.0) and len(needs["prompt 128"]) == 4
    assert tuple(needs["decode 128x16"]) == decode_tiles(card, 128, 4.0, 16)
    assert tuple(needs["latent prompt 512"]) == latent_prompt_tiles(card, 512, 64, 2.0)
    assert len(needs["latent decode 512"]) > 1
    for together in (16, 64, 128):
        for kernel in ("grouped gate", "grouped down"):
            assert tried[kernel, together] == grouped_tiles(kernel, "Q4_0", together, card)
    for found in needs.values():
        assert all(requests for requests in found.values()) and len(set(found.values())) == len(found)
