"""The Triton kernels of the gated delta net compute what plain torch does (runtime/kernels/plain_delta.py).

As in test_triton_kernels.py they run on a GPU when there is one, else in Triton's interpreter, in a process of their
own; without Triton everything here is skipped.
"""

import os
from dataclasses import replace

import pytest
import torch
from delta_inputs import DeltaCase, copy_case, expect_open, make_case, run_case, run_cut, run_open, shrink, widen
from interpreted import expect_interpreted_to_pass, mend_interpreter
from random_weights import DEVICE

triton = pytest.importorskip("triton", reason="Triton is installed with the CUDA build of torch only")
READY = DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
needs_kernels = pytest.mark.skipif(not READY, reason="runs inside test_delta_kernels_in_the_interpreter")

from pshard.batch_sizes import DELTA_CHUNK, DELTA_STEPS  # noqa: E402
from pshard.runtime.kernels.gpu import cuda  # noqa: E402
from pshard.runtime.kernels.gpu.delta import delta_kernels  # noqa: E402
from pshard.runtime.kernels.plain import PlainKernels  # noqa: E402
from pshard.tensor import TensorSpec  # noqa: E402
from pshard.units.operations import DeltaNet  # noqa: E402

if READY and DEVICE == "cpu":
    mend_interpreter()

CLOSE = 1e-6  # of rows in float32, where plain torch has 0.4e-6


@pytest.mark.slow
@pytest.mark.skipif(READY, reason="the kernels run here directly")
def test_delta_kernels_in_the_interpreter() -> None:
    expect_interpreted_to_pass(__file__)


@pytest.fixture(scope="module")
def kernels() -> cuda.CudaKernels:
    return cuda.CudaKernels(DEVICE, 64)


def make_scratch(case: DeltaCase) -> torch.Tensor:
    """As large as its noun says, and NaN all over."""
    w, none = case.weights, TensorSpec("", "F32", (1,))
    net = DeltaNet((none,), none, none, none, w.key_heads, w.value_heads, w.head)
    nbytes = net.scratch_nbytes(max(DELTA_STEPS + 1, case.qkv.shape[0]), len(case.slots), case.qkv.element_size())
    return torch.full((nbytes,), 0xFF, dtype=torch.uint8, device=DEVICE)


def expect_alike(got: DeltaCase, want: DeltaCase, close: float) -> None:
    """Differences within `close` times the deviation in the mean, a hundred times that each, as norms of small rows
    have it; what nobody wrote stays."""
    for name in ("out", "states", "tails"):
        a, b = getattr(got, name).double(), getattr(want, name)
        assert torch.equal(a.isnan(), b.isnan()), name
        error, spread = (a - b).nan_to_num(), b[~b.isnan()].std()
        assert error.square().mean().sqrt() <= close * spread, name
        assert error.abs().max() <= 100 * close * spread, name


def compare(kernels: cuda.CudaKernels, case: DeltaCase, close: float, longest: int = 0) -> None:
    want = widen(copy_case(case))
    run_case(PlainKernels(), want)
    run_case(kernels, case, longest, make_scratch(case))
    expect_alike(case, want, close)


@needs_kernels
@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("lengths", [(1,), (1, 1, 1), (2, 0, 5, 3)])
def test_few_tokens_are_computed_one_by_one(kernels: cuda.CudaKernels, lengths: tuple[int, ...], tiled: bool) -> None:
    case = make_case(lengths, tiled=tiled, padding=2, slots=6, device=DEVICE)
    compare(kernels, case, CLOSE)
    assert not kernels._few_rows.scratch[1].any()  # counters are ready for the next launch


@needs_kernels
@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("lengths", [(64,), (17,), (130, 0, 1, 70), (65, 2, 63), (33, 128)])
def test_many_tokens_are_computed_in_chunks(kernels: cuda.CudaKernels, lengths: tuple[int, ...], tiled: bool) -> None:
    compare(kernels, make_case(lengths, tiled=tiled, padding=3, device=DEVICE), CLOSE)


@needs_kernels
@pytest.mark.parametrize("lengths", [(1, 1), (65, 2)])
def test_gates_may_be_sigmoids(kernels: cuda.CudaKernels, lengths: tuple[int, ...]) -> None:
    case = make_case(lengths, device=DEVICE)
    case = replace(case, weights=replace(case.weights, gate="sigmoid"))
    compare(kernels, case, CLOSE)


