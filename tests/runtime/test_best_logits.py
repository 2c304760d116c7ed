"""Greedy sampling over ranks: the best of the parts is the best of the whole, and only candidates travel."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import open_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from model_files import write_gguf
from thread_ranks import ThreadGroup, random_tiers, run_ranks

from pshard.errors import StepFailed
from pshard.runtime.best_logits import FIELDS, _find_on_device, choose_best, find_best
from pshard.runtime.devices.device import CpuDevice
from pshard.runtime.sampling import Sampler, Sampling

CONTEXT = 96


@settings(max_examples=200)
@given(
    widths=st.lists(st.integers(0, 7), min_size=1, max_size=5).filter(any), rows=st.integers(0, 3), seed=st.integers(0)
)
def test_the_best_of_the_parts_is_the_first_largest_of_the_whole(widths: list[int], rows: int, seed: int) -> None:
    rng = random.Random(seed)
    logits = torch.tensor([[float(rng.randrange(4)) for _ in range(sum(widths))] for _ in range(rows)])
    logits = logits.reshape(rows, sum(widths))
    candidates = torch.cat([find_best(part) for part in logits.split(widths, dim=1)], dim=1)
    best = choose_best(candidates)
    assert best.dtype == torch.float32 and best.shape == (rows, 2)
    for row, (value, column) in zip(logits.tolist(), best.tolist()):
        assert value == max(row) and column == row.index(max(row))


@settings(max_examples=100)
@given(rows=st.integers(1, 4), columns=st.integers(1, 40), nan=st.booleans(), seed=st.integers(0))
def test_a_device_finds_the_candidates_that_the_host_finds(rows: int, columns: int, nan: bool, seed: int) -> None:
    rng = random.Random(seed)
    part = torch.tensor([[float(rng.randrange(4)) for _ in range(columns)] for _ in range(rows)])
    if nan:
        part[rng.randrange(rows), rng.randrange(columns)] = float("nan")
    assert torch.equal(_find_on_device(part).nan_to_num(-1.0), find_best(part).nan_to_num(-1.0))


def test_of_greedy_steps_no_logits_come_to_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "m.gguf", arch="qwen3", qtype="Q4_0", vocab=333)
    came, receive = list[int](), CpuDevice.receive

    def note(device: CpuDevice, here: torch.Tensor, there: torch.Tensor) -> None:
        came.append(here.numel())
        receive(device, here, there)

    monkeypatch.setattr(CpuDevice, "receive", note)
    with open_engine(path, context=CONTEXT) as engine:
        best = engine.forward([3, 1, 4, 1, 5], best_only=True)
        assert not came
        engine.reset()
        logits = engine.forward([3, 1, 4, 1, 5])
        assert came == [333]
    assert best.tolist() == [float(logits.max()), float(logits.argmax())]


@pytest.mark.parametrize("at", [0, 2, 5])
def test_a_nan_in_any_part_is_found_and_refused(at: int) -> None:
    logits = torch.tensor([[1.0, 5.0, 2.0, 3.0, 9.0, 0.0]])
    logits[0, at] = float("nan")
    best = choose_best(torch.cat([find_best(part) for part in logits.split([3, 0, 3], dim=1)], dim=1))
    with pytest.raises(StepFailed, match="not numbers"):
        Sampler(Sampling(temperature=0)).take_best(*best[0].tolist())


@pytest.mark.parametrize(("mode", "shares"), [("tensor", (2.0, 0.0, 5.0)), ("layer", (1.0, 2.0)), ("tensor", (1.0,))])
def test_ranks_exchange_candidates_and_find_what_one_rank_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, shares: tuple[float, ...]
) -> None:
    path, gathered = write_gguf(tmp_path / "m.gguf", arch="qwen3", qtype="Q4_0", vocab=333), []
    plain = ThreadGroup.gather_columns

    def gather(group: ThreadGroup, local: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        gathered.append(local.shape[1])
        return plain(group, local, *args, **named)

    monkeypatch.setattr(ThreadGroup, "gather_columns", gather)

    def talk(engine: Any, best_only: bool) -> torch.Tensor:
        rows = [engine.forward(p, best_only=best_only) for p in ([3, 1, 4, 1, 5] * 4, [9], [2, 6, 5])]
        return torch.stack([*rows, *engine.forward([7, 8], all_logits=True, best_only=best_only)])

    def run(best_only: bool) -> list[torch.Tensor]:
        gathered.clear()
        return run_ranks(path, shares, lambda e: talk(e, best_only), CONTEXT, random_tiers(3, CONTEXT), mode=mode)

    logits = run(False)
    assert len(shares) == 1 or max(gathered) > FIELDS
    expected = [[float(value), float(column)] for value, column in zip(*logits[0].max(1))]
    for best in run(True):
        assert best.tolist() == expected
    assert set(gathered) <= {FIELDS}
