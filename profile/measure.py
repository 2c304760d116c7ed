"""Measures everything and puts the MachineProfile together."""

import datetime
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import zip_longest

import torch

from pshard import __version__
from pshard.errors import KernelRefused, NoRoom, UserError
from pshard.machine import (
    AcceleratorInfo,
    AttentionTiming,
    CollectiveTiming,
    Contention,
    CopyTiming,
    DeltaTiming,
    ElementwiseTiming,
    ExpertTiming,
    HostInfo,
    InPlaceTiming,
    MachineProfile,
    MatmulTiming,
    Provenance,
    ReadTiming,
    RefusedKernel,
    Reserve,
    RouteTiming,
    ShareTiming,
    describe_busy,
)
from pshard.profile.effort import Effort, Shapes, fit_card, shapes_to_tune
from pshard.profile.identify import count_cores, identify_accelerators, identify_host, unlike_accelerators, unlike_links
from pshard.profile.timed.collective_times import measure_collectives
from pshard.profile.timed.draft_cost import time_drafts
from pshard.profile.timed.host_threads import (
    ROUNDS,
    MemoryReader,
    matvec_rates,
    measure_reads,
    pick_threads,
    thread_counts,
    unit_reader,
    use_threads,
)
from pshard.profile.timed.kernel_jobs import Found, Job, Row, list_jobs, require_first_of_each_sort, side_name
from pshard.profile.timed.measure_reserve import measure_reserve
from pshard.profile.timed.operands import LEAST_ROTATION, OperandPool
from pshard.profile.timed.rank_shares import measure_shares
from pshard.profile.timed.slot_cost import time_slots
from pshard.profile.timed.step_cost import time_launch, time_steps
from pshard.profile.timed.time_in_place import Layer, time_in_place
from pshard.profile.timed.time_kernels import KernelBench, repeat_unlike
from pshard.profile.timed.time_links import LinkBench, measure_contention, open_link, time_copies
from pshard.profile.tuning.attention_cases import attention_cases
from pshard.profile.tuning.compile_jobs import compile_jobs
from pshard.profile.tuning.tile_cases import int8_cases, tile_cases
from pshard.profile.tuning.tile_tuning import tune_tiles
from pshard.runtime.build_executor import choose_kernels
from pshard.runtime.devices.device import Device, open_device
from pshard.runtime.devices.usable_gpus import describe_unused
from pshard.runtime.kernels.api import Kernels, TiledKernels
from pshard.runtime.kernels.gpu.tiles.kernel_failures import describe_failure, is_kernel_failure
from pshard.times.gpu_tiles import TileChoice
from pshard.times.stolen_time import DISTURBED, disturbed_share, read_core_time

COMPILING = "compiling GPU kernels"  # as progress says it
AGAIN = 0.15  # of the kernels' time, that timing disturbed ones again may take

Progress = Callable[[str, float], None]  # what begins now, and the share of the work that is done


@dataclass(frozen=True)
class ProfileRequest:
    """What to measure. `accelerator`: "cuda" or "cpu"; `threads`: None picks them; `model`: shapes to time exactly."""

    accelerator: str
    effort: Effort
    model: Shapes | None
    threads: int | None
    command: str


@dataclass(frozen=True)
class HostFigures:
    """What was found out about the host before anything else."""

    info: HostInfo
    reads: tuple[ReadTiming, ...]


@dataclass(frozen=True)
class LinkFigures:
    """What was found out about the link."""

    copies: tuple[CopyTiming, ...]
    contention: Contention


