"""Products that leave the norm that follows them: what takes it gives the same as with a norm of its own.

The kernels run on a GPU when there is one, else in Triton's interpreter in a process of their own.
"""

import os
from typing import Any

import pytest
import torch
from interpreted import expect_interpreted_to_pass, mend_interpreter
from random_weights import DEVICE, random_tensor, random_weight

triton = pytest.importorskip("triton", reason="Triton is installed with the CUDA build of torch only")
READY = DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
needs_kernels = pytest.mark.skipif(not READY, reason="runs inside test_norms_in_the_interpreter")

from pshard.model_config import Experts  # noqa: E402
from pshard.runtime.kernels.api import ExpertWeights, Packed, Routes  # noqa: E402
from pshard.runtime.kernels.gpu import cuda, norms  # noqa: E402
from pshard.times.gpu_tiles import Tile, TileChoice  # noqa: E402

if READY and DEVICE == "cpu":
    mend_interpreter()

D, EPS = 96, 1e-5
NO_TILE = torch.empty(0, dtype=torch.uint8, device=DEVICE)


@pytest.mark.slow
@pytest.mark.skipif(READY, reason="the kernels run here directly")
def test_norms_in_the_interpreter() -> None:
    expect_interpreted_to_pass(__file__)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of every norm that is a launch of its own."""
    found, kernel = list[int](), norms.triton_rows.rms_norm_kernel

    class Watched:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            found.append(grid[0])
            return kernel[grid]

    monkeypatch.setattr(norms.triton_rows, "rms_norm_kernel", Watched())
    return found


def near(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Within what int8 activations, rounded to bfloat16 before or not, differ by."""
    return bool((got.float() - want.float()).norm() < 0.01 * want.float().norm())


def make_experts(rule: Experts, qtype: str) -> ExpertWeights:
    shapes = ((rule.d_expert, D), (rule.d_expert, D), (D, rule.d_expert))
    stacks = [[random_weight(qtype, *shape, seed=9 * i + e)[0] for e in range(rule.count)]
              for i, shape in enumerate(shapes)]  # fmt: skip
    at = torch.tensor([[one.data.data_ptr() for one in stack] for stack in stacks], device=DEVICE)
    biases = tuple(random_tensor(rule.count, rows, seed=rows) for rows, _ in shapes) if rule.biases else None
    return ExpertWeights(*(tuple(stack) for stack in stacks), at, biases)  # type: ignore[arg-type]


