"""On a CUDA GPU a text has the same bits alone and in company, when steps are filled up to their tier. Skipped without
one."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from engines import open_engine
from hybrid_files import VOCAB as HYBRID_VOCAB
from hybrid_files import random_hybrid, write_hybrid_gguf
from latent_files import random_tensors, write_latent_gguf
from model_files import write_gguf

from pshard.runtime.devices.device import CudaDevice
from pshard.runtime.engine import Engine
from pshard.runtime.texts.text import Piece

pytestmark = pytest.mark.gpu
DEMO = Path(__file__).parents[3] / "examples" / "demo.gguf"
TEXTS, MADE, TIER = 24, 12, 32


def write_model(folder: Path, what: str) -> tuple[Path, int]:
    """The file, and how many ids there are."""
    path = folder / "m.gguf"
    if what == "demo":
        return DEMO, 256
    if what == "hybrid":
        return write_hybrid_gguf(path, "dense", random_hybrid("dense"), qtype="Q8_0"), HYBRID_VOCAB
    if what == "latent":
        return write_latent_gguf(path, "lite", random_tensors("lite"), qtype="Q8_0"), 320
    return write_gguf(path, "qwen3moe", qtype="Q4_0", n_layers=3), 320


def answer(engine: Engine, prompts: list[list[int]], salt: str, late: int) -> list[list[tuple[int, bytes]]]:
    """Of each prompt the tokens made, and the bits of their logits. The last `late` texts come one by one; steps take
    as much of the prompts as the tier leaves room for."""
    pool, made = engine.texts, [list[tuple[int, bytes]]() for _ in prompts]
    texts = [pool.open(prompt, salt=salt) for prompt in prompts]
    lacking = [list(prompt[text.cached :]) for prompt, text in zip(prompts, texts)]
    step = 0
    while any(len(found) < MADE for found in made):
        pieces, room = {}, TIER
        for i in range(min(len(prompts) - late + step, len(prompts))):
            if len(made[i]) < MADE and room:
                new, lacking[i] = lacking[i][:room], lacking[i][room:]
                pieces[i] = Piece(texts[i], tuple(new), "none" if lacking[i] else "last", full=not lacking[i])
                room -= len(new)
        for i, rows in zip(pieces, pool.step(list(pieces.values()))):
            if rows:
                token = int(np.argmax(rows[0].full))
                made[i].append((token, rows[0].full.tobytes()))
                lacking[i] = [token]
        step += 1
    for text in texts:
        pool.close(text)
    return made


@pytest.mark.parametrize("what", ["demo", "hybrid", "moe", "latent"])
def test_24_texts_at_once_have_the_bits_of_each_alone(tmp_path: Path, what: str) -> None:
    path, vocab = write_model(tmp_path, what)
    rng = random.Random(1)
    prompts = [[rng.randrange(vocab) for _ in range(rng.choice((1, 5, 20, 70)))] for _ in range(TEXTS)]
    options = {"context": 512 * TEXTS, "sequences": TEXTS, "tokens": (1, TIER, 96), "kv_types": ("bf16", "bf16")}
    with open_engine(path, kernels="fast", device="cuda", exact=True, **options) as engine:
        engine.texts.keep_tier(TIER)
        together = answer(engine, prompts, "together", TEXTS // 2)
        alone = [answer(engine, [prompt], f"alone {i}", 0)[0] for i, prompt in enumerate(prompts)]
    assert [[token for token, _ in found] for found in together] == [[token for token, _ in found] for found in alone]
    assert together == alone


@pytest.mark.parametrize("what", ["demo", "hybrid", "moe", "latent"])
def test_a_graph_serves_all_numbers_of_texts_up_to_its_rung(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Texts that come and go capture no more than the ladder has, and give the bits of kernels started one by one."""
    path, vocab = write_model(tmp_path, what)
    keys = set[tuple]()
    repeat = CudaDevice.repeat

    def counted(self, key, worth_it, work):
        keys.add(key)
        repeat(self, key, worth_it, work)

    def talk() -> list[torch.Tensor]:
        rng, found = random.Random(2), list[torch.Tensor]()
        options = {"context": 128 * TEXTS, "sequences": TEXTS, "tokens": (TEXTS, 96)}
        with open_engine(path, kernels="fast", device="cuda", **options) as engine:
            for width in (*range(1, TEXTS + 1), 17, 9, 3):
                new = [[rng.randrange(vocab)] if i < width else [] for i in range(TEXTS)]
                found += [logits for logits in engine.forward(new) if logits.numel()]
        return found

    monkeypatch.setattr(CudaDevice, "repeat", counted)
    by_graphs = talk()
    assert {key[3] for key in keys} == {1, 2, 4, 8, 12, 16, 24}
    monkeypatch.setattr(CudaDevice, "repeat", lambda self, key, worth_it, work: work())
    one_by_one = talk()
    assert all(torch.equal(one, other) for one, other in zip(by_graphs, one_by_one, strict=True))