def measure_machine(request: ProfileRequest, progress: Progress) -> MachineProfile:
    """Measure this machine: threads and DRAM, then the link, then the kernels.

    Raises UserError when the accelerator asked for is not there.
    """
    started = time.monotonic()
    accelerators = identify_accelerators(request.accelerator)
    unlike = unlike_accelerators(accelerators)
    device = open_device(request.accelerator)
    try:
        request, unfit = fit_request(request, device)
        host, acc, notes = open_benches(request.effort, device)
        notes += unfit
        progress("host memory and threads", 0.0)
        figures = _measure_host(request, host)
        progress("link", 0.05)
        link = _measure_link(request.effort, device, host)
        progress("tiles" if acc is None else COMPILING, 0.08)
        tiles, jobs, spent = prepare_kernels(request, acc, plan_jobs(request, acc is not None), notes)
        started += spent
        progress("steps between kernels", 0.09)  # whoever counts how long kernels are compiled must not count these
        benches = {"host": host, "acc": acc or host}
        fast = benches["acc"].kernels, host.kernels
        steps = time_steps("acc", device, fast, MemoryReader(host))
        rows: list[Found] = [*steps.rows, *time_drafts("acc", device, fast, steps.of("acc"))]
        if acc is not None:
            rows.append(time_launch("acc", device, fast))
            rows += find_slot_cost(request, "acc", device, fast, host)
        cores = read_core_time()
        deadline = started + request.effort.limit

        def show_first(label: str, share: float) -> None:
            progress(label, 0.1 + 0.85 * share / len(unlike))

        timed, skipped = run_jobs(jobs, benches, deadline, show_first, notes)
        again = repeat_unlike(host, [r for r in timed if isinstance(r, MatmulTiming) and r.device == "host"])
        timed = [again.get(row, row) for row in timed]
        notes += describe_busy("kernels were", disturbed_share(cores, read_core_time()))
        rows += timed
        if acc is not None:
            rows += time_in_place(acc, device, layers_to_read(request))
            rows += find_reserve(request, "acc", device, notes)
    finally:
        device.close()
    copies = link.copies
    if request.effort.short and unlike[1:]:
        notes.append(f"of {len(unlike)} unlike accelerators only the first was timed")
        unlike = unlike[:1]
    for done, other in enumerate(unlike[1:], 1):

        def show(label: str, share: float, done: int = done) -> None:
            progress(label, 0.1 + 0.85 * (done + share) / len(unlike))

        own, own_copies, own_tiles, left_out = measure_accelerator(request, other, host, notes, show)
        rows, copies, skipped = [*rows, *own], (*copies, *own_copies), skipped + left_out
        tiles = (*tiles, *own_tiles)
    for other in () if request.effort.short else unlike_links(accelerators):
        copies = (*copies, *measure_link(request.effort, other))
    progress("ranks", 0.97)
    collectives = time_collectives(request, len(accelerators), notes)
    shares = time_shares(request, len(accelerators), host, notes)
    if acc is None:
        rows += [replace(row, device="acc") for row in timed]
        notes.append("the accelerator is the CPU: its kernels are the host's and were timed once")
    if not any(c.memory == "pinned" for c in link.copies):
        notes.append("page-locking was refused: copies are from pageable memory")
    if skipped:
        notes.append(f"{skipped} series of the general grid were left out for lack of time")
    profile = _compose(request, accelerators, figures, replace(link, copies=copies), steps.handoff, rows, notes)
    return replace(profile, collectives=collectives, shares=shares, tiles=tiles)


def layers_to_read(request: ProfileRequest) -> Sequence[Layer]:
    """Layers of routed experts that are timed as they are read in place: the model's, else the grid's typical ones."""
    return request.model.experts if request.model else request.effort.grid.experts


def prepare_kernels(
    request: ProfileRequest, bench: KernelBench | None, jobs: Sequence[Job], notes: list[str]
) -> tuple[tuple[TileChoice, ...], list[Job], float]:
    """The tiles of an accelerator's kernels, the jobs that are to be timed, and seconds that the limit does not count;
    what the jobs need is compiled then, as far as there is time for it."""
    started, ready = time.monotonic(), list(jobs)
    tiles = choose_tiles(request, bench, notes)
    if bench is not None:
        ready = compile_jobs(jobs, bench, request.effort.compile_seconds, in_time=request.effort.short)
    if len(ready) < len(jobs):
        notes.append(f"{len(jobs) - len(ready)} timings were left out, as their kernels were not compiled in time")
    return tiles, ready, time.monotonic() - started


def choose_tiles(request: ProfileRequest, bench: KernelBench | None, notes: list[str]) -> tuple[TileChoice, ...]:
    """The fastest tiles of an accelerator's kernels, which its bench uses from then on; none where it has none.

    What was left out goes into the notes.
    """
    if bench is None or not isinstance(bench.kernels, TiledKernels):
        return ()
    effort = request.effort
    shapes = shapes_to_tune(effort, request.model)
    cases = tile_cases(shapes, effort.tile_tokens, effort.tile_matrices)
    if effort.tile_tokens:  # a short profile has no time for tiles
        cases += [*attention_cases(shapes), *int8_cases(shapes, effort.tile_matrices)]
    tuned = tune_tiles(bench, bench.kernels, cases, effort.tile_seconds)
    where = side_name(bench.side)
    if not cases:
        why = "without -m a quick profile chooses none" if request.model is None else "the model has none to choose"
        notes.append(f"{where}: tiles are the defaults; {why}")
    if tuned.untried:
        notes.append(f"{where}: {tuned.untried} tiles were not tried for lack of time")
    if tuned.failures:
        notes.append(f"{where}: {len(tuned.failures)} tiles were passed over, as {tuned.failures[0]}")
    return tuned.choices


