"""The executor's own cost per unit: it walks real steps over a small model whose kernels do nothing, or next to it."""

from typing import Any

import torch

from pshard.buffers import SMALL_BATCH, kv_blocks
from pshard.machine import ElementwiseTiming
from pshard.model import ModelConfig, ModelSpec, Rope, TensorSpec, Unit
from pshard.plan import Buffers, Placement, Prediction, RankPlan, Solve, TierPlan
from pshard.profile.timing import Pace, median_seconds
from pshard.runtime.device import Device
from pshard.runtime.executor import Executor, Group
from pshard.runtime.kernels.api import Kernels, Segment
from pshard.runtime.kv_cache import KVShape
from pshard.runtime.weights import HostWeights

LAYERS, WIDTH, CONTEXT = 32, 64, 256
PROMPT = 2 * SMALL_BATCH  # tokens
ARENA_BYTES = 16 << 20


class NoKernels:
    """Stands in for kernels of the same kind, and does nothing."""

    def __init__(self, real: Kernels) -> None:
        self.act_dtype, self.repeatable = real.act_dtype, real.repeatable

    def _nothing(self, *arguments: Any) -> None:
        pass

    rms_norm = linear = linear_group = gate_up = rope_store = attention = _nothing

    def ffn(self, *arguments: Any) -> bool:
        return True


def time_step(side: str, device: Device, fast: tuple[Kernels, Kernels], pace: Pace) -> ElementwiseTiming:
    """Seconds that the executor adds to every unit on a side ("host" or "acc").

    fast: the kernels of the accelerator and of the host that it stands in for.
    """
    kernels: Any = NoKernels(fast[0]), NoKernels(fast[1])
    seconds = _time_walk("cpu" if side == "host" else "pinned", 1, device, kernels, pace)
    return ElementwiseTiming(side, "step", 1, 1, seconds)


def time_launch(side: str, device: Device, fast: tuple[Kernels, Kernels], pace: Pace) -> ElementwiseTiming:
    """Seconds that launching a unit's kernels takes on an accelerator ("acc") where no graph holds them: for a prompt
    that is not a full micro-batch, over matrices so small that computing takes less time."""
    return ElementwiseTiming(side, "launch", 1, 1, _time_walk("pinned", PROMPT, device, fast, pace))


def _time_walk(where: str, tokens: int, device: Device, kernels: tuple[Kernels, Kernels], pace: Pace) -> float:
    """Seconds per unit of a walk with so many tokens over the small model, all of it placed there."""
    spec = _small_model()
    plan = _one_tier(where, spec, 1 if tokens == 1 else 2 * tokens)
    weights = HostWeights(spec.units, device)
    kv = KVShape(CONTEXT, 1, "bf16", "bf16")
    executor = Executor(spec, plan, device, device.allocate(ARENA_BYTES), weights, kv, kernels, Group())
    ids = torch.zeros(tokens, dtype=torch.int64)
    segments = (Segment(0, 0, tokens, 1, tuple(range(kv_blocks(tokens + 1, 1)))),)

    def run(i: int) -> None:
        executor.run(ids, segments, [tokens - 1], lambda: [(0, 1)])

    seconds = median_seconds(run, pace)
    executor.close()
    weights.close()
    return seconds / len(spec.units)


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


def _one_tier(where: str, spec: ModelSpec, tokens: int) -> RankPlan:
    kv = "host" if where == "cpu" else "vram"
    placements = (
        Placement("embedding", "cpu"),
        *(Placement(u.name, where, kv if u.kind == "attention" else None) for u in spec.units[1:]),
    )
    pins = tuple(u.name for u in spec.units[1:]) if where == "pinned" else ()
    layers = tuple(u.name for u in spec.units if u.kind == "attention") if where == "pinned" else ()
    unknown = Prediction(0.0, 0.0, (), "", 0, 0)
    tier = TierPlan(tokens, placements, Buffers(0, 0, 0, 0, 0), unknown, Solve("", 0.0, 0.0, 0.0, 0.0, ""))
    return RankPlan(0, ARENA_BYTES >> 20, 1.0, pins, layers, (tier,))
