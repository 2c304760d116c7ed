"""Windows and sinks on a CUDA GPU: cells in VRAM and on the host, graphs, cuts back. Skipped without one."""

import random

import pytest
import torch
from plan_samples import make_tier, make_variant
from toy_kinds import VOCAB, ToyFile

from pshard.reserve import TORCH_RESERVE_MIB
from pshard.runtime.build_engine import build_engine
from pshard.runtime.devices.device import open_device
from pshard.runtime.engine import Engine

pytestmark = pytest.mark.gpu
CONTEXT, SEQUENCES = 768, 2
ROUNDED = 1e-3  # of the logits' mean square: what bfloat16 costs


def open_on_gpu(file: ToyFile, place: tuple[str, str], batch: int) -> Engine:
    places: dict[str, tuple] = {u.name: place if u.kind.state else ("pinned", None) for u in file.spec.units}
    shape = CONTEXT * SEQUENCES, SEQUENCES
    tiers = tuple(make_tier(file.spec, n, places, 1, *shape, batch=batch) for n in (SEQUENCES, batch))
    variant = make_variant(file.spec, tiers, *shape, reserve_mib=TORCH_RESERVE_MIB)
    return build_engine(file, variant, open_device("cuda"))


@pytest.mark.parametrize("batch", [24, 64, 300])
@pytest.mark.parametrize("place", [("pinned", "vram"), ("streamed", "host"), ("cpu", "host")], ids=str)
def test_every_placement_gives_the_logits_of_a_plain_forward(place: tuple[str, str], batch: int) -> None:
    file, rng, texts = ToyFile("wawa", context=CONTEXT), random.Random(0), [list[int]() for _ in range(SEQUENCES)]
    with open_on_gpu(file, place, batch) as engine:
        for turn, sizes in enumerate([(300, 3), (1, 1), (1, 200), (1, 1), (150, 1), *[(1, 1)] * 70]):
            if turn == 4:
                engine.reset(0, 40)
                texts[0] = texts[0][:40]
            new = [[rng.randrange(VOCAB) for _ in range(n)] for n in sizes]
            for text, ids, logits in zip(texts, new, engine.forward(new, all_logits=True), strict=True):
                text += ids
                if turn < 8 or turn > 72:
                    expected = file.logits(text)[-len(ids) :]
                    assert torch.isfinite(logits).all()
                    assert ((logits - expected) ** 2).mean() < ROUNDED * (expected**2).mean()