def run_layer(tokens: int, qtype: str, rule: Experts, leaves: bool) -> list[torch.Tensor]:
    """Output product, norm, router and experts, norm, and the products that follow, for layers that differ in depth.
    leaves: products are told of the norms."""
    kernels = cuda.CudaKernels(DEVICE, 64)
    hidden = random_tensor(tokens, D, seed=1).float() * torch.tensor([3.0, 0.1, 40.0, 1.0])[:tokens, None].to(DEVICE)
    mixed, out, bias = (
        random_tensor(tokens, 128, seed=2),
        random_weight(qtype, D, 128, seed=3)[0],
        random_tensor(D, seed=4),
    )
    first, second = (random_tensor(D, seed=seed).float().abs() + 0.5 for seed in (5, 6))
    router = random_tensor(rule.count, D, seed=7).float().mul_(0.1)
    weight, x = Packed(router.flatten().view(torch.uint8), "F32", rule.count, D), torch.full((tokens, D), float("nan"))
    x, ids = x.to(DEVICE), torch.full((tokens, rule.used), -7, dtype=torch.int32, device=DEVICE)
    routes = Routes(ids, torch.zeros(tokens, rule.used, device=DEVICE))
    normed = torch.full((tokens, D), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    group = tuple(random_weight(qtype, rows, D, seed=rows)[0] for rows in (64, 32, 32))
    products = torch.full((tokens, 128), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    kernels.forget()
    told = [(norm, EPS) if leaves else None for norm in (first, second)]
    kernels.linear(mixed, out, hidden, NO_TILE, bias.float(), accumulate=True, following=told[0])
    middle = hidden.clone()
    kernels.rms_norm(hidden, first, EPS, x)
    kernels.route(x, weight, rule, routes)
    kernels.experts(x, routes, make_experts(rule, qtype), rule, hidden, {"normed": normed}, True, told[1])
    kernels.rms_norm(hidden, second, EPS, normed)
    kernels.linear_group(normed, group, products, NO_TILE, (None, None, None))
    return [middle, x, routes.weights, hidden, products, ids]


@needs_kernels
@pytest.mark.parametrize(("qtype", "tokens", "biases"), [("Q4_0", 1, False), ("MXFP4", 1, True), ("Q8_0", 4, True)])
def test_a_layer_needs_no_norm_of_its_own(launched: list[int], qtype: str, tokens: int, biases: bool) -> None:
    activation, scores = ("clamped", "chosen") if biases else ("silu", "softmax")
    rule = Experts(6, 2, 64, scores=scores, activation=activation, biases=biases)
    got = run_layer(tokens, qtype, rule, leaves=True)
    assert launched == []
    want = run_layer(tokens, qtype, rule, leaves=False)
    assert launched == [tokens, tokens]
    assert torch.equal(got[0], want[0]) and torch.equal(got[5], want[5])
    torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got[2], want[2], rtol=1e-4, atol=1e-6)
    assert near(got[3], want[3]) and near(got[4], want[4])


@needs_kernels
def test_a_norm_of_other_rows_weights_or_number_is_made(launched: list[int]) -> None:
    kernels, mixed, out = cuda.CudaKernels(DEVICE, 64), random_tensor(5, 64, seed=1), random_weight("Q8_0", D, 64, 3)[0]
    norm, other = torch.ones(D, device=DEVICE), torch.ones(D, device=DEVICE)
    for rows, weight, eps in ((1, norm, EPS), (2, other, EPS), (2, norm, 2 * EPS), (5, norm, EPS)):
        hidden = random_tensor(5, D, seed=2).float()
        normed = torch.full((rows, D), float("nan"), dtype=torch.bfloat16, device=DEVICE)
        n = 5 if rows == 5 else 2
        kernels.linear(mixed[:n], out, hidden[:n], NO_TILE, accumulate=True, following=(norm, EPS))
        kernels.rms_norm(hidden[:rows], weight, eps, normed)
        want = hidden[:rows] * torch.rsqrt(hidden[:rows].square().mean(1, keepdim=True) + eps)
        assert launched.pop() == rows
        torch.testing.assert_close(normed.float(), want, rtol=1e-2, atol=1e-3)


@needs_kernels
def test_what_was_told_is_for_one_product(launched: list[int]) -> None:
    kernels, out = cuda.CudaKernels(DEVICE, 64), random_weight("Q8_0", D, 64, 3)[0]
    mixed, hidden = random_tensor(1, 64, seed=1), random_tensor(1, D, seed=2).float()
    norm, normed = torch.ones(D, device=DEVICE), torch.empty(1, D, dtype=torch.bfloat16, device=DEVICE)
    kernels.linear(mixed, out, hidden, NO_TILE, accumulate=True, following=(norm, EPS))
    kernels.linear(mixed, out, hidden, NO_TILE, accumulate=True)  # what the first one left is no longer so
    kernels.rms_norm(hidden, norm, EPS, normed)
    assert launched == [1]


@needs_kernels
def test_a_product_that_leaves_a_norm_completes_32_results_whatever_tile_is_the_fastest(launched: list[int]) -> None:
    fastest = Tile(16, 32, 4, 1, 1056, 56)
    kernels, out = cuda.CudaKernels(DEVICE, 64), random_weight("Q4_0", D, 64, 3)[0]
    kernels.use_tiles((TileChoice("acc", "matvec", "Q4_0", 1, fastest, 1e-5, 2e-5),))
    mixed, hidden = random_tensor(1, 64, seed=1), random_tensor(1, D, seed=2).float()
    norm, normed = torch.ones(D, device=DEVICE), torch.empty(1, D, dtype=torch.bfloat16, device=DEVICE)
    kernels.linear(mixed, out, hidden, NO_TILE, accumulate=True, following=(norm, EPS))
    kernels.rms_norm(hidden, norm, EPS, normed)
    assert launched == []
