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

LAYERS, THIN, CONTEXT = 32, 64, 256
PROMPT = 2 * SMALL_BATCH  # tokens
TURNS, HIDDEN = 8, 5120  # layers and width of the model that changes sides: hidden vectors as long as real ones
LEAST_HANDOFF = 1e-7  # of a difference of noisy times
SPARE_MIB = 16  # of the arena, for all but weights


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


def time_handoff(device: Device, fast: tuple[Kernels, Kernels], pace: Pace) -> float:
    """Seconds in which the executor brings one hidden vector (float32 [HIDDEN]) to the host and back to the
    accelerator, beside its cost per unit: half of the units on either side, by turns, less as many on one alone."""
    kernels: Any = NoKernels(fast[0]), NoKernels(fast[1])
    spec = _small_model(TURNS, HIDDEN)
    turns, acc, host = (_time_walk(where, 1, device, kernels, pace, spec) for where in ("turns", "pinned", "cpu"))
    units, trips = len(spec.units) / 2, TURNS + 1 - 0.5  # on either side; a walk on the accelerator has one trip too
    return max(LEAST_HANDOFF, (2 * turns - acc - host) * units / trips)


def _time_walk(
    where: str,
    tokens: int,
    device: Device,
    kernels: tuple[Kernels, Kernels],
    pace: Pace,
    spec: ModelSpec | None = None,
) -> float:
    """Seconds per unit of a walk with so many tokens over a small model, placed as `_one_tier` says."""
    spec = spec or _small_model()
    plan = _one_tier(where, spec, 1 if tokens == 1 else 2 * tokens)
    weights = HostWeights(spec.units, device)
    kv = KVShape(CONTEXT, 1, "bf16", "bf16")
    arena = device.allocate(plan.budget_mib << 20)
    executor = Executor(spec, plan, device, arena, weights, kv, kernels, Group())
    ids = torch.zeros(tokens, dtype=torch.int64)
    segments = (Segment(0, 0, tokens, 1, tuple(range(kv_blocks(tokens + 1, 1)))),)

    def run(i: int) -> None:
        executor.run(ids, segments, [tokens - 1], lambda: [(0, 1)])

    seconds = median_seconds(run, pace)
    executor.close()
    weights.close()
    return seconds / len(spec.units)


def _small_model(layers: int = LAYERS, d_model: int = THIN) -> ModelSpec:
    """Matrices have THIN rows or columns; there are two heads of half as many."""
    config = ModelConfig(
        "llama", layers, d_model, 2, 1, THIN // 2, THIN, THIN, 1e-6, CONTEXT, Rope(THIN // 2, 1e4, "halves")
    )
    units = [Unit("embedding", "embedding", -1, (_tensor("token_embd.weight", THIN, d_model),))]
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
        units.append(Unit(f"attention.{i}", "attention", i, attention))
        units.append(Unit(f"ffn.{i}", "ffn", i, ffn))
    head = (_tensor("output_norm.weight", d_model), _tensor("output.weight", THIN, d_model))
    units.append(Unit("output", "output", -1, head))
    return ModelSpec("step cost", "", config, tuple(units))


def _tensor(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, "F32", shape)


def _one_tier(where: str, spec: ModelSpec, tokens: int) -> RankPlan:
    """All units "pinned" or on the "cpu", or by "turns": attention and output pinned, FFNs on the CPU. The embedding is
    looked up on the host."""
    places = {u.name: "cpu" if where == "cpu" or (where, u.kind) == ("turns", "ffn") else "pinned" for u in spec.units}
    places["embedding"] = "cpu"
    kv = {u.name: "host" if where == "cpu" else "vram" for u in spec.units if u.kind == "attention"}
    placements = tuple(Placement(name, at, kv.get(name)) for name, at in places.items())
    pins = tuple(u for u, at in places.items() if at == "pinned")
    unknown = Prediction(0.0, 0.0, (), "", 0, 0)
    tier = TierPlan(tokens, placements, Buffers(0, 0, 0, 0, 0), unknown, Solve("", 0.0, 0.0, 0.0, 0.0, ""))
    arena = SPARE_MIB + (spec.packed_nbytes >> 20)
    return RankPlan(0, arena, 1.0, pins, tuple(u for u, at in kv.items() if at == "vram"), (tier,))
