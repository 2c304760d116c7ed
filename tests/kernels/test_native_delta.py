"""The CPU's kernels of the gated delta net give what plain torch gives in float64, by any threads, and are replayed."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from delta_inputs import DeltaCase, copy_case, expect_open, make_case, run_case, run_cut, run_open, shrink, widen

from pshard.runtime.kernels.cpu import native
from pshard.runtime.kernels.cpu.host import HostKernels
from pshard.runtime.kernels.cpu.recording import record
from pshard.runtime.kernels.plain import PlainKernels

pytestmark = pytest.mark.skipif(not native.is_available(), reason=f"no C++ library: {native.why_missing()}")
CLOSE = 1e-6  # of the deviation in the mean; plain torch has 0.4e-6


@pytest.fixture(params=(1, 3))
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = native.threads()
    native.set_threads(request.param)
    yield request.param
    native.set_threads(before)


@pytest.fixture
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = native.isa()
    try:
        native.set_isa(request.param)
    except ValueError as error:
        pytest.skip(str(error))
    yield request.param
    native.set_isa(before)


def expect_alike(got: DeltaCase, want: DeltaCase) -> None:
    for name in ("out", "states", "tails"):
        a, b = getattr(got, name).double(), getattr(want, name)
        assert torch.equal(a.isnan(), b.isnan()), name
        error, spread = (a - b).nan_to_num(), b[~b.isnan()].std()
        assert error.square().mean().sqrt() <= CLOSE * spread, name
        assert error.abs().max() <= 100 * CLOSE * spread, name


def compare(case: DeltaCase) -> None:
    want = widen(copy_case(case))
    run_case(PlainKernels(), want)
    run_case(HostKernels(), case)
    expect_alike(case, want)


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("lengths", [(1,), (1, 1, 1, 1), (2, 0, 8, 3), (9,), (64,), (130, 0, 1, 70)], ids=str)
def test_sequences_of_any_lengths(threads: int, lengths: tuple[int, ...], tiled: bool) -> None:
    compare(make_case(lengths, tiled=tiled, padding=2, slots=6))


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512_vnni"], indirect=True)
@pytest.mark.parametrize("head", [32, 48, 128, 144])
def test_heads_of_any_size_with_any_instructions(isa: str, head: int) -> None:
    for lengths in ((1, 2), (70,)):
        compare(make_case(lengths, head=head))


@pytest.mark.parametrize("lengths", [(2,), (70,)], ids=str)
def test_small_keys_are_normed_with_their_epsilon(lengths: tuple[int, ...]) -> None:
    compare(shrink(make_case(lengths)))


def test_heads_that_no_vector_fits_go_through_torch() -> None:
    compare(make_case((3, 20), head=8))


def test_micro_batches_of_any_sizes_give_the_same_state(threads: int) -> None:
    whole = make_case((150,))
    want = widen(copy_case(whole))
    run_case(PlainKernels(), want)
    for cut in ((150,), (1, 149), (8,) * 18 + (6,), (70, 1, 79)):
        parts = copy_case(whole)
        run_cut(HostKernels(), parts, cut)
        expect_alike(parts, want)


def test_threads_that_are_put_aside_change_no_bit() -> None:
    """A head that another thread finishes goes on where it was left: no token counts twice."""
    before = native.threads()
    native.set_threads(3)
    cases = [make_case((1, 2, 8), key_heads=8, value_heads=16, head=128) for _ in range(2)]
    stop = native._C["stop_helpers"]
    try:
        run_case(HostKernels(), cases[0])
        for point in (2, 3):  # taken, worked
            again = copy_case(cases[1])
            stop(point)
            run_case(HostKernels(), again)
            stop(0)
            for name in ("out", "states", "tails"):
                assert torch.equal(getattr(again, name), getattr(cases[0], name)), (name, point)
    finally:
        stop(0)
        native.set_threads(before)


def test_calls_are_recorded_and_repeat_with_new_numbers_and_slots() -> None:
    case = make_case((1, 1), slots=5)
    kernels, got = HostKernels(), copy_case(case)
    calls = record(lambda: kernels.delta_net(**vars(got), longest=1))
    assert calls is not None
    got.qkv[:2].normal_()
    got.slots.copy_(torch.tensor([4, 0]))
    fresh = replace(widen(copy_case(got)), qkv=got.qkv.double())
    calls.replay()
    run_case(PlainKernels(), fresh)
    expect_alike(got, fresh)


@pytest.mark.parametrize("tiled", [False, True])
def test_open_rows_that_hold_leave_the_bits_that_they_have_alone(threads: int, tiled: bool) -> None:
    """Beside a prompt in chunks too, which changes no open row."""
    for lengths, held in (((6, 1, 3), (4, -1, 3)), ((4, 70, 2), (1, -1, 0)), ((16,), (16,)), ((2,), (2,))):
        case = make_case(lengths, tiled=tiled, padding=1, slots=5)
        together = copy_case(case)
        run_open(HostKernels(), together, held)
        expect_open(HostKernels(), case, together, held, torch.equal)


@pytest.mark.parametrize("tiled", [False, True])
def test_plain_kernels_take_open_rows_as_tokens_that_come_one_by_one(tiled: bool) -> None:
    case, held = make_case((4, 70, 2), tiled=tiled, slots=5), (2, -1, 0)
    together = copy_case(case)
    run_open(PlainKernels(), together, held)
    expect_open(PlainKernels(), case, together, held, partial(torch.allclose, atol=1e-6))
