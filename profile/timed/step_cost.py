"""The executor's own cost: it walks real steps over a small model whose kernels do nothing, or next to it.

Where the CPU computes units, its stand-ins read as much of the host's memory as a unit may have, and what that takes is
not counted: a step's own work then meets caches that hold nothing of it, as between real kernels, and takes 5 to 20
times as long as in a loop.
"""

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast

from pshard.batch import Batch, Span
from pshard.batch_sizes import SMALL_BATCH
from pshard.homes import HOST, ON_CPU, PINNED, STREAMED, VRAM
from pshard.machine import ElementwiseTiming
from pshard.model import ModelSpec
from pshard.model_config import ModelConfig, Rope
from pshard.plan import Buffers, Placement, Prediction, RankPlan, Solve, TierPlan, Variant
from pshard.routing.play_record import RoutingPlay
from pshard.runtime.devices.device import Device
from pshard.runtime.engine import Engine
from pshard.runtime.executor import Executor, Group
from pshard.runtime.kernels.api import Kernels, Segment
from pshard.runtime.memory.kv_store import KVStore
from pshard.runtime.memory.weights import HostWeights
from pshard.tensor import TensorSpec
from pshard.units.attention import ATTENTION
from pshard.units.divide_unit import whole_unit
from pshard.units.embedding import EMBEDDING
from pshard.units.ffn import FFN
from pshard.units.kv_cells import kv_blocks
from pshard.units.output import OUTPUT
from pshard.units.state import StateShape
from pshard.units.unit import Unit
from pshard.workload import Workload

LAYERS, THIN, CONTEXT = 32, 64, 256
PROMPT = 2 * SMALL_BATCH  # tokens
TURNS, HIDDEN = 8, 5120  # layers and width of the model that changes sides: hidden vectors as long as real ones
LEAST = 1e-7  # of a difference of noisy times
WALKS, WARM_UPS, AGAIN = 17, 2, 4
SPARE_MIB = 16  # of the arena, for all but weights
FILLED = 32 << 20  # bytes: 10 us and more of an accelerator
SLOTS = 3  # as many as units are copied between two on the CPU, beside which all arrive


@dataclass(frozen=True)
class StepFigures:
    """What a step costs the host's thread, seconds of each kind, and of a hidden vector's way to the host and back."""

    rows: tuple[ElementwiseTiming, ...]
    handoff: float

    def of(self, side: str) -> float:
        """What a unit costs on a side."""
        return next(row.seconds for row in self.rows if row.device == side and row.what == "step")


class Reads(Protocol):
    """Reads about as much of host memory as a unit on the CPU does; `seconds`: what all calls have taken so far, also
    those that were written down and replayed."""

    def __call__(self) -> object: ...
    @property
    def seconds(self) -> float: ...


class Fills:
    """Takes an accelerator some time, and the host none."""

    seconds = 0.0

    def __init__(self, device: Device) -> None:
        self._memory = device.allocate(FILLED)

    def __call__(self) -> None:
        self._memory.zero_()


class NoKernels:
    """Stands in for kernels of the same kind, and does nothing, or `reads` for each unit."""

    def __init__(self, real: Kernels, reads: Reads | None = None) -> None:
        self.act_dtype, self.repeatable, self.recordable = real.act_dtype, real.repeatable, real.recordable
        self.fills, self.leaves_norms, self.fuses_norms = real.fills, real.leaves_norms, real.fuses_norms
        self._reads = reads

    @property
    def seconds(self) -> float:
        """What reading has taken so far."""
        return self._reads.seconds if self._reads is not None else 0.0

    def _nothing(self, *arguments: Any, **more: Any) -> None:
        pass

    forget = look_up = rms_norm = linear = linear_group = gate_up = rope_store = route = add_rows = _nothing

    def attention(self, *arguments: Any, **more: Any) -> None:
        if self._reads is not None:
            self._reads()

    experts = attention

    def ffn(self, *arguments: Any) -> bool:
        self.attention()
        return True


