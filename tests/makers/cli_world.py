"""A small world for tests of the commands: a tiny model with a tokenizer, and a profile of this machine in the cache.

The profile says of this machine what `pshard.profile.identify` finds, so that commands accept it; its tables come from
made-up rates, so that a plan under a small budget streams, pins and computes on the CPU, and takes no measuring.
"""

import dataclasses
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from model_files import write_gguf
from tokenizers import pre_tokenizers

from pshard.jsonio import to_json
from pshard.machine import MachineProfile
from pshard.planner.price.datasheet import Rates, profile_from_datasheet

RATES = Rates(link=8e9, acc_memory=60e9, acc_flops=2e12, host_memory=12e9, host_flops=0.1e12, kind="cpu")
CHAT = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@dataclass(frozen=True)
class World:
    """Where things lie. `budget` (MiB) holds a part of the model, `roomy` holds all of it."""

    model: Path
    profile: Path
    registry: Path
    budget: int = 6
    roomy: int = 64


def make_world(folder: Path, **model: Any) -> World:
    """Write a model of 9 MiB and a profile of this machine into `folder`/models and `folder`/cache.

    Commands find the profile when PSHARD_CACHE is that cache, which is so for `folder` = tmp_path.
    """
    world = world_in(folder)
    world.model.parent.mkdir(exist_ok=True)
    write_gguf(world.model, **({"n_layers": 4, "vocab": 258, "metadata": tokenizer_metadata()} | model))
    write_profile(world.profile)
    return world


def write_profile(path: Path) -> Path:
    """Write the made-up profile of this machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_write_out(made_up_profile()), encoding="utf-8")
    return path


@cache
def _write_out(profile: MachineProfile) -> str:
    """As `save_profile` does: once, as thousands of rows take longer than many a test."""
    return json.dumps(to_json(profile), indent=1) + "\n"


_make_tables = cache(profile_from_datasheet)


def world_in(folder: Path) -> World:
    """The world that lies, or will lie, in a folder."""
    model = folder / "models" / "tiny.gguf"
    return World(model, folder / "cache" / "profile.json", model.with_name("tiny.gguf.pshard.json"))


def made_up_profile(rates: Rates = RATES) -> MachineProfile:
    """This machine's identity with tables made from `rates`."""
    from pshard.profile.identify import identify_accelerators, identify_host

    made = _make_tables(rates)
    provenance = dataclasses.replace(made.provenance, date="2026-01-02T03:04:05+00:00", notes=("made up for a test",))
    return dataclasses.replace(
        made, host=identify_host(1), accelerators=identify_accelerators("cpu"), provenance=provenance
    )


def tokenizer_metadata() -> dict[str, Any]:
    """GGUF keys of a tokenizer with one token per byte, a begin and an end token, and a chat template."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<s>", "</s>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 256 + [3, 3],
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 257,
        "tokenizer.chat_template": CHAT,
    }


def edit_json(path: Path, *keys: Any, value: Any) -> None:
    """Set the value at data[keys[0]][keys[1]]... of a JSON file."""
    data = json.loads(path.read_text())
    at = data
    for key in keys[:-1]:
        at = at[key]
    at[keys[-1]] = value
    path.write_text(json.dumps(data))