@needs_kernels
def test_chunks_of_more_rows_than_the_scratch_holds(kernels: cuda.CudaKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_kernels, "DELTA_ROWS", 128)
    compare(kernels, make_case((200, 90), device=DEVICE), CLOSE)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_that_a_sequence_lacks_are_zeros(kernels: cuda.CudaKernels, dtype: torch.dtype) -> None:
    """Up to the end of its last chunk: products go over whole chunks, and NaN times 0 is NaN."""
    case = make_case((17, 100), dtype=dtype, head=32, device=DEVICE)
    scratch = make_scratch(case)
    run_case(kernels, case, scratch=scratch)
    keys, w, u, p, _ = delta_kernels._divide(scratch, case.weights, 2 * 128, dtype)
    head = case.weights.head
    for part, width in ((keys, head), (w, head), (u, head), (p, DELTA_CHUNK)):
        rows = part.view(-1, 2, 128, width)  # heads, sequences, 128 rows of each
        for sequence, tokens, end in ((0, 17, 64), (1, 100, 128)):
            assert rows[:, sequence, :tokens].isfinite().all()
            assert not rows[:, sequence, tokens:end].any()


@needs_kernels
@pytest.mark.parametrize("lengths", [(1, 2), (20, 90)])
def test_rows_of_bfloat16(kernels: cuda.CudaKernels, lengths: tuple[int, ...]) -> None:
    compare(kernels, make_case(lengths, dtype=torch.bfloat16, head=32, device=DEVICE), 0.015)


@needs_kernels
def test_a_captured_launch_serves_shorter_sequences(kernels: cuda.CudaKernels) -> None:
    """`longest` may be more than any sequence has, and more sequences may be there than bring tokens."""
    for longest in (DELTA_STEPS, 190):
        compare(kernels, make_case((3, 1, 0), device=DEVICE, padding=186), CLOSE, longest)


@needs_kernels
def test_micro_batches_of_any_sizes_give_the_same_state(kernels: cuda.CudaKernels) -> None:
    whole = make_case((90,), key_heads=1, value_heads=2, device=DEVICE)
    for cut in ((1, 89), (8,) * 11 + (2,), (40, 1, 49)):
        parts, want = copy_case(whole), widen(copy_case(whole))
        run_case(PlainKernels(), want)
        run_cut(kernels, parts, cut, make_scratch(whole))
        expect_alike(parts, want, CLOSE)


@needs_kernels
@pytest.mark.parametrize("lengths", [(2,), (20,)], ids=str)
def test_small_keys_are_normed_with_their_epsilon(kernels: cuda.CudaKernels, lengths: tuple[int, ...]) -> None:
    compare(kernels, shrink(make_case(lengths, device=DEVICE)), CLOSE)


@needs_kernels
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 3 * CLOSE), (torch.bfloat16, 0.025)], ids=str)
def test_alike_keys_and_slow_decay_stay_exact(kernels: cuda.CudaKernels, dtype: torch.dtype, close: float) -> None:
    """The system of a chunk is hardest to solve where all of its keys are one."""
    case = make_case((128,), dtype=dtype, head=32 if dtype == torch.bfloat16 else 16, device=DEVICE)
    case.qkv[:] = case.qkv[:1] + 0.01 * case.qkv
    case.weights.decay.fill_(-1e-4)
    case.beta.fill_(4.0)
    compare(kernels, case, close)


@needs_kernels
def test_few_rows_are_left_quantised_for_the_product_that_follows(kernels: cuda.CudaKernels) -> None:
    case = make_case((1, 1, 2), head=32, dtype=torch.bfloat16, device=DEVICE)
    run_case(kernels, case)
    assert kernels._activations.ready is not None
    ready = [part.clone() for part in kernels._activations.quantise(case.out)[0]]
    fresh = kernels._activations.quantise(case.out.clone())[0]
    chunks, rows = case.out.shape[1] // 32, 4
    for mine, other, each in zip(ready, fresh, (8, 1, 2)):
        assert torch.equal(mine[: rows * chunks * each], other[: rows * chunks * each])


@needs_kernels
def test_what_does_not_fit_is_refused(kernels: cuda.CudaKernels) -> None:
    with pytest.raises(ValueError, match="heads of 48 elements"):
        run_case(kernels, make_case((1,), head=48, device=DEVICE))
    with pytest.raises(ValueError, match="bytes of scratch, not 0"):
        run_case(kernels, make_case((100,), device=DEVICE))


@needs_kernels
@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize(
    ("lengths", "held"), [((6, 1, 3), (4, -1, 3)), ((4, 70, 2), (1, -1, 0)), ((16,), (2,)), ((2,), (2,))], ids=str
)
def test_open_rows_that_hold_leave_the_bits_that_they_have_alone(
    kernels: cuda.CudaKernels, lengths: tuple[int, ...], held: tuple[int, ...], tiled: bool
) -> None:
    """Beside a prompt in chunks too, which changes no open row."""
    head = 128 if DEVICE == "cuda" else 16  # of smaller ones a GPU adds up rows by how they are aligned
    case = make_case(lengths, head=head, tiled=tiled, padding=1, slots=5, dtype=torch.bfloat16, device=DEVICE)
    together = copy_case(case)
    run_open(kernels, together, held, make_scratch(case))
    expect_open(kernels, case, together, held, torch.equal)
    assert not kernels._few_rows.scratch[1].any()
