"""The Triton kernels of routed experts compute what plain torch does (runtime/kernels/plain_experts.py).

As in test_triton_kernels.py they run on a GPU when there is one, else in Triton's interpreter, in a process of their
own; without Triton everything here is skipped.
"""

import os
from dataclasses import replace
from functools import cache, partial

import pytest
import random_weights
import torch
from interpreted import expect_interpreted_to_pass, mend_interpreter
from random_weights import DEVICE, random_weight

triton = pytest.importorskip("triton", reason="Triton is installed with the CUDA build of torch only")
READY = DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
needs_kernels = pytest.mark.skipif(not READY, reason="runs inside test_expert_kernels_in_the_interpreter")

from pshard.model_config import Chunks, Experts  # noqa: E402
from pshard.quant import QUANT_TYPES  # noqa: E402
from pshard.runtime.kernels.api import ExpertWeights, Packed, Routes  # noqa: E402
from pshard.runtime.kernels.gpu import cuda  # noqa: E402
from pshard.runtime.kernels.plain import PlainKernels  # noqa: E402
from pshard.units.share import Wave  # noqa: E402

if READY and DEVICE == "cpu":
    mend_interpreter()

random_tensor = partial(random_weights.random_tensor, dtype=torch.float32)


@pytest.mark.slow
@pytest.mark.skipif(READY, reason="the kernels run here directly")
def test_expert_kernels_in_the_interpreter() -> None:
    expect_interpreted_to_pass(__file__)


@pytest.fixture(scope="module")
def kernels() -> cuda.CudaKernels:
    return cuda.CudaKernels(DEVICE, 64)


def empty_routes(tokens: int, rule: Experts) -> Routes:
    return Routes(torch.full((tokens, rule.used), -1, dtype=torch.int32, device=DEVICE),
                  torch.full((tokens, rule.used), float("nan"), device=DEVICE))  # fmt: skip


RULES = [
    Experts(20, 8, 64),
    Experts(18, 4, 64, normed=False, scale=2.5),
    Experts(16, 4, 64, scores="chosen", biases=True),
    Experts(24, 6, 64, scores="sigmoid", scale=2.446, choice_bias=True),
    Experts(24, 1, 64, scores="sigmoid", normed=False),
    Experts(18, 8, 64, scores="sigmoid", choice_bias=True, groups=6, groups_used=3),
    Experts(20, 5, 64, groups=5, groups_used=2),
    Experts(384, 16, 64),
    Experts(20, 20, 64, normed=False),
]


@needs_kernels
@pytest.mark.parametrize(("rule", "tokens", "kind"), [
    *((rule, 1, torch.float32) for rule in RULES[:6]), (RULES[1], 3, torch.bfloat16),
    *((rule, 5, torch.float16) for rule in RULES), (RULES[1], 20, torch.float32)])  # fmt: skip
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
    factors = random_tensor(rule.count, seed=5).float() if tokens in (3, 5) else None
    kernels.route(x, weight, rule, got, bias, choice_bias, factors=factors)
    PlainKernels().route(x, weight, rule, want, bias, choice_bias, factors=factors)
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


Layer = tuple[Experts, ExpertWeights]


@cache
def make_layer(rule: Experts, qtypes: tuple[str, str, str], d_model: int, missing: tuple[int, ...] = ()) -> Layer:
    """Experts of random weights, all but the missing ones here; the fourth is the first one again, and so on."""
    seed = 7
    shapes = ((rule.d_expert, d_model), (rule.d_expert, d_model), (d_model, rule.d_expert))
    sides: list[list[Packed | None]] = []
    for which, (qtype, shape) in enumerate(zip(qtypes, shapes, strict=True)):
        made = [random_weight(qtype, *shape, seed=seed + 3 * i + which)[0] for i in range(min(3, rule.count))]
        sides.append([None if i in missing else made[i % 3] for i in range(rule.count)])
    at = [[0 if one is None else one.data.data_ptr() for one in side] for side in sides]
    biases = None
    if rule.biases:
        first, second, third = (random_tensor(rule.count, rows, seed=seed + rows) for rows, _ in shapes)
        biases = first, second + 0.5, third
    addresses = torch.tensor(at, dtype=torch.int64, device=DEVICE)
    return rule, ExpertWeights(tuple(sides[0]), tuple(sides[1]), tuple(sides[2]), addresses, biases)


