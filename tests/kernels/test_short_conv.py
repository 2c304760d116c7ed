"""Gated short convolutions: every device's kernels against float64.

Triton's run on a GPU when there is one, else in the interpreter in a process of their own.
"""

import importlib.util
import os

import pytest
import torch
from interpreted import expect_interpreted_to_pass, mend_interpreter
from random_weights import DEVICE

from pshard.runtime.kernels.cpu.host import HostKernels
from pshard.runtime.kernels.plain import PlainKernels

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
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


@pytest.mark.skipif(not HAS_TRITON or not (INTERPRETED or DEVICE == "cuda"), reason="runs in the interpreter")
@pytest.mark.parametrize("taps", [2, 3, 4])
@pytest.mark.parametrize("parts", PARTS.values(), ids=list(PARTS))
def test_channels_see_their_last_inputs_on_gpus(parts: list[int], taps: int) -> None:
    from pshard.runtime.kernels.gpu.cuda import CudaKernels

    check(CudaKernels(DEVICE, 64), parts, taps, 0.02, DEVICE)
