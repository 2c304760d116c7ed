"""Sums and gathers through peers' memory: the kernels in Triton's interpreter, between processes."""

import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from engines import open_engine
from model_files import write_gguf
from peer_program import MANY, SUMS, inner_weight, summand
from rank_program import add_normalised, normalise
from warm_python import WarmProcess

pytest.importorskip("triton", reason="Triton is installed with the CUDA build of torch only")
MAKERS = Path(__file__).resolve().parents[1] / "makers"
SLOW = {2: "sums", 3: "rounds"}
WIRES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def run_ranks(scenario: str, ranks: int, folder: Path) -> None:
    path = os.pathsep.join(filter(None, (str(MAKERS), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    program = [sys.executable, "-P", str(MAKERS / "peer_program.py"), str(folder)]
    commands = [[*program, str(r), str(ranks), scenario] for r in range(ranks)]
    told = [(folder / f"errors-{r}").open("w+b") for r in range(ranks)]
    processes = [WarmProcess(c, environment, stderr=errors) for c, errors in zip(commands, told, strict=True)]
    try:
        for process, errors in zip(processes, told, strict=True):
            code = process.wait(200)
            errors.seek(0)
            assert code == 0, errors.read().decode()
    finally:
        for process, errors in zip(processes, told, strict=True):
            process.kill()
            errors.close()


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory, share: float) -> Callable[[int], Path]:
    """The folder in which so many ranks, started once, left what they found in all scenarios, `SLOW` where slow tests
    run."""

    @cache
    def start(ranks: int) -> Path:
        folder = tmp_path_factory.mktemp(f"{ranks}-ranks")
        scenarios = {2: ["norms", "many", "slices", "pushes", "late"], 3: ["gathers"]}[ranks]
        run_ranks("+".join([*scenarios, *([SLOW[ranks]] if share == 1 else [])]), ranks, folder)
        return folder

    return start


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_are_in_rank_order_and_the_same_bits_on_every_rank(ranks: int, left: Callable[[int], Path]) -> None:
    """Those of three ranks by one program, which takes several rounds."""
    results = [torch.load(left(ranks) / f"sums-{r}.pt") for r in range(ranks)]
    for seed, (shape, algorithm, wire) in enumerate(SUMS):
        parts = [summand(r, shape, seed).to(WIRES[wire]).float() for r in range(ranks)]
        total = torch.zeros(shape)
        for part in parts:
            total = total + part
        if algorithm == "two-shot":
            total = total.to(WIRES[wire]).float()
        onto = torch.arange(total.numel(), dtype=torch.float32).view(shape) + total
        rounding = 2.0**-6 * max(p.abs().max() for p in parts) if wire == "bf16" else 0.0  # the interpreter cuts off
        for i, want in ((2 * seed, onto), (2 * seed + 1, total)):
            torch.testing.assert_close(results[0][i], want, rtol=0, atol=rounding, msg=f"{shape} {algorithm} {wire}")
            assert all(torch.equal(found[i], results[0][i]) for found in results), f"{shape} {algorithm} {wire}"


def test_a_sum_may_add_and_normalise_at_once(left: Callable[[int], Path]) -> None:
    folder, weight = left(2), summand(9, (96,), 2)
    part, before = summand(0, (3, 96), 0) + summand(1, (3, 96), 0), summand(9, (3, 96), 1)
    for rank in range(2):
        plain, normed, inner, normed_inner = torch.load(folder / f"norms-{rank}.pt")
        assert torch.equal(plain, before + part)
        torch.testing.assert_close(inner.double(), add_normalised(before, part, inner_weight(96)), rtol=1e-5, atol=1e-5)
        for hidden, got in ((plain, normed), (inner, normed_inner)):
            torch.testing.assert_close(got[:, :96].double(), normalise(hidden, weight), rtol=1e-5, atol=1e-5)
            assert not got[:, 96:].any()


def test_sums_of_many_rows_normalise_as_they_go(left: Callable[[int], Path]) -> None:
    folder = left(2)
    found = [torch.load(folder / f"many-{rank}.pt") for rank in range(2)]
    for seed, (rows, cols, wire, dtype) in enumerate(MANY):
        parts = [summand(rank, (rows, cols), seed).to(dtype).to(WIRES[wire]).float() for rank in range(2)]
        before, weight = summand(9, (rows, cols), seed), summand(9, (cols,), 2)
        hidden = before + (parts[0] + parts[1])
        normed = normalise(hidden, weight)
        # the interpreter cuts off where a GPU rounds
        cut = 2.0**-6 * max(p.abs().max() for p in parts) if dtype.itemsize > WIRES[wire].itemsize else 0.0
        assert all(torch.equal(one, other) for one, other in zip(found[0][seed], found[1][seed]))
        got, out, rounded, alone, in_place, from_pairs, from_made, inner, of_inner = found[0][seed]
        wanted = add_normalised(before, parts[0] + parts[1], inner_weight(cols))
        torch.testing.assert_close(inner.double(), wanted, rtol=1e-5 + cut, atol=1e-5 + cut)
        torch.testing.assert_close(of_inner.double(), normalise(inner, weight), rtol=1e-5, atol=1e-5)
        assert torch.equal(alone, got)
        torch.testing.assert_close(got, hidden, rtol=0, atol=cut)
        torch.testing.assert_close(in_place, parts[0] + parts[1], rtol=0, atol=cut)
        torch.testing.assert_close(from_pairs, from_made, rtol=0, atol=0 if wire == "f32" or not cut else cut)
        assert not torch.equal(from_pairs, got)
        torch.testing.assert_close(out[:, :cols].double(), normed, rtol=1e-5 + cut, atol=1e-5 + cut)
        assert not out[:, cols:].any()
        if seed:
            torch.testing.assert_close(rounded.float(), out[:, :cols], rtol=2.0**-7, atol=0)
        else:
            assert not rounded.any()


def test_programs_of_a_row_share_its_norm(left: Callable[[int], Path]) -> None:
    folder = left(2)
    first, second = (torch.load(folder / f"slices-{rank}.pt") for rank in range(2))
    shape = first[0].shape
    plain, inner = (summand(0, shape, seed) + summand(1, shape, seed) for seed in (0, 3))
    assert shape[1] > 1024
    torch.testing.assert_close(
        first[0].double(), add_normalised(plain, inner, inner_weight(shape[1])), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(first[1].double(), normalise(first[0], summand(9, shape[1:], 2)), rtol=1e-5, atol=1e-5)
    assert all(torch.equal(one, other) for one, other in zip(first, second))


def test_a_part_that_leaves_from_its_product_gives_the_same_sum(left: Callable[[int], Path]) -> None:
    folder = left(2)
    first, second = (torch.load(folder / f"pushes-{rank}.pt") for rank in range(2))
    for seed, (ours, theirs) in enumerate(zip(first, second)):
        for (part, hidden, normed), (their_part, *rest) in zip(ours, theirs):
            assert torch.equal(hidden, summand(9, hidden.shape, seed) + (part + their_part)) and hidden.any()
            assert torch.equal(hidden, rest[0]) and torch.equal(normed, rest[1]) and torch.equal(normed, ours[0][2])


def test_columns_of_unequal_ranks_are_gathered(left: Callable[[int], Path]) -> None:
    folder = left(3)
    wanted = torch.cat([torch.full((1, w), float(r)) for r, w in enumerate((4100, 0, 37))], dim=1)
    for rank in range(3):
        assert torch.equal(torch.load(folder / f"gathers-{rank}.pt"), torch.cat([wanted, wanted + 0.25]))


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "arch"), [(3, "qwen3"), (2, "qwen3moe")])
def test_engines_sum_and_gather_through_peers(ranks: int, arch: str, tmp_path: Path) -> None:
    # dp4a is the quicker way in the interpreter
    shape = {"qtype": "Q4_0", "d_expert": 64, "n_layers": 2} if arch == "qwen3moe" else {"qtype": "Q5_0"}
    write_gguf(tmp_path / "m.gguf", arch, **shape)
    with open_engine(tmp_path / "m.gguf", context=64) as engine:
        wanted = engine.forward([5, 6], all_logits=True)
    run_ranks("engines", ranks, tmp_path)
    found = [torch.load(tmp_path / f"engines-{r}.pt") for r in range(ranks)]
    assert ((found[0] - wanted) ** 2).mean() / (wanted**2).mean() < 2e-3  # int8 activations
    assert all(torch.equal(other, found[0]) for other in found)


@pytest.mark.slow
def test_a_prompts_sums_may_take_norms_along_and_ranks_may_divide_its_routing(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "qwen3moe", qtype="Q4_0", d_expert=64, n_layers=2)
    with open_engine(tmp_path / "m.gguf", context=128, tokens=(80,)) as engine:
        wanted = engine.forward([7 * i % 320 for i in range(70)], all_logits=True)
    run_ranks("prompts", 2, tmp_path)
    found = [torch.load(tmp_path / f"prompts-{rank}.pt") for rank in range(2)]
    # of so many rows each rank has its own columns
    divided, whole, alone = (torch.cat(columns, dim=1) for columns in zip(*found, strict=True))
    assert torch.equal(divided, whole) and torch.equal(whole, alone)
    assert ((alone - wanted) ** 2).mean() / (wanted**2).mean() < 2e-3  # activations in bfloat16


def test_a_rank_that_does_not_come_is_named_and_nobody_waits_for_ever(left: Callable[[int], Path]) -> None:
    folder = left(2)
    assert (folder / "late").read_text() == "1"
