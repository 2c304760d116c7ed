"""Random inputs of a gated delta net, as its units bring them: rows of wider buffers, values as models have them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from pshard.runtime.kernels.api import DeltaWeights, OpenNet


@dataclass(frozen=True)
class DeltaCase:
    """The arguments of `Kernels.delta_net` by name."""

    qkv: torch.Tensor
    z: torch.Tensor
    beta: torch.Tensor
    alpha: torch.Tensor
    weights: DeltaWeights
    states: torch.Tensor
    tails: torch.Tensor
    slots: torch.Tensor
    offsets: torch.Tensor
    out: torch.Tensor


def make_weights(key_heads: int, value_heads: int, head: int, tiled: bool = False) -> DeltaWeights:
    """Decays from hardly any to a state that is forgotten at once."""
    generator = torch.Generator().manual_seed(1)
    channels = (2 * key_heads + value_heads) * head
    return DeltaWeights(
        torch.randn(channels, 4, generator=generator) * 0.5,
        torch.randn(value_heads, generator=generator),
        -torch.logspace(-3, 1.2, value_heads),
        torch.rand(head, generator=generator) + 0.5,
        1e-6,
        key_heads,
        value_heads,
        head,
        tiled,
    )


def make_case(
    lengths: tuple[int, ...],
    key_heads: int = 2,
    value_heads: int = 4,
    head: int = 16,
    tiled: bool = False,
    dtype: torch.dtype = torch.float32,
    padding: int = 0,
    slots: int = 0,
    device: str = "cpu",
) -> DeltaCase:
    """Sequences of so many new tokens, in slots in no order; `dtype`: of the states, and of the rows unless bfloat16 is
    asked for, where states stay float32. Nothing is written into `out` yet: it is NaN."""
    generator = torch.Generator().manual_seed(2)
    weights = make_weights(key_heads, value_heads, head, tiled)
    rows, slots = sum(lengths) + padding, slots or len(lengths) + 1
    channels, width = weights.conv.shape[0], value_heads * head
    wide = torch.randn(rows, channels + width + 2 * value_heads + 8, generator=generator).to(dtype)
    wide[sum(lengths) :] = torch.nan  # whoever reads padding spreads it
    kept = torch.float32 if dtype == torch.bfloat16 else dtype
    states = torch.randn(slots, value_heads, head, head, generator=generator).to(kept) * 0.3
    tails = torch.randn(slots, 3, channels, generator=generator).to(kept)
    at = torch.randperm(slots, generator=generator)[: len(lengths)].int()
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    out = torch.full((rows, width + 4), torch.nan, dtype=dtype)
    moved = replace(weights, **{n: getattr(weights, n).to(device) for n in ("conv", "dt_bias", "decay", "norm")})
    wide, out = wide.to(device), out.to(device)
    qkv, z, beta, alpha, _ = wide.split((channels, width, value_heads, value_heads, 8), 1)
    return DeltaCase(
        qkv,
        z,
        beta,
        alpha,
        moved,
        states.to(device),
        tails.to(device),
        at.to(device),
        offsets.to(device),
        out[:, :width],
    )


def shrink(case: DeltaCase) -> DeltaCase:
    """With inputs so small that the epsilon of the keys' norm counts."""
    case.qkv.mul_(2e-3)
    case.tails.mul_(2e-3)
    return case


def copy_case(case: DeltaCase) -> DeltaCase:
    """The same with an `out`, states and tails of its own. `out` keeps its stride: kernels add up rows in an order that
    depends on it."""
    out = torch.empty_strided(case.out.shape, case.out.stride(), dtype=case.out.dtype, device=case.out.device)
    return replace(case, out=out.copy_(case.out), states=case.states.clone(), tails=case.tails.clone())


def widen(case: DeltaCase) -> DeltaCase:
    """The same in float64: plain kernels then say what is right."""
    named = {name: value.double() for name, value in vars(case).items() if name not in ("weights", "slots", "offsets")}
    return replace(case, **named)


