"""The kernel timings that a profile consists of: what each is, how long it may take, whether it can be left out."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from pshard.batch_sizes import LOGIT_ROWS
from pshard.machine import (
    AttentionTiming,
    DeltaTiming,
    ElementwiseTiming,
    ExpertTiming,
    InPlaceTiming,
    MatmulTiming,
    RefusedKernel,
    Reserve,
    RouteTiming,
)
from pshard.profile.effort import Effort, Shapes
from pshard.profile.timed.time_delta import time_delta
from pshard.profile.timed.time_experts import time_experts, time_router
from pshard.profile.timed.time_kernels import KernelBench, time_attention, time_elementwise, time_embedding, time_matmul
from pshard.profile.timed.time_latent import time_latent
from pshard.profile.timed.time_streams import time_index, time_streams
from pshard.units.kernel_names import kernel_names, name_experts, name_products, name_router

Row = MatmulTiming | AttentionTiming | ElementwiseTiming | ExpertTiming | InPlaceTiming | RouteTiming | DeltaTiming
Found = Row | RefusedKernel | Reserve
KV_TYPE = "bf16"
TOGETHER, TOGETHER_CONTEXTS = (16, 64), (128, 1024)  # sequences that decode at once, and cells of each
DELTA_TOKENS = (4, 16, 64, 256, 1024, 4096)
EXPERT_TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
FILL_SECONDS = 0.1  # in which operand copies are laid out on an accelerator, roughly; only for the expected time


@dataclass(frozen=True)
class Job:
    """One series of timings on one side ("host", "acc", "acc1"...). `expected` seconds are a guess; an `optional` job
    may be skipped for time. `kernel`: as `kernel_names` calls what only this job's shapes stand for; "" where a plan
    does without."""

    side: str
    label: str
    expected: float
    optional: bool
    run: Callable[[KernelBench], Sequence[Row]]
    kernel: str = ""


def list_jobs(side: str, effort: Effort, model: Shapes | None) -> list[Job]:
    """All kernel timings of one side ("host", "acc", "acc1"...), each once: a model's own shapes first, then the grid.

    Only matmuls and experts of the grid are optional: its attention and elementwise rows stand in for every model's.
    Without a model the first of each sort is not: no plan can be made without one.
    """
    jobs: dict[object, Job] = {}
    for shapes, of_grid in ((model, False), (effort.grid, True)):
        if shapes is not None:
            for key, job in _jobs_of(side, effort, shapes, of_grid):
                jobs.setdefault(key, job)
    listed = list(jobs.values()) if model else require_first_of_each_sort(list(jobs.values()))
    return sorted(listed, key=lambda job: job.optional)


def require_first_of_each_sort(jobs: Sequence[Job]) -> list[Job]:
    """The same jobs, of which the first of each sort and side is not optional."""
    sorts = [(job.side, getattr(job.run, "func", job.label)) for job in jobs]
    return [replace(job, optional=job.optional and sort in sorts[:i]) for i, (job, sort) in enumerate(zip(jobs, sorts))]


def _jobs_of(side: str, effort: Effort, shapes: Shapes, of_grid: bool) -> Iterator[tuple[object, Job]]:
    tokens = effort.host_tokens if side == "host" else effort.acc_tokens
    few = tuple(t for t in tokens if t in (1, 16, 512, 4096))
    name = side_name(side)
    run: Callable[[KernelBench], Sequence[Row]]
    fill, each = FILL_SECONDS if side != "host" else 0.0, 1.5 * effort.pace.seconds
    for heads in shapes.attention:
        for count, contexts in attention_points(tokens, shapes.context):
            run = partial(time_attention, shape=heads, kv_type=KV_TYPE, tokens=count, contexts=contexts)
            expected = (fill + each) * len(contexts) + effort.slow
            yield (
                (heads, count),
                Job(side, f"{name} attention, {count} tokens", expected, False, run, *kernel_names(heads)),
            )
        together = tuple(sorted({min(c, shapes.context) for c in TOGETHER_CONTEXTS}))
        for n in TOGETHER:
            run = partial(time_attention, shape=heads, kv_type=KV_TYPE, tokens=1, contexts=together, sequences=n)
            expected = (fill + each) * len(together)
            yield (
                (heads, "together", n),
                Job(side, f"{name} attention, {n} sequences", expected, False, run, *kernel_names(heads)),
            )
    yield from _latent_jobs(side, effort, shapes)
    yield from _delta_jobs(side, effort, shapes)
    yield from _stream_jobs(side, effort, shapes, few)
    for i, (d_model, d_ffn) in enumerate(shapes.widths if shapes.attention else ()):
        heads = shapes.attention[min(i, len(shapes.attention) - 1)]  # several models may share theirs
        run = partial(time_elementwise, d_model=d_model, d_ffn=d_ffn, shape=heads, tokens=few)
        expected = (3 * fill + 7 * each) * len(few)
        yield (d_model, d_ffn), Job(side, f"{name} norm, rope, activation", expected, False, run)
    for qtype, width in shapes.embedding:
        run = partial(time_embedding, qtype=qtype, width=width, tokens=few)
        yield (qtype, width), Job(side, f"{name} embedding {qtype}", fill + each * len(few), False, run)
    for qtype, rows, cols in (*shapes.matmuls, *shapes.heads):
        counts = tokens if (qtype, rows, cols) in shapes.matmuls else tuple(t for t in tokens if t <= LOGIT_ROWS)
        run = partial(time_matmul, qtype=qtype, rows=rows, cols=cols, tokens=counts)
        expected = fill + each * len(counts) + effort.slow
        label = f"{name} matmul {qtype} {rows}x{cols}"
        yield (qtype, rows, cols), Job(side, label, expected, of_grid, run, name_products(qtype))
    yield from _expert_jobs(side, effort, shapes, of_grid)


def _latent_jobs(side: str, effort: Effort, shapes: Shapes) -> Iterator[tuple[object, Job]]:
    """Attention over latents: a model's own, as tables of other attention stand in for it where there is none."""
    tokens = effort.host_tokens if side == "host" else effort.acc_tokens
    points = [(count, contexts, 1) for count, contexts in attention_points(tokens, shapes.context)]
    points += [(1, tuple(sorted({min(c, shapes.context) for c in TOGETHER_CONTEXTS})), n) for n in TOGETHER]
    fill, each = FILL_SECONDS if side != "host" else 0.0, 1.5 * effort.pace.seconds
    for heads in shapes.latent:
        for count, contexts, sequences in points:
            run = partial(
                time_latent, shape=heads, kv_type=KV_TYPE, tokens=count, contexts=contexts, sequences=sequences
            )
            what = f"{count} tokens" if sequences == 1 else f"{sequences} sequences"
            label = f"{side_name(side)} attention over latents, {what}"
            expected = (fill + each) * len(contexts) + effort.slow
            yield (heads, count, sequences), Job(side, label, expected, False, run, *kernel_names(heads))


