"""Hybrids on a CUDA GPU: engines in every place, several sequences, cuts and graphs. Skipped without one."""

import random
from pathlib import Path

import pytest
import torch
from engines import open_engine, pinned_everywhere
from hybrid_files import LIKE, VOCAB, random_hybrid, write_hybrid_gguf
from plan_samples import make_tier

from pshard.models import open_model
from pshard.runtime.kernels.plain import PlainKernels
from pshard.units.delta_net import DELTA_NET

pytestmark = pytest.mark.gpu
CONTEXT = 256
ROUNDED = 2e-2  # of the logits' mean square, as for experts


def talk(engine) -> torch.Tensor:
    """Three texts that grow unequally, are cut and begin anew: logits of every new token."""
    rng, found = random.Random(1), []
    with engine:
        for turn, sizes in enumerate([(70, 9, 1), (1, 1, 1), (1, 0, 1), (0, 30, 4), (1, 1, 1), (1, 1, 1), (2, 2, 2)]):
            if turn == 3:
                engine.reset(0, 40)
            if turn == 5:
                engine.reset(2)
            new = [[rng.randrange(VOCAB) for _ in range(n)] for n in sizes]
            found += [logits for logits in engine.forward(new, all_logits=True) if logits.numel()]
    return torch.cat(found)


@pytest.mark.parametrize("like", LIKE)
@pytest.mark.parametrize("place", DELTA_NET.places, ids=str)
def test_states_give_the_reference_logits_wherever_they_are(tmp_path: Path, like: str, place: tuple) -> None:
    path, shape = write_hybrid_gguf(tmp_path / "m.gguf", like, random_hybrid(like), qtype="Q8_0"), (3 * CONTEXT, 3)
    with open_model(path) as file:
        spec = file.spec
    places = {u.name: ("pinned", "vram" if u.kind.state else None) for u in spec.units}
    places |= {u.name: place for u in spec.units if u.kind is DELTA_NET}
    tiers = tuple(make_tier(spec, n, places, 2, *shape) for n in (4, 80))
    expected = talk(open_engine(path, pinned_everywhere(spec, (4, 80), *shape), "plain", *shape))
    for checkpoint_bytes in (0, 1 << 20):
        options = {"device": "cuda", "checkpoint_bytes": checkpoint_bytes}
        got = talk(open_engine(path, tiers, "fast", *shape, **options))
        assert torch.isfinite(got).all()
        assert ((got - expected) ** 2).mean() < ROUNDED * (expected**2).mean()


def test_decoding_by_graphs_is_decoding_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many sequences as rows or fewer, in graphs that were captured for other ones."""
    path = write_hybrid_gguf(tmp_path / "m.gguf", "dense", random_hybrid("dense"), qtype="Q4_0")

    def decode() -> torch.Tensor:
        rng = random.Random(2)
        with open_engine(path, None, "fast", 4 * CONTEXT, 4, (4, 32), device="cuda") as engine:
            engine.forward([[rng.randrange(VOCAB) for _ in range(n)] for n in (5, 9, 2, 7)])
            rounds = [(1, 1, 0, 0), (0, 0, 1, 1), (1, 0, 0, 1), (2, 0, 0, 0), (0, 2, 0, 0), (1, 1, 1, 1), (4, 0, 0, 0)]
            turns = [[[rng.randrange(VOCAB) for _ in range(n)] for n in sizes] for sizes in 2 * rounds]
            found = [logits for new in turns for logits in engine.forward(new, all_logits=True) if logits.numel()]
        return torch.cat(found)

    by_graphs = decode()
    monkeypatch.setattr("pshard.runtime.devices.device.CudaDevice.repeat", lambda self, key, worth_it, work: work())
    assert torch.equal(by_graphs, decode())


def test_gates_of_rows_are_torchs() -> None:
    from pshard.runtime.kernels.gpu.cuda import CudaKernels

    torch.manual_seed(0)
    for tokens in (1, 16, 300):
        x, gate = (torch.randn(tokens, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        wanted = x.clone()
        PlainKernels().gate_rows(wanted, gate)
        CudaKernels("cuda", 512).gate_rows(x, gate)
        torch.testing.assert_close(x, wanted, rtol=0.02, atol=0.02)