def measure_accelerator(
    request: ProfileRequest, accelerator: AcceleratorInfo, host: KernelBench, notes: list[str], progress: Progress
) -> tuple[list[Found], tuple[CopyTiming, ...], tuple[TileChoice, ...], int]:
    """Rows of an accelerator that is unlike the first ("acc1"...): its kernels, the executor's step and its link alone.

    Also its tiles, and how many series of the general grid were skipped; it has as much time for these as the first and
    the host.
    """
    side, started = f"acc{accelerator.index}", time.monotonic()
    device = open_device(accelerator.kind, accelerator.index)
    try:
        request, left_out = fit_request(request, device)
        effort = request.effort
        notes += left_out
        fast, on_host, _ = choose_kernels(device, "fast", max(effort.acc_tokens))
        progress(f"link of {side_name(side)}", 0.0)
        with closing(_open_link(effort, device)) as link:
            copies = _time_copies(link, effort, side)
        pool = OperandPool(_pool_bytes(effort, device), device.torch_device)
        bench = KernelBench(side, fast, device.torch_device, pool, effort.pace, effort.slow)
        jobs = list_jobs(side, effort, request.model)
        tiles, jobs, spent = prepare_kernels(request, bench, jobs, notes)
        deadline = started + spent + effort.limit
        rows, skipped = run_jobs(jobs, {side: bench}, deadline, progress, notes)
        steps = time_steps(side, device, (fast, on_host), MemoryReader(host))
        own = [row for row in steps.rows if row.device == side]
        own += time_drafts(side, device, (fast, on_host), steps.of(side))
        if device.kind != "cpu":
            rows.append(time_launch(side, device, (fast, on_host)))
            rows += find_slot_cost(request, side, device, (fast, on_host), host)
            rows += time_in_place(bench, device, layers_to_read(request))
            rows += find_reserve(request, side, device, notes)
        return [*own, *rows], copies, tiles, skipped
    finally:
        device.close()


def find_reserve(request: ProfileRequest, side: str, device: Device, notes: list[str]) -> tuple[Reserve, ...]:
    """What torch and the kernels take of an accelerator; none in a short profile, which loads too few kernels."""
    return () if request.effort.short else measure_reserve(side, device, notes)


def find_slot_cost(
    request: ProfileRequest, side: str, device: Device, fast: tuple[Kernels, Kernels], host: KernelBench
) -> Sequence[ElementwiseTiming]:
    """What slots that follow use cost the host; none in a short profile, or for a model without experts."""
    follows = not request.effort.short and (request.model is None or request.model.experts)
    return time_slots(side, device, fast, MemoryReader(host)) if follows else ()


def fit_request(request: ProfileRequest, device: Device) -> tuple[ProfileRequest, tuple[str, ...]]:
    """The request with what fits the accelerator's free memory, and a note of what is left out."""
    free = _free_bytes(device)
    if free is None:
        return request, ()
    effort, left_out = fit_card(request.effort, request.model, free)
    return replace(request, effort=effort), left_out


