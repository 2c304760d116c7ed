"""Times routed experts whose weights lie in page-locked host memory: the kernel reads what was chosen over the link."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from pshard.machine import InPlaceTiming
from pshard.model_config import Experts
from pshard.profile.timed.operands import LEAST_ROTATION, OperandPool
from pshard.profile.timed.time_experts import expert_calls, rotate_layers
from pshard.profile.timed.time_kernels import KernelBench, time_series
from pshard.quant import packed_nbytes
from pshard.runtime.devices.device import Device
from pshard.units.moe.in_place import IN_PLACE_TOKENS
from pshard.units.operations import used_share

READ_TOKENS = tuple(1 << n for n in range(IN_PLACE_TOKENS.bit_length()))  # 1, 2, 4 up to IN_PLACE_TOKENS
Layer = tuple[str, str, int, Experts]  # type of gate and up, type of down, d_model, their rule


def time_in_place(bench: KernelBench, device: Device, layers: Sequence[Layer]) -> list[InPlaceTiming]:
    """Every layer's experts for a few numbers of tokens, as the runtime reads them in place; a layer whose experts are
    as large as another's takes as long. Empty where the system refuses to lock the operands' memory."""
    by_size = {_expert_nbytes(layer): layer for layer in reversed(layers)}
    if not by_size:
        return []
    pool = OperandPool(min(bench.pool.nbytes, LEAST_ROTATION), torch.device("cpu"))
    if not device.page_lock(pool.memory):
        return []
    try:
        there, rows = replace(bench, pool=pool), list[InPlaceTiming]()
        for nbytes, layer in by_size.items():
            if nbytes <= pool.nbytes:  # the pool would take other memory for a larger one
                rows += _time_layer(there, layer, nbytes)
        return rows
    finally:
        device.page_unlock(pool.memory)


def _time_layer(bench: KernelBench, layer: Layer, nbytes: int) -> list[InPlaceTiming]:
    gate, down, d_model, rule = layer
    weights = rotate_layers(bench, (gate, down), d_model, rule)
    calls = partial(expert_calls, bench, weights, rule, d_model)
    series = time_series(READ_TOKENS, bench.slow, lambda n: bench.seconds(calls(n), n))
    used = {n: rule.count * used_share(rule.used, rule.count, n) for n in READ_TOKENS}
    return [InPlaceTiming(bench.side, nbytes, n, round(used[n] * nbytes), seconds) for n, seconds in series]


def _expert_nbytes(layer: Layer) -> int:
    gate, down, d_model, rule = layer
    return 2 * packed_nbytes(gate, rule.d_expert, d_model) + packed_nbytes(down, d_model, rule.d_expert)
