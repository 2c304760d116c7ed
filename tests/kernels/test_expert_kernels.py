"""The Triton kernels of routed experts compute what plain torch does (runtime/kernels/plain_experts.py).

As in test_triton_kernels.py they run on a GPU when there is one, else in Triton's interpreter, in a process of their
own; without Triton everything here is skipped.
"""

import os

import pytest
import torch
from interpreted import mend_interpreter, run_interpreted
from random_weights import DEVICE

triton = pytest.importorskip("triton", reason="Triton is installed with the CUDA build of torch only")
READY = DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
needs_kernels = pytest.mark.skipif(not READY, reason="runs inside test_expert_kernels_in_the_interpreter")

from pshard.model_config import Experts  # noqa: E402
from pshard.runtime.kernels.api import Packed, Routes  # noqa: E402
from pshard.runtime.kernels.gpu import cuda  # noqa: E402
from pshard.runtime.kernels.plain import PlainKernels  # noqa: E402

if READY and DEVICE == "cpu":
    mend_interpreter()


@pytest.mark.slow
@pytest.mark.skipif(READY, reason="the kernels run here directly")
def test_expert_kernels_in_the_interpreter() -> None:
    done = run_interpreted(__file__)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "passed" in done.stdout


@pytest.fixture(scope="module")
def kernels() -> cuda.CudaKernels:
    return cuda.CudaKernels(DEVICE, 64)


def random_tensor(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def empty_routes(tokens: int, rule: Experts) -> Routes:
    return Routes(torch.full((tokens, rule.used), -1, dtype=torch.int32, device=DEVICE),
                  torch.full((tokens, rule.used), float("nan"), device=DEVICE))  # fmt: skip


RULES = [
    Experts(128, 8, 64),
    Experts(60, 4, 64, normed=False, scale=2.5),
    Experts(32, 4, 64, scores="chosen", biases=True),
    Experts(64, 6, 64, scores="sigmoid", scale=2.446, choice_bias=True),
    Experts(96, 8, 64, scores="sigmoid", choice_bias=True, groups=6, groups_used=3),
    Experts(20, 5, 64, groups=5, groups_used=2),
    Experts(512, 16, 64),
]


@needs_kernels
@pytest.mark.parametrize(("rule", "tokens", "kind"), [
    *((rule, 1, torch.float32) for rule in RULES), *((rule, 3, torch.bfloat16) for rule in RULES[:2]),
    *((rule, 9, torch.float16) for rule in RULES[:5]), (RULES[5], 70, torch.float32)])  # fmt: skip
def test_tokens_are_routed_by_the_rule(
    kernels: cuda.CudaKernels, rule: Experts, tokens: int, kind: torch.dtype
) -> None:
    d_model = 288
    router = random_tensor(rule.count, d_model, seed=1).mul_(0.05).to(kind)
    name = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}[kind]
    weight = Packed(router.flatten().view(torch.uint8), name, rule.count, d_model)
    x = random_tensor(tokens, d_model + 8, seed=2)[:, :d_model]
    bias = random_tensor(rule.count, seed=3) if rule.biases else None
    choice_bias = random_tensor(rule.count, seed=4) * 0.1 if rule.choice_bias else None
    got, want = empty_routes(tokens, rule), empty_routes(tokens, rule)
    kernels.route(x, weight, rule, got, bias, choice_bias)
    PlainKernels().route(x, weight, rule, want, bias, choice_bias)
    assert torch.equal(got.ids, want.ids)
    torch.testing.assert_close(got.weights, want.weights, rtol=2e-5, atol=1e-6)


@needs_kernels
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid", "chosen"])
def test_equal_scores_go_to_the_lowest_experts(kernels: cuda.CudaKernels, scores: str, tokens: int) -> None:
    rule = Experts(40, 5, 64, scores=scores, groups=4, groups_used=3)
    router = torch.zeros(40, 32, device=DEVICE)
    router[[7, 12, 33]] = 1.0
    router[5:7], router[20] = -0.0, 0.0
    x = torch.full((tokens, 32), 0.25, device=DEVICE)
    got = empty_routes(tokens, rule)
    kernels.route(x, Packed(router.flatten().view(torch.uint8), "F32", 40, 32), rule, got)
    assert got.ids.tolist() == [[7, 12, 33, 0, 1]] * tokens


@needs_kernels
@pytest.mark.parametrize("tokens", [2, 6])
@pytest.mark.parametrize("rule", RULES[1:5], ids=lambda rule: f"{rule.scores}-{rule.groups}")
def test_a_token_of_nan_gets_experts_that_exist_and_harms_no_other(
    kernels: cuda.CudaKernels, rule: Experts, tokens: int
) -> None:
    router = random_tensor(rule.count, 64, seed=5)
    weight = Packed(router.flatten().view(torch.uint8), "F32", rule.count, 64)
    x = random_tensor(tokens, 64, seed=6) * 0.1
    clean, got = empty_routes(tokens, rule), empty_routes(tokens, rule)
    choice_bias = random_tensor(rule.count, seed=4) if rule.choice_bias else None
    kernels.route(x, weight, rule, clean, None, choice_bias)
    x[1, 3] = float("nan")
    kernels.route(x, weight, rule, got, None, choice_bias)
    assert ((got.ids >= 0) & (got.ids < rule.count)).all()
    assert all(len(set(row)) == rule.used for row in got.ids.tolist())
    assert torch.isnan(got.weights[1]).any()
    others = [i for i in range(tokens) if i != 1]
    assert torch.equal(got.ids[others], clean.ids[others]) and torch.equal(got.weights[others], clean.weights[others])
