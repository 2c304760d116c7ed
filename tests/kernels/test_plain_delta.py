"""The gated delta net in plain torch: both forms agree, and a state does not depend on how its tokens were cut."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from delta_inputs import DeltaCase, make_case, run_cut, shrink

from pshard.runtime.kernels.plain import PlainKernels
from pshard.runtime.kernels.plain_delta import run_chunked, run_recurrent

CUTS = {"one by one": (1,) * 150, "eights": (8,) * 18 + (6,), "1 + 149": (1, 149), "70 + 1 + 79": (70, 1, 79)}


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 200])
def test_chunks_give_what_single_tokens_give(tokens: int) -> None:
    torch.manual_seed(0)
    heads, d = 3, 16
    q, k, v = (torch.randn(heads, tokens, d, dtype=torch.float64) for _ in range(3))
    k = torch.nn.functional.normalize(k, dim=-1)
    decay, share = -3 * torch.rand(heads, tokens).double(), torch.rand(heads, tokens).double()
    state = torch.randn(heads, d, d, dtype=torch.float64)
    want, end = run_recurrent(q, k, v, decay, share, state)
    got, last = run_chunked(q, k, v, decay, share, state)
    assert (got - want).abs().max() < 1e-9 and (last - end).abs().max() < 1e-9


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("cut", CUTS.values(), ids=list(CUTS))
def test_micro_batches_of_any_sizes_give_the_same(cut: tuple[int, ...], tiled: bool) -> None:
    whole, parts = (make_case((150,), tiled=tiled, dtype=torch.float64) for _ in range(2))
    run_cut(PlainKernels(), whole, (150,))
    run_cut(PlainKernels(), parts, cut)
    for name in ("out", "states", "tails"):
        assert (getattr(parts, name) - getattr(whole, name)).abs().max() < 1e-9, name


@pytest.mark.parametrize("size", [lambda case: case, shrink], ids=["ordinary", "small"])
def test_by_hand_one_token_of_one_head(size: Callable[[DeltaCase], DeltaCase]) -> None:
    """Every formula once more, without the code's help."""
    case = size(make_case((1,), key_heads=1, value_heads=1, head=4, dtype=torch.float64))
    w, x = case.weights, case.qkv[0].double()
    raw = torch.cat((case.tails[case.slots[0]], x[None]))
    mixed = (raw * w.conv.double().T).sum(0)
    mixed = mixed / (1 + torch.exp(-mixed))
    q, k, v = mixed.split(4)
    q, k = q / (q.square().sum() + 1e-6).sqrt() / 2, k / (k.square().sum() + 1e-6).sqrt()
    gate = torch.exp(w.decay.double() * torch.log1p(torch.exp(case.alpha[0].double() + w.dt_bias.double())))
    before = gate * case.states[case.slots[0], 0]
    u = (v - before.T @ k) / (1 + torch.exp(-case.beta[0].double()))
    state = before + torch.outer(k, u)
    o = state.T @ q
    z = case.z[0].double()
    want = o / (o.square().mean() + w.eps).sqrt() * w.norm.double() * z / (1 + torch.exp(-z))
    run_cut(PlainKernels(), case, (1,))
    assert (case.states[case.slots[0], 0] - state).abs().max() < 1e-12
    assert (case.out[0] - want).abs().max() < 1e-7  # norm weights are float32
    assert torch.equal(case.tails[case.slots[0]], raw[1:])


def test_sequences_touch_their_own_slots_and_padding_touches_nothing() -> None:
    case = make_case((2, 0, 70, 1), padding=5, slots=7)
    alone = [
        replace(case, out=case.out.clone(), states=case.states.clone(), tails=case.tails.clone()) for _ in range(4)
    ]
    before = case.states.clone(), case.tails.clone()
    run_cut(PlainKernels(), case, None)
    used = case.slots.tolist()
    for slot in range(7):
        moved = slot in (used[0], used[2], used[3])
        assert torch.equal(case.states[slot], before[0][slot]) != moved
        assert torch.equal(case.tails[slot], before[1][slot]) != moved
    assert case.out[73:].isnan().all() and case.out[:73].isfinite().all()
    for i, one in enumerate(alone):
        first, last = case.offsets[i : i + 2].tolist()
        only = replace(
            one, qkv=one.qkv[first:last], z=one.z[first:last], beta=one.beta[first:last], alpha=one.alpha[first:last],
            out=one.out[first:last], slots=one.slots[i : i + 1], offsets=torch.tensor([0, last - first]).int(),
        )  # fmt: skip
        run_cut(PlainKernels(), only, None)
        assert torch.equal(only.out, case.out[first:last])
        assert torch.equal(one.states[used[i]], case.states[used[i]])


def test_grouped_and_tiled_heads_use_other_keys() -> None:
    grouped, tiled = (make_case((5,), tiled=t) for t in (False, True))
    for case in (grouped, tiled):
        run_cut(PlainKernels(), case, None)
    assert (grouped.out - tiled.out).abs().max() > 0.1