def run_case(kernels: Any, case: DeltaCase, longest: int = 0, scratch: torch.Tensor | None = None) -> None:
    """One micro-batch."""
    most = max(1, int((case.offsets[1:] - case.offsets[:-1]).max()))
    kernels.delta_net(**vars(case), longest=max(longest, most), scratch=scratch)


def run_cut(kernels: Any, case: DeltaCase, cut: tuple[int, ...] | None, scratch: torch.Tensor | None = None) -> None:
    """The tokens of the one sequence in micro-batches of these sizes; None: all sequences at once."""
    if cut is None:
        run_case(kernels, case, scratch=scratch)
        return
    first = 0
    for tokens in cut:
        rows = slice(first, first + tokens)
        named = {name: getattr(case, name)[rows] for name in ("qkv", "z", "beta", "alpha", "out")}
        offsets = torch.tensor([0, tokens], dtype=torch.int32, device=case.out.device)
        run_case(kernels, replace(case, **named, offsets=offsets), scratch=scratch)
        first += tokens


def take_rows(case: DeltaCase, i: int, at: int) -> DeltaCase:
    """One token of sequence i alone, with the states, tails and `out` of the case."""
    row = int(case.offsets[i]) + at
    named = {name: getattr(case, name)[row : row + 1] for name in ("qkv", "z", "beta", "alpha", "out")}
    offsets = torch.tensor([0, 1], dtype=torch.int32, device=case.out.device)
    return replace(case, **named, slots=case.slots[i : i + 1], offsets=offsets)


def run_open(kernels: Any, case: DeltaCase, held: tuple[int, ...], scratch: torch.Tensor | None = None) -> torch.Tensor:
    """One micro-batch whose sequences are open that have a number in `held`, not -1; so many of their rows are then
    taken into the states. Returns what open rows left."""
    rows, w = case.qkv.shape[0], case.weights
    width = w.conv.shape[0] + (w.key_heads + w.value_heads) * w.head + w.value_heads
    opened = torch.full((rows, width + 3), torch.nan, dtype=case.states.dtype, device=case.out.device)
    slots = case.slots.tolist()
    numbers = [slot if kept < 0 else -1 - slot for slot, kept in zip(slots, held, strict=True)]
    index = torch.tensor(numbers, dtype=torch.int32, device=case.out.device)
    longest = max(1, int((case.offsets[1:] - case.offsets[:-1]).max()))
    before = case.states.clone(), case.tails.clone()
    kernels.delta_net(**vars(replace(case, slots=index)), longest=longest, scratch=scratch, opened=opened)
    net = OpenNet(case.tails, opened, case.states, w.key_heads, w.tiled)
    for slot, kept, first in zip(slots, held, case.offsets.tolist()):
        if kept >= 0:
            for now, was in zip((case.states, case.tails), before):
                assert torch.equal(now[slot], was[slot])  # as they were, until it is known what holds
            kernels.settle_states([net], slot, slice(first, first + kept))
    return opened


def expect_open(
    kernels: Any,
    case: DeltaCase,
    together: DeltaCase,
    held: tuple[int, ...],
    alike: Callable[[torch.Tensor, torch.Tensor], bool],
) -> None:
    """What `run_open` made of a copy of the case is what tokens give that come one by one."""
    alone = copy_case(case)
    for i, kept in enumerate(held):
        if kept < 0:
            continue
        slot, rows = int(case.slots[i]), slice(int(case.offsets[i]), int(case.offsets[i + 1]))
        states, tails = [alone.states[slot].clone()], [alone.tails[slot].clone()]
        for at in range(rows.stop - rows.start):
            run_case(kernels, take_rows(alone, i, at))
            states.append(alone.states[slot].clone())
            tails.append(alone.tails[slot].clone())
        assert alike(together.out[rows], alone.out[rows])
        assert alike(together.states[slot], states[kept]) and alike(together.tails[slot], tails[kept])
