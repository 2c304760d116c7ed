"""What following use costs the host: a small model's experts move through slots, by choices that are made up.

Kernels do nothing, but those of the CPU read as much of the host's memory as layers may have, as in `step_cost.py`: so
what a step does with its slots meets caches that hold nothing of it. Choices are looked at, tables change and are sent,
and copies begin.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from pshard.homes import ON_CPU, PINNED, STREAMED, VRAM
from pshard.machine import ElementwiseTiming
from pshard.model import ModelSpec
from pshard.model_config import Experts
from pshard.plan import Buffers, Placement, Prediction, RankPlan, Solve, TierPlan
from pshard.profile.timed.step_cost import (
    LEAST,
    SPARE_MIB,
    WARM_UPS,
    NoKernels,
    Reads,
    make_small_model,
    open_plan,
    time_runs,
)
from pshard.routing.play_record import RoutingPlay
from pshard.routing.record import RoutingRecord, id_type
from pshard.runtime.devices.device import Device
from pshard.runtime.kernels.api import Kernels
from pshard.tensor import TensorSpec
from pshard.units.moe.expert_cache import ExpertCache, slot_nbytes
from pshard.units.moe.experts import DOWN, EXPERTS, GATE, UP
from pshard.units.moe.router import NORMS, ROUTER, WEIGHT
from pshard.units.unit import Unit

COUNT, USED, LAYERS, WIDTH = 256, 8, 32, 64  # as many experts as common models have; each is a row of each matrix
SLOTS, ADMITS, TOKENS = 512, 16, 512


def time_slots(side: str, device: Device, fast: tuple[Kernels, Kernels], reads: Reads) -> list[ElementwiseTiming]:
    """Seconds of a step's slots beside what comes to them, and of each expert that does."""
    kernels = NoKernels(fast[0]), NoKernels(fast[1], reads if device.kind != "cpu" else None)
    kept, moved = (_time_slots(make_mixture(), admits, device, kernels) for admits in (0, ADMITS))
    found = {"slots": kept, "admit": (moved - kept) / ADMITS}
    return [ElementwiseTiming(side, what, 1, 1, max(LEAST, seconds)) for what, seconds in found.items()]


def make_mixture() -> ModelSpec:
    """A small model whose FFNs are routers and experts."""
    spec = make_small_model(LAYERS, WIDTH)
    units = [part for unit in spec.units for part in (_list_parts(unit.layer) if _is_ffn(unit) else [unit])]
    return replace(spec, units=tuple(units), config=replace(spec.config, experts=Experts(COUNT, USED, 1)))


def _is_ffn(unit: Unit) -> bool:
    return unit.layer >= 0 and not unit.kind.state


def _list_parts(layer: int) -> list[Unit]:
    router = (
        TensorSpec(f"blk.{layer}.{NORMS[0]}", "F32", (WIDTH,)),
        TensorSpec(f"blk.{layer}.{WEIGHT}", "F32", (COUNT, WIDTH)),
    )
    shapes = {GATE: (COUNT, WIDTH), UP: (COUNT, WIDTH), DOWN: (COUNT * WIDTH, 1)}
    experts = tuple(TensorSpec(f"blk.{layer}.{role}", "F32", shape, COUNT) for role, shape in shapes.items())
    return [Unit(f"router.{layer}", ROUTER, layer, router), Unit(f"experts.{layer}", EXPERTS, layer, experts)]


def _time_slots(spec: ModelSpec, admits: int, device: Device, kernels: tuple[Any, Any]) -> float:
    """The median of what a step's slots take, with as many experts that come to them."""
    steps = list[float]()

    def timed(act: Callable[..., None], begins: bool) -> Callable[..., None]:
        def call(*arguments: int) -> None:
            start = time.perf_counter()
            act(*arguments)
            taken = time.perf_counter() - start
            steps.append(taken) if begins else steps.append(steps.pop() + taken if steps else taken)

        return call

    plan = _plan(spec, admits)
    with open_plan(replace(spec, caches=plan.caches), plan, device, kernels, _play()) as executor:
        slots: Any = executor.slots
        slots.observe, slots.begin = timed(slots.observe, True), timed(slots.begin, False)
        time_runs(executor, 1, 1, kernels[1])
    return statistics.median(steps[WARM_UPS:])


def _plan(spec: ModelSpec, admits: int) -> RankPlan:
    """All is pinned but experts: half of each layer is read in place, and half is the CPU's."""
    experts = [unit for unit in spec.units if unit.kind.parts]
    names = tuple(unit.name for unit in experts)
    cache = ExpertCache(names, SLOTS, slot_nbytes(experts[0]), "frequency", admits)
    placements = tuple(_place(unit) for unit in spec.units)
    unknown, buffers = Prediction(0.0, 0.0, (), "", 0, 0), Buffers(0, 0, 0, 0, 0, cached=cache.nbytes)
    tier = TierPlan(1, placements, buffers, unknown, Solve("", 0.0, 0.0, ""), in_place=True)
    pinned = tuple(unit.name for unit in spec.units if not (unit.kind.parts or unit.kind.is_looked_up))
    states = tuple(place.unit for place in placements if place.kv)
    arena = SPARE_MIB + (spec.packed_nbytes + cache.nbytes >> 20)
    return RankPlan(0, arena, 1.0, pinned, states, (tier,), caches=(cache,))


def _place(unit: Unit) -> Placement:
    if unit.kind.parts:
        return Placement(unit.name, STREAMED, None, COUNT // 2)
    if unit.kind.is_looked_up:
        return Placement(unit.name, ON_CPU, None)
    return Placement(unit.name, PINNED, VRAM.name if unit.kind.state else None)


def _play() -> RoutingPlay:
    """Tokens that choose at random, so that each misses as many as come."""
    drawn = np.random.default_rng(0).random((TOKENS, LAYERS, COUNT)).argsort(2)[:, :, :USED]
    record = RoutingRecord("", tuple(range(LAYERS)), COUNT, drawn.astype(id_type(COUNT)), (1,) * TOKENS)
    return RoutingPlay(record, 1)
