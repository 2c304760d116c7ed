"""Gated short convolutions: every device's kernels against float64.

Triton's run on a GPU when there is one, else in the interpreter in a process of their own.
"""

import importlib.util
import os
from itertools import pairwise

import pytest
import torch
from interpreted import expect_interpreted_to_pass, mend_interpreter
from random_weights import DEVICE

from pshard.runtime.kernels.api import OpenNet
from pshard.runtime.kernels.cpu import native
from pshard.runtime.kernels.cpu.host import HostKernels
from pshard.runtime.kernels.plain import PlainKernels

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
OPEN = [((6, 1, 3), (4, -1, 3)), ((4, 70, 2), (1, -1, 0)), ((16, 2), (16, 2))]  # tokens; those that hold, -1: no draft
PARTS = {"one token": [1], "few, and none": [3, 0, 1, 8], "prompts": [70, 0, 33, 1]}  # tokens of each sequence

if INTERPRETED:
    mend_interpreter()


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON or INTERPRETED or DEVICE == "cuda", reason="Triton's kernels run here directly")
def test_the_kernels_of_gpus_in_the_interpreter() -> None:
    expect_interpreted_to_pass(__file__)


def check(kernels, parts: list[int], taps: int, bound: float, device: str = "cpu") -> None:
    """Two micro-batches, of which the second goes on where the first ended; rows behind the last touch nothing."""
    channels, slots = 160, [2, 0, 3, 1][: len(parts)]
    draw = torch.Generator().manual_seed(1)
    weights = torch.randn(channels, taps, generator=draw)
    tails = torch.randn(5, taps - 1, channels, generator=draw)
    wanted, tails, weights = tails.double(), tails.to(device), weights.to(device)
    offsets = [sum(parts[:i]) for i in range(len(parts) + 1)]
    index = (torch.tensor(values, dtype=torch.int32, device=device) for values in (slots, offsets))
    index = tuple(index)
    for _ in range(2):
        x = torch.randn(offsets[-1] + 2, 3 * channels, generator=draw).to(kernels.act_dtype)
        out = torch.full((len(x), channels), 7.0, dtype=kernels.act_dtype, device=device)
        kernels.short_conv(x.to(device), weights, tails, *index, out=out, longest=max(parts))
        for slot, first, end in zip(slots, offsets, offsets[1:]):
            for row in range(first, end):
                given, gate, by = x[row].double().chunk(3)
                seen = torch.cat((wanted[slot], (given * by)[None]))
                expected = gate * (seen * weights.cpu().double().T).sum(0)
                assert (out[row].cpu().double() - expected).abs().max() < bound * expected.abs().max(), row
                wanted[slot] = seen[1:]
        assert (out[offsets[-1] :] == 7).all()
        assert (tails.cpu().double() - wanted).abs().max() < 1e-5


@pytest.mark.parametrize("taps", [2, 3, 5])
@pytest.mark.parametrize("parts", PARTS.values(), ids=list(PARTS))
@pytest.mark.parametrize("kernels", [PlainKernels(), HostKernels()], ids=["plain", "host"])
def test_channels_see_their_last_inputs(kernels, parts: list[int], taps: int) -> None:
    check(kernels, parts, taps, 1e-5)


