"""Times gated delta nets through the kernels that the runtime calls: token by token and in chunks."""

from collections.abc import Sequence

import torch

from pshard.machine import DeltaTiming
from pshard.profile.timed.time_kernels import NORM_EPS, KernelBench, time_series
from pshard.runtime.kernels.api import DeltaWeights
from pshard.units.operations import DeltaNet


def time_delta(bench: KernelBench, net: DeltaNet, tokens: Sequence[int], sequences: int = 1) -> list[DeltaTiming]:
    """So many new tokens of each of so many sequences, until one is slow; every call continues other states. Nothing
    where the operand pool has no room for the states of all of them."""
    if sequences > 1 and sequences * net.state_nbytes > bench.pool.nbytes:
        return []
    series = time_series(tokens, bench.slow, lambda n: _time_one(bench, net, n, sequences))
    return [DeltaTiming(bench.side, *net.shape, n, sequences, seconds) for n, seconds in series]


def _time_one(bench: KernelBench, net: DeltaNet, tokens: int, sequences: int) -> float:
    rows, width, device = sequences * tokens, net.value_heads * net.head, bench.device
    shape = (sequences, net.value_heads, net.head, net.head)
    kept = [part.view(torch.float32).view(shape) for part in bench.pool.rotate_states(sequences * net.state_nbytes)]
    weights = DeltaWeights(
        torch.full((net.channels, 4), 0.25, device=device),
        torch.zeros(net.value_heads, device=device),
        torch.full((net.value_heads,), -0.05, device=device),
        torch.ones(net.head, device=device),
        NORM_EPS,
        *net.shape,
        net.tiled,
    )
    qkv, z, out = (bench.activations(rows, n) for n in (net.channels, width, width))
    beta, alpha = (bench.activations(rows, net.value_heads) for _ in range(2))
    tails = torch.zeros(sequences, 3, net.channels, device=device)
    slots = torch.arange(sequences, dtype=torch.int32, device=device)
    offsets = torch.arange(0, rows + 1, tokens, dtype=torch.int32, device=device)
    nbytes = net.scratch_nbytes(rows, sequences, out.element_size()) if device.type == "cuda" else 0
    scratch = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def run(i: int) -> None:
        bench.kernels.delta_net(
            qkv, z, beta, alpha, weights, kept[i % len(kept)], tails=tails, slots=slots, offsets=offsets, out=out,
            longest=tokens, scratch=scratch,
        )  # fmt: skip

    return bench.seconds(run, rows)