def random_routes(tokens: int, rule: Experts, seed: int = 8) -> Routes:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(rule.count, generator=generator)[: rule.used] for _ in range(tokens)])
    weights = torch.rand(tokens, rule.used, generator=generator) + 0.1
    return Routes(ids.int().to(DEVICE), weights.to(DEVICE))


def make_scratch(tokens: int, rule: Experts, d_model: int) -> dict[str, torch.Tensor]:
    """As pshard.units.moe.experts lists it, full of what nobody wrote."""
    pairs = tokens * rule.used
    kind = torch.bfloat16
    return {
        "gated": torch.full((pairs, rule.d_expert), float("nan"), dtype=kind, device=DEVICE),
        "picked": torch.full((pairs, d_model), float("nan"), dtype=kind, device=DEVICE),
        "order": torch.full((4 * pairs + 4 * rule.count + 64,), 1 << 30, dtype=torch.int32, device=DEVICE),
    }


def run_both(
    kernels: cuda.CudaKernels, layer: Layer, x: torch.Tensor, routes: Routes, accumulate: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [M, D] of the kernels (on a GPU twice, with the same bits; nothing beside it written) and of plain torch."""
    (rule, weights), (tokens, d_model) = layer, x.shape
    start = random_tensor(tokens, d_model, seed=9) if accumulate else torch.full((tokens, d_model), float("nan"))
    results = []
    for _ in range(2 if DEVICE == "cuda" else 1):  # the interpreter is slow, and would show no race
        wide = torch.full((tokens, d_model + 16), float("nan"), device=DEVICE)
        out = wide[:, 8 : 8 + d_model]
        out.copy_(start)
        kernels.experts(x, routes, weights, rule, out, make_scratch(tokens, rule, d_model), accumulate)
        assert torch.isnan(wide[:, :8]).all() and torch.isnan(wide[:, 8 + d_model :]).all()
        results.append(out)
    if DEVICE == "cuda":
        assert torch.equal(results[0].nan_to_num(), results[1].nan_to_num())
    want = start.to(DEVICE)
    PlainKernels().experts(x, routes, weights, rule, want, {}, accumulate)
    return results[0], want


def error(out: torch.Tensor, want: torch.Tensor) -> float:
    """Relative error in the Euclidean norm; NaN stays NaN and fails every comparison."""
    return float((out - want).norm() / want.norm())


BOUND = 0.03  # activations are cut to int8 twice, gated ones of 32 columns among them
PACKED = sorted(name for name, q in QUANT_TYPES.items() if q.planes)
ONE = [0, 1, 0, 1, 2, 1, 1, 1, 1, 1]  # tokens' first expert: nearly all take one, and one of four takes none
# types of gate, up and down, D, F, tokens: up to 8 tokens of packed types go pair by pair, others sorted by expert
CASES = [
    *(((q, q, "Q8_0"), 256, 32, 11) for q in PACKED), (("Q4_0", "Q4_0", "Q4_0"), 64, 32, 1),
    (("Q4_K", "Q4_K", "Q8_0"), 256, 32, 1), (("Q8_0", "Q8_0", "Q6_K"), 32, 256, 1),
    (("MXFP4", "MXFP4", "MXFP4"), 32, 32, 2), (("Q4_0", "Q5_0", "MXFP4"), 64, 96, 3),
    (("BF16", "BF16", "BF16"), 96, 48, 3), (("F32", "F16", "BF16"), 40, 24, 12), (("Q4_0", "Q4_0", "BF16"), 64, 48, 9),
    (("Q8_0", "Q8_0", "Q8_0"), 96, 32, 70), (("IQ2_XS", "IQ2_XS", "Q8_0"), 256, 64, 1),
    (("Q8_0", "Q8_0", "IQ3_S"), 64, 256, 1), (("IQ1_M", "IQ1_M", "Q8_0"), 256, 64, 1),
    (("Q8_0", "Q8_0", "IQ3_XXS"), 64, 256, 1), (("FP8", "FP8", "FP8"), 128, 128, 3),
    (("NVFP4", "NVFP4", "NVFP4"), 64, 64, 2), (("IQ3_XXS", "Q2_K", "Q8_0"), 256, 32, 1),
    (("Q4_0", "IQ1_S", "Q8_0"), 256, 32, 2),
]  # fmt: skip


@needs_kernels
@pytest.mark.parametrize(("qtypes", "d_model", "inner", "tokens"), CASES)
def test_chosen_experts_add_up_by_weight(
    kernels: cuda.CudaKernels, qtypes: tuple[str, str, str], d_model: int, inner: int, tokens: int
) -> None:
    rule = Experts(1, 1, inner) if tokens == 11 else Experts(3, 2 if tokens in (3, 70) else 1, inner)
    layer = make_layer(rule, qtypes, d_model)
    x = random_tensor(tokens, d_model + 8, seed=10, dtype=torch.bfloat16)[:, :d_model] * 0.3
    got, want = run_both(kernels, layer, x, random_routes(tokens, layer[0]))
    assert error(got, want) < BOUND


@needs_kernels
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("rule", [
    Experts(20, 8, 64, scale=1.5, chunks=Chunks(2, 32, 0.05)), Experts(12, 6, 64, chunks=Chunks(3, 32, 0.5)),
], ids=["more chunks", "fewer"])  # fmt: skip
def test_tokens_take_their_experts_chunks_by_the_scores_of_these_numbers(
    kernels: cuda.CudaKernels, rule: Experts, tokens: int
) -> None:
    """Of one token these scores are nearly nothing, which is not divided by; a row that only fills takes none."""
    logits = 4 * random_tensor(tokens, rule.count, seed=1)
    logits[0, : rule.of_chunks().count] -= 30
    scored = empty_routes(tokens, replace(rule, used=rule.count))
    found = logits.softmax(-1).sort(dim=1, descending=True)
    scored.ids.copy_(found.indices)
    scored.weights.copy_(found.values)
    scored.ids[4:] = -1
    got, want = empty_routes(tokens, rule.of_chunks()), empty_routes(tokens, rule.of_chunks())
    kernels.choose_chunks(scored, rule, got)
    PlainKernels().choose_chunks(scored, rule, want)
    assert torch.equal(got.ids, want.ids)
    assert (want.ids[:4].cpu() == found.indices[:4, : want.ids.shape[1]].cpu() // rule.chunks.each).all()
    torch.testing.assert_close(got.weights[:4], want.weights[:4], rtol=2e-5, atol=1e-9)
    sums = got.weights.sum(1)
    assert sums[0] < 1e-3 and (tokens == 1 or abs(float(sums[1]) / (rule.scale * rule.chunks.scale) - 1) < 1e-5)


@needs_kernels
@pytest.mark.parametrize("tokens", [2, 10])
def test_a_token_may_take_one_expert_twice(kernels: cuda.CudaKernels, tokens: int) -> None:
    rule = Experts(3, 3, 32)
    x, routes = random_tensor(tokens, 64, seed=11, dtype=torch.bfloat16), random_routes(tokens, rule)
    routes.ids[:, 2] = routes.ids[:, 0]
    routes.ids[0] = 1
    got, want = run_both(kernels, make_layer(rule, ("Q8_0", "Q8_0", "Q8_0"), 64), x, routes, accumulate=True)
    assert error(got, want) < BOUND


@needs_kernels
@pytest.mark.parametrize("tokens", [2, 10])
@pytest.mark.parametrize("activation", ["silu", "clamped", "gelu", "relu", "silu<0.5"])
def test_biases_missing_experts_and_skewed_routes(kernels: cuda.CudaKernels, activation: str, tokens: int) -> None:
    rule = Experts(4, 2, 32, activation=activation, biases=True)
    layer = make_layer(rule, ("Q8_0", "Q8_0", "Q8_0"), 32, missing=(0,))
    x = random_tensor(tokens, 32, seed=11, dtype=torch.bfloat16) * 4
    routes = random_routes(tokens, rule)
    routes.ids[:, 0] = torch.tensor(ONE[:tokens], dtype=torch.int32)
    routes.ids[:, 1] = torch.where(routes.ids[:, 0] == 1, 0, 1)  # nobody takes expert 3
    got, want = run_both(kernels, layer, x, routes, accumulate=True)
    assert error(got, want) < BOUND


@needs_kernels
@pytest.mark.parametrize("tokens", [2, 10])
def test_a_ranks_rows_may_be_fewer_than_scratch_has_room_for_and_another_may_add_downs_bias(
    kernels: cuda.CudaKernels, tokens: int
) -> None:
    rule, weights = make_layer(Experts(4, 2, 32, biases=True), ("Q8_0", "Q8_0", "Q8_0"), 64)
    assert weights.biases is not None
    layer = replace(rule, d_expert=96), replace(weights, biases=(*weights.biases[:2], None))
    x = random_tensor(tokens, 64, seed=16, dtype=torch.bfloat16)
    got, want = run_both(kernels, layer, x, random_routes(tokens, rule), accumulate=True)
    assert error(got, want) < BOUND


@needs_kernels
@pytest.mark.parametrize("tokens", [1, 9])
def test_where_no_expert_is_here_nothing_is_added(kernels: cuda.CudaKernels, tokens: int) -> None:
    rule, weights = make_layer(Experts(2, 1, 32), ("Q8_0", "Q8_0", "Q8_0"), 32, missing=(0,))
    routes = Routes(torch.zeros(tokens, 1, dtype=torch.int32, device=DEVICE), torch.ones(tokens, 1, device=DEVICE))
    x = random_tensor(tokens, 32, seed=12, dtype=torch.bfloat16)
    got, _ = run_both(kernels, (rule, weights), x, routes)
    assert (got == 0).all()


@needs_kernels
@pytest.mark.parametrize("tokens", [2, 9])
def test_weights_of_nan_harm_no_other_token(kernels: cuda.CudaKernels, tokens: int) -> None:
    layer = make_layer(Experts(2, 2, 32), ("Q8_0", "Q8_0", "Q8_0"), 32)
    x, routes = random_tensor(tokens, 32, seed=13, dtype=torch.bfloat16), random_routes(tokens, layer[0])
    routes.weights[1] = float("nan")
    got, want = run_both(kernels, layer, x, routes)
    others = [i for i in range(tokens) if i != 1]
    assert torch.isnan(got[1]).all() and error(got[others], want[others]) < BOUND


@needs_kernels
def test_experts_leave_what_was_handed_over(kernels: cuda.CudaKernels) -> None:
    """A shared FFN reads the same activations after the experts did."""
    rule, weights = make_layer(Experts(2, 1, 32), ("Q8_0", "Q8_0", "Q8_0"), 32)
    hidden, normed = random_tensor(2, 32, seed=14), torch.empty(2, 32, dtype=torch.bfloat16, device=DEVICE)
    both, none = torch.empty(2, 64, dtype=torch.bfloat16, device=DEVICE), torch.empty(0, dtype=torch.uint8)
    matrix = random_weight("Q8_0", 32, 32, seed=15)[0]
    kernels.rms_norm(hidden, torch.ones(32, device=DEVICE), 1e-5, normed)
    run_both(kernels, (rule, weights), normed, random_routes(2, rule))
    assert kernels._activations.ready is not None
    kernels.gate_up(normed, matrix, matrix, both[:, :32], both, none)
    kept = both[:, :32].clone()
    kernels.gate_up(normed.clone(), matrix, matrix, both[:, :32], both, none)
    assert torch.equal(both[:, :32], kept)


GPU_CASES = [
    *(((q, q, q), 512, 256, tokens) for q in PACKED for tokens in (1, 3, 8, 20)),
    *(((q, q, q), 512, 256, tokens) for q in ("Q4_0", "Q6_K", "MXFP4") for tokens in (70, 150, 300)),
    *(((q, q, q), 512, 256, tokens) for q in ("BF16", "FP8") for tokens in (1, 8, 20, 300)),
    *((("Q4_K", "Q4_K", "Q6_K"), 2048, 768, tokens) for tokens in (1, 16, 512, 1500)),
    *((("MXFP4", "MXFP4", "MXFP4"), 2880, 2880, tokens) for tokens in (1, 16, 512)),
    *(((PACKED[n - 1], q, PACKED[n - 2]), 512, 256, 1 + n % 4) for n, q in enumerate(PACKED)),
]


@needs_kernels
@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="sizes for a GPU")
@pytest.mark.parametrize(("qtypes", "d_model", "inner", "tokens"), GPU_CASES)
def test_experts_of_a_models_size(
    kernels: cuda.CudaKernels, qtypes: tuple[str, str, str], d_model: int, inner: int, tokens: int
) -> None:
    clamped = qtypes[0] == "MXFP4"
    rule = Experts(12, 4, inner, activation="clamped" if clamped else "silu", biases=clamped)
    layer = make_layer(rule, qtypes, d_model, missing=(5,))
    x = random_tensor(tokens, d_model, seed=16, dtype=torch.bfloat16) * 0.3
    got, want = run_both(kernels, layer, x, random_routes(tokens, rule), accumulate=True)
    assert error(got, want) < BOUND


@needs_kernels
@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="page-locked memory that a GPU reads")
@pytest.mark.parametrize("tokens", [1, 16])
@pytest.mark.parametrize("qtype", PACKED)
def test_experts_in_host_memory_give_the_bits_of_those_in_vram(
    kernels: cuda.CudaKernels, qtype: str, tokens: int
) -> None:
    """A type's codebook lies on the GPU wherever the weights are: a kernel cannot read it from plain host memory."""
    rule, here = make_layer(Experts(4, 2, 256), (qtype, qtype, qtype), 256)
    sides = [
        [m and replace(m, data=m.data.cpu().pin_memory()) for m in side] for side in (here.gate, here.up, here.down)
    ]
    addresses = torch.tensor([[m.data.data_ptr() if m else 0 for m in side] for side in sides], device=DEVICE)
    gate, up, down = (tuple(side) for side in sides)
    there = ExpertWeights(gate, up, down, addresses)
    x, routes = random_tensor(tokens, 256, seed=16, dtype=torch.bfloat16) * 0.3, random_routes(tokens, rule)
    both = []
    for weights in (here, there):
        both.append(torch.empty(tokens, 256, device=DEVICE))
        kernels.experts(x, routes, weights, rule, both[-1], make_scratch(tokens, rule, 256), False)
    assert torch.equal(both[0], both[1]) and both[0].isfinite().all()


@needs_kernels
@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="there are no CUDA graphs on the CPU")
@pytest.mark.parametrize("tokens", [1, 30])
def test_a_graph_takes_the_experts_that_each_replay_chooses(kernels: cuda.CudaKernels, tokens: int) -> None:
    rule, weights = make_layer(Experts(16, 4, 256), ("Q4_0", "Q4_0", "Q4_0"), 256)
    router = Packed(random_tensor(16 * 256, seed=17).view(torch.uint8), "F32", 16, 256)
    x, routes = random_tensor(tokens, 256, seed=18), empty_routes(tokens, rule)
    narrow, out = torch.empty(tokens, 256, dtype=torch.bfloat16, device=DEVICE), torch.empty(tokens, 256, device=DEVICE)
    scratch = make_scratch(tokens, rule, 256)

    def run() -> None:
        narrow.copy_(x)
        kernels.route(x, router, rule, routes)
        kernels.experts(narrow, routes, weights, rule, out, scratch, False)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for seed in (19, 20):
        x.copy_(random_tensor(tokens, 256, seed=seed))
        graph.replay()
        replayed = out.clone()
        want_routes, want = empty_routes(tokens, rule), torch.empty(tokens, 256, device=DEVICE)
        PlainKernels().route(x, router, rule, want_routes)
        PlainKernels().experts(x.bfloat16(), want_routes, weights, rule, want, {}, False)
        assert torch.equal(routes.ids, want_routes.ids) and error(replayed, want) < BOUND


