"""The executor's own cost per unit: it walks real steps over a small model whose kernels do nothing."""

from typing import Any

import torch

from pshard.machine import ElementwiseTiming
from pshard.model import ModelConfig, ModelSpec, Rope, TensorSpec, Unit
from pshard.plan import Buffers, Placement, Prediction, RankPlan, Solve, TierPlan
from pshard.profile.timing import Pace, median_seconds
from pshard.runtime.device import Device
from pshard.runtime.executor import Executor, Group
from pshard.runtime.kernels.api import Kernels, Segment
from pshard.runtime.kv_cache import KVShape
from pshard.runtime.weights import HostWeights

LAYERS, WIDTH, CONTEXT = 32, 64, 64
ARENA_BYTES = 16 << 20


class NoKernels:
    """Stands in for kernels of the same kind, and does nothing."""

    def __init__(self, real: Kernels) -> None:
        self.act_dtype, self.repeatable = real.act_dtype, real.repeatable

    def _nothing(self, *arguments: Any) -> None:
        pass

    rms_norm = linear = linear_group = gate_up = rope_store = attention = _nothing


def time_step(side: str, device: Device, fast: tuple[Kernels, Kernels], pace: Pace) -> ElementwiseTiming:
    """Seconds that the executor adds to every unit on a side ("host" or "acc").

    fast: the kernels of the accelerator and of the host that it stands in for.
    """
    spec = _small_model()
    plan = _one_tier("cpu" if side == "host" else "pinned", spec)
    kernels: Any = NoKernels(fast[0]), NoKernels(fast[1])
    weights = HostWeights(spec.units, device)
    kv = KVShape(CONTEXT, 1, "bf16", "bf16")
    executor = Executor(spec, plan, device, device.allocate(ARENA_BYTES), weights, kv, kernels, Group())
    ids, segments = torch.zeros(1, dtype=torch.int64), (Segment(0, 0, 1, 1, (0,)),)

    def run(i: int) -> None:
        executor.run(ids, segments, [0], lambda: [(0, 1)])

    seconds = median_seconds(run, pace)
    executor.close()
    weights.close()
    return ElementwiseTiming(side, "step", 1, 1, seconds / len(spec.units))


def _small_model() -> ModelSpec:
    rope = Rope(dims=32, base=10000.0, pairing="halves")
    config = ModelConfig("llama", LAYERS, WIDTH, 2, 1, 32, WIDTH, WIDTH, 1e-6, CONTEXT, rope)
    units = [Unit("embedding", "embedding", -1, (_matrix("token_embd.weight", WIDTH),))]
    for i in range(LAYERS):
        heads = [_matrix(f"blk.{i}.attn_{part}.weight", rows) for part, rows in (("q", 64), ("k", 32), ("v", 32))]
        attention = (_norm(f"blk.{i}.attn_norm.weight"), *heads, _matrix(f"blk.{i}.attn_output.weight", WIDTH))
        ffn = [_matrix(f"blk.{i}.ffn_{part}.weight", WIDTH) for part in ("gate", "up", "down")]
        units.append(Unit(f"attention.{i}", "attention", i, attention))
        units.append(Unit(f"ffn.{i}", "ffn", i, (_norm(f"blk.{i}.ffn_norm.weight"), *ffn)))
    units.append(Unit("output", "output", -1, (_norm("output_norm.weight"), _matrix("output.weight", WIDTH))))
    return ModelSpec("step cost", "", config, tuple(units))


def _norm(name: str) -> TensorSpec:
    return TensorSpec(name, "F32", (WIDTH,))


def _matrix(name: str, rows: int) -> TensorSpec:
    return TensorSpec(name, "F32", (rows, WIDTH))


def _one_tier(where: str, spec: ModelSpec) -> RankPlan:
    kv = "host" if where == "cpu" else "vram"
    placements = (
        Placement("embedding", "cpu"),
        *(Placement(u.name, where, kv if u.kind == "attention" else None) for u in spec.units[1:]),
    )
    pins = tuple(u.name for u in spec.units[1:]) if where == "pinned" else ()
    layers = tuple(u.name for u in spec.units if u.kind == "attention") if where == "pinned" else ()
    unknown = Prediction(0.0, 0.0, (), "", 0, 0)
    tier = TierPlan(1, placements, Buffers(0, 0, 0, 0, 0), unknown, Solve("", 0.0, 0.0, 0.0, 0.0, ""))
    return RankPlan(0, ARENA_BYTES >> 20, 1.0, pins, layers, (tier,))