def time_steps(side: str, device: Device, fast: tuple[Kernels, Kernels], reads: Reads) -> StepFigures:
    """What the executor adds to the units of a step, on the host and on accelerator `side`; see docs/profiling.md.

    fast: the kernels of the accelerator and of the host that they stand in for.
    """
    lanes = device.kind != "cpu"  # else both sides meet the same caches, and copies are other threads' work
    kernels = NoKernels(fast[0]), NoKernels(fast[1], reads if lanes else None)
    wide = make_small_model(TURNS, HIDDEN)
    walks = {where: _time_walk(where, 1, device, kernels, wide) for where in (PINNED, ON_CPU, "turns")}
    thin = _time_walk(PINNED, 1, device, kernels)
    if not lanes:
        return _on_one_side(side, walks, thin)
    walks |= {where: _time_walk(where, 1, device, kernels, wide) for where in (STREAMED, "pairs")}
    step = max(LEAST, (thin - _time_walk(PINNED, 1, device, kernels, make_small_model(LAYERS // 2))) / LAYERS)
    busy = NoKernels(fast[0], Fills(device)), kernels[1]
    half, whole = (_time_decoding(n, device, busy) for n in (LAYERS // 2, LAYERS))
    return _between_lanes(side, walks, step, 2 * half - whole)


def _on_one_side(side: str, walks: dict[str, float], thin: float) -> StepFigures:
    """Of the CPU as accelerator. thin: a walk over LAYERS layers; walks: over TURNS."""
    units, on_cpu = 2 * TURNS + 2, TURNS + 1  # by turns: the FFNs and the embedding, which always is
    share = (units - on_cpu) / (units - 1)  # of the pinned walk's other units, and of its half a hand-off
    # by turns a unit of the host may cost less, hand-off included, than one of many behind each other
    host = min(walks[ON_CPU] / units, max(LEAST, (walks["turns"] - share * walks[PINNED]) / (on_cpu - share)))
    # a walk with n units on the host, of which the embedding is one, has n - 1/2 hand-offs there and back
    pinned = walks[PINNED] - host
    handoff = max(LEAST, (walks["turns"] - on_cpu * host - share * pinned) / (on_cpu - 0.5 - 0.5 * share))
    seconds = {(side, "step"): thin / (2 * LAYERS + 2), ("host", "step"): host}
    return StepFigures(_rows(seconds), handoff)


def _between_lanes(side: str, walks: dict[str, float], step: float, begun: float) -> StepFigures:
    """Of an accelerator that works on its own. step: what a unit adds to a walk. begun: what a token of an engine takes
    beside its units where these take longer than the host needs to make the next walk, as it does meanwhile.

    A walk by n units of the host, of which the embedding is one, begins once, has n hand-offs there and back, the last
    with the logits, and its other units add a `step` each.
    """
    units = 2 * TURNS + 2
    trip = max(2 * LEAST, (walks["turns"] - walks[PINNED]) / TURNS + step)  # a unit of the host with its hand-off
    alone = max(0.0, walks[PINNED] - trip - (units - 1) * step)  # what these walks take beside their units
    # by turns a unit of the host may cost less than one of many behind each other
    host = min(max(LEAST, (walks[ON_CPU] - alone) / units), trip - LEAST)
    copy = max(LEAST, (walks[STREAMED] - walks["turns"]) / TURNS)
    on_cpu, copied = TURNS // 2 + 1, 3 * TURNS // 2  # in pairs; a unit that is copied begins a run
    others = alone + on_cpu * trip + (units - on_cpu) * step + copied * copy
    run = max(LEAST, (walks["pairs"] - others) / (copied - on_cpu + 1))
    own = {"step": step, "turn": max(LEAST, begun - trip), "copy": copy, "run": run}
    return StepFigures(_rows({(side, what): s for what, s in own.items()} | {("host", "step"): host}), trip - host)


def _rows(seconds: dict[tuple[str, str], float]) -> tuple[ElementwiseTiming, ...]:
    return tuple(ElementwiseTiming(*key, 1, 1, s) for key, s in seconds.items())


def time_launch(side: str, device: Device, fast: tuple[Kernels, Kernels]) -> ElementwiseTiming:
    """Seconds that launching a unit's kernels takes on an accelerator ("acc") where no graph holds them: for a prompt
    that is not a full micro-batch, over matrices so small that computing takes less time."""
    spec = make_small_model()
    return ElementwiseTiming(side, "launch", 1, 1, _time_walk(PINNED, PROMPT, device, fast) / len(spec.units))


def _time_walk(
    where: str,
    tokens: int,
    device: Device,
    kernels: tuple[Any, Any],
    spec: ModelSpec | None = None,
) -> float:
    """Seconds of a walk with so many tokens over a small model, placed as `_one_tier` says, less what `kernels` of the
    host kept account of."""
    many = AGAIN if where == PINNED and tokens == 1 else 1  # short ones, of which differences are taken
    with open_executor(where, tokens, device, kernels, spec or make_small_model()) as executor:
        return time_runs(executor, tokens, many, kernels[1])


def time_runs(executor: Executor, tokens: int, many: int, host: Any) -> float:
    """The median seconds of `many` times WALKS micro-batches, less what kernels of the host kept account of."""
    segments = (Segment(0, 0, tokens, 1, tuple(range(kv_blocks(tokens + 1, 1)))),)
    samples: list[float] = []
    for _ in range(many * WALKS):
        start, elsewhere = time.perf_counter(), getattr(host, "seconds", 0.0)
        executor.run([0] * tokens, segments, Batch((Span(tokens, 1),)), lambda: segments, foresee=lambda: segments)
        samples.append(time.perf_counter() - start - (getattr(host, "seconds", 0.0) - elsewhere))
    return statistics.median(samples[many * WARM_UPS :])


def _time_decoding(layers: int, device: Device, kernels: tuple[Any, Any]) -> float:
    """Seconds of a token by an engine over a small model of so many layers, all of it pinned."""
    samples: list[float] = []
    with open_executor(PINNED, 1, device, kernels, make_small_model(layers)) as executor:
        engine = make_engine(executor, 1)
        for _ in range(AGAIN * WALKS):
            start = time.perf_counter()
            engine.forward([0])
            samples.append(time.perf_counter() - start)
    return statistics.median(samples[AGAIN * WARM_UPS :])


def make_engine(executor: Executor, tokens: int, head: Executor | None = None) -> Engine:
    """An engine over an executor of `open_executor`, for micro-batches of so many tokens. head: drafts for it."""
    plan = executor.plan
    workload = Workload((plan.budget_mib,), CONTEXT, max_ubatch=tokens, prompt=1, generated=1)
    store = cast(KVStore, None)  # nothing is saved
    variant = Variant(workload, True, (plan,), drafter=head.plan if head else None)
    return Engine(executor, variant, None, (), lambda: None, store, head=head)


@contextmanager
def open_executor(
    where: str, tokens: int, device: Device, kernels: tuple[Any, Any], spec: ModelSpec
) -> Iterator[Executor]:
    """An executor of a model placed as `_one_tier` says, for micro-batches of so many tokens."""
    with open_plan(spec, _one_tier(where, spec, 1 if tokens == 1 else 2 * tokens), device, kernels) as executor:
        yield executor


@contextmanager
def open_plan(
    spec: ModelSpec, plan: RankPlan, device: Device, kernels: tuple[Any, Any], play: RoutingPlay | None = None
) -> Iterator[Executor]:
    """An executor of a model under a plan. play: what its tokens choose."""
    weights = HostWeights(map(whole_unit, spec.units), device)
    weights.lock()
    states = StateShape(CONTEXT, 1, "bf16", "bf16")
    arena = device.allocate(plan.budget_mib << 20)
    executor = Executor(spec, plan, device, arena, weights, states, kernels, Group(), play=play)
    yield executor
    executor.close()
    weights.close()


def make_small_model(layers: int = LAYERS, d_model: int = THIN) -> ModelSpec:
    """A model whose matrices have THIN rows or columns; there are two heads of half as many."""
    config = ModelConfig(
        "llama",
        layers,
        d_model,
        n_heads=2,
        n_kv_heads=1,
        head_dim=THIN // 2,
        d_ffn=THIN,
        vocab=THIN,
        norm_eps=1e-6,
        context=CONTEXT,
        rope=Rope(THIN // 2, 1e4, "halves"),
    )
    units = [Unit(EMBEDDING.name, EMBEDDING, -1, (_tensor("token_embd.weight", THIN, d_model),))]
    for i in range(layers):
        attention = (
            _tensor(f"blk.{i}.attn_norm.weight", d_model),
            *(_tensor(f"blk.{i}.attn_{part}.weight", n, d_model) for part, n in (("q", THIN), ("k", 32), ("v", 32))),
            _tensor(f"blk.{i}.attn_output.weight", d_model, THIN),
        )
        ffn = (
            _tensor(f"blk.{i}.ffn_norm.weight", d_model),
            *(_tensor(f"blk.{i}.ffn_{part}.weight", THIN, d_model) for part in ("gate", "up")),
            _tensor(f"blk.{i}.ffn_down.weight", d_model, THIN),
        )
        units.append(Unit(f"attention.{i}", ATTENTION, i, attention))
        units.append(Unit(f"ffn.{i}", FFN, i, ffn))
    head = (_tensor("output_norm.weight", d_model), _tensor("output.weight", THIN, d_model))
    units.append(Unit(OUTPUT.name, OUTPUT, -1, head))
    return ModelSpec("step cost", "", config, tuple(units))


def _tensor(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, "F32", shape)


def _one_tier(where: str, spec: ModelSpec, tokens: int) -> RankPlan:
    """All units PINNED or ON_CPU, or by "turns": attention pinned, FFNs on the CPU; STREAMED: attention streamed
    instead; "pairs": of every second layer the FFN as well. The output is pinned but with ON_CPU, and the
    embedding is looked up on the host."""
    places = {u.name: _place(where, u) for u in spec.units}
    kv = {u.name: HOST.name if where == ON_CPU else VRAM.name for u in spec.units if u.kind.state}
    placements = tuple(Placement(name, at, kv.get(name)) for name, at in places.items())
    pins = tuple(u for u, at in places.items() if at == PINNED)
    slots = SLOTS if STREAMED in places.values() else 0
    slot = max((u.packed_nbytes for u in spec.units if places[u.name] == STREAMED), default=0)
    unknown = Prediction(0.0, 0.0, (), "", 0, 0)
    buffers = Buffers(0, 0, slots, slot, 0)
    tier = TierPlan(tokens, placements, buffers, unknown, Solve("", 0.0, 0.0, ""))
    arena = SPARE_MIB + (spec.packed_nbytes >> 20)
    return RankPlan(0, arena, 1.0, pins, tuple(u for u, at in kv.items() if at == VRAM.name), (tier,))


def _place(where: str, unit: Unit) -> str:
    if where == ON_CPU or unit.kind.is_looked_up:
        return ON_CPU
    if where == PINNED or unit.kind.gives_logits:
        return PINNED
    if not unit.kind.state and (where != "pairs" or unit.layer % 2):
        return ON_CPU
    return PINNED if where == "turns" else STREAMED
