"""Ranks on GPUs of one host: sums of every way, and ranks that die or do not come. Needs two GPUs."""

import time
from pathlib import Path

import pytest
import torch
from head_files import write_headed
from rank_program import add_normalised, normalise, partial
from test_parallel_group import expect_wide_norms, processes_of, run_ranks

from pshard.profile.timed.collective_times import measure_collectives

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
WIRES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
BOUNDS = {"f32": 1e-13, "bf16": 3e-5, "f16": 5e-7}  # NMSE against float64; two roundings of 7 numbers at worst


@pytest.mark.parametrize("backend", ["peers", "nccl"])
def test_sums_are_right_and_the_same_bits_on_every_rank_and_every_time(backend: str, tmp_path: Path) -> None:
    done = run_ranks(f"gpu_sums@{backend}", 2, tmp_path)
    assert done.returncode == 0, done.stderr
    first, other = (torch.load(tmp_path / f"gpu_sums-{r}.pt") for r in range(2))
    for (shape, dtype, algorithm, sums), theirs in zip(first, other):
        parts = [partial(r, shape) for r in range(2)]
        wanted = sum(p.double() for p in parts)
        found = float(((sums[0].double() - wanted) ** 2).sum() / (wanted**2).sum())
        assert found < BOUNDS[dtype], (shape, dtype, algorithm, found)
        assert torch.equal(sums, theirs[3]) and all(torch.equal(s, sums[0]) for s in sums), (shape, dtype, algorithm)
        if algorithm in ("rows", "many-rows", "one-shot"):  # parts are rounded, sums are not
            rounded = [p.to(WIRES[dtype]).float() for p in parts]
            assert torch.equal(sums[0], rounded[0] + rounded[1]), (shape, dtype, algorithm)


@pytest.mark.parametrize("backend", ["peers", "nccl"])
def test_norms_over_all_heads_are_of_sums_over_gpus(backend: str, tmp_path: Path) -> None:
    """Wherever attention is, within what bfloat16 costs, the same on both ranks."""
    expect_wide_norms(backend, tmp_path, rounded=2e-2)


def test_programs_of_a_row_share_its_norm(tmp_path: Path) -> None:
    done = run_ranks("gpu_norms@peers", 2, tmp_path)
    assert done.returncode == 0, done.stderr
    first, other = (torch.load(tmp_path / f"gpu_norms-{r}.pt") for r in range(2))
    for i, (hidden, normed) in enumerate(first):
        assert torch.equal(hidden, other[i][0]) and torch.equal(normed, other[i][1])
        assert torch.equal(hidden, first[i // 2 * 2][0]) and torch.equal(normed, first[i // 2 * 2][1])
        before, part = partial(9, hidden.shape), partial(0, hidden.shape) + partial(1, hidden.shape)
        if i % 4 < 2:
            assert torch.equal(hidden, before + part)
        else:
            torch.testing.assert_close(
                hidden.double(), add_normalised(before, part, partial(7, part.shape[1:])), rtol=1e-5, atol=1e-5
            )
        wanted = normalise(hidden, partial(8, hidden.shape[1:]))
        assert float(((normed.double() - wanted) ** 2).sum() / (wanted**2).sum()) < 1e-5  # bfloat16


def test_sums_of_many_rows_normalise_as_they_go(tmp_path: Path) -> None:
    done = run_ranks("gpu_many_rows@peers", 2, tmp_path)
    assert done.returncode == 0, done.stderr
    first, other = (torch.load(tmp_path / f"gpu_many_rows-{r}.pt") for r in range(2))
    for i, (hidden, normed, rounded) in enumerate(first):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(first[i], other[i], strict=True))
        parts = [partial(r, hidden.shape).to(torch.bfloat16).float() for r in range(2)]
        before, part = partial(9, hidden.shape), parts[0] + parts[1]
        if i % 2 == 0:
            assert torch.equal(hidden, before + part)
        else:
            torch.testing.assert_close(
                hidden.double(), add_normalised(before, part, partial(7, part.shape[1:])), rtol=1e-5, atol=1e-4
            )
        wanted = normalise(hidden, partial(8, hidden.shape[1:]))
        torch.testing.assert_close(normed.double(), wanted, rtol=1e-6, atol=1e-4)
        # a compiler may sum a row's squares once for each of the two types, in another order
        torch.testing.assert_close(rounded.double(), normed.double(), rtol=2.0**-8 + 1e-6, atol=0)
        assert float((rounded != normed.to(torch.bfloat16)).float().mean()) < 1e-3


def test_a_part_that_leaves_from_its_product_gives_the_same_sum(tmp_path: Path) -> None:
    done = run_ranks("gpu_pushes@peers", 2, tmp_path)
    assert done.returncode == 0, done.stderr
    first, other = (torch.load(tmp_path / f"gpu_pushes-{r}.pt") for r in range(2))
    for i, ((part, hidden), (their_part, their_hidden)) in enumerate(zip(first, other, strict=True)):
        assert torch.equal(hidden, part + their_part) and torch.equal(hidden, their_hidden) and hidden.any()
        assert torch.equal(hidden, first[i // 4 * 4][1])


@pytest.mark.parametrize("backend", ["peers", "nccl"])
@pytest.mark.parametrize("like", ["llama", "glm"])
def test_drafts_of_a_cut_head_are_launched_at_once_and_are_those_that_come_one_by_one(
    like: str, backend: str, tmp_path: Path
) -> None:
    write_headed(tmp_path / "m.gguf", like, own=like == "glm")
    done = run_ranks(f"drafts@{backend}", 2, tmp_path)
    assert done.returncode == 0, done.stderr
    (found, chained), other = (torch.load(tmp_path / f"drafts-{rank}.pt") for rank in range(2))
    assert chained and other == (found, chained)
    assert found[0] == found[1] and all(len(told) == 7 for told in found[0])


def test_a_rank_that_dies_ends_the_one_that_waits_on_its_gpu(tmp_path: Path) -> None:
    start = time.monotonic()
    done = run_ranks("gpu_crash@peers", 2, tmp_path)
    assert done.returncode == 9 and "rank 1 of 2 ended with code 9" in done.stderr
    assert time.monotonic() - start < 60
    assert not processes_of(tmp_path)


def test_a_rank_that_never_comes_to_a_sum_on_the_gpu_is_named(tmp_path: Path) -> None:
    done = run_ranks("gpu_late@peers", 2, tmp_path)
    assert done.returncode == 2 and "rank 1 did not come to a sum" in done.stderr
    assert not processes_of(tmp_path)


def test_every_way_is_timed_alone_and_beside_copies() -> None:
    timings = measure_collectives("cuda", (2,), (16 << 10, 1 << 20))
    small = [t for t in timings if t.nbytes == 16 << 10]
    assert {t.backend for t in small} >= {"rows", "normed", "pushed", "one-shot", "two-shot", "nccl"}
    assert all(0 < t.seconds < 1 for t in timings)
    assert {t.copies for t in timings} == {False, True} and {t.dtype for t in timings} == {"f32", "bf16"}
