"""The gated delta net on a CUDA GPU, in a true model's sizes: right, repeatable, and one graph for all batches of a
shape. Skipped without one; the kernels' other tests are in tests/kernels/test_delta_kernels.py."""

import pytest
import torch
from delta_inputs import DeltaCase, copy_case, make_case, run_case, widen

from pshard.runtime.kernels.plain import PlainKernels
from pshard.tensor import TensorSpec
from pshard.units.operations import DeltaNet

pytestmark = pytest.mark.gpu
NONE = TensorSpec("", "F32", (1,))
CLOSE = {torch.float32: 2e-6, torch.bfloat16: 0.015}  # of the deviation, in the mean
LENGTHS = [(1,), (1,) * 16, (3, 0, 16), (17,), (600, 1, 0, 90), (4200,)]


def make_scratch(case: DeltaCase) -> torch.Tensor:
    w = case.weights
    net = DeltaNet((NONE,), NONE, NONE, NONE, w.key_heads, w.value_heads, w.head)
    nbytes = net.scratch_nbytes(case.qkv.shape[0] + 64, len(case.slots), case.qkv.element_size())
    return torch.full((nbytes,), 0xFF, dtype=torch.uint8, device="cuda")


def make_true(lengths: tuple[int, ...], kind: torch.dtype, tiled: bool = False, padding: int = 3) -> DeltaCase:
    heads = {"key_heads": 16, "value_heads": 48 if tiled else 32, "head": 128}
    return make_case(lengths, **heads, tiled=tiled, dtype=kind, padding=padding, device="cuda")


def expect_alike(got: DeltaCase, want: DeltaCase, close: float) -> None:
    for name in ("out", "states", "tails"):
        a, b = getattr(got, name).double(), getattr(want, name)
        assert torch.equal(a.isnan(), b.isnan()), name
        error = ((a - b).nan_to_num().square().mean().sqrt() / b[~b.isnan()].std()).item()
        assert error <= close, (name, error)


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)} of {max(lengths)}")
def test_true_sizes_give_what_float64_gives_and_repeat(
    lengths: tuple[int, ...], kind: torch.dtype, tiled: bool
) -> None:
    from pshard.runtime.kernels.gpu.cuda import CudaKernels

    kernels, case = CudaKernels("cuda", 64), make_true(lengths, kind, tiled)
    want, again = widen(copy_case(case)), copy_case(case)
    run_case(PlainKernels(), want)
    for one in (case, again):
        run_case(kernels, one, scratch=make_scratch(case))
    expect_alike(case, want, CLOSE[kind])
    assert torch.equal(case.states, again.states) and torch.equal(case.tails, again.tails)
    assert torch.equal(case.out.nan_to_num(), again.out.nan_to_num())


@pytest.mark.parametrize(("lengths", "other", "longest"), [
    ((1,) * 4, (1, 0, 1, 0), 1), ((5, 3), (1, 7), 8), ((300, 20), (0, 301), 320),
])  # fmt: skip
def test_one_graph_serves_other_sequences_of_the_same_shape(
    lengths: tuple[int, ...], other: tuple[int, ...], longest: int
) -> None:
    """Slots, offsets and rows are read when the graph is replayed."""
    from pshard.runtime.kernels.gpu.cuda import CudaKernels

    kernels = CudaKernels("cuda", 64)
    room = sum(lengths) + longest
    case = make_true(lengths, torch.bfloat16, padding=room - sum(lengths))
    case.qkv.nan_to_num_(0.5)
    case.z.nan_to_num_(0.5)
    case.beta.nan_to_num_(0.5)
    case.alpha.nan_to_num_(0.5)
    scratch, graph = make_scratch(case), torch.cuda.CUDAGraph()
    kept = case.states.clone(), case.tails.clone()
    run_case(kernels, case, longest, scratch)  # compiles
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        kernels.delta_net(**vars(case), longest=longest, scratch=scratch)
    case.states.copy_(kept[0])
    case.tails.copy_(kept[1])
    case.slots.copy_(case.slots.flip(0))
    case.offsets.copy_(torch.tensor([0, *other]).cumsum(0))
    case.out.fill_(torch.nan)
    want = widen(copy_case(case))
    run_case(PlainKernels(), want)
    graph.replay()
    torch.cuda.synchronize()
    expect_alike(case, want, CLOSE[torch.bfloat16])
