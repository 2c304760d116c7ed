"""Several residual streams and n-grams: every device's kernels against plain torch.

Triton's run on a GPU when there is one, else in the interpreter in a process of their own.
"""

import importlib.util
import os
from typing import Any

import pytest
import torch
from interpreted import expect_interpreted_to_pass, mend_interpreter
from random_weights import DEVICE

from pshard.runtime.kernels.api import Kernels
from pshard.runtime.kernels.cpu.host import HostKernels
from pshard.runtime.kernels.plain import PlainKernels

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = pytest.mark.skipif(not HAS_TRITON or not (INTERPRETED or DEVICE == "cuda"), reason="runs in the interpreter")
SIZES = [(1, 4, 160), (5, 2, 96), (3, 3, 50), (400, 4, 96)]  # rows, streams, elements of each
FEW = [*SIZES[:3], (70, 2, 96)]
EPS = 1e-5

if INTERPRETED:
    mend_interpreter()


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON or INTERPRETED or DEVICE == "cuda", reason="Triton's kernels run here directly")
def test_the_kernels_of_gpus_in_the_interpreter() -> None:
    expect_interpreted_to_pass(__file__, "kernels_of_gpus")


def draw(*shape: int, seed: int) -> torch.Tensor:
    """Random numbers in rows that lie farther apart than they are long."""
    wide = torch.randn(*shape[:-1], shape[-1] + 12, generator=torch.Generator().manual_seed(seed))
    return wide[..., : shape[-1]]


def expect_alike(kernels: Kernels, device: str, sizes: tuple[int, int, int]) -> None:
    """What goes into streams, their norms and their mix are as in plain torch."""
    (rows, count, width), plain, close = sizes, PlainKernels(), 2e-6 if kernels.act_dtype == torch.float32 else 0.01
    given, weight = draw(rows, width, seed=1), draw(count * width, seed=2)
    gates, x = (draw(rows, count * width, seed=seed).to(kernels.act_dtype) for seed in (3, 4))

    def run(by: Kernels, to: str) -> list[torch.Tensor]:
        streams, kind = draw(rows, count * width + 4, seed=5).to(to), by.act_dtype
        found, given_to, weight_to = [], given.to(to), weight.to(to)
        for call in ("inject", "norm", "enter", "spread", "enter spread", "mix"):
            out = torch.full((rows, count * width + 8), 7.0, dtype=kind, device=to)[:, : count * width]
            if call == "inject":
                by.inject_stream(given_to, streams, count)
            elif call == "spread":
                by.spread_stream(given_to, streams, count)
            elif call == "norm":
                by.norm_streams(streams, weight_to, count, EPS, out)
            elif call == "mix":
                mixed, cleared = torch.ones(rows, width + 3, device=to), torch.ones(rows, width, device=to)
                by.mix_streams(x.to(kind).to(to), gates.to(kind).to(to), count, mixed[:, :width], cleared)
                assert not cleared.any()
                assert (mixed[:, width:] == 1).all()
                found.append(mixed)
            else:
                by.enter_streams(given_to, streams, "spread" in call, weight_to, count, EPS, out)
            found += [streams.clone(), out]
        return [part.float().cpu() for part in found]

    for found, wanted in zip(run(kernels, device), run(plain, "cpu"), strict=True):
        assert (found - wanted).abs().max() < close * wanted.abs().max()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_streams_are_as_in_plain_torch(sizes: tuple[int, int, int]) -> None:
    expect_alike(HostKernels(), "cpu", sizes)


@ON_GPU
@pytest.mark.parametrize("sizes", FEW, ids=str)
def test_kernels_of_gpus_have_streams_as_in_plain_torch(sizes: tuple[int, int, int]) -> None:
    from pshard.runtime.kernels.gpu.cuda import CudaKernels

    expect_alike(CudaKernels(DEVICE, 64), DEVICE, sizes)


@ON_GPU
@pytest.mark.parametrize("sizes", [(1, 8, 96), (3, 2, 128)], ids=str)
def test_kernels_of_gpus_leave_norms_of_streams_quantised(sizes: tuple[int, int, int]) -> None:
    from pshard.runtime.kernels.gpu.cuda import CudaKernels

    kernels, (rows, count, width) = CudaKernels(DEVICE, 64), sizes
    given, weight = draw(rows, width, seed=1).to(DEVICE), draw(count * width, seed=2).to(DEVICE)
    streams = draw(rows, count * width + 4, seed=5).to(DEVICE)
    out = torch.empty(rows, count * width, dtype=torch.bfloat16, device=DEVICE)
    kernels.enter_streams(given, streams, False, weight, count, EPS, out)
    ready, _ = kernels._activations.find(out)
    assert ready is not None
    left = [part.clone() for part in ready]
    kernels.forget()
    fresh, _ = kernels._activations.quantise(out)
    for mine, other, each in zip(left, fresh, (8, 1, 2)):  # rows have no room behind their whole eights of chunks
        used = rows * count * width // 32 * each
        assert torch.equal(mine[:used], other[:used])


