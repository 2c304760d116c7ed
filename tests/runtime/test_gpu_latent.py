"""Latent attention on a CUDA GPU: kernels of a true model's sizes, and engines in every place. Skipped without one."""

import random
from pathlib import Path

import pytest
import torch
from engines import open_engine, pinned_everywhere
from latent_files import LIKE, random_tensors, write_latent_gguf
from plan_samples import make_tier

from pshard.models import open_model
from pshard.runtime.kernels.api import RopeTable, Segment
from pshard.runtime.kernels.plain import PlainKernels
from pshard.runtime.kernels.row_index import make_rows
from pshard.units.kv_cells import KV_BLOCK
from pshard.units.latent_attention import LATENT_ATTENTION, latent_pieces

pytestmark = pytest.mark.gpu
CONTEXT = 256
ROUNDED = 2e-2  # of the logits' mean square, as for experts


def talk(engine) -> torch.Tensor:
    """Prompts and single tokens: logits of every position."""
    rng = random.Random(1)
    prompts = [[rng.randrange(320) for _ in range(n)] for n in (70, 9, 1, 1, 4, 1, 1)]
    with engine:
        return torch.cat([engine.forward(p, all_logits=True) for p in prompts])


@pytest.mark.parametrize("like", LIKE)
@pytest.mark.parametrize("place", LATENT_ATTENTION.places, ids=str)
def test_latents_give_the_reference_logits_wherever_they_are(tmp_path: Path, like: str, place: tuple) -> None:
    path = write_latent_gguf(tmp_path / "m.gguf", like, random_tensors(like), qtype="Q8_0")
    with open_model(path) as file:
        spec = file.spec
    places = {u.name: ("pinned", "vram" if u.kind.state else None) for u in spec.units}
    places |= {u.name: place for u in spec.units if u.kind is LATENT_ATTENTION}
    tiers = tuple(make_tier(spec, n, places, 2, CONTEXT, 1) for n in (4, 80))
    expected = talk(open_engine(path, pinned_everywhere(spec, (4, 80), CONTEXT), context=CONTEXT))
    got = talk(open_engine(path, tiers, "fast", CONTEXT, device="cuda"))
    assert torch.isfinite(got).all()
    assert ((got - expected) ** 2).mean() < ROUNDED * (expected**2).mean()
    assert torch.equal(got, talk(open_engine(path, tiers, "fast", CONTEXT, device="cuda")))


@pytest.mark.parametrize(("tokens", "past"), [(1, 3000), (16, 40), (300, 500)])
@pytest.mark.parametrize("heads", [16, 128])
def test_kernels_of_true_sizes_are_torchs(heads: int, tokens: int, past: int) -> None:
    from pshard.runtime.kernels.gpu.cuda import CudaKernels

    torch.manual_seed(0)
    rank, rope, blocks = 512, 64, -(-(past + tokens) // KV_BLOCK)
    rows = make_rows((Segment(0, 0, tokens, past, tuple(range(blocks))),), "cuda")
    angle = torch.rand(past + tokens, rope // 2, device="cuda")
    table, norm = RopeTable(angle.cos(), angle.sin(), "adjacent"), torch.rand(rank, device="cuda")
    half = {"device": "cuda", "dtype": torch.bfloat16}
    kv, q = torch.randn(tokens, rank + rope, **half), torch.randn(tokens, heads, rank + rope, **half)
    partial = torch.empty(min(tokens, 64) * latent_pieces(min(tokens, 64), heads), heads, rank + 2, device="cuda")
    found = []
    for kernels in (PlainKernels(), CudaKernels("cuda", 512)):
        cells = torch.zeros(blocks, KV_BLOCK, 1, rank + rope, **half)
        cells.copy_(torch.linspace(-1, 1, cells.numel(), device="cuda").view_as(cells).sin())
        turned, mixed = q.clone(), torch.empty_like(q)
        kernels.store_latent(kv.clone(), q[..., rank:], turned[..., rank:], norm, 1e-6, table, rows, cells)
        kernels.attend_latent(turned, rank, cells, rows, 0.1, mixed, partial)
        found.append((cells.float(), turned.float(), mixed[..., :rank].float()))
    for want, got in zip(*found):
        torch.testing.assert_close(got, want, rtol=0.03, atol=0.03)
