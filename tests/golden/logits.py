"""Digests of logits of tiny models under many placements. They hold for one machine: compare two commits on it."""

import hashlib
import random
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import torch
from engines import converse, open_engine
from model_files import write_gguf, write_hf_folder
from plan_samples import make_tier, random_places, shrink_places, split_places

from pshard.models import open_model

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo.gguf"
TOKENS = (1, 16, 64)
SEEDS = range(3)


def digest_logits(device: str) -> dict[str, str]:
    """Case -> digest of all logits of a conversation."""
    with tempfile.TemporaryDirectory() as folder:
        files = {**_write_models(Path(folder)), "demo": DEMO}
        found = {}
        for (name, path), kernels, seed in product(files.items(), ("fast", "plain"), SEEDS):
            for users in (1, 3) if seed == 0 else (1,):
                key = f"{name}, {kernels}, {users} users, placements {seed}"
                found[key] = _digest(path, device, kernels, seed, users)
    return found


def _write_models(folder: Path) -> dict[str, Path]:
    made = {f"{arch} F32": write_gguf(folder / f"{arch}.gguf", arch) for arch in ("llama", "qwen2", "qwen3")}
    for qtype in ("Q4_0", "Q8_0", "Q4_K", "Q6_K", "BF16", "MXFP4"):
        made[f"qwen3 {qtype}"] = write_gguf(folder / f"{qtype}.gguf", "qwen3", qtype=qtype, n_layers=3)
    torch.manual_seed(0)
    write_hf_folder(folder / "mistral", "mistral")
    made["mistral from its folder"] = folder / "mistral"
    return made


def _digest(path: Path, device: str, kernels: str, seed: int, users: int) -> str:
    with open_model(path) as file:
        spec = file.spec
    rng = random.Random(seed)
    context, tiers = 256 * users, []
    places = random_places(spec, rng)
    split = split_places(spec, places, rng) if seed == 1 else {}
    for tokens in TOKENS:
        own = split if split and tokens <= 16 else places
        if seed != 1:
            places = shrink_places(spec, places, rng)
        tiers.append(make_tier(spec, tokens, own, 2, context, users))
    types = ("f32", "f32") if seed < 2 or device == "cuda" else ("q8_0", "bf16")
    digest = hashlib.sha256()
    with open_engine(path, tuple(tiers), kernels, context, users, device=device, kv_types=types) as engine:
        for logits in _talk(engine, users):
            digest.update(logits.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def _talk(engine, users: int) -> Iterator[torch.Tensor]:
    if users == 1:
        yield converse(engine)
        return
    rng = random.Random(2)
    for lengths in ((40, 3, 70), (1, 1, 1), (1, 0, 1), (5, 1, 2)):
        yield from engine.forward([[rng.randrange(320) for _ in range(n)] for n in lengths], all_logits=True)