def check_open(kernels, parts: tuple[int, ...], held: tuple[int, ...], taps: int, device: str = "cpu") -> None:
    """Open rows, beside a prompt too, give what tokens give that come one by one, and change tails when it is said
    which of them hold."""
    channels, slots, draw = 160, [2, 0, 3][: len(parts)], torch.Generator().manual_seed(2)
    weights, before = (
        torch.randn(*shape, generator=draw).to(device) for shape in ((channels, taps), (5, taps - 1, 160))
    )
    x = torch.randn(sum(parts), 3 * channels, generator=draw).to(kernels.act_dtype).to(device)
    opened = torch.full((len(x), channels + 3), torch.nan, device=device)

    def run(
        rows: slice, slots: list[int], offsets: list[int], tails: torch.Tensor, **more: torch.Tensor
    ) -> torch.Tensor:
        index = (torch.tensor(values, dtype=torch.int32, device=device) for values in (slots, offsets))
        out, longest = torch.empty_like(x[rows, :channels]), max(b - a for a, b in pairwise(offsets))
        kernels.short_conv(x[rows], weights, tails, *index, out=out, longest=longest, **more)
        return out

    offsets = [sum(parts[:i]) for i in range(len(parts) + 1)]
    tails = before.clone()
    places = [slot if kept < 0 else -1 - slot for slot, kept in zip(slots, held)]
    out = run(slice(None), places, offsets, tails, opened=opened)
    for slot, kept, first, end in zip(slots, held, offsets, offsets[1:]):
        if kept < 0:
            assert not torch.equal(tails[slot], before[slot])
            continue
        assert torch.equal(tails[slot], before[slot])
        kernels.settle_states([OpenNet(tails, opened)], slot, slice(first, first + kept))
        alone, wanted = before.clone(), before[slot]
        for row in range(first, end):
            assert torch.equal(out[row], run(slice(row, row + 1), [slot], [0, 1], alone)[0])
            wanted = alone[slot].clone() if row < first + kept else wanted
        assert torch.equal(tails[slot], wanted)


@pytest.mark.skipif(not native.is_available(), reason=f"no C++ library: {native.why_missing()}")
def test_threads_that_are_put_aside_change_no_bit() -> None:
    """No token goes into a tail twice where another thread computes channels again."""
    before, draw = native.threads(), torch.Generator().manual_seed(3)
    x, taps = torch.randn(9, 3 * 4096, generator=draw), torch.randn(4096, 3, generator=draw)
    tails, slots, offsets = torch.randn(2, 2, 4096, generator=draw), torch.tensor([1, 0]), torch.tensor([0, 8, 9])
    stop, made = native._C["stop_helpers"], []
    native.set_threads(3)
    try:
        for point in (0, 2, 3):  # none, taken, worked
            now, out = tails.clone(), torch.empty(9, 4096)
            stop(point)
            HostKernels().short_conv(x, taps, now, slots.int(), offsets.int(), out=out, longest=8)
            stop(0)
            made.append(torch.cat((out.flatten(), now.flatten())))
        assert torch.equal(made[0], made[1]) and torch.equal(made[0], made[2])
    finally:
        stop(0)
        native.set_threads(before)


@pytest.mark.parametrize(("parts", "held"), OPEN, ids=str)
@pytest.mark.parametrize("kernels", [PlainKernels(), HostKernels()], ids=["plain", "host"])
def test_open_rows_that_hold_leave_the_bits_that_they_have_alone(
    kernels, parts: tuple[int, ...], held: tuple[int, ...]
) -> None:
    for taps in (2, 3, 5):
        check_open(kernels, parts, held, taps)


@pytest.mark.skipif(not HAS_TRITON or not (INTERPRETED or DEVICE == "cuda"), reason="runs in the interpreter")
@pytest.mark.parametrize("taps", [2, 3, 4])
@pytest.mark.parametrize("parts", PARTS.values(), ids=list(PARTS))
def test_channels_see_their_last_inputs_on_gpus(parts: list[int], taps: int) -> None:
    from pshard.runtime.kernels.gpu.cuda import CudaKernels

    check(CudaKernels(DEVICE, 64), parts, taps, 0.02, DEVICE)


@pytest.mark.skipif(not HAS_TRITON or not (INTERPRETED or DEVICE == "cuda"), reason="runs in the interpreter")
@pytest.mark.parametrize("taps", [2, 4])
@pytest.mark.parametrize(("parts", "held"), OPEN, ids=str)
def test_open_rows_that_hold_leave_the_bits_that_they_have_alone_on_gpus(
    parts: tuple[int, ...], held: tuple[int, ...], taps: int
) -> None:
    from pshard.runtime.kernels.gpu.cuda import CudaKernels

    check_open(CudaKernels(DEVICE, 64), parts, held, taps, DEVICE)