def _delta_jobs(side: str, effort: Effort, shapes: Shapes) -> Iterator[tuple[object, Job]]:
    """Gated delta nets: a model's own. Prompts of one sequence, and one token of each of several."""
    most = max(effort.host_tokens if side == "host" else effort.acc_tokens)
    prompts = (1, *(t for t in DELTA_TOKENS if t <= most))
    fill, each = FILL_SECONDS if side != "host" else 0.0, 1.5 * effort.pace.seconds
    for net in shapes.delta:
        for tokens, sequences in ((prompts, 1), *(((1,), n) for n in TOGETHER)):
            run = partial(time_delta, net=net, tokens=tokens, sequences=sequences)
            what = f"up to {tokens[-1]} tokens" if sequences == 1 else f"{sequences} sequences"
            expected = (fill + each) * len(tokens) + effort.slow
            label = f"{side_name(side)} delta net, {what}"
            yield ("delta", net.shape, sequences), Job(side, label, expected, False, run, *kernel_names(net))


def _stream_jobs(side: str, effort: Effort, shapes: Shapes, tokens: tuple[int, ...]) -> Iterator[tuple[object, Job]]:
    """Residual streams beside each other, and an index of cells: a model's own."""
    each, name = 1.5 * effort.pace.seconds + (FILL_SECONDS if side != "host" else 0.0), side_name(side)
    for streams in shapes.streams:
        run: Callable[[KernelBench], Sequence[Row]] = partial(time_streams, shape=streams, tokens=tokens)
        yield ("streams", streams), Job(side, f"{name} residual streams", 2 * each * len(tokens), False, run)
    for index in shapes.index:
        least = index.most * index.each
        contexts = tuple(n * least for n in (2, 4, 8) if n * least <= max(shapes.context, 2 * least))
        run = partial(time_index, index=index, contexts=contexts)
        yield ("index", index), Job(side, f"{name} choice of cells", each * len(contexts) + effort.slow, False, run)


def _expert_jobs(side: str, effort: Effort, shapes: Shapes, of_grid: bool) -> Iterator[tuple[object, Job]]:
    """Routers and experts; a rule's details that rows do not have make no jobs of their own."""
    most = max(effort.host_tokens if side == "host" else effort.acc_tokens)
    tokens, name = tuple(t for t in EXPERT_TOKENS if t <= most), side_name(side)
    expected = 1.5 * effort.pace.seconds * len(tokens) + effort.slow + (FILL_SECONDS if side != "host" else 0.0)
    run: Callable[[KernelBench], Sequence[Row]]
    for qtype, d_model, rule in shapes.routers:
        run = partial(time_router, qtype=qtype, d_model=d_model, rule=rule, tokens=tokens)
        label = f"{name} router {qtype}, {rule.used} of {rule.count}"
        key = "router", qtype, d_model, rule.count, rule.used
        yield key, Job(side, label, expected, of_grid, run, name_router(qtype))
    for gate, down, d_model, rule in shapes.experts:
        run = partial(time_experts, types=(gate, down), d_model=d_model, rule=rule, tokens=tokens)
        label = f"{name} experts {gate}, {rule.used} of {rule.count}, {rule.d_expert}x{d_model}"
        of = ("experts", gate, down, d_model, rule.count, rule.used, rule.d_expert)
        yield of, Job(side, label, expected, of_grid, run, name_experts(gate, down))


def side_name(side: str) -> str:
    """ "host" and "acc1" as people call them."""
    return "CPU" if side == "host" else f"accelerator {side.removeprefix('acc')}".rstrip()


def attention_points(tokens: tuple[int, ...], context: int) -> list[tuple[int, tuple[int, ...]]]:
    """New tokens -> contexts: many for one token (decode); for prompts the prompt alone and two longer contexts."""
    decode = tuple(sorted({c for c in (128, 1024, 4096, 16384) if c < context} | {context}))
    prompts = [t for t in tokens if t in (16, 128, 512, 2048, 4096, 8192) and t <= context]
    return [(1, decode), *((t, tuple(sorted({t, max(t, min(4096, context)), context}))) for t in prompts)]
