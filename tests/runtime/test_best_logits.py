"""Greedy drawing over ranks: the best of the parts is the best of the whole, and only candidates travel."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_files import write_gguf
from thread_ranks import ThreadGroup, random_tiers, run_ranks

from pshard.errors import StepFailed
from pshard.runtime.best_logits import FIELDS, choose_best, find_best
from pshard.runtime.sampling import Sampler, Sampling

CONTEXT = 96


@settings(max_examples=200, deadline=None)
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


@pytest.mark.parametrize("at", [0, 2, 5])
def test_a_nan_in_any_part_is_found_and_refused(at: int) -> None:
    logits = torch.tensor([[1.0, 5.0, 2.0, 3.0, 9.0, 0.0]])
    logits[0, at] = float("nan")
    best = choose_best(torch.cat([find_best(part) for part in logits.split([3, 0, 3], dim=1)], dim=1))
    with pytest.raises(StepFailed, match="not numbers"):
        Sampler(Sampling(temperature=0)).take_best(*best[0].tolist())


@pytest.mark.parametrize(
    ("mode", "shares"), [("tensor", (1.0, 1.0)), ("tensor", (2.0, 0.0, 5.0)), ("layer", (1.0, 2.0)), ("tensor", (1.0,))]
)
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