def _pool_bytes(effort: Effort, device: Device) -> int:
    """Of an accelerator's operands: a quarter of what is free at most, but for a matrix that takes more."""
    free = _free_bytes(device)
    most = min(effort.rotation, LEAST_ROTATION)
    return most if free is None else min(most, free // 4)


def _free_bytes(device: Device) -> int | None:
    """Of an accelerator that has memory of its own."""
    return torch.cuda.mem_get_info(device.torch_device)[0] if device.kind == "cuda" else None


def _open_link(effort: Effort, device: Device) -> LinkBench:
    return open_link(device, min(effort.rotation, LEAST_ROTATION), max(effort.copy_sizes))


def _time_copies(link: LinkBench, effort: Effort, side: str) -> tuple[CopyTiming, ...]:
    return tuple(replace(c, device=side) for c in time_copies(link, effort.copy_sizes, effort.pace))


def measure_link(effort: Effort, accelerator: AcceleratorInfo) -> tuple[CopyTiming, ...]:
    """Copies over the link of an accelerator that is like one before but for its link."""
    device = open_device(accelerator.kind, accelerator.index)
    try:
        with closing(_open_link(effort, device)) as link:
            return _time_copies(link, effort, f"acc{accelerator.index}")
    finally:
        device.close()


def open_benches(effort: Effort, device: Device) -> tuple[KernelBench, KernelBench | None, list[str]]:
    """Benches of the host and of the accelerator (None when that is the CPU), and notes on kernels that are missing."""
    cpu = torch.device("cpu")
    fast, on_host, notes = choose_kernels(device, "fast", max(effort.acc_tokens))
    host = KernelBench("host", on_host, cpu, OperandPool(effort.rotation, cpu), effort.pace, effort.slow)
    if device.kind == "cpu":
        return host, None, list(notes)
    pool = OperandPool(_pool_bytes(effort, device), device.torch_device)
    acc = KernelBench("acc", fast, device.torch_device, pool, effort.pace, effort.slow)
    return host, acc, [*notes, *describe_unused()]


def time_collectives(request: ProfileRequest, devices: int, notes: list[str]) -> tuple[CollectiveTiming, ...]:
    """All-reduces between as many ranks as there are devices (on CPUs, as there are cores up to 4).

    What keeps them from being timed goes into the notes: only plans for several ranks need them.
    """
    ranks = _rank_counts(request, devices)
    if not ranks:
        return ()
    try:
        timings = measure_collectives(request.accelerator, ranks, request.effort.sums)
    except UserError as error:
        notes.append(str(error))
        return ()
    if any(c.backend == "gloo" for c in timings):
        notes.append("sums of CPU ranks go through gloo, not through shared memory, which needs the native library")
    return timings


def time_shares(request: ProfileRequest, devices: int, host: KernelBench, notes: list[str]) -> tuple[ShareTiming, ...]:
    """What ranks have of this host, for as many ranks as sums are timed for; a failure goes into the notes."""
    counts = _rank_counts(request, devices)
    try:
        return measure_shares(host, request.accelerator, counts, request.effort.share_seconds)
    except UserError as error:
        notes.append(str(error))
        return ()


def _rank_counts(request: ProfileRequest, devices: int) -> list[int]:
    """For how many ranks sums and shares are timed; none when the effort has no sizes of sums."""
    most = devices if request.accelerator != "cpu" else min(4, count_cores())
    counts = (2, most) if request.effort.quick else range(2, most + 1)
    return sorted({n for n in counts if 1 < n <= most}) if request.effort.sums else []


def _measure_host(request: ProfileRequest, bench: KernelBench) -> HostFigures:
    counts = thread_counts(count_cores(), request.effort.quick)
    if request.threads is not None:
        counts = tuple(sorted({*counts, request.threads}))
    reads = measure_reads(bench, counts)
    threads = request.threads or pick_threads(matvec_rates(bench, counts))
    use_threads(threads)
    return HostFigures(identify_host(threads), reads)


def _measure_link(effort: Effort, device: Device, host: KernelBench) -> LinkFigures:
    with closing(_open_link(effort, device)) as link:
        copies = tuple(time_copies(link, effort.copy_sizes, effort.pace))
        contention = measure_contention(link, unit_reader(host), effort.contention_seconds)
        return LinkFigures(copies, contention)


def plan_jobs(request: ProfileRequest, has_own_kernels: bool) -> list[Job]:
    """Kernel timings in order: what must be timed first, both sides in turn, so that a time limit cuts both alike."""
    sides = ("host", "acc") if has_own_kernels else ("host",)
    lists = [list_jobs(side, request.effort, request.model) for side in sides]
    mixed = [job for group in zip_longest(*lists) for job in group if job is not None]
    if request.effort.short:
        mixed = require_first_of_each_sort([replace(job, optional=True) for job in mixed])
    return sorted(mixed, key=lambda job: job.optional)


def expected_seconds(request: ProfileRequest) -> float:
    """A guess at how long `measure_machine` will take."""
    effort = request.effort
    jobs = sum(job.expected for job in plan_jobs(request, request.accelerator != "cpu"))
    unlike = len(unlike_accelerators(identify_accelerators(request.accelerator)))
    reads = 3 * ROUNDS * len(thread_counts(count_cores(), effort.quick)) * effort.pace.seconds
    copies = 7 * len(effort.copy_sizes) * effort.pace.seconds + 2 * effort.contention_seconds
    tiles = effort.tile_seconds if request.accelerator != "cpu" else 0.0
    steps = 3.0 if request.accelerator != "cpu" else 0.5  # walks beside reads
    return 2 + steps + reads + copies + unlike * (min(effort.limit, jobs) + tiles) + 15 * bool(effort.sums)


def run_jobs(
    jobs: list[Job], benches: dict[str, KernelBench], deadline: float, progress: Progress, notes: list[str]
) -> tuple[list[Found], int]:
    """Rows of all jobs, and how many optional ones were skipped because `deadline` (time.monotonic()) had passed. What
    the card cannot run is left out, with a note, and stands behind the rows.

    The host's that others disturbed are run once more at the end, the most disturbed first, in up to AGAIN of the time
    that all took.
    """
    found: dict[Job, dict[Row, Row]] = {}
    lost: dict[Job, float] = {}
    refused: dict[tuple[str, str], RefusedKernel] = {}
    skipped, total, done, started = 0, sum(job.expected for job in jobs) or 1.0, 0.0, time.monotonic()
    for job in jobs:
        if job.optional and time.monotonic() > deadline:
            skipped += 1
        else:
            progress(job.label, done / total)
            began = read_core_time()
            made = _run_job(job, benches[job.side], notes)
            if isinstance(made, RefusedKernel):
                refused.setdefault((job.side, job.kernel), made)
                made = ()
            found[job] = {replace(row, seconds=0.0): row for row in made}
            if job.side == "host":
                lost[job] = disturbed_share(began, read_core_time())
        done += job.expected
    notes += [f"{side_name(bench.side)}: {line}" for bench in benches.values() for line in _passed_over(bench)]
    end = time.monotonic() + AGAIN * (time.monotonic() - started)
    for job in sorted((job for job in lost if lost[job] >= DISTURBED), key=lost.__getitem__, reverse=True):
        if time.monotonic() > end:
            break
        progress(f"{job.label} again", 1.0)
        for row in job.run(benches[job.side]):
            key = replace(row, seconds=0.0)
            found[job][key] = min(row, found[job].get(key, row), key=lambda r: r.seconds)
    return [*(row for rows in found.values() for row in rows.values()), *refused.values()], skipped


def _passed_over(bench: KernelBench | None) -> tuple[str, ...]:
    """Tiles that a bench's kernels had to do without, a line each."""
    return bench.kernels.passed_over if bench and isinstance(bench.kernels, TiledKernels) else ()


def _run_job(job: Job, bench: KernelBench, notes: list[str]) -> Sequence[Row] | RefusedKernel:
    """A job's rows; a note, and which kernel it is, where the card cannot run it."""
    try:
        return job.run(bench)
    except Exception as error:
        if not isinstance(error, KernelRefused) and not is_kernel_failure(error):
            raise
        why = str(error) if isinstance(error, KernelRefused) else describe_failure(error)
        notes.append(f"{job.label} was left out: {why}")
        if not job.kernel or isinstance(error, NoRoom):
            return ()
        return RefusedKernel(job.side, job.kernel, why.split("; use --kernels")[0])


def _compose(
    request: ProfileRequest,
    accelerators: tuple[AcceleratorInfo, ...],
    host: HostFigures,
    link: LinkFigures,
    handoff_seconds: float,
    rows: list[Found],
    notes: list[str],
) -> MachineProfile:
    return MachineProfile(
        host=host.info,
        accelerators=accelerators,
        matmuls=tuple(r for r in rows if isinstance(r, MatmulTiming)),
        attention=tuple(r for r in rows if isinstance(r, AttentionTiming)),
        elementwise=tuple(r for r in rows if isinstance(r, ElementwiseTiming)),
        experts=tuple(r for r in rows if isinstance(r, ExpertTiming)),
        in_place=tuple(r for r in rows if isinstance(r, InPlaceTiming)),
        routes=tuple(r for r in rows if isinstance(r, RouteTiming)),
        deltas=tuple(r for r in rows if isinstance(r, DeltaTiming)),
        refused=tuple(r for r in rows if isinstance(r, RefusedKernel)),
        reserves=tuple(r for r in rows if isinstance(r, Reserve)),
        copies=link.copies,
        reads=host.reads,
        contention=link.contention,
        handoff_seconds=handoff_seconds,
        provenance=Provenance(
            source="measured",
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            command=request.command,
            pshard=__version__,
            torch=torch.__version__,
            python=platform.python_version(),
            os=platform.platform(),
            quick=request.effort.quick,
            short=request.effort.short,
            notes=tuple(notes),
        ),
    )