@needs_kernels
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(("qtype", "tokens"), [("Q4_0", 20), ("MXFP4", 9)])
def test_waves_of_experts_give_the_bits_of_all_at_once(
    kernels: cuda.CudaKernels, qtype: str, tokens: int, accumulate: bool
) -> None:
    rule, d_model = Experts(8, 3, 32, biases=True), 64
    _, whole = make_layer(rule, (qtype, qtype, qtype), d_model)
    x, routes = random_tensor(tokens, d_model, seed=3).bfloat16(), random_routes(tokens, rule)
    start = random_tensor(tokens, d_model, seed=9).to(DEVICE)
    want, out, scratch = start.clone(), start.clone(), make_scratch(tokens, rule, d_model)
    kernels.experts(x, routes, whole, rule, want, make_scratch(tokens, rule, d_model), accumulate)
    for wave, here in enumerate((range(3), range(3, 6), range(6, 8))):
        absent = [i for i in range(rule.count) if i not in here]
        addresses = whole.addresses.clone()
        addresses[:, absent] = 0
        gate, up, down = (
            tuple(None if i in absent else one for i, one in enumerate(side))
            for side in (whole.gate, whole.up, whole.down)
        )
        weights = ExpertWeights(gate, up, down, addresses, whole.biases, wave=Wave(wave, 3), summed=whole.addresses)
        kernels.experts(x, routes, weights, rule, out, scratch, accumulate)
        assert torch.equal(out, want if wave == 2 else start)