def test_a_row_alone_has_the_bits_that_it_has_among_others() -> None:
    kernels, (rows, count, width) = HostKernels(), SIZES[-1]
    given, weight, streams = (
        draw(rows, width, seed=1),
        draw(count * width, seed=2),
        draw(rows, count * width + 4, seed=5),
    )
    out = torch.empty(rows, count * width)
    alone, own = streams[7:8].clone(), torch.empty(1, count * width)
    kernels.enter_streams(given, streams, False, weight, count, EPS, out)
    kernels.enter_streams(given[7:8], alone, False, weight, count, EPS, own)
    assert torch.equal(own, out[7:8])
    assert torch.equal(alone, streams[7:8])


def make_grams(parts: list[int], count: int, width: int, taps: int, apart: int) -> dict[str, Any]:
    """Of sequences of so many tokens, with as many rows behind them that are nobody's; the second one's are open."""
    wide, rows = count * width, sum(parts) + 2
    slots = [2, -1, 3, 1][: len(parts)]
    offsets = [sum(parts[:i]) for i in range(len(parts) + 1)]
    return {
        "x": draw(rows, wide, seed=1), "norm": draw(wide, seed=2), "taps": torch.randn(wide, taps),
        "sizes": (count, apart),
        "eps": EPS, "streams": draw(rows, wide + 4, seed=4).clone(), "tails": torch.randn(4, (taps - 1) * apart, wide),
        "slots": torch.tensor(slots, dtype=torch.int32), "offsets": torch.tensor(offsets, dtype=torch.int32),
        "opened": torch.zeros(rows, wide),
    }  # fmt: skip


@pytest.mark.parametrize("sizes", [(2, 96, 4, 3), (4, 130, 3, 1)], ids=str)
@pytest.mark.parametrize("parts", [[1], [3, 4, 0, 12], [70, 1, 33, 200]], ids=str)
def test_grams_are_added_as_in_plain_torch(parts: list[int], sizes: tuple[int, int, int, int]) -> None:
    torch.manual_seed(3)
    expect_grams_added(HostKernels(), "cpu", parts, sizes)


@ON_GPU
@pytest.mark.parametrize("sizes", [(2, 96, 4, 3), (4, 130, 3, 1)], ids=str)
@pytest.mark.parametrize("parts", [[1], [3, 4, 0, 12], [40, 1, 9]], ids=str)
def test_kernels_of_gpus_add_grams_as_plain_torch(parts: list[int], sizes: tuple[int, int, int, int]) -> None:
    from pshard.runtime.kernels.gpu.cuda import CudaKernels

    torch.manual_seed(3)
    expect_grams_added(CudaKernels(DEVICE, 64), DEVICE, parts, sizes)


def expect_grams_added(kernels: Kernels, device: str, parts: list[int], sizes: tuple[int, int, int, int]) -> None:
    """Streams, tails and open rows are as in plain torch; nobody's rows may be anything."""
    given, end = make_grams(parts, *sizes), sum(parts)
    kept = {name: value.to(device, copy=True) if isinstance(value, torch.Tensor) else value
            for name, value in given.items()}  # fmt: skip
    PlainKernels().add_grams(**given)
    kernels.add_grams(**kept)
    assert (kept["streams"][:end].cpu() - given["streams"][:end]).abs().max() < 1e-5
    assert (kept["tails"].cpu() - given["tails"]).abs().max() < 1e-5
    if len(parts) > 1:
        own = slice(parts[0], parts[0] + parts[1])
        assert (kept["opened"][own].cpu() - given["opened"][own]).abs().max() < 1e-5


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_grams_are_gated_as_in_plain_torch(sizes: tuple[int, int, int]) -> None:
    expect_grams_gated(HostKernels(), "cpu", sizes)


@ON_GPU
@pytest.mark.parametrize("sizes", FEW, ids=str)
def test_kernels_of_gpus_gate_grams_as_plain_torch(sizes: tuple[int, int, int]) -> None:
    from pshard.runtime.kernels.gpu.cuda import CudaKernels

    expect_grams_gated(CudaKernels(DEVICE, 64), DEVICE, sizes)


def expect_grams_gated(kernels: Kernels, device: str, sizes: tuple[int, int, int]) -> None:
    """Grams are gated as in plain torch, those whose scores are zero too."""
    rows, count, width = sizes
    key, value, streams = (draw(rows, n, seed=n) for n in (count * width, width, count * width + 4))
    key[0] = 0  # scores of zero
    key, value = (part.to(kernels.act_dtype) for part in (key, value))
    norms = draw(count * width, seed=8), draw(count * width, seed=9)
    found, wanted = torch.empty(rows, count * width, device=device), torch.empty(rows, count * width)
    moved = key.to(device), value.to(device), streams.to(device), (norms[0].to(device), norms[1].to(device))
    kernels.gate_grams(*moved, count, EPS, found)
    PlainKernels().gate_grams(key, value, streams, norms, count, EPS, wanted)
    assert (found.cpu() - wanted).abs().max() < 1e-5 * wanted.abs().max()
