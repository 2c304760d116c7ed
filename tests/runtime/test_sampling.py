"""Choosing tokens from logits."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pshard.runtime.sampling import Sampler, Sampling
from pshard.runtime.sampling.chain import BLOCK, find_largest


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6), n=st.integers(1, 40 * BLOCK), share=st.floats(0, 1), levels=st.sampled_from((9, 10**6))
)
def test_the_largest_values_are_found_in_order(seed: int, n: int, share: float, levels: int) -> None:
    values = np.random.default_rng(seed).integers(0, levels, n).astype(np.float32)
    k = max(1, int(share**4 * n))
    found = find_largest(values, k)
    assert len(set(found.tolist())) == k
    assert (values[found] == np.sort(values)[::-1][:k]).all()
    assert (np.diff(found)[np.diff(values[found]) == 0] > 0).all()


def test_temperature_zero_takes_the_largest() -> None:
    logits = torch.randn(151936, generator=torch.Generator().manual_seed(3))
    assert Sampler(Sampling(temperature=0)).choose(logits) == int(logits.argmax())


def test_equal_seeds_draw_the_same_and_others_differ() -> None:
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(3))

    def draw(seed: int) -> list[int]:
        sampler = Sampler(Sampling(top_k=0, top_p=1, min_p=0, seed=seed))
        return [sampler.choose(logits) for _ in range(20)]

    assert draw(1) == draw(1) != draw(2)


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(top_k=2, top_p=1, min_p=0), {0, 1}),
        (Sampling(top_k=0, top_p=0.6, min_p=0), {0, 1}),  # 0.5 is below 0.6, 0.75 is not
        (Sampling(top_k=0, top_p=1, min_p=0.4), {0, 1}),  # 0.25 of 0.5 is above 0.4, 0.125 is not
        (Sampling(top_k=0, top_p=1, min_p=0), {0, 1, 2, 3}),
        (Sampling(top_k=4, top_p=1e-9, min_p=0), {0}),
    ],
)
def test_filters_keep_what_they_say(sampling: Sampling, kept: set[int]) -> None:
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    sampler = Sampler(replace(sampling, seed=1))
    assert {sampler.choose(logits) for _ in range(400)} == kept


def test_draws_follow_the_chances_at_the_temperature() -> None:
    sampler = Sampler(Sampling(temperature=0.5, top_k=0, top_p=1, min_p=0, seed=5))
    logits = torch.tensor([0.6, 0.3, 0.1]).log()
    drawn = np.bincount([sampler.choose(logits) for _ in range(4000)], minlength=3) / 4000
    chances = np.array([0.36, 0.09, 0.01]) / 0.46
    assert np.abs(drawn - chances).max() < 0.02
